"""``ls``, ``show``, ``stats``, ``sql``: what is in the store."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from lightning_otel.cli import say_error
from lightning_otel.cli.options import Form, Id, rows_options, when_options
from lightning_otel.cli.output import (
    age,
    count_noun,
    print_json,
    print_rows,
    print_table,
    seconds,
    shown,
    size,
    store_option,
    suggest,
    talk,
)
from lightning_otel.errors import QueryError

if TYPE_CHECKING:
    from lightning_otel.dataset import Store
    from lightning_otel.store.counts import Accounting

_ROLLOUT_COLUMNS = (
    "rollout", "status", "age", "agents", "calls", "tokens", "time", "reward", "task",
)  # fmt: skip
_TRACE_COLUMNS = ("trace", "age", "agents", "input", "output", "calls", "tokens", "time", "reward")
_TEXT_COLUMNS = ("task", "agents", "agent", "input", "output", "observation", "action")
_SHORTEST_ID = {"rollout": 16, "trace": 8}
_SQL_S = 300.0
_SQL_BYTES = 4 << 30
_SQL_ROWS = 1_000_000
_SQL_SIZE = 256 << 20
"""What a statement at the terminal may take: much, but not the whole machine for ever."""


@click.command()
@click.argument("what", type=click.Choice(["rollouts", "traces"]), default="rollouts")
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True,
    help="How many, the newest first.",
)  # fmt: skip
@click.option("--all", "every", is_flag=True, help="All of them.")
@when_options
@rows_options
@store_option
def ls(
    what: str,
    limit: int,
    every: bool,
    since: int | None,
    until: int | None,
    form: Form | None,
    store: str | None,
) -> None:
    """List traces or rollouts, the newest first."""
    from lightning_otel.cli import listing
    from lightning_otel.dataset import Store

    opened = Store(store)
    find = listing.list_traces if what == "traces" else listing.list_rollouts
    rows, total = find(opened, None if every else limit, since_ns=since, until_ns=until)
    if form is not None or not sys.stdout.isatty():
        keys = listing.TRACE_KEYS if what == "traces" else listing.ROLLOUT_KEYS
        print_rows(rows, keys, form=form, times=("start_ns", "end_ns"))
    elif rows:
        noun = what[:-1]
        columns = _TRACE_COLUMNS if what == "traces" else _ROLLOUT_COLUMNS
        ids = _short_ids([row[f"{noun}_id"] for row in rows], _SHORTEST_ID[noun])
        print_table([_make_shown_row(row, noun, ids) for row in rows], columns, _TEXT_COLUMNS)
    if not rows:
        is_any = since is not None or until is not None
        talk(f"no {what} of that time" if is_any else f"no {what} yet")
        suggest("ls" if is_any else "run -- python your_agent.py", store)
        return
    if total > len(rows):
        talk(f"{len(rows)} of {total} {what} · --all for the rest")
    suggest("show @last" if what == "rollouts" else f"show {rows[0]['trace_id'][:8]}", store)


def _make_shown_row(row: Mapping[str, Any], noun: str, ids: Mapping[str, str]) -> dict[str, Any]:
    """A row for people."""
    return {
        **row,
        noun: ids[row[f"{noun}_id"]],
        "age": age(row["start_ns"]),
        "tokens": f"{row['input_tokens'] or 0}→{row['output_tokens'] or 0}",
        "time": seconds(row["end_ns"] - row["start_ns"]),
        "reward": None if row["reward"] is None else float(f"{row['reward']:.4g}"),
    }


def _short_ids(ids: Sequence[str], shortest: int) -> dict[str, str]:
    """Beginnings of ids that tell them apart, all of one length, to be typed again."""
    longest = max(map(len, ids))
    wanted = len(set(ids))
    length = next(
        size for size in range(shortest, longest + shortest + 1)
        if len({whole[:size] for whole in ids}) == wanted
    )  # fmt: skip
    return {whole: whole[:length] for whole in ids}


@click.command()
@click.argument("target", metavar="[ID]", type=Id(), default="@last")
@click.option("--tree", "view", flag_value="tree", help="The span tree with credit; the default.")
@click.option("--transitions", "view", flag_value="transitions", help="The transitions instead.")
@click.option("--svg", metavar="FILE", help="Write a picture of the tree; - is stdout.")
@click.option("--all", "every", is_flag=True, help="Every line, however many there are.")
@rows_options
@store_option
def show(
    target: str,
    view: str | None,
    svg: str | None,
    every: bool,
    form: Form | None,
    store: str | None,
) -> None:
    """Show one rollout, trace or span, by a prefix of its id or @last (the default).

    @last~1 is the rollout before the last one, @last~2 the one before that.
    """
    from lightning_otel.cli import showing
    from lightning_otel.dataset import Store
    from lightning_otel.views.outlines import outline_of

    if svg is not None and (view or form):
        raise click.UsageError("--svg draws the tree and prints nothing; give it alone")
    opened = Store(store)
    noun, whole = opened.find(target)
    if svg is not None:
        showing.write_picture(outline_of(opened.source, noun, whole), svg)
    elif view == "transitions":
        rollout_id = whole if noun == "rollout" else opened.rollout_of(noun, whole)
        if form is not None:
            showing.print_rows_of(opened, rollout_id, form=form)
        else:
            showing.print_transitions(outline_of(opened.source, "rollout", rollout_id), every=every)
            suggest(f"analyze {shown(rollout_id)}", store)
    elif form is not None:
        found = outline_of(opened.source, noun, whole)
        showing.print_nodes(found, is_tree=view == "tree", form=form)
    else:
        showing.print_tree(
            outline_of(opened.source, noun, whole),
            every=every,
            with_attributes=noun in ("span", "response"),
        )
        suggest(f"show {shown(target)} --transitions", store)


@click.command()
@rows_options
@store_option
def stats(form: Form | None, store: str | None) -> None:
    """Count what was kept, from spans to transitions, and what was lost or left out."""
    from lightning_otel.cli.listing import store_stats
    from lightning_otel.dataset import Store

    opened = Store(store)
    found = store_stats(opened)
    if form == "json":
        print_json(found)
        return
    if form is not None:
        rows = [{"name": name, "value": value} for name, value in _flatten_numbers(found)]
        print_rows(rows, ("name", "value"), form=form)
        return
    for name, value in _stats_lines(found):
        click.echo(f"{name:<12} {shown(value)}")
    if "accounting" not in found:
        talk("what was lost is counted where the spans are recorded")
    suggest("export triplets -o triplets.jsonl", store)


def _flatten_numbers(found: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, object]]:
    """Every number with its path, such as ``funnel.calls``."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _flatten_numbers(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _stats_lines(found: Mapping[str, Any]) -> list[tuple[str, object]]:
    funnel = found["funnel"]
    unfinished = [name for name in ("running", "incomplete") if found.get(name)]
    return [
        ("store", found["store"]),
        ("spans", f"{funnel['spans']} in {count_noun(funnel['rollouts'], 'rollout')}"),
        *((name, count_noun(found[name], "rollout")) for name in unfinished),
        ("calls", funnel["calls"]),
        ("transitions", f"{funnel['transitions']}, {funnel['exact']} with exact token ids"),
        *(("not exact", f"{count} × {reason}") for reason, count in funnel["inexact"].items()),
        *(("note", f"{count} × {reason}") for reason, count in funnel["notes"].items()),
        ("rewards", f"{funnel['rewards']}, {funnel['rewards_placed']} credited to a call"),
        ("rewarded", f"{funnel['rewarded']} of {count_noun(funnel['transitions'], 'transition')}"),
        *(_kept_lines(found) if "accounting" in found else ()),
        *(("left out", f"{count} × {reason}") for reason, count in found["left_out"].items()),
    ]


