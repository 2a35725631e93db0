"""View of traces, with the filters and the text search of their list.

Columns without content tell which traces match; a page's own spans tell the rest.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.store.prices import COSTS, SUM_COSTS
from lightning_otel.store.reader import Reader
from lightning_otel.store.schema import NARROW_COLUMNS
from lightning_otel.store.sql import CALL_OPERATIONS, ROLLOUT, attribute_sql, quote_text
from lightning_otel.store.views import (
    ALIVE,
    LAST_REWARD,
)
from lightning_otel.types import conventions as c
from lightning_otel.views.previews import read_texts, sql_of, task_words
from lightning_otel.views.table import WHEN, Filter, View

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

STATUSES: Final = ("ended", "failed", "running", "incomplete")
REWARDS_SINCE: Final = "reward IS NOT NULL AND operation IS NULL AND start_ns >= ?"
"""Rewards that are nothing else, from a time on."""
_HAS_SPAN: Final = "trace_id IN (SELECT trace_id FROM spans, (SELECT {} AS value) WHERE {})"
_HAS_REWARD: Final = (
    f"rollout_id IN (SELECT rollout_id FROM rollouts GROUP BY 1 HAVING {LAST_REWARD} {{}})"
)
_REWARD_VIEWS: Final = ("rollouts",)
"""To bind it costs as much as all the others."""
_VERSION: Final = attribute_sql(c.RESOURCE_VERSION)
# The object says of agents which version of each resource: {"*": {"prompt": "v3"}}.
_IS_VERSION: Final = f"""contains(attributes::VARCHAR, 'lightning.resource')
  AND ({_VERSION} = value OR {_VERSION} GLOB value OR (contains(value, '@')
    AND contains(replace({attribute_sql(c.RESOURCES)}, ' ', ''),
      to_json(split_part(value, '@', 1)) || ':' || to_json(split_part(value, '@', 2)))))"""
# JSON holds a text as JSON escapes it; what is looked for is that without its quotation marks.
_NEEDLE: Final = "lower(to_json(?::VARCHAR)::VARCHAR)[2:-2]"
_CONTAINS: Final = " OR ".join([
    *(f"contains(lower({column}), value)" for column in (
        "input_messages", "output_messages", "attributes::VARCHAR", "system_instructions")),
    "starts_with(trace_id, value)",
])  # fmt: skip


def _add_details(store: "Store", rows: list[dict[str, Any]], con: Reader | None) -> None:
    assert con is not None
    details, earned = con.run(lambda: _read_details(con, rows))
    ends = [(row["trace_id"], row["trace_id"]) for row in rows]
    read = sql_of(store, con)
    for row, texts in zip(rows, read_texts(read, rows, "trace_id", ends), strict=True):
        row |= details[row["trace_id"]]
        row["reward"], task = earned.get(row["rollout_id"], (None, None))
        row["task"] = task_words(task)
        row["input"], row["output"] = texts


def _read_details(
    con: Reader, rows: Sequence[dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[float | None, str | None]]]:
    names = ", ".join(quote_text(row["trace_id"]) for row in rows)
    bounds = [min(row["start_ns"] for row in rows), max(row["last_ns"] for row in rows)]
    con.execute(
        f"CREATE OR REPLACE TEMP TABLE page AS SELECT {', '.join(NARROW_COLUMNS)} FROM spans "
        f"WHERE trace_id IN ({names}) AND start_ns BETWEEN ? AND ?",
        bounds,
    )
    cursor = con.execute(_DETAILS)
    keys = [column[0] for column in cursor.description or ()]
    details = {row[0]: dict(zip(keys, row, strict=True)) for row in cursor.fetchall()}
    earned = {
        rollout_id: (reward, task) for rollout_id, reward, task in con.execute(_EARNED).fetchall()
    }
    return details, earned


_IS_ROOT: Final = "parent_span_id IS NULL AND reward IS NULL"
_MATCHING: Final = f"""
SELECT trace_id, min({ROLLOUT}) AS rollout_id, min(start_ns) AS start_ns,
  max(coalesce(end_ns, start_ns)) AS end_ns, max(start_ns) AS last_ns, count(*) AS spans,
  CASE WHEN bool_or({_IS_ROOT} AND status = 'ERROR') THEN 'failed'
    WHEN NOT bool_or(end_ns IS NULL) OR (bool_or({_IS_ROOT} AND end_ns IS NOT NULL)
      AND NOT bool_or({_IS_ROOT} AND end_ns IS NULL)) THEN 'ended'
    WHEN bool_or(end_ns IS NULL AND is_alive(process)) THEN 'running' ELSE 'incomplete'
  END AS status
