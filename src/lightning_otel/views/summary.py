"""Counts of a store, and summaries of a period: rewards, errors, latency, tokens, cost."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.store.damage import count_missing_spans
from lightning_otel.store.prices import COSTS, SUM_COSTS, read_prices
from lightning_otel.store.quarantine import read_notes
from lightning_otel.store.removal import measure_disk, measure_leftover
from lightning_otel.store.source import at_moment, read_overview
from lightning_otel.store.table import Query
from lightning_otel.store.views import LAST_REWARD, MARGIN
from lightning_otel.views.nouns import FAILURES

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

PERIODS: Final[Mapping[str, int]] = {"1h": 3600, "24h": 86_400, "7d": 604_800, "30d": 2_592_000}
"""Seconds by name."""

_ROLLOUTS: Final = f"""
SELECT start_ns >= ? AS is_now, count(*) AS rollouts, avg(reward) AS reward, {MARGIN},
  count(reward) AS rewarded, count(*) FILTER (status = 'failed') / count(*) AS error_rate,
  quantile_cont(took_s, 0.5) AS p50_s, quantile_cont(took_s, 0.95) AS p95_s
FROM (SELECT rollout_id, min(start_ns) AS start_ns, {LAST_REWARD} AS reward,
    arg_max(status, start_ns) AS status,
    CASE WHEN arg_max(status, start_ns) <> 'running'
      THEN (max(end_ns) - min(start_ns)) / 1e9 END AS took_s
  FROM rollouts GROUP BY rollout_id)
WHERE start_ns >= ? AND start_ns < ? GROUP BY 1"""
_COSTS: Final = f"""
SELECT start_ns >= ? AS is_now,
  (coalesce(sum(input_tokens), 0) + coalesce(sum(output_tokens), 0))::BIGINT AS tokens,
  {SUM_COSTS} AS cost, count(*) FILTER (cost IS NULL) AS unpriced,
  coalesce(list_sort(list(DISTINCT coalesce(model, 'unknown')) FILTER (NOT is_priced)), [])
    AS unpriced_models
FROM ({COSTS}) WHERE start_ns >= ? AND start_ns < ? GROUP BY 1"""
_TOTAL_COST: Final = f"""
SELECT {SUM_COSTS} AS cost, count(*) FILTER (cost IS NULL) AS unpriced FROM ({COSTS})"""
_UNFINISHED: Final = "SELECT status, count(DISTINCT rollout_id) FROM attempts GROUP BY 1"
_PERIODS: Final = 12
"""Parts of the time of all rollouts in which failures are counted."""
_EXAMPLES: Final = 3
_COUNTS: Final = ", ".join(f"count(*) FILTER (part = {part})" for part in range(_PERIODS))
_GROUPS: Final = f"""
SELECT error_type, tool, agent, model, count(*) AS count, count(DISTINCT rollout_id) AS rollouts,
  count(DISTINCT rollout_id) FILTER (is_fatal) AS failed, max(start_ns) AS last_ns,
  arg_max(error_message, start_ns) AS message, [{_COUNTS}] AS trend,
  arg_max(rollout_id, start_ns, {_EXAMPLES}) AS examples
FROM (SELECT *, greatest(0, least({_PERIODS - 1}, (start_ns - low) * {_PERIODS} // length)) AS part
  FROM failures, (SELECT min(start_ns) AS low, greatest(1, max(end_ns) - min(start_ns)) AS length
    FROM attempts) WHERE {{where}})
GROUP BY error_type, tool, agent, model ORDER BY count DESC, last_ns DESC"""


_NOTHING: Final[Mapping[str, Any]] = {
    "rollouts": 0, "rewarded": 0, "tokens": 0, "unpriced": 0, "unpriced_models": (),
    **dict.fromkeys(("reward", "margin", "error_rate", "p50_s", "p95_s", "cost")),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Summary:
    """Numbers of the rollouts and model calls that started in a period."""

    rollouts: int
    rewarded: int
    """Those with a reward."""
    reward: float | None
    """Mean reward; null if none has one."""
    margin: float | None
    """Half of the mean reward's 95 % interval, by a normal distribution; null of fewer than 8."""
    error_rate: float | None
    """Share that failed, 0 to 1."""
    p50_s: float | None
    """Median duration in seconds."""
    p95_s: float | None
    """The duration that 95 % stay below."""
    tokens: int
    """Input and output tokens of all calls."""
    cost: float | None
    """Of the calls with a price, in the currency of the prices."""
    unpriced: int
    """Calls without a price or a count of tokens."""
    unpriced_models: Sequence[str]


def read_summaries(store: "Store", period: str = "24h") -> tuple[Summary, Summary]:
    """Return the summary of the period up to now, and of the one before it.

    Raises:
        ConfigError: The price table cannot be read.
    """
    con = store.source.connect_overview()
    until = time.time_ns()
    middle, since = (until - n * PERIODS[period] * 1_000_000_000 for n in (1, 2))
    bounds = [middle, since, until]
    read_prices()  # whoever asks for costs is told of a table that is none
    periods = {True: dict(_NOTHING), False: dict(_NOTHING)}
    for query in (_ROLLOUTS, _COSTS):
        for row in Query(con, query, bounds).dicts():
            periods[row.pop("is_now")] |= row
    return Summary(**periods[True]), Summary(**periods[False])


def group_failures(store: "Store", values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return errors by type, tool, agent and model, the most frequent first, by filters' values."""
    active, where = FAILURES.match(values)
    return read_overview(store.source, _GROUPS.format(where=where), [*active.values()])


def store_stats(store: "Store") -> dict[str, Any]:
    """Return the funnel, the files, and every counted loss; of a store elsewhere the funnel."""
    store = at_moment(store)
    report = store.report()
    funnel = asdict(report)
    funnel.pop("dropped")
    stats: dict[str, Any] = {"store": store.name, "funnel": funnel, "left_out": report.reasons()}
    con = store.source.connect_overview()
    stats |= Query(con, _TOTAL_COST).head(1)[0]
    if "://" in store.name:
        return stats  # the rest is not counted here, and so not 0
    counts = dict(con.execute(_UNFINISHED).fetchall())
    accounting = store.accounting()
    stats |= {name: counts.get(name, 0) for name in ("running", "incomplete")}
    stats["accounting"] = {**asdict(accounting), "missing": accounting.missing}
    moment = store.source.moment
    if moment is None:
        return {**stats, **dict.fromkeys(("files", "segments", "bytes", "missing", "gone"), 0)}
    layout, manifest = moment.layout, moment.snapshot().manifest
    stats |= {
        "files": len(manifest.live_files),
        "segments": len(layout.list_unsettled(manifest)),
        "bytes": measure_disk(layout),
        "missing": sum(count_missing_spans(layout, manifest).values()),
        "gone": sum(note.gone for note in read_notes(layout)),
    }
    leftover = measure_leftover(layout, manifest, is_removed=True)
    return {**stats, "removed": leftover._asdict()} if leftover.size_bytes else stats
