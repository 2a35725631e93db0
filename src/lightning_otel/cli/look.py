"""``ls``, ``stats``, ``sql``, ``plot``: what is in the store."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import click

from lightning_otel.cli import print_error
from lightning_otel.cli.names import METRIC, RUN
from lightning_otel.cli.options import (
    COUNT,
    Form,
    filter_options,
    format_option,
    store_option,
    when_options,
)
from lightning_otel.cli.output import (
    count_noun,
    format_age_since,
    format_leftover,
    format_ns,
    format_size,
    print_data,
    print_note,
    print_rows,
    print_table,
    printable,
    suggest,
)  # fmt: skip
from lightning_otel.dataset import Store
from lightning_otel.errors import QueryError
from lightning_otel.types.report import Dimension
from lightning_otel.types.text import format_number
from lightning_otel.views.nouns import ATTEMPTS, FAILURES, word_error
from lightning_otel.views.traces import TRACES

if TYPE_CHECKING:
    from lightning_otel.views.plot import Chart
    from lightning_otel.views.sandbox import Limits

VIEWS: Final = {"rollouts": ATTEMPTS, "traces": TRACES, "failures": FAILURES}
LIST_FILTERS: Final = {**FAILURES.filters, **ATTEMPTS.filters}
"""Those of each view."""
_ID = {"traces": "trace_id", "failures": "span_id"}
_COLUMNS = {
    "rollouts": (
        "rollout", "status", "started", "agents", "calls", "tokens", "cost", "duration", "reward",
        "error", "task",
    ),
    "traces": (
        "trace", "started", "agents", "input", "output", "calls", "tokens", "cost", "duration",
        "reward", "error",
    ),
    "failures": ("rollout", "span", "started", "error", "tool", "agent", "model"),
    "breakdown": (
        "name", "rollouts", "reward", "±", "uses", "errors", "p50", "p95", "tokens", "cost",
    ),
}  # fmt: skip
_TEXT_COLUMNS = ("error", "tool", "agent", "model", "task", "agents", "input", "output")
_SHORTEST_ID = {"rollout": 16, "trace": 8, "span": 8}
_WIDTH = 80


@click.command()
@click.argument("what", type=click.Choice([*VIEWS]), default="rollouts")
@click.option(
    "--limit", type=COUNT, default=20, show_default=True,
    help="Number of rows.",
)  # fmt: skip
@click.option("--all", "is_all", is_flag=True, help="Print every row.")
@filter_options(LIST_FILTERS)
@format_option
@store_option
def ls(
    what: Literal["rollouts", "traces", "failures"], limit: int, is_all: bool, form: Form | None,
    store: str | None, **filters: Any,
) -> None:  # fmt: skip
    """List rollouts, traces or failures, the newest first."""
    view = VIEWS[what]
    values = {name: value for name, value in filters.items() if value is not None}
    if unknown := values.keys() - view.filters.keys():
        raise click.UsageError(f"{what} have no {min(unknown)}; leave out --{min(unknown)}")
    rows, total, _ = view.read(Store(store), values, limit=None if is_all else limit)
    if form is not None or not sys.stdout.isatty():
        print_rows(rows, view.columns, form=form, times=("start_ns", "end_ns"))
    elif rows:
        _word_rows(rows, [name for name in _COLUMNS[what] if name in _SHORTEST_ID])
        has_cost = any(row.get("cost") is not None for row in rows)
        names = [name for name in _COLUMNS[what] if name != "cost" or has_cost]
        print_table(rows, names, _TEXT_COLUMNS)
    if not rows:
        is_of_time = values.keys() <= {"since", "until"}
        print_note(
            f"no {what} {'of that time' if is_of_time else 'like that'}"
            if values
            else f"no {what} yet"
        )
        suggest("ls" if values else "run -- python your_agent.py", store)
        return
    if total > len(rows):
        print_note(f"{len(rows)} of {total} {what} · --all for the rest")
    suggest("show @last" if what == "rollouts" else f"show {rows[0][_ID[what]][:8]}", store)


def _word_rows(rows: Sequence[dict[str, Any]], nouns: Sequence[str]) -> None:
    for noun in nouns:
        ids = _short_ids([row[f"{noun}_id"] for row in rows], _SHORTEST_ID[noun])
        for row in rows:
            row[noun] = ids[row[f"{noun}_id"]]
    for row in rows:
        row["started"] = format_age_since(row["start_ns"])
        row["error"] = word_error({"status": "failed", **row})
        if "is_fatal" in row:
            continue
        row["tokens"] = f"{row['input_tokens'] or 0}→{row['output_tokens'] or 0}"
        row["duration"] = format_ns(row["end_ns"] - row["start_ns"])
        for name in ("cost", "reward"):
            row[name] = None if row[name] is None else float(format_number(row[name]))


def _short_ids(ids: Sequence[str], shortest: int) -> dict[str, str]:
    """Return beginnings of ids that tell them apart, all of one length, to be typed again."""
    length, count = shortest, len(set(ids))
    while len({whole[:length] for whole in ids}) < count:
        length += 1
    return {whole: whole[:length] for whole in ids}


@click.command()
@click.option("--by", type=click.Choice(get_args(Dimension)),
              help="Break rewards, errors, latency, tokens and cost down.")  # fmt: skip
@when_options
@format_option
@store_option
def stats(form: Form | None, store: str | None, by: str | None, **times: Any) -> None:
    """Count spans, rewards and transitions, and what was lost or left out.

    With --by, compare agents, models, versions of resources, or tools.
    """
    from lightning_otel.views.summary import store_stats

    if by is not None:
        _print_breakdown(by, times, form, store)
        return
    if any(times.values()):
        raise click.UsageError("--since and --until belong to --by")
    stats_ = store_stats(Store(store))
    rows = [{"name": name, "value": value} for name, value in _flatten_numbers(stats_)]
    if print_data(form, rows, document=stats_):
        return
    for name, value in _stats_lines(stats_):
        click.echo(f"{name:<12} {printable(value)}")
    if "accounting" not in stats_:
        print_note("what was lost is counted where the spans are recorded")
    suggest("export triplets -o triplets.jsonl", store)


def _print_breakdown(
    by: str, times: Mapping[str, Any], form: Form | None, store: str | None
) -> None:

    table = Store(store).breakdown(by, **times)
    rows = list(table)
    if form is not None or not sys.stdout.isatty():
        print_rows(rows, table.columns, form=form)
        return

    def word(value: float | None, text: str) -> str | None:
        return None if value is None else text.format(value)

    for row in rows:
        row["name"] = row["name"] or "unknown"
        row["reward"], row["±"] = word(row["reward"], "{:.3g}"), word(row["margin"], "{:.2g}")
        row["errors"], row["cost"] = f"{row['error_rate']:.1%}", word(row["cost"], "{:.4g}")
        for name in ("p50", "p95"):
            value = row[f"{name}_s"]
            row[name] = None if value is None else format_ns(int(value * 1e9))
    if rows:
        print_table(rows, _COLUMNS["breakdown"], ("name", "±", "tokens", "cost"))
    else:
        print_note(f"nothing of a {by} yet")
    suggest("ls failures", store)


def _flatten_numbers(stats: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, object]]:
    for name, value in stats.items():
        if isinstance(value, Mapping):
            yield from _flatten_numbers(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _stats_lines(stats: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    funnel = stats["funnel"]
    yield "store", stats["store"]
    yield "spans", f"{funnel['spans']} in {count_noun(funnel['rollouts'], 'rollout')}"
    for name in ("running", "incomplete"):
        if stats.get(name):
            yield name, count_noun(stats[name], "rollout")
    yield "calls", funnel["calls"]
    yield "transitions", f"{funnel['transitions']}, {funnel['exact']} with exact token ids"
    for name, reasons in (("not exact", funnel["inexact"]), ("note", funnel["notes"])):
        yield from ((name, f"{count} × {reason}") for reason, count in reasons.items())
    yield "rewards", f"{funnel['rewards']}, {funnel['rewards_placed']} credited to a call"
    yield "rewarded", f"{funnel['rewarded']} of {count_noun(funnel['transitions'], 'transition')}"
    if stats["cost"] is not None:
        unpriced = stats["unpriced"]
        more = f", and {count_noun(unpriced, 'call')} without a price" if unpriced else ""
        yield "cost", f"{stats['cost']:.6g}{more}"
    if "accounting" in stats:
        yield from _kept_lines(stats)
    yield from (("left out", f"{count} × {reason}") for reason, count in stats["left_out"].items())


def _kept_lines(stats: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    from lightning_otel.store.counts import Accounting

    files = count_noun(stats["files"], "file"), count_noun(stats["segments"], "segment")
    yield "on disk", ", ".join((*files, format_size(stats["bytes"])))
    if removed := stats.get("removed"):
        yield "removed", format_leftover(**removed)
    counts = {name: value for name, value in stats["accounting"].items() if name != "missing"}
    account = Accounting(**counts)
    yield "accounted", account.sentence()
    yield from (("not stored", f"{count} × {reason}") for reason, count in account.reasons())
    if account.slow_writes:
        spans = count_noun(account.slow_held, "span")
        yield "disk hung", f"{account.slow_writes} ×, {spans} waited in memory"
    if stats["missing"]:
        count = count_noun(stats["missing"], "span")
        yield "missing", f"{count} in damaged files; see: lightning-otel doctor"
    if stats["gone"]:
        yield "gone", f"{count_noun(stats['gone'], 'span')} with damaged files"


@click.command()
@click.argument("query")
@format_option
@store_option
def sql(query: str, form: Form | None, store: str | None) -> int:
    """Run one read-only SQL query over spans, calls, rewards and rollouts.

    A query sees only these tables. Its limits are five minutes, 4 GiB of memory, and a million rows
    or 256 MiB of output.
    """
    try:
        columns, rows, cut = run_query(Store(store), query)
    except QueryError as exc:
        print_error(str(exc), exc.why, 'lightning-otel sql "DESCRIBE spans"')
        return 1
    print_rows(rows, columns, form=form)
    if not rows:
        print_note("no rows")
        suggest('sql "DESCRIBE spans"', store)
    if cut:
        print_note(
            f"these are the first {count_noun(len(rows), 'row')}: more {cut} than fit; add a LIMIT"
        )
    return 0


def run_query(
    opened: Store, query: str, limits: "Limits | None" = None
) -> tuple[list[str], list[dict[str, Any]], str]:
    """Return columns, rows and what was cut: of files on this machine, in an own process."""
    if opened.layout is None:
        table = opened.sql(query)
        return table.columns, list(table), ""
    from lightning_otel.views.sandbox import Limits, run_statement

    # Much, but not the whole machine for ever.
    limits = limits or Limits(
        wall_s=300.0, memory_bytes=4 << 30, rows=1_000_000, size_bytes=256 << 20
    )
    with run_statement(opened.layout, query, limits) as answer:
        rows = [dict(zip(answer.columns, row, strict=True)) for row in answer]
        return answer.columns, rows, answer.cut


@click.command()
@click.argument("metrics", nargs=-1, metavar="[METRIC]...", type=METRIC)
@click.option(
    "--by",
    type=click.Choice(["rollout", "time", "step", "version"]),
    help="Horizontal axis.",
)
@click.option("--split", type=click.Choice(["agent"]), help="One line each.")
@click.option("--run", "runs", multiple=True, metavar="ID", type=RUN,
              help="Metrics that this training run logged; a prefix, or @last.")  # fmt: skip
@click.option("--mode", help="Only rollouts of this mode, such as val.")
@when_options
@click.option("--success", type=float, default=0.5, show_default=True,
              help="Least reward of a success.")  # fmt: skip
@click.option("--window", type=COUNT, help="Number of values in the moving mean.")
@click.option("--output", "-o", metavar="FILE", help="Write a picture: FILE.svg or .png.")
@format_option
@store_option
def plot(
    metrics: Sequence[str], output: str | None, form: Form | None, store: str | None, **options: Any
) -> None:
    """Draw reward, success_rate, length, tokens, duration, or what training runs logged (loss).

    By default the usual metrics over rollouts in the order they began, with their moving mean.
    """
    from lightning_otel.views.plot import plot_training_metrics

    if output is not None and form:
        raise click.UsageError("--output writes a picture and prints nothing; give it alone")
    drawn = plot_training_metrics(store, metrics, output, **options)
    charts = [chart.as_json() for chart in drawn]
    points = [
        {"metric": chart["metric"], "series": series["name"], **point}
        for chart in charts
        for series in chart["series"]
        for point in series["points"]
    ]
    columns = list(dict.fromkeys(name for row in points for name in row))
    columns = columns or ["metric", "series", "value"]
    if print_data(form, points, columns, document=charts, times=("start_ns",)):
        return
    if output is not None:
        curves = f"{len(drawn)} curve{'' if len(drawn) == 1 else 's'}"
        print_note(f"{curves}, {len(points)} points → {output}")
        return
    print_charts(drawn)
    is_any = any(chart.series for chart in drawn)
    suggest("show @last --findings" if is_any else "run -- python your_agent.py", store)


def print_charts(charts: "Sequence[Chart]") -> None:
    """Print charts as wide as the terminal; elsewhere 80 cells."""
    from lightning_otel.views.plot import chart_lines

    width = get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    try:
        is_ascii = not "▁█└┤".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        is_ascii = True
    for number, chart in enumerate(charts):
        if number:
            click.echo()
        for line in chart_lines(chart, width, is_ascii=is_ascii):
            click.echo(line)
