"""``ls``, ``show``, ``stats``, ``sql``: what is in the store."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from lightning_otel.cli.output import (
    ago,
    json_options,
    print_json,
    print_rows,
    shown,
    store_option,
    talk,
)

_ROLLOUT_COLUMNS = (
    "rollout", "status", "when", "agents", "calls", "rewards", "reward", "tokens", "seconds", "task",
)  # fmt: skip
_TRACE_COLUMNS = (
    "trace", "when", "agents", "input", "output", "calls", "tools", "tokens", "seconds", "reward",
)  # fmt: skip
_WIDTHS = {"rollout": 24, "trace": 12, "input": 32, "output": 32, "task": 32, "agents": 20}
_TEXT = 100


@click.command()
@click.argument("what", type=click.Choice(["traces", "rollouts"]), default="rollouts")
@click.option("--limit", default=20, show_default=True, help="How many, the newest first.")
@click.option("--all", "every", is_flag=True, help="All of them.")
@json_options
@store_option
def ls(
    what: str, limit: int, every: bool, as_json: bool, as_jsonl: bool, store: str | None
) -> None:
    """List traces or rollouts, the newest first."""
    from lightning_otel.cli.listing import list_rollouts, list_traces
    from lightning_otel.store import Store

    opened = Store(store)
    listed = (list_traces if what == "traces" else list_rollouts)(opened, None if every else limit)
    columns = _TRACE_COLUMNS if what == "traces" else _ROLLOUT_COLUMNS
    rows = listed.rows
    if as_json or as_jsonl:
        names = [name for name in (rows[0] if rows else {}) if name not in ("when",)]
        print_rows(rows, names, as_json=as_json, as_jsonl=as_jsonl)
        return
    for row in rows:
        row["when"] = ago(row["start_ns"])
    print_rows(rows, columns, widths=_WIDTHS)
    if listed.total > len(rows):
        talk(f"{len(rows)} of {listed.total} {what} · --all for the rest")
    if rows:
        talk(f"→ lightning-otel show {rows[0][what[:-1]][:12] if what == 'traces' else '@last'}")


@click.command()
@click.argument("target", metavar="ID", default="@last")
@click.option("--transitions", "as_transitions", is_flag=True, help="The transitions instead.")
@json_options
@store_option
def show(
    target: str, as_transitions: bool, as_json: bool, as_jsonl: bool, store: str | None
) -> None:
    """Show one rollout, trace or span, by a prefix of its id or @last."""
    from lightning_otel.store import Store

    opened = Store(store)
    noun, whole = opened.find(target)
    if noun == "trace" and not as_transitions:
        spans = opened.spans(trace_id=whole).rows()
    else:
        rollout_id = whole if noun == "rollout" else opened.rollout_of(noun, whole)
        if as_transitions:
            _show_transitions(opened, rollout_id, as_json=as_json, as_jsonl=as_jsonl)
            return
        spans = opened.spans(rollout_id=rollout_id).rows()
    if as_json or as_jsonl:
        from lightning_otel.cli.spans import sdk_json

        rows = [sdk_json(span) for span in spans]
        print_rows(rows, list(rows[0]), as_json=as_json, as_jsonl=as_jsonl)
        return
    from lightning_otel.cli.tree import tree_lines

    width = None
    if sys.stdout.isatty():
        from shutil import get_terminal_size

        width = get_terminal_size().columns
    for line in tree_lines(spans):
        click.echo(shown(line, width))
    talk(f"→ lightning-otel show {shown(target)} --transitions")


def _show_transitions(opened: Any, rollout_id: str, *, as_json: bool, as_jsonl: bool) -> None:
    from lightning_otel.adapter.messages import plain_text

    if as_json or as_jsonl:
        found = list(opened.transitions(rollout_id=rollout_id).dicts())
        print_rows(found, list(found[0]) if found else [], as_json=as_json, as_jsonl=as_jsonl)
        return
    rows = [
        {
            "agent": step.agent,
            "step": step.step,
            "observation": plain_text(step.observation[-1:]),
            "action": plain_text(step.action[:1]),
            "reward": step.reward,
            "done": step.done,
            "capture": step.capture,
            "tokens": f"{len(step.prompt_ids)}→{len(step.response_ids)}",
        }
        for step in opened.transitions(rollout_id=rollout_id)
    ]
    columns = ("agent", "step", "observation", "action", "reward", "done", "capture", "tokens")
    print_rows(rows, columns, widths={"observation": 40, "action": 40, "agent": 20})
    for reason, count in opened.report(rollout_id=rollout_id).reasons().items():
        talk(f"left out: {count} × {reason}")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@store_option
def stats(as_json: bool, store: str | None) -> None:
    """Count what was kept: spans, calls, token ids, rewards, transitions, and what was lost."""
    from lightning_otel.cli.listing import store_stats
    from lightning_otel.store import Store

    found = store_stats(Store(store))
    if as_json:
        print_json(found)
        return
    _print_stats(found)


def _print_stats(found: Mapping[str, Any]) -> None:
    funnel = found["funnel"]
    lines: Sequence[tuple[str, object]] = [
        ("store", found["store"]),
        ("spans", f"{funnel['spans']} in {funnel['rollouts']} rollouts"),
        ("calls", funnel["calls"]),
        ("transitions", f"{funnel['transitions']} ({funnel['exact']} with exact token ids)"),
        ("rewards", f"{funnel['rewards']} ({funnel['rewards_placed']} placed)"),
        ("rewarded", f"{funnel['rewarded']} of {funnel['transitions']} transitions"),
        (
            "on disk",
            f"{found['files']} files and {found['segments']} segments, {found['bytes'] / 1e6:.1f} MB",
        ),
        (
            "lost",
            f"{found['lost']} spans, {found['damaged']} damaged lines, {found['conflicts']} conflicts",
        ),
    ]
    for name, value in lines:
        click.echo(f"{name:<12} {shown(value)}")
    for reason, count in found["left_out"].items():
        click.echo(f"left out     {count} × {shown(reason)}")


@click.command()
@click.argument("query")
@json_options
@store_option
def sql(query: str, as_json: bool, as_jsonl: bool, store: str | None) -> None:
    """Run one read-only statement over spans, calls, rewards and rollouts."""
    from lightning_otel.store import Store

    table = Store(store).sql(query)
    print_rows(list(table), table.columns, as_json=as_json, as_jsonl=as_jsonl)
