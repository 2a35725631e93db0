"""Counts of a store, and summaries of a period: rewards, errors, latency, tokens, cost."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.dataset.batches import list_unfinished
from lightning_otel.rewards.prices import Prices, Tokens, cost_of, read_prices
from lightning_otel.store.damage import count_missing_spans
from lightning_otel.store.quarantine import read_notes
from lightning_otel.store.removal import measure_disk, measure_leftover
from lightning_otel.store.source import at_moment, read_overview
from lightning_otel.store.sql import attribute_sql
from lightning_otel.store.views import LAST_REWARD
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

PERIODS: Final[Mapping[str, int]] = {"1h": 3600, "24h": 86_400, "7d": 604_800, "30d": 2_592_000}
"""Seconds by name."""

_ROLLOUTS: Final = f"""
SELECT start_ns >= ? AS is_now, count(*) AS rollouts, avg(reward) AS reward,
  CASE WHEN count(reward) >= 8 THEN 1.96 * stddev_samp(reward) / sqrt(count(reward)) END AS margin,
  count(reward) AS rewarded, count(*) FILTER (status = 'failed') / count(*) AS error_rate,
  quantile_cont(took_s, 0.5) AS p50_s, quantile_cont(took_s, 0.95) AS p95_s
FROM (SELECT rollout_id, min(start_ns) AS start_ns, {LAST_REWARD} AS reward,
    arg_max(status, start_ns) AS status,
    CASE WHEN arg_max(status, start_ns) <> 'running'
      THEN (max(end_ns) - min(start_ns)) / 1e9 END AS took_s
  FROM rollouts GROUP BY rollout_id)
WHERE start_ns >= ? AND start_ns < ? GROUP BY 1"""
_TOKENS: Final = f"""
SELECT start_ns >= ? AS is_now, model, {{tier}} AS tier, count(*) AS calls,
  count(*) FILTER (input_tokens IS NOT NULL OR output_tokens IS NOT NULL) AS counted,
  coalesce(max(input_tokens), 0)::BIGINT AS longest,
  coalesce(sum(input_tokens), 0)::BIGINT AS given,
  coalesce(sum(output_tokens), 0)::BIGINT AS answered,
  coalesce(sum(TRY_CAST({attribute_sql(c.CACHED_TOKENS)} AS BIGINT)), 0)::BIGINT AS cached,
  coalesce(sum(TRY_CAST({attribute_sql(c.CACHE_CREATION_TOKENS)} AS BIGINT)), 0)::BIGINT AS written
FROM spans SEMI JOIN calls USING (trace_id, span_id)
WHERE start_ns >= ? AND start_ns < ? GROUP BY ALL"""
_FAILURES: Final = """
SELECT rollout_id, max(end_ns) AS end_ns, arg_max(task, start_ns) AS task FROM rollouts
GROUP BY rollout_id HAVING arg_max(status, start_ns) = 'failed' ORDER BY end_ns DESC LIMIT ?"""
_REASONS: Final = """
SELECT rollout_id, arg_max(status_message, start_ns) AS reason FROM spans
WHERE status = 'ERROR' AND rollout_id IN (SELECT unnest(?)) GROUP BY 1"""


_NO_ROLLOUTS: Final[Mapping[str, Any]] = {
    "rollouts": 0, "rewarded": 0,
    **dict.fromkeys(("reward", "margin", "error_rate", "p50_s", "p95_s")),
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
    unpriced_models: tuple[str, ...]


def read_summaries(store: "Store", period: str = "24h") -> tuple[Summary, Summary]:
    """Return the summary of the period up to now, and of the one before it.

    Raises:
        ConfigError: The price table cannot be read.
    """
    store = at_moment(store)
    until = time.time_ns()
    middle, since = (until - n * PERIODS[period] * 1_000_000_000 for n in (1, 2))
    bounds = [middle, since, until]
    rows = {row.pop("is_now"): row for row in read_overview(store.source, _ROLLOUTS, bounds)}
    prices = read_prices()
    bars = sorted({price.above for _, price in prices.rows})
    tier = " + ".join(f"(input_tokens > {bar})::INTEGER" for bar in bars)
    calls = list(store.sql(_TOKENS.format(tier=tier), bounds))
    now, before = (
        Summary(**rows.get(is_now, _NO_ROLLOUTS), **_sum_costs(calls, prices, is_now=is_now))
        for is_now in (True, False)
    )
    return now, before


def _sum_costs(calls: list[dict[str, Any]], prices: Prices, *, is_now: bool) -> dict[str, Any]:
    total, unpriced, costs, unknown = 0, 0, list[float](), set[str]()
    for row in calls:
        if row["is_now"] is is_now:
            price = prices.find([row["model"] or ""], row["longest"])
            total += row["given"] + row["answered"]
            unpriced += row["calls"] - (row["counted"] if price else 0)
            if price is None:
                unknown.add(row["model"] or "unknown")
            elif row["counted"]:
                tokens = Tokens(row["given"], row["answered"], row["cached"], row["written"])
                costs.append(cost_of(price, tokens))
    cost = sum(costs) if costs else None
    return {
        "tokens": total, "cost": cost, "unpriced": unpriced,
        "unpriced_models": tuple(sorted(unknown)),
    }  # fmt: skip


def list_failures(store: "Store", limit: int = 3) -> Iterator[dict[str, Any]]:
    """Yield the last rollouts that failed, each with the message of its last error."""
    rows = read_overview(store.source, _FAILURES, [limit])
    failures = store.sql(_REASONS, [[row["rollout_id"] for row in rows]])
    reasons = {row["rollout_id"]: row["reason"] for row in failures}
    for row in rows:
        yield {**row, "reason": reasons.get(row["rollout_id"]) or ""}


def store_stats(store: "Store") -> dict[str, Any]:
    """Return the funnel, the files, and every counted loss; of a store elsewhere the funnel."""
    store = at_moment(store)
    report = store.report()
    funnel = asdict(report)
    funnel.pop("dropped")
    stats: dict[str, Any] = {"store": store.name, "funnel": funnel, "left_out": report.reasons()}
    if "://" in store.name:
        return stats  # the rest is not counted here, and so not 0
    attempts = {(rollout_id, status) for rollout_id, _, status in list_unfinished(store.source)}
    counts = Counter(status for _, status in attempts)
    accounting = store.accounting()
    stats |= {name: counts[name] for name in ("running", "incomplete")}
    stats["accounting"] = {**asdict(accounting), "missing": accounting.missing}
    if store.layout is None:
        return {**stats, **dict.fromkeys(("files", "segments", "bytes", "missing", "gone"), 0)}
    manifest = store.layout.read_manifest()
    stats |= {
        "files": len(manifest.live_files),
        "segments": len(store.layout.list_unsettled(manifest)),
        "bytes": measure_disk(store.layout),
        "missing": sum(count_missing_spans(store.layout).values()),
        "gone": sum(note.gone for note in read_notes(store.layout)),
    }
    leftover = measure_leftover(store.layout, is_removed=True)
    return {**stats, "removed": leftover._asdict()} if leftover.size_bytes else stats
