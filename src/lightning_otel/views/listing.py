"""Rollouts and traces, the newest first, and what a store counts."""

from collections import Counter
from dataclasses import asdict
from typing import Any, Final, Literal, NamedTuple

from lightning_otel import conventions as c
from lightning_otel.dataset import Store
from lightning_otel.dataset.batches import unfinished
from lightning_otel.messages import parse_messages, plain_text
from lightning_otel.store.damage import count_missing_spans
from lightning_otel.store.earnings import LAST_REWARD
from lightning_otel.store.layout import total_bytes
from lightning_otel.store.quarantine import read_notes
from lightning_otel.store.source import overview
from lightning_otel.store.sql import ROLLOUT, quoted

_GENERATIVE = ", ".join(map(quoted, sorted(c.GENERATIVE_OPERATIONS)))
# A reward given later stands in a trace of its own, which to a person is none.
_TRACES = f"""
WITH t AS (
  SELECT trace_id, min({ROLLOUT}) AS rollout_id,
    min(start_ns) AS start_ns, max(coalesce(end_ns, start_ns)) AS end_ns,
    string_agg(DISTINCT agent, ', ' ORDER BY agent) AS agents, count(*) AS spans,
    count(*) FILTER (operation IN ({_GENERATIVE})) AS calls,
    count(*) FILTER (operation = '{c.EXECUTE_TOOL}') AS tools,
    sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens
  FROM spans GROUP BY trace_id
  HAVING count(*) FILTER (name <> '{c.SPAN_ANNOTATION}') > 0
), newest AS (
  SELECT *, count(*) OVER () AS total FROM t {{window}} ORDER BY start_ns DESC, trace_id {{limit}}
)
SELECT total, n.trace_id, n.rollout_id, n.start_ns, n.end_ns, n.agents, n.spans, n.calls, n.tools,
  n.input_tokens, n.output_tokens, r.reward
FROM newest n
LEFT JOIN (
  SELECT rollout_id, {LAST_REWARD} AS reward FROM rollouts GROUP BY rollout_id
) r USING (rollout_id)
ORDER BY n.start_ns DESC, n.trace_id
"""
_ROLLOUTS = """
SELECT *, count(*) OVER () AS total FROM rollouts {window}
ORDER BY start_ns DESC, rollout_id, attempt_id {limit}
"""
# On its own, so that a page of traces reads no bodies, and that only theirs are read for texts.
_TEXTS = """
SELECT trace_id, arg_min(input_messages, start_ns) AS first_input,
  arg_max(output_messages, start_ns) AS last_output
FROM calls WHERE trace_id IN (SELECT unnest(?)) AND start_ns BETWEEN ? AND ? GROUP BY trace_id
"""
KEYS: Final = {
    "rollouts": (
        "rollout_id", "attempt_id", "status", "start_ns", "end_ns", "agents", "spans", "calls",
        "rewards", "reward", "input_tokens", "output_tokens", "task",
    ),
    "traces": (
        "trace_id", "rollout_id", "start_ns", "end_ns", "agents", "input", "output", "spans",
        "calls", "tools", "reward", "input_tokens", "output_tokens",
    ),
}  # fmt: skip
"""Columns of a list."""


class Listing(NamedTuple):
    """Rows to show and how many there are in all."""

    rows: list[dict[str, Any]]
    total: int


def list_newest(
    store: Store,
    noun: Literal["rollouts", "traces"],
    limit: int | None,
    *,
    since_ns: int | None = None,
    until_ns: int | None = None,
    with_texts: bool = True,
) -> Listing:
    """Return the newest rollouts or traces.

    Args:
        store: Where they are.
        noun: Which of them.
        limit: How many; None for all.
        since_ns: Only those that began then or later, Unix nanoseconds.
        until_ns: Only those that began before.
        with_texts: Of traces, what was asked first and answered last. Without, no body is read.
    """
    bounds = ((">=", since_ns), ("<", until_ns))
    window = " AND ".join(f"start_ns {sign} {int(at)}" for sign, at in bounds if at is not None)
    query = (_TRACES if noun == "traces" else _ROLLOUTS).format(
        window=f"WHERE {window}" if window else "",
        limit="" if limit is None else f"LIMIT {int(limit)}",
    )
    rows = overview(store.source, query)
    total = max([row.pop("total") for row in rows], default=0)
    if noun == "traces" and with_texts and rows:
        _add_texts(store, rows)
    return Listing(rows, total)


def _add_texts(store: Store, rows: list[dict[str, Any]]) -> None:
    starts, ends = ([row[name] for row in rows] for name in ("start_ns", "end_ns"))
    found = store.sql(_TEXTS, [[row["trace_id"] for row in rows], min(starts), max(ends)])
    texts = {row["trace_id"]: (row["first_input"], row["last_output"]) for row in found}
    for row in rows:
        asked, answered = map(parse_messages, texts.get(row["trace_id"], (None, None)))
        users = [message for message in asked or () if message.get("role") == "user"]
        row |= {"input": plain_text(users[:1]), "output": plain_text((answered or ())[:1])}


def store_stats(store: Store) -> dict[str, Any]:
    """Return the funnel, the files, and every counted loss; of a store elsewhere the funnel."""
    report = store.report()
    funnel = asdict(report)
    funnel.pop("dropped")
    found: dict[str, Any] = {"store": store.name, "funnel": funnel, "left_out": report.reasons()}
    if "://" in store.name:
        return found  # the rest is not counted here, and so not 0
    attempts = {(rollout_id, status) for rollout_id, _, status in unfinished(store.source)}
    counts = Counter(status for _, status in attempts)
    accounting = store.accounting()
    found |= {name: counts[name] for name in ("running", "incomplete")}
    found["accounting"] = {**asdict(accounting), "missing": accounting.missing}
    if store.layout is None:
        return {**found, **dict.fromkeys(("files", "segments", "bytes", "missing", "gone"), 0)}
    manifest = store.layout.read_manifest()
    segments = store.layout.unsettled(manifest)
    files = [store.layout.data / file.name for file in manifest.live_files]
    return {
        **found,
        "files": len(files),
        "segments": len(segments),
        "bytes": total_bytes([*files, *segments]),
        "missing": sum(count_missing_spans(store.layout).values()),
        "gone": sum(note.gone for note in read_notes(store.layout)),
    }
