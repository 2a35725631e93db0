"""``analyze``: what happened in one rollout, and what stands out."""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import click

from lightning_otel.cli.options import Form, Id, rows_options
from lightning_otel.cli.output import (
    has_colours,
    print_json,
    print_rows,
    print_table,
    shown,
    store_option,
    styled,
    suggest,
    terminal_width,
)
from lightning_otel.errors import ConfigError

if TYPE_CHECKING:
    from lightning_otel.analysis import Analysis, Step

_COLUMNS: Final = (
    "step", "observation", "action", "reward", "credit", "advantage", "tokens", "time", "cost",
    "capture",
)  # fmt: skip
_TEXTS: Final = ("step", "observation", "action", "credit", "advantage", "cost")
_MANY: Final = 200
_BROKEN: Final = frozenset({"error", "incomplete", "uncredited", "left_out", "no_steps"})


@click.command()
@click.argument("rollout", metavar="[ROLLOUT]", type=Id(), default="@last")
@click.option(
    "--price", "prices", multiple=True, metavar="[MODEL=]IN,OUT",
    help="What a million tokens in and out cost; MODEL may be a glob.",
)  # fmt: skip
@click.option(
    "--advantage", type=click.Choice(["grpo", "rloo", "dr_grpo"]),
    help="Compare it with the other rollouts of its task.",
)  # fmt: skip
@click.option("--all", "every", is_flag=True, help="Every step, however many there are.")
@rows_options
@store_option
def analyze(
    rollout: str,
    prices: Sequence[str],
    advantage: str | None,
    every: bool,
    form: Form | None,
    store: str | None,
) -> None:
    """Say of one rollout what happened, step by step, and what stands out; @last by default.

    --json is all of it, --jsonl and --csv are the steps.
    """
    from lightning_otel.analysis import analyze_episode

    found = analyze_episode(
        rollout, store, prices=dict(map(_parse_price, prices)), advantage=cast(Any, advantage)
    )
    if form == "json":
        print_json(found.as_json())
        return
    if form is not None:
        steps = found.as_json()["steps"]
        print_rows(steps, list(steps[0]) if steps else [], form=form)
        return
    _print_report(found, every=every)
    suggest(f"show {shown(found.rollout_id)}", store)


def _parse_price(text: str) -> tuple[str, tuple[float, float]]:
    model, _, pair = text.rpartition("=")
    try:
        price_in, price_out = map(float, pair.split(","))
    except ValueError as exc:
        raise ConfigError(
            f"--price {text} is no price; write IN,OUT of a million tokens, or MODEL=IN,OUT"
        ) from exc
    return model or "*", (price_in, price_out)


def _print_report(found: "Analysis", *, every: bool) -> None:
    width, is_coloured = terminal_width(), has_colours()

    def say(text: str, style: str = "") -> None:
        click.echo(styled([(shown(text), style)], width, is_coloured=is_coloured))

    say(found.headline(), "bold")
    if found.task:
        say(f"task {found.task}", "dim")
    rows = list(_step_rows(found.steps))
    if sys.stdout.isatty() and rows:
        kept = rows if every else rows[:_MANY]
        print_table(kept, _COLUMNS, _TEXTS)
        if len(kept) < len(rows):
            say(f"the first {_MANY} of {len(rows)} steps · --all for the rest", "dim")
    elif rows:
        print_rows(rows, _COLUMNS)
    is_all = every or not sys.stdout.isatty()
    for given in found.rewards if is_all else found.rewards[:_MANY]:
        say(f"reward {given}", "green")
    if not is_all and len(found.rewards) > _MANY:
        say(f"the first {_MANY} of {len(found.rewards)} rewards · --all for the rest", "dim")
    for each in found.findings:
        say(f"! {each.text}", "red" if each.kind in _BROKEN else "yellow")
    if not found.findings:
        say("nothing stands out", "dim")


def _step_rows(steps: "Iterable[Step]") -> Iterable[dict[str, Any]]:
    from lightning_otel.types.wording import duration

    for step in steps:
        yield {
            "step": step.label,
            "observation": step.observation,
            "action": step.action,
            "reward": step.reward,
            "credit": ", ".join(step.credit),
            "advantage": None if step.advantage is None else f"{step.advantage:.3g}",
            "tokens": f"{_known_count(step.input_tokens)}→{_known_count(step.output_tokens)}",
            "time": "?" if step.duration_s is None else duration(step.duration_s),
            "cost": None if step.cost is None else f"{step.cost:.3g}",
            "capture": step.capture,
        }


def _known_count(count: int | None) -> str:
    return "?" if count is None else str(count)
