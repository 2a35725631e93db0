"""Output of ``show``: tree, steps and picture of one rollout, trace or span."""

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from lightning_otel.adapter.outline import Outline, salient
from lightning_otel.cli.options import Form
from lightning_otel.cli.output import (
    count_noun,
    has_colours,
    print_rows,
    print_table,
    shown,
    styled,
    talk,
    terminal_width,
)
from lightning_otel.cli.tree import node_json, tree_lines
from lightning_otel.messages import plain_text
from lightning_otel.picture import picture
from lightning_otel.types import Transition

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

_COLUMNS: Final = (
    "agent", "branch", "step", "observation", "action", "reward", "done", "capture", "tokens",
)  # fmt: skip
_TEXTS: Final = ("agent", "branch", "observation", "action")
_TIMES: Final = ("start_ns", "end_ns")
_MANY: Final = 200
"""Lines that a terminal gets unless all are asked for."""


def print_tree(found: Outline, *, every: bool, with_attributes: bool) -> None:
    """The tree on stdout; of a span also what is written on it.

    Args:
        found: What to print.
        every: Also on a terminal every line.
        with_attributes: Print the first node's attributes.
    """
    width, is_coloured = terminal_width(), has_colours()
    is_shown = None
    if width is not None and not every and len(found.nodes) > _MANY:
        is_shown = salient(found.nodes, _MANY)
    for line in tree_lines(found, width, is_shown):
        click.echo(styled(line, width, is_coloured=is_coloured))
    if with_attributes:
        attributes = found.nodes[0].span.attributes
        indent = max(map(len, attributes), default=0)
        for key, value in attributes.items():
            click.echo(f"  {shown(key):<{indent}}  {shown(value)}")
    if is_shown is not None:
        talk(
            f"{_MANY} of {count_noun(len(found.nodes), 'span')} · --all for the rest, "
            "or show SPAN for what is below one"
        )


def print_nodes(found: Outline, *, is_tree: bool, form: Form) -> None:
    """The spans as the SDK prints them; of the tree what became of each, in its order."""
    if is_tree:
        rows: list[dict[str, Any]] = list(node_json(found))
    else:
        from lightning_otel.cli.spans import sdk_json

        rows = [sdk_json(node.span) for node in found.nodes]
    print_rows(rows, list(rows[0]), form=form, times=_TIMES)


def print_rows_of(opened: "Store", rollout_id: str, *, form: Form) -> None:
    """A rollout's transitions, for machines."""
    from lightning_otel.cli.export import parsed

    found = [parsed(row) for row in opened.transitions(rollout_id=rollout_id).dicts()]
    print_rows(found, list(found[0]) if found else [], form=form, times=_TIMES)


def print_transitions(found: Outline, *, every: bool) -> None:
    """One line a step, in order of trajectories, and why calls and rewards are in none.

    Args:
        found: A rollout.
        every: Also on a terminal every step.
    """
    rows = list(_step_rows(found))
    shown_rows = rows
    if sys.stdout.isatty() and rows:
        shown_rows = rows if every else rows[: _MANY // 2] + rows[_MANY // 2 :][-_MANY // 2 :]
        alone = len({row["agent"] for row in rows}) == 1
        print_table(shown_rows, _COLUMNS[1:] if alone else _COLUMNS, _TEXTS)
    else:
        print_rows(rows, _COLUMNS)
    if not rows:
        talk("no transitions" + (f" in {found.nodes[0].span.rollout_id}" if found.nodes else ""))
    if len(shown_rows) < len(rows):
        talk(
            f"the first and last {_MANY // 2} of {count_noun(len(rows), 'step')} · "
            "--all for the rest"
        )
    for reason, count in found.report.reasons().items():
        talk(f"left out: {count} × {reason}")
    for rule, count in _count_tokens(each.rule for each in found.report.repairs).items():
        talk(f"moved: {count_noun(count, 'span')}: {rule}")


def _count_tokens(names: Iterator[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return found


def _step_rows(found: Outline) -> Iterator[Mapping[str, Any]]:
    """A row a step, each once, on the first branch it lies on."""
    seen: set[tuple[str, str]] = set()
    is_tried_again = len({path.attempt_id for path in found.trajectories}) > 1
    for path in found.trajectories:
        attempt = f"attempt {path.attempt_id} · " if is_tried_again else ""
        cause = "" if path.cause == "start" else path.cause.replace("_", " ")
        for step in path.transitions:
            if (step.trace_id, step.span_id) in seen:
                continue
            seen.add((step.trace_id, step.span_id))
            told = f"{path.branch} {cause}".strip()
            yield {
                "agent": step.agent,
                "branch": attempt + told if attempt or path.branch or cause else "",
                "step": step.step,
                "observation": plain_text(step.observation[-1:]),
                "action": plain_text(step.action[:1]),
                "reward": step.reward,
                "done": "yes" if step.done else "no",
                "capture": step.capture,
                "tokens": _token_text(step),
            }


def _token_text(step: Transition) -> str:
    """Token ids as the server gave them, else the tokens it counted."""
    asked = len(step.prompt_ids) or step.input_tokens or 0
    return f"{asked}→{len(step.response_ids) or step.output_tokens or 0}"


def write_picture(found: Outline, path: str) -> None:
    """The picture in a file, the user's alone as the store is, or on stdout if a hyphen is said.

    Raises:
        ConfigError: No file can be made there.
    """
    from lightning_otel.store.layout import private_file

    drawn = picture(found)
    if path == "-":
        click.echo(drawn)
        return
    with private_file(path) as made:
        made.write_text(drawn, encoding="utf-8")
    talk(f"{count_noun(len(found.nodes), 'span')} → {path}")
