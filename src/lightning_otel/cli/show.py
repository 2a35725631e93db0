"""``show``: rollouts, traces, spans and versions, one by one or two side by side."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from lightning_otel.cli.names import ID
from lightning_otel.cli.options import Form, format_option, store_option
from lightning_otel.cli.output import (
    count_noun,
    line_printer,
    print_data,
    print_note,
    print_rows,
    print_table,
    printable,
    suggest,
    terminal_width,
)  # fmt: skip
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError
from lightning_otel.store.source import at_moment
from lightning_otel.types.text import step_row
from lightning_otel.types.transitions import distinct

if TYPE_CHECKING:
    from lightning_otel.adapter import Adaptation
    from lightning_otel.types import Trajectory, Transition
    from lightning_otel.views.analysis import Analysis
    from lightning_otel.views.trace import Trace

_STEP_COLUMNS: Final = (
    "agent", "branch", "step", "observation", "action", "reward", "done", "capture", "tokens",
)  # fmt: skip
_ANALYSIS_COLUMNS: Final = (
    "step", "observation", "action", "reward", "credit", "advantage", "tokens", "time", "cost",
    "capture",
)  # fmt: skip
_FIGURES: Final = ("figure", "a", "b", "change")
_TIMES: Final = ("start_ns", "end_ns")
_MANY: Final = 200
"""Lines that a terminal gets unless all are asked for."""
_SAME: Final = 3
"""Lines that stay the same and are shown around those that do not, unless all are asked for."""
_SIGNS: Final = {" ": "dim", "-": "red", "+": "green"}
_BROKEN: Final = frozenset({"error", "incomplete", "uncredited", "left_out", "no_steps"})


@click.command()
@click.argument("target", metavar="[ID]", type=ID, default="@last")
@click.argument("other", metavar="[OTHER]", type=ID, required=False)
@click.option("--tree", "view", flag_value="tree",
              help="Show the span tree with credit (the default).")  # fmt: skip
@click.option("--transitions", "view", flag_value="transitions", help="Show the transitions.")
@click.option("--findings", "view", flag_value="findings",
              help="Explain a rollout: steps, credit, cost, anomalies.")  # fmt: skip
@click.option("--price", "prices", multiple=True, metavar="[MODEL=]IN,OUT",
              help="For --findings: price of a million input and output tokens; "
              "MODEL may be a glob.")  # fmt: skip
@click.option("--advantage", type=click.Choice(["grpo", "rloo", "dr_grpo"]),
              help="For --findings: compare it with the other rollouts of its task.")  # fmt: skip
@click.option("--svg", metavar="FILE", help="Write a picture of the tree; - for stdout.")
@click.option("--all", "is_all", is_flag=True, help="Print every line.")
@format_option
@store_option
def show(
    target: str, other: str | None, view: str | None, prices: Sequence[str], advantage: Any,
    svg: str | None, is_all: bool, form: Form | None, store: str | None,
) -> None:  # fmt: skip
    """Show one rollout, trace or span, by a prefix of its id or @last (the default).

    @last~1 is the rollout before the last one. With OTHER, compare the two: calls, tokens, rewards,
    time, messages. They may also be versions of one resource, such as system_prompt@1 and
    system_prompt@2.
    """
    if svg is not None and (view or form or other):
        raise click.UsageError("--svg draws the tree and prints nothing; give it alone")
    if other is not None and view:
        raise click.UsageError(f"--{view} shows one rollout; leave out {other}")
    if view != "findings" and (prices or advantage):
        raise click.UsageError("--price and --advantage belong to --findings")
    if other is not None:
        _show_differences(target, other, is_all=is_all, form=form, store=store)
    elif view == "findings":
        _show_findings(target, prices, advantage, is_all=is_all, form=form, store=store)
    elif form is not None:
        print_data(form, show_rows(Store(store), target, view or "spans"), times=_TIMES)
    else:
        _show_trace(target, view, svg, is_all=is_all, store=store)


def _show_trace(
    target: str, view: str | None, svg: str | None, *, is_all: bool, store: str | None
) -> None:

    from lightning_otel.views.stored_trace import read_trace

    opened = at_moment(Store(store))
    noun, whole = opened.find(target)
    if view == "transitions":
        rollout_id = opened.rollout_of(noun, whole)
        _print_transitions(rollout_id, list(opened.adapt(rollout_id=rollout_id)), is_all=is_all)
        suggest(f"show {printable(rollout_id)} --findings", store)
        return
    trace = read_trace(opened, noun, whole)
    if svg is not None:
        _write_picture(opened, trace, svg)
        return
    _print_tree(opened, trace, is_all=is_all, with_attributes=noun in ("span", "response"))
    suggest(f"show {printable(target)} --transitions", store)


def show_rows(opened: Store, target: str, view: str) -> list[dict[str, Any]]:
    """Return what an id names for programs: its ``tree``, its ``spans`` or its ``transitions``."""
    from lightning_otel.cli.spans import row_json, sdk_json
    from lightning_otel.views.stored_trace import load_spans, read_trace

    opened = at_moment(opened)
    noun, whole = opened.find(target)
    if view == "transitions":
        rollout_id = opened.rollout_of(noun, whole)
        return [json.loads(line) for line in opened.transitions(rollout_id=rollout_id).lines()]
    trace = read_trace(opened, noun, whole)
    if view == "tree":
        return list(row_json(trace.rows))
    load_spans(opened, trace.rows)
    return [sdk_json(row.span) for row in trace.rows]


def _print_tree(opened: Store, trace: "Trace", *, is_all: bool, with_attributes: bool) -> None:
    from lightning_otel.cli.spans import tree_lines
    from lightning_otel.views.folding import select_rows
    from lightning_otel.views.previews import read_previews
    from lightning_otel.views.stored_trace import load_spans

    width, print_line = terminal_width(), line_printer()
    is_shown = None
    if width is not None and not is_all and len(trace.rows) > _MANY:
        is_shown = select_rows(trace.rows, _MANY)
    for line in tree_lines(trace, partial(read_previews, opened), width, is_shown):
        print_line(line)
    if with_attributes and trace.rows:
        load_spans(opened, trace.rows[:1])
        attributes = trace.rows[0].span.attributes
        indent = max(map(len, attributes), default=0)
        for key, value in attributes.items():
            click.echo(f"  {printable(key):<{indent}}  {printable(value)}")
        for event in trace.rows[0].span.events:
            click.echo(f"  event {printable(event.name)}")
            for key, value in event.attributes.items():
                click.echo(f"    {printable(key)}")
                for text in str(value).splitlines():
                    click.echo(f"      {printable(text)}")
    if is_shown is not None:
        print_note(
            f"{_MANY} of {count_noun(len(trace.rows), 'span')} · --all for the rest, "
            "or show SPAN for what is below one"
        )


def _print_transitions(rollout_id: str, parts: Sequence["Adaptation"], *, is_all: bool) -> None:
    from lightning_otel.types import Report

    rows = list(_step_rows([path for part in parts for path in part.trajectories]))
    report = Report.total(part.report for part in parts)
    alone = len({row["agent"] for row in rows}) == 1
    sample = rows if is_all else rows[: _MANY // 2] + rows[_MANY // 2 :][-_MANY // 2 :]
    if _print_steps(
        rows, sample, _STEP_COLUMNS, ("agent", "branch", "observation", "action"), alone=alone
    ):
        steps = count_noun(len(rows), "step")
        print_note(f"the first and last {_MANY // 2} of {steps} · --all for the rest")
    if not rows:
        print_note(f"no transitions in {printable(rollout_id)}")
    for reason, count in report.reasons().items():
        print_note(f"left out: {count} × {reason}")
    for rule, count in Counter(repair.rule for repair in report.repairs).items():
        print_note(f"moved: {count_noun(count, 'span')}: {rule}")


def _print_steps(
    rows: Sequence[Mapping[str, Any]],
    sample: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    texts: Sequence[str],
    *,
    alone: bool = False,
) -> bool:
    """Print some steps on a terminal, all in a pipe; return True if some were left out."""
    if not (sys.stdout.isatty() and rows):
        print_rows(rows, columns)
        return False
    print_table(sample, columns[1:] if alone else columns, texts)
    return len(sample) < len(rows)


def _step_rows(trajectories: Sequence["Trajectory"]) -> Iterator[Mapping[str, Any]]:
    is_tried_again = len({path.attempt_id for path in trajectories}) > 1
    for step, path in distinct(trajectories):
        attempt = f"attempt {path.attempt_id} · " if is_tried_again else ""
        cause = "" if path.cause == "start" else path.cause.replace("_", " ")
        branch = f"{path.branch} {cause}".strip()
        yield {
            **step_row(step),
            "branch": attempt + branch if attempt or path.branch or cause else "",
            "done": "yes" if step.done else "no",
            "tokens": _token_text(step),
        }


def _token_text(step: "Transition") -> str:
    prompt_count = len(step.prompt_ids) or step.input_tokens or 0
    return f"{prompt_count}→{len(step.response_ids) or step.output_tokens or 0}"


def _write_picture(opened: Store, trace: "Trace", path: str) -> None:
    from lightning_otel.store.files import private_file
    from lightning_otel.views.picture import draw_trace
    from lightning_otel.views.stored_trace import load_spans

    load_spans(opened, [row for row in trace.rows if row.kind == "reward"])
    drawn = draw_trace(trace)
    if path == "-":
        click.echo(drawn)
        return
    with private_file(path) as temporary:
        temporary.write_text(drawn, encoding="utf-8")
    print_note(f"{count_noun(len(trace.rows), 'span')} → {path}")


def _show_findings(
    target: str, prices: Sequence[str], advantage: Any, *, is_all: bool, form: Form | None,
    store: str | None,
) -> None:  # fmt: skip
    from lightning_otel.views.analysis import analyze_episode

    analysis = analyze_episode(
        target, store, prices=dict(map(_parse_price, prices)), advantage=advantage
    )
    document = analysis.as_json()
    if not print_data(form, document["steps"], document=document):
        _print_analysis(analysis, is_all=is_all)
        suggest(f"show {printable(analysis.rollout_id)}", store)


def _parse_price(text: str) -> tuple[str, tuple[float, float]]:
    model, _, pair = text.rpartition("=")
    try:
        price_in, price_out = map(float, pair.split(","))
    except ValueError as exc:
        raise ConfigError(
            f"--price {text} is no price; write IN,OUT of a million tokens, or MODEL=IN,OUT"
        ) from exc
    return model or "*", (price_in, price_out)


def _print_analysis(analysis: "Analysis", *, is_all: bool) -> None:
    print_line = line_printer()

    def say(text: str, style: str = "") -> None:
        print_line([(printable(text), style)])

    say(analysis.headline(), "bold")
    if analysis.task:
        say(f"task {analysis.task}", "dim")
    rows = list(_analysis_rows(analysis))
    sample = rows if is_all else rows[:_MANY]
    texts = ("step", "observation", "action", "credit", "advantage", "cost")
    if rows and _print_steps(rows, sample, _ANALYSIS_COLUMNS, texts):
        say(f"the first {_MANY} of {len(rows)} steps · --all for the rest", "dim")
    rewards = analysis.rewards if is_all or not sys.stdout.isatty() else analysis.rewards[:_MANY]
    for reward in rewards:
        say(f"reward {reward}", "green")
    if len(rewards) < len(analysis.rewards):
        say(f"the first {_MANY} of {len(analysis.rewards)} rewards · --all for the rest", "dim")
    for finding in analysis.findings:
        say(f"! {finding.text}", "red" if finding.kind in _BROKEN else "yellow")
    if not analysis.findings:
        say("nothing stands out", "dim")


def _analysis_rows(analysis: "Analysis") -> Iterable[dict[str, Any]]:
    from lightning_otel.types.text import format_duration

    def known(value: Any, word: Callable[[Any], str] = str, lacking: Any = "?") -> Any:
        return lacking if value is None else word(value)

    for step in analysis.steps:
        yield {
            "step": step.label,
            "observation": step.observation,
            "action": step.action,
            "reward": step.reward,
            "credit": ", ".join(step.credit),
            "advantage": known(step.advantage, "{:.3g}".format, None),
            "tokens": f"{known(step.input_tokens)}→{known(step.output_tokens)}",
            "time": known(step.duration_s, format_duration),
            "cost": known(step.cost, "{:.3g}".format, None),
            "capture": step.capture,
        }


def _show_differences(
    a: str, b: str, *, is_all: bool, form: Form | None, store: str | None
) -> None:
    document = diff_document(store, a, b, is_all=is_all)
    if "diff" in document:
        _print_versions(document, form, store)
        return
    rows, sides = document["figures"], (document["a"], document["b"])
    if print_data(form, rows, _FIGURES, document=document):
        return
    for sign, side in zip("-+", sides, strict=True):
        click.echo(f"{sign} {side['noun']} {printable(side['id'])}")
    for row in rows:
        row["change"] = f"{row['change']:+g}" if row["change"] else ""
    print_rows(rows, _FIGURES)
    _print_said(document["said"], is_all=is_all)
    if document["left_a"] or document["left_b"]:
        print_note(
            f"{document['left_a']} and {document['left_b']} further lines were not laid beside "
            "each other · --all does"
        )
    suggest(f"show {printable(sides[1]['id'])}", store)


def diff_document(store: str | None, a: str, b: str, *, is_all: bool = False) -> dict[str, Any]:
    """Return the differences of two rollouts, traces or versions, for programs."""
    if "@" in a[1:] or "@" in b[1:]:
        return _diff_versions(a, b, store)
    from lightning_otel.views.differences import MOST_LINES, compare_ids

    *names, differences = compare_ids(Store(store), a, b, None if is_all else MOST_LINES)
    sides = [{"noun": noun, "id": whole} for noun, whole in names]
    rows = [dict(zip(_FIGURES, (*row, row.change), strict=True)) for row in differences.figures]
    return {
        "a": sides[0], "b": sides[1], "figures": rows,
        "said": [line._asdict() for line in differences.said],
        "left_a": differences.left_a, "left_b": differences.left_b,
    }  # fmt: skip


def _print_said(lines: Sequence[Mapping[str, str]], *, is_all: bool) -> None:
    changed = [at for at, line in enumerate(lines) if line["sign"] != " "]
    context = {at + by for at in changed for by in range(-_SAME, _SAME + 1)}
    print_line = line_printer()
    shown_lines = [line for at, line in enumerate(lines) if is_all or at in context]
    for line in shown_lines:
        print_line([(f"{line['sign']} {printable(line['text'])}", _SIGNS[line["sign"]])])
    if not changed:
        print_note("they say the same")
    if skipped := len(lines) - len(shown_lines):
        print_note(f"{count_noun(skipped, 'line')} the same on both sides · --all shows them")


def _diff_versions(a: str, b: str, store: str | None) -> dict[str, Any]:
    """Diff two versions of one resource; ``resources diff`` tells what rewards say of them."""
    from lightning_otel.cli.resources import open_resources
    from lightning_otel.views.nouns import parse_version

    name, _, first = a.partition("@")
    other, mark, second = b.partition("@")
    if mark and other != name:
        raise ConfigError(f"{a} and {b} are of two resources; name two versions of one")
    opened = open_resources(store, is_reading=True)
    one, two = (opened.get(name, parse_version(text)).version for text in (first, second or b))
    return {"name": name, "a": one, "b": two, "diff": opened.diff(name, one, two).splitlines()}


def _print_versions(row: Mapping[str, Any], form: Form | None, store: str | None) -> None:
    if print_data(form, [row], document=row):
        return
    print_line = line_printer(is_cut=False)
    for line in row["diff"]:
        print_line([(printable(line), _SIGNS.get(line[:1], ""))])
    if not row["diff"]:
        print_note("they are the same")
    suggest(f"resources diff {row['name']} {row['a']} {row['b']}", store)
