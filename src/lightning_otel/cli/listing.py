"""The rows behind ``ls`` and ``stats``."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

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
)
"""
_NEWEST_TRACES = (
    _TRACES
    + f""", newest AS (
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
)
# On its own, so that a page of traces reads no bodies, and that only theirs are read for texts.
_TEXTS = """
SELECT trace_id, arg_min(input_messages, start_ns) AS first_input,
  arg_max(output_messages, start_ns) AS last_output
FROM calls WHERE trace_id IN (SELECT unnest(?)) AND start_ns BETWEEN ? AND ? GROUP BY trace_id
"""
_NEWEST = "start_ns DESC, rollout_id, attempt_id"
ROLLOUT_KEYS = (
    "rollout_id", "attempt_id", "status", "start_ns", "end_ns", "agents", "spans", "calls",
    "rewards", "reward", "input_tokens", "output_tokens", "task",
)  # fmt: skip
TRACE_KEYS = (
    "trace_id", "rollout_id", "start_ns", "end_ns", "agents", "input", "output", "spans", "calls",
    "tools", "reward", "input_tokens", "output_tokens",
)  # fmt: skip


class Listing(NamedTuple):
    """Rows to show and how many there are in all."""

    rows: list[dict[str, Any]]
    total: int


def list_rollouts(
    store: Store, limit: int | None, *, since_ns: int | None = None, until_ns: int | None = None
) -> Listing:
    """The newest rollouts.

    Args:
        store: Where they are.
        limit: How many; None for all.
        since_ns: Only those that began then or later, Unix nanoseconds.
        until_ns: Only those that began before.
    """
    window = _window_condition(since_ns, until_ns)
    query = (
        f"SELECT *, count(*) OVER () AS total FROM rollouts {window} "
        f"ORDER BY {_NEWEST} {_limit_clause(limit)}"
    )
    return _split_total(overview(store.source, query))


def list_traces(
    store: Store,
    limit: int | None,
    *,
    with_texts: bool = True,
    since_ns: int | None = None,
    until_ns: int | None = None,
) -> Listing:
    """The newest traces.

    Args:
        store: Where they are.
        limit: How many; None for all.
        with_texts: With what was asked first and answered last. Without, no body is read.
        since_ns: Only those that began then or later, Unix nanoseconds.
        until_ns: Only those that began before.
    """
    query = _NEWEST_TRACES.format(
        limit=_limit_clause(limit), window=_window_condition(since_ns, until_ns)
    )
    rows, total = _split_total(overview(store.source, query))
    texts = _read_texts(store, rows) if with_texts and rows else {}
    for row in rows:
        first_input, last_output = texts.get(row["trace_id"], (None, None))
        asked = parse_messages(first_input) or ()
        users = [message for message in asked if message.get("role") == "user"]
        row["input"] = plain_text(users[:1])
        row["output"] = plain_text((parse_messages(last_output) or ())[:1])
    return Listing(rows, total)


def _read_texts(store: Store, rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """The first input and the last output of each trace."""
    found = store.sql(
        _TEXTS,
        [
            [row["trace_id"] for row in rows],
            min(row["start_ns"] for row in rows),
            max(row["end_ns"] for row in rows),
        ],
    )
    return {row["trace_id"]: (row["first_input"], row["last_output"]) for row in found}


def store_stats(store: Store) -> dict[str, Any]:
    """The funnel, the files, and every loss that was counted; the funnel alone of one elsewhere."""
    report = store.report()
    funnel = asdict(report)
    funnel.pop("dropped")
    found: dict[str, Any] = {
        "store": store.name,
        "funnel": funnel,
        "left_out": report.reasons(),
    }
    if "://" in store.name:
        return found  # the rest is not counted here, and so not 0
    accounting = store.accounting()
    found |= {
        **_count_unfinished(store),
        "accounting": {**asdict(accounting), "missing": accounting.missing},
    }
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


def _count_unfinished(store: Store) -> dict[str, int]:
    """Count the rollouts that go on, and those that broke off."""
    found = {(rollout_id, status) for rollout_id, _, status in unfinished(store.source)}
    counts = Counter(status for _, status in found)
    return {name: counts[name] for name in ("running", "incomplete")}


def _split_total(rows: list[dict[str, Any]]) -> Listing:
    """Split rows from their total, which each of them tells."""
    totals = [row.pop("total") for row in rows]
    return Listing(rows, max(totals, default=0))


def _window_condition(since_ns: int | None, until_ns: int | None) -> str:
    parts = [f"start_ns >= {int(since_ns)}"] if since_ns is not None else []
    parts += [f"start_ns < {int(until_ns)}"] if until_ns is not None else []
    return f"WHERE {' AND '.join(parts)}" if parts else ""


def _limit_clause(limit: int | None) -> str:
    return "" if limit is None else f"LIMIT {int(limit)}"
