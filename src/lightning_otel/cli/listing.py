"""The rows behind ``ls`` and ``stats``."""

from dataclasses import asdict
from typing import Any, NamedTuple

from lightning_otel.adapter.messages import parse_messages, plain_text
from lightning_otel.store import Store
from lightning_otel.store.layout import total_bytes

_TRACES = """
WITH t AS (
  SELECT trace_id, min(start_ns) AS start_ns, max(coalesce(end_ns, start_ns)) AS end_ns,
    string_agg(DISTINCT agent, ', ') AS agents, count(*) AS spans,
    count(*) FILTER (operation IN ('chat', 'text_completion', 'generate_content')) AS calls,
    count(*) FILTER (operation = 'execute_tool') AS tools,
    sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens,
    arg_max(reward, start_ns) FILTER (reward IS NOT NULL) AS reward
  FROM spans GROUP BY trace_id ORDER BY start_ns DESC {limit}
)
SELECT t.*, c.first_input, c.last_output FROM t LEFT JOIN (
  SELECT trace_id, arg_min(input_messages, start_ns) AS first_input,
    arg_max(output_messages, start_ns) AS last_output
  FROM calls WHERE trace_id IN (SELECT trace_id FROM t) GROUP BY trace_id
) c USING (trace_id) ORDER BY start_ns DESC
"""


class Listing(NamedTuple):
    """Rows to show and how many there are in all."""

    rows: list[dict[str, Any]]
    total: int


def _limit(limit: int | None) -> str:
    return "" if limit is None else f"LIMIT {int(limit)}"


def _tokens(row: dict[str, Any]) -> str:
    return f"{row['input_tokens'] or 0}→{row['output_tokens'] or 0}"


def list_rollouts(store: Store, limit: int | None) -> Listing:
    """The newest rollouts."""
    total = next(iter(store.sql("SELECT count(*) AS n FROM rollouts")))["n"]
    rows = list(store.sql(f"SELECT * FROM rollouts ORDER BY start_ns DESC {_limit(limit)}"))
    for row in rows:
        row["rollout"] = row["rollout_id"]
        row["tokens"] = _tokens(row)
        row["seconds"] = round((row["end_ns"] - row["start_ns"]) / 1e9, 2)
    return Listing(rows, total)


def list_traces(store: Store, limit: int | None) -> Listing:
    """The newest traces, with what was asked first and answered last."""
    total = next(iter(store.sql("SELECT count(DISTINCT trace_id) AS n FROM spans")))["n"]
    rows = list(store.sql(_TRACES.format(limit=_limit(limit))))
    for row in rows:
        row["trace"] = row["trace_id"]
        row["tokens"] = _tokens(row)
        row["seconds"] = round((row["end_ns"] - row["start_ns"]) / 1e9, 2)
        asked = parse_messages(row.pop("first_input")) or ()
        users = [message for message in asked if message.get("role") == "user"]
        row["input"] = plain_text(users[:1])
        row["output"] = plain_text((parse_messages(row.pop("last_output")) or ())[:1])
    return Listing(rows, total)


def store_stats(store: Store) -> dict[str, Any]:
    """The funnel, the files, and every loss that was counted."""
    report = store.report()
    funnel = asdict(report)
    funnel.pop("dropped")
    found: dict[str, Any] = {
        "store": store.name,
        "funnel": funnel,
        "left_out": report.reasons(),
    }
    if store.layout is None:
        return {**found, "files": 0, "segments": 0, "bytes": 0, **dict.fromkeys(_LOSSES, 0)}
    manifest = store.layout.read_manifest()
    settled = {segment.name for segment in manifest.segments}
    segments = [path for path in store.layout.segments() if path.name not in settled]
    files = [store.layout.data / file.name for file in manifest.live_files]
    return {
        **found,
        "files": len(files),
        "segments": len(segments),
        "bytes": total_bytes([*files, *segments]),
        **{name: sum(getattr(s, name) for s in manifest.segments) for name in _LOSSES},
    }


_LOSSES = ("lost", "damaged", "conflicts")
