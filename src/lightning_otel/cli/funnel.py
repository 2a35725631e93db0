"""The funnel from spans to a trainer's rows, for people and programs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_otel.cli.output import count_noun, json_text

if TYPE_CHECKING:
    from lightning_otel.dataset.export import Exported
    from lightning_otel.formats.format import Format, LeftOut


def lines(done: "Exported", made: "Format", place: str, *, is_selected: bool) -> Iterator[str]:
    """The funnel, from rollouts to rows, and every reason."""
    report = done.report
    yield f"rollouts   {report.rollouts}"
    lost = sum(each.noun == "call" for each in report.dropped)
    yield f"calls      {report.calls}: {report.transitions} are transitions, {lost} left out"
    yield f"tokens     {report.exact} of {report.transitions} transitions have exact token ids"
    yield (
        f"rewards    {report.rewards}: {report.rewards_placed} placed; "
        f"{report.rewarded} of {report.transitions} transitions have one"
    )
    yield f"rows       {done.rows} of {done.format} → {place}"
    for reason, number in report.reasons().items():
        yield f"  left out: {number} × {reason}"
    for reason, number in report.inexact.items():
        yield f"  not exact: {number} × {reason}"
    for reason, number in report.notes.items():
        yield f"  note: {number} × {reason}"
    for reason, number in done.left_out.items():
        yield f"  in no row: {count_noun(number, 'step')}: {reason}"
    for reason, number in done.partial.items():
        yield f"  in a row without: {count_noun(number, 'step')}: {reason}"
    if not done.rows:
        yield f"nothing to train on: {_explain_empty(done, made, is_selected=is_selected)}"


def _explain_empty(done: "Exported", made: "Format", *, is_selected: bool) -> str:
    """Return why there is no row, and what to do."""
    if not done.report.spans and is_selected:
        return "no step is of such an agent, rollout or time; see: lightning-otel ls"
    if not done.report.spans:
        return "the store has no spans here; record some: lightning-otel run -- python agent.py"
    if not done.report.calls:
        return "no model was called; see what is captured: lightning-otel doctor"
    if not done.report.transitions:
        return "every call was left out; see the reasons: lightning-otel stats"
    if done.left_out:
        return f"it needs {made.needs or 'more'}. Most steps have {next(iter(done.left_out))}"
    return "no step is such as was asked for; see: lightning-otel ls"


def document(
    done: "Exported", made: "Format", *, is_dry_run: bool, is_selected: bool
) -> Mapping[str, Any]:
    """The same as one JSON document."""
    report = done.report
    return {
        "dry_run": is_dry_run,
        "format": done.format,
        "rollouts": report.rollouts,
        "calls": report.calls,
        "transitions": report.transitions,
        "exact": report.exact,
        "inexact": dict(report.inexact),
        "notes": dict(report.notes),
        "rewards": report.rewards,
        "rewards_placed": report.rewards_placed,
        "rewarded": report.rewarded,
        "rows": done.rows,
        "left_out": {**report.reasons(), **done.left_out},
        "partial": dict(done.partial),
        "why_empty": None if done.rows else _explain_empty(done, made, is_selected=is_selected),
    }


@contextmanager
def left_out_file(path: str | None) -> "Iterator[Callable[[LeftOut], None] | None]":
    """Writes what is left out, one JSON object a line."""
    if path is None:
        yield None
        return
    from lightning_otel.store.layout import private_file

    with private_file(path) as made, made.open("w", encoding="utf-8") as file:

        def write(left: "LeftOut") -> None:
            step = left.step
            found = {
                "rollout_id": step.rollout_id,
                "attempt_id": step.attempt_id,
                "agent": step.agent,
                "trace_id": step.trace_id,
                "span_id": step.span_id,
                "reason": left.reason,
                "is_row_written": left.is_row_written,
            }
            file.write(json_text(found) + "\n")

        yield write
