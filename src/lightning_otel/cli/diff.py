"""``diff``: two rollouts, traces or versions of a resource beside each other."""

from typing import TYPE_CHECKING, Any, Final

import click

from lightning_otel.cli.options import Form, Id, rows_options
from lightning_otel.cli.output import (
    count_noun,
    has_colours,
    print_json,
    print_rows,
    shown,
    store_option,
    styled,
    suggest,
    talk,
    terminal_width,
)
from lightning_otel.errors import ConfigError

if TYPE_CHECKING:
    from lightning_otel.adapter.differing import Difference

_COLUMNS: Final = ("figure", "a", "b", "change")
_STYLES: Final = {" ": "dim", "-": "red", "+": "green"}
_SAME: Final = 3
"""Lines that stay the same and are shown around those that do not, unless all are asked for."""


@click.command()
@click.argument("a", type=Id())
@click.argument("b", type=Id())
@click.option("--all", "every", is_flag=True, help="Also all that is the same.")
@rows_options
@store_option
def diff(a: str, b: str, every: bool, form: Form | None, store: str | None) -> None:
    """Lay two rollouts or traces beside each other: calls, tokens, rewards, time, what was said.

    A and B are ids, or the beginnings of ids, or @last and @last~1; or versions of one resource,
    such as system_prompt@1 and system_prompt@2.
    """
    if _is_version(a) or _is_version(b):
        _diff_versions(a, b, form, store)
        return
    from lightning_otel.adapter.differing import MOST_LINES, differ
    from lightning_otel.dataset import Store
    from lightning_otel.views.outlines import outline_of

    opened = Store(store)
    names = [opened.find(each) for each in (a, b)]
    one, other = (outline_of(opened.source, *each) for each in names)
    found = differ(one, other, None if every else MOST_LINES)
    sides = [{"noun": noun, "id": whole} for noun, whole in names]
    rows = [
        {"figure": each.name, "a": each.a, "b": each.b, "change": each.change}
        for each in found.figures
    ]
    if form == "json":
        print_json({
            "a": sides[0], "b": sides[1], "figures": rows,
            "said": [each._asdict() for each in found.said],
            "left_a": found.left_a, "left_b": found.left_b,
        })  # fmt: skip
        return
    if form is not None:
        print_rows(rows, _COLUMNS, form=form)
        return
    for sign, each in zip("-+", sides, strict=True):
        click.echo(f"{sign} {each['noun']} {shown(each['id'])}")
    print_rows([{**row, "change": _signed_number(row["change"])} for row in rows], _COLUMNS)
    _print_said(found, every=every)
    suggest(f"show {shown(names[1][1])}", store)


def _signed_number(change: float | None) -> str:
    return "" if not change else f"{change:+g}"


def _print_said(found: "Difference", *, every: bool) -> None:
    """Print the messages; fold equal ones except around a difference."""
    signs = [each.sign for each in found.said]
    changed = [at for at, sign in enumerate(signs) if sign != " "]
    near = {at + by for at in changed for by in range(-_SAME, _SAME + 1)}
    width, is_coloured = terminal_width(), has_colours()
    skipped = 0
    for at, each in enumerate(found.said):
        if not every and at not in near:
            skipped += 1
            continue
        line = [(f"{each.sign} {shown(each.text)}", _STYLES[each.sign])]
        click.echo(styled(line, width, is_coloured=is_coloured))
    if not changed:
        talk("they say the same")
    if skipped:
        talk(f"{count_noun(skipped, 'line')} the same on both sides · --all shows them")
    if found.left_a or found.left_b:
        talk(
            f"{found.left_a} and {found.left_b} further lines were not laid beside each other · "
            "--all does"
        )


def _is_version(text: str) -> bool:
    return "@" in text[1:]


def _diff_versions(a: str, b: str, form: Form | None, store: str | None) -> None:
    """Two versions of one resource; what rewards say of them is told by ``resources diff``."""
    from lightning_otel.cli.resources import opened_resources, version_of

    name, _, first = a.partition("@")
    other, mark, second = b.partition("@")
    if mark and other != name:
        raise ConfigError(f"{a} and {b} are of two resources; name two versions of one")
    opened = opened_resources(store, is_reading=True)
    sides = [opened.get(name, version_of(each)) for each in (first, second if mark else b)]
    lines = opened.diff(name, sides[0].version, sides[1].version).splitlines()
    row: dict[str, Any] = {
        "name": name, "a": sides[0].version, "b": sides[1].version, "diff": lines
    }  # fmt: skip
    if form == "json":
        print_json(row)
    elif form is not None:
        print_rows([row], list(row), form=form)
    else:
        is_coloured = has_colours()
        for line in lines:
            style = _STYLES.get(line[:1], "")
            click.echo(styled([(shown(line), style)], None, is_coloured=is_coloured))
        if not lines:
            talk("they are the same")
        suggest(f"resources diff {name} {sides[0].version} {sides[1].version}", store)
