"""``resources``: what agents are given, in versions, and which of them."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_otel.cli import SuggestingGroup
from lightning_otel.cli.names import RESOURCE
from lightning_otel.cli.options import Form, format_option, store_option
from lightning_otel.cli.output import (
    count_noun,
    print_aged,
    print_data,
    print_json,
    print_line,
    print_note,
    printable,
    suggest,
)  # fmt: skip
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError
from lightning_otel.types.values import parse_json
from lightning_otel.views.nouns import describe_resource, parse_version

if TYPE_CHECKING:
    from lightning_otel.resources import Resources
    from lightning_otel.resources.comparison import Comparison
    from lightning_otel.types import Resource

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_UNPAIRED = click.option("--unpaired", is_flag=True, help="Compare all rollouts, of any tasks.")
_RANGE = click.option(
    "--range", "reward_range", type=float, nargs=2, metavar="LOW HIGH",
    help="Lowest and highest reward that there can be; by default what was seen.",
)  # fmt: skip
_WEIGHT = click.option(
    "--weight", type=float, help="Share of rollouts that get the canary, 0 to 1."
)
_KINDS = click.Choice(["prompt", "endpoint", "weights"])


@click.group(cls=SuggestingGroup)
def resources() -> None:
    """Publish prompts, models and weights; promote a version or roll back."""


def open_resources(store: str | None, *, is_reading: bool = False) -> "Resources":
    """The resources beside a store, or where ``LIGHTNING_OTEL_STATE`` says."""
    from lightning_otel import config
    from lightning_otel.resources import Resources
    from lightning_otel.state import State
    from lightning_otel.store.layout import Layout

    place = config.STATE.read() or store or config.STORE.read()
    if is_reading and "://" not in place:
        Layout(place).require()
    return Resources(State(place))


@resources.command("list")
@format_option
@store_option
def list_resources(form: Form | None, store: str | None) -> None:
    """List the resources and their versions in use."""
    opened = open_resources(store, is_reading=True)
    rows = [describe_resource(opened, name) for name in opened.names()]
    for row in rows:
        row["share"] = f"{row['canary_weight']:.0%}" if row["canary"] else None
    columns = ("name", "kind", "newest", "live", "canary", "share", "withdrawn", "created_ns")
    print_aged(rows, columns, form)
    _tell_waiting(opened, [row["name"] for row in rows], store)
    if not rows:
        print_note("no resource was published yet")
        suggest("resources publish system_prompt 'Be brief.'", store)
    else:
        suggest(f"resources show {printable(rows[0]['name'])}", store)


@resources.command()
@click.argument("target", metavar="NAME[@VERSION]", type=RESOURCE)
@format_option
@store_option
def show(target: str, form: Form | None, store: str | None) -> None:
    """Show one version, or the history of a resource."""
    opened = open_resources(store, is_reading=True)
    if "@" in target:
        name, _, version = target.partition("@")
        resource = opened.get(name, parse_version(version or "live"))
        row = asdict(resource)
        if not print_data(form, [row], document=row, times=("created_ns",)):
            _print_body(resource)
        return
    names = {version: alias for alias, version in sorted(opened.aliases(target).items())}
    withdrawn = opened.withdrawn(target)
    rows = [
        {
            **asdict(alias_version), "alias": names.get(alias_version.version),
            "withdrawn": withdrawn.get(alias_version.version),
        }
        for alias_version in opened.versions(target)
    ]  # fmt: skip
    columns = ("version", "alias", "kind", "parent", "run_id", "metrics", "withdrawn", "created_ns")
    print_aged(rows, columns, form, more=("body",))
    _tell_waiting(opened, [target], store)


def _tell_waiting(opened: "Resources", names: Sequence[str], store: str | None) -> None:
    from lightning_otel.resources.waiting import explain_waiting

    for name in names:
        if reason := explain_waiting(opened, name, Store(store)):
            print_note(f"the canary of {name} waits in vain: {reason}")


def _print_body(resource: "Resource") -> None:
    if resource.kind != "prompt":
        print_json(resource.body)
        return
    for line in str(resource.body["template"]).splitlines():
        print_line(line)
    for example in resource.prompt.examples:
        click.echo(f"── {printable(example.get('role'))}: {printable(example.get('content'))}")


@resources.command()
@click.argument("name", metavar="NAME", type=RESOURCE)
@click.argument("body", required=False)
@click.option("--file", "path", type=_FILE, help="Read the body from a file.")
@click.option("--kind", type=_KINDS, help="Kind of resource; guessed by default.")
@click.option("--alias", help="Point an alias at it: live, canary, or your own.")
@_WEIGHT
@click.option("--parent", type=int, help="The version it was made from.")
@store_option
def publish(
    name: str, body: str | None, path: Path | None, store: str | None, **options: Any
) -> None:
    """Publish a version.

    For example: resources publish system_prompt 'Be brief.' --alias canary

    BODY is a prompt's text, or JSON: chat messages of which the first is the system's, or an object
    such as {"model": "m", "sampling": {"temperature": 0.2}}.
    """
    if (body is None) == (path is None):
        raise ConfigError("publish takes a BODY or a --file, one of the two")
    text = body if path is None else path.read_text(encoding="utf-8")
    assert text is not None
    content = parse_json(text) if text.lstrip()[:1] in ("{", "[") else text
    opened = open_resources(store)
    print_line(opened.publish(name, content, **options))
    _tell_aliases(opened, name)


@resources.command()
@click.argument("name", metavar="NAME", type=RESOURCE)
@click.argument("alias")
@click.argument("version")
@_WEIGHT
@store_option
def alias(name: str, alias: str, version: str, weight: float | None, store: str | None) -> None:
    """Point an alias at a version.

    For example: resources alias system_prompt canary 3 --weight 0.2. The version none
    removes the alias.
    """
    opened = open_resources(store, is_reading=True)
    number = None if version == "none" else opened.get(name, parse_version(version)).version
    opened.set_alias(name, alias, number, weight=weight)
    _tell_aliases(opened, name)


@resources.command()
@click.argument("name", metavar="NAME", type=RESOURCE)
@click.option("--if-better", is_flag=True, help="Only if it is significantly better than live.")
@_UNPAIRED
@_RANGE
@store_option
def promote(name: str, if_better: bool, store: str | None, **options: Any) -> None:
    """Make the canary live.

    Running agents follow within a second or two.
    """
    opened = open_resources(store, is_reading=True)
    last_move = opened.last_move(name)
    if if_better:
        comparison = _compare(opened, name, "live", "canary", store, **options)
        if not comparison.is_better:
            print_note(
                f"{name}@{comparison.b} stays the canary: {comparison} is {comparison.verdict}"
            )
            return
    print_line(opened.promote(name, last_move=last_move))
    _tell_aliases(opened, name)


@resources.command()
@click.argument("name", metavar="NAME", type=RESOURCE)
@click.option("--reason", default="", help="Reason, kept with the version.")
@click.option(
    "--if-worse",
    is_flag=True,
    help="Only if it is significantly worse than live on the same tasks.",
)
@_UNPAIRED
@_RANGE
@store_option
def withdraw(name: str, reason: str, if_worse: bool, store: str | None, **options: Any) -> None:
    """Withdraw the canary and keep the reason.

    What is live does not change.
    """
    opened = open_resources(store, is_reading=True)
    version = opened.get(name, "canary").version
    if if_worse:
        comparison = _compare(opened, name, "live", "canary", store, **options)
        if not comparison.is_worse:
            print_note(f"{name}@{version} stays: {comparison} is {comparison.verdict}")
            return
        reason = reason or f"worse: {comparison}"
    print_line(opened.withdraw(name, reason, version=version))
    _tell_aliases(opened, name)


@resources.command()
@click.argument("name", metavar="NAME", type=RESOURCE)
@store_option
def rollback(name: str, store: str | None) -> None:
    """Make the previous version live again.

    Running agents follow within a second or two.
    """
    opened = open_resources(store, is_reading=True)
    print_line(opened.rollback(name))
    _tell_aliases(opened, name)


@resources.command()
@click.argument("name", metavar="NAME", type=RESOURCE)
@click.argument("a", default="live")
@click.argument("b", default="canary")
@_UNPAIRED
@_RANGE
@store_option
def diff(name: str, a: str, b: str, store: str | None, **options: Any) -> None:
    """Compare the texts and rewards of two versions.

    By default these are live and canary.
    """
    opened = open_resources(store, is_reading=True)
    for line in opened.diff(name, parse_version(a), parse_version(b)).splitlines():
        print_line(line)
    try:
        comparison = _compare(opened, name, parse_version(a), parse_version(b), store, **options)
    except ConfigError as exc:
        print_note(exc.what)
        return
    print_line(f"{comparison}: {comparison.verdict}")
    for reason, count in comparison.left_out.items():
        print_note(f"{count_noun(count, 'rollout')} left out: {reason}")
    if comparison.is_worse and opened.aliases(name).get("canary") == comparison.b:
        suggest(f"resources withdraw {name}", store)


def _compare(
    opened: "Resources",
    name: str,
    a: int | str,
    b: int | str,
    store: str | None,
    *,
    unpaired: bool,
    reward_range: tuple[float, float] | None,
) -> "Comparison":

    is_paired = False if unpaired else None
    return opened.compare(name, a, b, Store(store), is_paired=is_paired, reward_range=reward_range)


def _tell_aliases(opened: "Resources", name: str) -> None:
    parts = []
    for word, version in sorted(opened.aliases(name).items()):
        share = f" for {opened.canary_weight(name):.0%}" if word == "canary" else ""
        parts.append(f"{word} is {name}@{version}{share}")
    print_note("; ".join(parts) or f"{name} has no alias: nobody is given it")