def _kept_lines(found: Mapping[str, Any]) -> list[tuple[str, object]]:
    """List facts about a local store: its files, and the accounts of its spans."""
    from lightning_otel.store.counts import Accounting

    kept = [
        count_noun(found["files"], "file"),
        count_noun(found["segments"], "segment"),
        size(found["bytes"]),
    ]
    accounting = dict(found["accounting"])
    accounting.pop("missing")
    account = Accounting(**accounting)
    return [
        ("on disk", ", ".join(kept)),
        ("accounted", account.sentence()),
        *(("not stored", f"{count} × {reason}") for reason, count in account.reasons()),
        *_slowness_lines(account),
        *_damage_lines(found),
    ]


def _slowness_lines(account: "Accounting") -> list[tuple[str, object]]:
    if not account.slow_writes:
        return []
    hung = f"{account.slow_writes} ×, {count_noun(account.slow_held, 'span')} waited in memory"
    return [("disk hung", hung)]


def _damage_lines(found: Mapping[str, Any]) -> list[tuple[str, object]]:
    lines: list[tuple[str, object]] = []
    if found["missing"]:
        count = count_noun(found["missing"], "span")
        lines.append(("missing", f"{count} in damaged files; see: lightning-otel doctor"))
    if found["gone"]:
        lines.append(("gone", f"{count_noun(found['gone'], 'span')} with damaged files"))
    return lines


@click.command()
@click.argument("query")
@rows_options
@store_option
def sql(query: str, form: Form | None, store: str | None) -> int:
    """Run one read-only statement over spans, calls, rewards and rollouts.

    It sees nothing but these, and ends after five minutes, 4 GiB of memory, a million rows or 256
    MiB of them.
    """
    from lightning_otel.dataset import Store

    try:
        columns, rows, cut = _run_query(Store(store), query)
    except QueryError as exc:
        say_error(str(exc), exc.why, 'lightning-otel sql "DESCRIBE spans"')
        return 1
    print_rows(rows, columns, form=form)
    if not rows:
        talk("no rows")
        suggest('sql "DESCRIBE spans"', store)
    if cut:
        talk(
            f"these are the first {count_noun(len(rows), 'row')}: more {cut} than fit; add a LIMIT"
        )
    return 0


def _run_query(opened: "Store", query: str) -> tuple[list[str], list[dict[str, Any]], str]:
    """Columns, rows and what was cut: of files on this machine, in a process of its own."""
    if opened.layout is None:
        table = opened.sql(query)
        return table.columns, list(table), ""
    from lightning_otel.views.sandbox import Limits, ask

    limits = Limits(wall_s=_SQL_S, memory_bytes=_SQL_BYTES, rows=_SQL_ROWS, size_bytes=_SQL_SIZE)
    with ask(opened.layout, query, limits) as answer:
        rows = [dict(zip(answer.columns, row, strict=True)) for row in answer]
        return answer.columns, rows, answer.cut
