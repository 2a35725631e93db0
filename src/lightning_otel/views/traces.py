"""View of traces, with the filters and details that lists of rollouts and conversations share.

Columns without content tell which rows match; a page's own spans tell the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
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
_OF_SPANS: Final = {
    "trace": "trace_id IN (SELECT trace_id FROM {})",
    "rollout": f"rollout_id IN (SELECT {ROLLOUT} FROM {{}})",
    "conversation": f"""coalesce(
  list_has_any(rollout_ids, (SELECT list({ROLLOUT}) FROM {{}})), false)""",
}
"""Conditions of the rows of a list, by its noun: of those with one of some spans."""
_HAS_REWARD: Final = (
    f"rollout_id IN (SELECT rollout_id FROM rollouts GROUP BY 1 HAVING {LAST_REWARD} {{}})"
)
_REWARD_VIEWS: Final = ("rollouts",)
"""To bind it costs as much as all the others."""
CONVERSATION: Final = attribute_sql(c.CONVERSATION_ID)
DETAIL_VIEWS: Final = ("spans", "calls", "rollouts", "failures", ALIVE)
"""Views that the rows of a list and their details are read of."""
_RECEIVED: Final = attribute_sql(c.RECEIVED)
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


def add_details(noun: str, store: "Store", rows: list[dict[str, Any]], con: Reader | None) -> None:
    """Add what a list tells of each row on its page: agents, models, counts, errors and words."""
    assert con is not None
    key = f"{noun}_id"
    details, earned = con.run(lambda: _read_details(con, rows, key))
    place = "trace_id" if noun == "trace" else "rollout_id"
    ends = [(row[place], row.get("last_id", row[place])) for row in rows]
    texts = read_texts(sql_of(store, con), rows, place, ends)
    for row, (question, answer) in zip(rows, texts, strict=True):
        row |= details[row[key]]
        reward, task = earned.get(row["rollout_id"], (None, None))
        row.setdefault("reward", reward)
        row["task"] = task_words(task)
        row["input"], row["output"] = question, answer
        row["title"] = row["task"] or question


def _read_details(
    con: Reader, rows: Sequence[dict[str, Any]], key: str
) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[float | None, str | None]]]:
    pairs = [(row[key], name) for row in rows for name in row.get("rollout_ids", (row[key],))]
    last_ns = max(row.get("last_ns", row["end_ns"]) for row in rows)
    member = "trace_id" if key == "trace_id" else ROLLOUT
    con.execute(
        f"CREATE OR REPLACE TEMP TABLE page AS SELECT id, {', '.join(NARROW_COLUMNS)} FROM spans "
        f"JOIN (SELECT unnest(?) AS id, unnest(?) AS member) ON {member} = member "
        "WHERE start_ns BETWEEN ? AND ?",
        [*map(list, zip(*pairs, strict=True)), min(row["start_ns"] for row in rows), last_ns],
    )
    cursor = con.execute(_DETAILS)
    keys = [column[0] for column in cursor.description or ()]
    details = {row[0]: dict(zip(keys[1:], row[1:], strict=True)) for row in cursor.fetchall()}
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
SELECT id, string_agg(DISTINCT agent, ', ' ORDER BY agent) AS agents,
  -- An agent names what it asks for, not what answers.
  coalesce(list_sort(list(DISTINCT model) FILTER (
    model <> '' AND operation IS DISTINCT FROM {quote_text(c.INVOKE_AGENT)})), []) AS models,
  count(*) FILTER (is_call) AS calls, count(is_fault) AS errors,
  first(error_type ORDER BY is_fatal DESC, start_ns) FILTER (is_fault) AS error_type,
  first(error_message ORDER BY is_fatal DESC, start_ns) FILTER (is_fault) AS error_message,
  count(*) FILTER (is_tool) AS tools,
  sum(input_tokens) FILTER (is_call)::BIGINT AS input_tokens,
  sum(output_tokens) FILTER (is_call)::BIGINT AS output_tokens, {SUM_COSTS} AS cost
FROM counted LEFT JOIN (SELECT trace_id, span_id, cost FROM ({COSTS})) USING (trace_id, span_id)
LEFT JOIN (
  SELECT trace_id, span_id, error_type, error_message, is_fatal, true AS is_fault FROM failures
) USING (trace_id, span_id)
GROUP BY id"""
_EARNED: Final = f"""
SELECT rollout_id, {LAST_REWARD} AS reward, any_value(task) AS task
FROM rollouts WHERE rollout_id IN (SELECT {ROLLOUT} FROM page) GROUP BY 1"""


def search_filters(noun: str, statuses: tuple[str, ...]) -> Mapping[str, Filter]:
    """Return all filters of the list of a noun: of traces, rollouts or conversations."""

    def has_span(condition: str, value: str = "?") -> str:
        return _OF_SPANS[noun].format(f"spans, (SELECT {value} AS value) WHERE {condition}")

    def named(column: str, help: str) -> Filter:
        condition = has_span(f"{column} = value OR {column} GLOB value")
        return Filter(condition, help, hint="name or glob*")

    reward = (_HAS_REWARD if noun == "trace" else "reward {}").format
    return MappingProxyType({
        "q": Filter(
            has_span(_CONTAINS, _NEEDLE),
            "Only those with this text in a message or attribute, or whose id begins so.",
            hint="text of a message, or an id", label="Search", has_bodies=True,
        ),
        "agent": named("agent", "Only those in which this agent acts."),
        "model": named("model", "Only those in which this model answers."),
        "status": Filter("status = ?", "Only those with this status.", choices=statuses),
        **WHEN,
        "rewarded": Filter(f"({reward('IS NOT NULL')}) = ?",
                           "Only those with, or without, a reward.", bool, views=_REWARD_VIEWS),
        "error": Filter(
            f"""({_OF_SPANS[noun].format("spans WHERE status = 'ERROR'")}) = ?""",
            "Only those with, or without, a failed span.", bool,
        ),
        "id": Filter(
            f"starts_with({noun}_id, ?)", "Only ids with this prefix.", hint="prefix", label="ID"
        ),
        "conversation": Filter(
            has_span(f"{CONVERSATION} = value"), "Only those of this conversation (the whole id)."
        ),
        "min_reward": Filter(reward(">= ?"), "Only those with at least this reward.", float,
                             label="Reward from", views=_REWARD_VIEWS),
        "max_reward": Filter(reward("<= ?"), "Only those with at most this reward.", float,
                             label="Reward to", views=_REWARD_VIEWS),
        "version": Filter(
            has_span(_IS_VERSION),
            "Only those in which this version of a resource acted.", hint="prompt@3",
            label="Resource version",
        ),
        "origin": Filter(
            f"({_OF_SPANS[noun].format(f'spans WHERE {_RECEIVED} IS NOT NULL')})"
            " = (? = 'received')",
            "Only those recorded here (own), or received.", choices=("own", "received"),
        ),
    })  # fmt: skip


TRACES: Final = View(
    (
        "trace_id", "rollout_id", "start_ns", "end_ns", "agents", "input", "output", "spans",
        "calls", "tools", "reward", "input_tokens", "output_tokens", "cost",
    ),
    _MATCHING,
    WHEN,
    ("start_ns DESC", "trace_id"),
    ("start_ns", "duration", "spans"),
    partial(add_details, "trace"),
    DETAIL_VIEWS,
    _MATCHING,
)  # fmt: skip
"""Traces, with what was asked first and answered last."""
TRACE_SEARCH: Final = replace(TRACES, filters=search_filters("trace", STATUSES))
"""Traces with all filters of their page."""