FROM spans GROUP BY trace_id HAVING count(*) FILTER (name <> {quote_text(c.SPAN_ANNOTATION)}) > 0"""
"""All traces, with what filters and the order of a list need."""
_DETAILS: Final = f"""
WITH counted AS (SELECT *, operation IN ({CALL_OPERATIONS})
  -- What several instrumentors told of one request counts once.
  AND (trace_id, span_id) NOT IN (
    SELECT trace_id, span_id FROM facts WHERE kind = 'call' AND is_repeated) AS is_call,
  -- A framework's tool, MCP's client and its server tell of one execution, each within the other.
  operation = {quote_text(c.EXECUTE_TOOL)} AND (trace_id, coalesce(parent_span_id, '')) NOT IN
    (SELECT trace_id, span_id FROM page WHERE operation = {quote_text(c.EXECUTE_TOOL)}) AS is_tool
  FROM page)
SELECT trace_id, string_agg(DISTINCT agent, ', ' ORDER BY agent) AS agents,
  coalesce(list_sort(list(DISTINCT model) FILTER (model <> '')), []) AS models,
  count(*) FILTER (is_call) AS calls, coalesce(any_value(faults.errors), 0) AS errors,
  any_value(faults.error_type) AS error_type, any_value(faults.error_message) AS error_message,
  count(*) FILTER (is_tool) AS tools,
  sum(input_tokens) FILTER (is_call)::BIGINT AS input_tokens,
  sum(output_tokens) FILTER (is_call)::BIGINT AS output_tokens, {SUM_COSTS} AS cost
FROM counted LEFT JOIN (SELECT trace_id, span_id, cost FROM ({COSTS})) USING (trace_id, span_id)
LEFT JOIN (
  SELECT trace_id, count(*) AS errors, first(error_type ORDER BY is_fatal DESC, start_ns)
    AS error_type, first(error_message ORDER BY is_fatal DESC, start_ns) AS error_message
  FROM failures GROUP BY trace_id
) AS faults USING (trace_id)
GROUP BY trace_id"""
_EARNED: Final = f"""
SELECT rollout_id, {LAST_REWARD} AS reward, any_value(task) AS task
FROM rollouts WHERE rollout_id IN (SELECT {ROLLOUT} FROM page) GROUP BY 1"""

TRACES: Final = View(
    (
        "trace_id", "rollout_id", "start_ns", "end_ns", "agents", "input", "output", "spans",
        "calls", "tools", "reward", "input_tokens", "output_tokens", "cost",
    ),
    _MATCHING,
    WHEN,
    ("start_ns DESC", "trace_id"),
    ("start_ns", "duration", "spans"),
    _add_details,
    ("spans", "calls", "rollouts", "failures", ALIVE),
    _MATCHING,
)  # fmt: skip
"""Traces, with what was asked first and answered last."""

TRACE_SEARCH: Final = replace(
    TRACES,
    filters=MappingProxyType({
        "q": Filter(
            _HAS_SPAN.format(_NEEDLE, _CONTAINS),
            "Only those with this text in a message or attribute, or whose id begins so.",
            hint="text of a message, or an id", label="Search", has_bodies=True,
        ),
        "agent": Filter(
            _HAS_SPAN.format("?", "agent = value OR agent GLOB value"),
            "Only those in which this agent acts.", hint="name or glob*",
        ),
        "model": Filter(
            _HAS_SPAN.format("?", "model = value OR model GLOB value"),
            "Only those in which this model answers.", hint="name or glob*",
        ),
        "status": Filter("status = ?", "Only those with this status.", choices=STATUSES),
        **WHEN,
        "rewarded": Filter(
            f"({_HAS_REWARD.format('IS NOT NULL')}) = ?",
            "Only those with, or without, a reward.", bool, views=_REWARD_VIEWS,
        ),
        "error": Filter(
            "(trace_id IN (SELECT trace_id FROM spans WHERE status = 'ERROR')) = ?",
            "Only those with, or without, a failed span.", bool,
        ),
        "min_reward": Filter(
            _HAS_REWARD.format(">= ?"), "Only those with at least this reward.", float,
            label="Reward from", views=_REWARD_VIEWS,
        ),
        "max_reward": Filter(
            _HAS_REWARD.format("<= ?"), "Only those with at most this reward.", float,
            label="Reward to", views=_REWARD_VIEWS,
        ),
        "version": Filter(
            _HAS_SPAN.format("?", _IS_VERSION),
            "Only those in which this version of a resource acted.", hint="prompt@3",
            label="Resource version",
        ),
        "origin": Filter(
            f"""(trace_id IN (SELECT trace_id FROM spans
              WHERE {attribute_sql(c.RECEIVED)} IS NOT NULL)) = (? = 'received')""",
            "Only those recorded here (own), or received.", choices=("own", "received"),
        ),
    }),
)  # fmt: skip
"""Traces with all filters of their page."""
