"""The views: how spans and facts read as calls, rewards, rollouts, steps and tools.

What an attempt earned, where a reward belongs and which calls are one is decided by the adapter
alone; the view ``facts`` holds its answers, and ``attempts`` says which of them are current.
"""

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final, get_args

from lightning_otel.store.layout import FACTS_VERSION
from lightning_otel.store.prices import COSTS, NO_PRICES, SUM_COSTS, create_prices
from lightning_otel.store.sql import (
    CALL_OPERATIONS,
    ROLLOUT,
    attribute_sql,
    check_read_only,
    quote_text,
)
from lightning_otel.types import conventions as c
from lightning_otel.types.report import Dimension
from lightning_otel.types.transitions import STEP_COLUMNS

if TYPE_CHECKING:
    import duckdb


LAST_REWARD: Final = "arg_max_null(reward, start_ns)"
"""A rollout's reward, over the rows of its attempts in the view ``rollouts``: the last one's."""
IS_BARE_REWARD: Final = "(reward IS NOT NULL AND operation IS NULL)"
"""A span that is a reward and nothing else: only such a one moves to another attempt."""
IS_ANNOTATION: Final = f"({IS_BARE_REWARD} OR name = {quote_text(c.SPAN_ANNOTATION)})"
"""A reward or a retraction, and maybe another annotation."""

_IS_ROLLOUT: Final = f"name = '{c.SPAN_ROLLOUT}'"
_IS_OPEN: Final = "end_ns IS NULL"
_IS_ENDED_ROOT: Final = f"parent_span_id IS NULL AND end_ns IS NOT NULL AND NOT {IS_ANNOTATION}"
_STATUS: Final = f"""
  CASE WHEN bool_or({_IS_ROLLOUT} AND status = 'ERROR') THEN 'failed'
       WHEN bool_or({_IS_ROLLOUT}) AND NOT bool_or({_IS_ROLLOUT} AND {_IS_OPEN}) THEN 'succeeded'
       -- Something inside that never ended does not leave open what is around it.
       WHEN NOT bool_or({_IS_OPEN}) OR (NOT bool_or({_IS_ROLLOUT}) AND bool_or({_IS_ENDED_ROOT})
         AND NOT bool_or({_IS_OPEN} AND parent_span_id IS NULL)) THEN 'succeeded'
       WHEN bool_or({_IS_OPEN} AND is_alive(process)) THEN 'running'
       ELSE 'incomplete' END"""

ATTEMPTS: Final = f"""
SELECT {ROLLOUT} AS rollout_id, coalesce(attempt_id, '1') AS attempt_id,
  -- Spans are only added, and end: these tell whether any did.
  hash({ROLLOUT}, coalesce(attempt_id, '1'), count(*), {FACTS_VERSION},
    bit_xor(hash(trace_id, span_id, {_IS_OPEN}))) AS fingerprint,
  {_STATUS} AS status, min(start_ns) AS start_ns, max(greatest(start_ns, end_ns)) AS end_ns,
  count(*) AS spans, true AS is_current,
  -- What holds nothing but rewards waits for what these judge.
  NOT bool_and({IS_BARE_REWARD} AND name = {quote_text(c.SPAN_ANNOTATION)}) AS is_attempt
FROM spans GROUP BY 1, 2"""
"""The attempts as they were recorded, each with a number that its spans give it."""

# The joins stand within: on top of a view they have a mere count(*) read every column, message
# bodies and all (DuckDB 2.0).
CALLS: Final = f"""
SELECT trace_id, span_id, parent_span_id, {ROLLOUT} AS rollout_id, attempt_id,
  coalesce(agent, fact_agent) AS agent, operation,
  provider, model, request_model, response_model, response_id, start_ns, end_ns,
  (end_ns - start_ns) / 1e6 AS duration_ms, status,
  {attribute_sql(c.ERROR_TYPE)} AS error_type, input_tokens, output_tokens,
  attributes->'$."{c.FINISH_REASONS}"' AS finish_reasons,
  system_instructions, input_messages, output_messages, tool_definitions,
  prompt_token_ids, response_token_ids, response_logprobs, process, sequence, reason, cost
FROM spans LEFT JOIN (
  SELECT trace_id, span_id, agent AS fact_agent, is_repeated, reason, request_model, response_model
  FROM facts WHERE kind = 'call'
) USING (trace_id, span_id)
LEFT JOIN (SELECT trace_id, span_id, cost FROM ({COSTS})) USING (trace_id, span_id)
WHERE operation IN ({CALL_OPERATIONS}) AND NOT coalesce(is_repeated, false)"""

_NAME: Final = f"coalesce({attribute_sql(c.REWARD_NAME)}, {attribute_sql(c.EVALUATION_NAME)})"
REWARDS: Final = f"""
SELECT trace_id, span_id, parent_span_id, coalesce(fact_rollout, {ROLLOUT}) AS rollout_id,
  coalesce(fact_attempt, attempt_id) AS attempt_id, agent, start_ns, reward AS value,
  {_NAME} AS name, {attribute_sql(c.REWARD_AUTHOR)} AS author,
  {attribute_sql(f"{c.LINK_PREFIX}.0.key_match")} AS link_key,
  {attribute_sql(c.LINK_VALUE)} AS link_value, process, sequence,
  placed_by, call_ids, reason
FROM spans LEFT JOIN (
  SELECT trace_id, span_id, rollout_id AS fact_rollout, is_retracted, placed_by, call_ids, reason,
    CASE WHEN NOT coalesce(is_waiting, false) THEN attempt_id END AS fact_attempt
  FROM facts WHERE kind = 'reward'
) USING (trace_id, span_id)
WHERE reward IS NOT NULL AND NOT coalesce(is_retracted, false)"""

ROLLOUTS: Final = f"""
SELECT attempts.rollout_id, attempts.attempt_id, attempts.status,
  coalesce(facts.start_ns, attempts.start_ns) AS start_ns,
  coalesce(facts.end_ns, attempts.end_ns) AS end_ns,
  coalesce(facts.spans, attempts.spans) AS spans, traces, calls,
  reward_spans - retracted AS rewards, reward,
  input_tokens, output_tokens, agents, task,
  facts.fingerprint IS NOT NULL AND attempts.is_current AS is_current, steps, rewarded,
  rewards AS named_rewards, models, cached_tokens, error_type, error_message, resources, mode,
  task_id, group_id, cost
FROM attempts LEFT JOIN (FROM facts WHERE kind = 'attempt') AS facts
  USING (rollout_id, attempt_id, fingerprint)
LEFT JOIN (
  SELECT rollout_id, attempt_id, fingerprint, {SUM_COSTS} AS cost FROM ({COSTS}) GROUP BY ALL
) AS costs USING (rollout_id, attempt_id, fingerprint)
WHERE coalesce(facts.is_attempt, attempts.is_attempt)"""

_CURRENT: Final = "fingerprint IN (SELECT fingerprint FROM attempts)"
STEPS: Final = f"""
SELECT {", ".join(STEP_COLUMNS)}, has_next FROM facts WHERE kind = 'step' AND {_CURRENT}"""
TOOLS: Final = f"""
SELECT trace_id, span_id, rollout_id, attempt_id, agent, name, start_ns, end_ns,
  (end_ns - start_ns) / 1e6 AS duration_ms, error_type
FROM facts WHERE kind = 'tool' AND {_CURRENT}"""
FAILURES: Final = f"""
SELECT trace_id, span_id, rollout_id, attempt_id, start_ns, end_ns, agent, name AS tool, model,
  error_type, error_message, is_fatal
FROM facts WHERE kind = 'fault' AND {_CURRENT}"""

MARGIN: Final = """
CASE WHEN count(reward) >= 8 THEN 1.96 * stddev_samp(reward) / sqrt(count(reward)) END AS margin"""
"""Half of a mean reward's 95 % interval, by a normal distribution; null of fewer than 8."""
_CALLS_MADE: Final = f"FROM ({COSTS}) WHERE {_CURRENT}"
_TOOLS_USED: Final = f"FROM facts WHERE kind = 'tool' AND NOT is_repeated AND {_CURRENT}"
_STEPS_MADE: Final = f"FROM facts WHERE kind = 'step' AND {_CURRENT}"
_TOKENS: Final = "coalesce(input_tokens, 0) + coalesce(output_tokens, 0)"
_RUN: Final = f"""rollout_id, sum({_TOKENS})::BIGINT AS tokens, {SUM_COSTS} AS cost,
  CASE WHEN any_value(status) <> 'running' THEN max(end_ns) - min(start_ns) END AS took_ns"""
_ONCE: Final = "rollout_id, end_ns - start_ns AS took_ns, error_type IS NOT NULL AS is_failed"
_STAMPS: Final = "CASE WHEN len(json_keys(resources)) > 0 THEN json_keys(resources) ELSE [''] END"
_USES: Final[Mapping[str, str]] = {
    # An attempt, from the first to the last that the agent did in it.
    "agent": f"""
SELECT agent AS name, {_RUN}, coalesce(bool_or(is_fatal), false) AS is_failed FROM (
  SELECT rollout_id, attempt_id, agent, start_ns, end_ns, input_tokens, output_tokens, cost
  {_CALLS_MADE}
  UNION ALL BY NAME SELECT rollout_id, attempt_id, agent, start_ns, end_ns {_TOOLS_USED}
  UNION ALL BY NAME SELECT rollout_id, attempt_id, agent, start_ns, end_ns {_STEPS_MADE}
  UNION ALL BY NAME SELECT rollout_id, attempt_id, agent, is_fatal FROM ({FAILURES})
) JOIN states USING (rollout_id, attempt_id) GROUP BY agent, rollout_id, attempt_id""",
    # A call.
    "model": f"SELECT model AS name, {_ONCE}, {_TOKENS} AS tokens, cost {_CALLS_MADE}",
    # As of an agent.
    "version": f"""
SELECT name, {_RUN}, any_value(status) = 'failed' AS is_failed FROM (
  SELECT *, CASE WHEN stamp = '' THEN resource_version
    ELSE stamp || '@' || json_extract_string(resources, '$."' || stamp || '"') END AS name
  FROM (SELECT trace_id, span_id, rollout_id, attempt_id, start_ns, end_ns, resources,
    resource_version, unnest({_STAMPS}) AS stamp {_STEPS_MADE})
) LEFT JOIN (SELECT trace_id, span_id, input_tokens, output_tokens, cost {_CALLS_MADE})
  USING (trace_id, span_id)
JOIN states USING (rollout_id, attempt_id) GROUP BY name, rollout_id, attempt_id""",
    # An execution.
    "tool": f"SELECT name, {_ONCE}, NULL::BIGINT AS tokens, NULL::DOUBLE AS cost {_TOOLS_USED}",
}
DIMENSIONS: Final = get_args(Dimension)


def breakdown_sql(dimension: str, rollouts: str = f"({ROLLOUTS})") -> str:
    """Return a query for a row each name of one of ``DIMENSIONS``, of the rollouts that count."""
    return f"""
SELECT {quote_text(dimension)} AS dimension, nullif(name, '') AS name, rollouts, rewarded, reward,
  margin, uses, error_rate, p50_s, p95_s, tokens, cost
FROM (WITH chosen AS MATERIALIZED (SELECT rollout_id, attempt_id, status, start_ns, reward
    FROM {rollouts}),
  states AS (SELECT rollout_id, attempt_id, status FROM chosen),
  uses AS MATERIALIZED (SELECT * REPLACE (coalesce(name, '') AS name) FROM ({_USES[dimension]})
    SEMI JOIN chosen USING (rollout_id))
  SELECT * FROM (
    SELECT name, count(*) AS uses, count(*) FILTER (is_failed) / count(*) AS error_rate,
      quantile_cont(took_ns, 0.5) / 1e9 AS p50_s, quantile_cont(took_ns, 0.95) / 1e9 AS p95_s,
      sum(tokens)::BIGINT AS tokens, {SUM_COSTS} AS cost
    FROM uses GROUP BY name
  ) JOIN (
    SELECT name, count(*) AS rollouts, count(reward) AS rewarded, avg(reward) AS reward, {MARGIN}
    FROM (SELECT DISTINCT name, rollout_id FROM uses) JOIN (
      SELECT rollout_id, {LAST_REWARD} AS reward FROM chosen GROUP BY 1) USING (rollout_id)
    GROUP BY name
  ) USING (name)
)"""


_QUERIES: Final = {
    "calls": CALLS, "rewards": REWARDS, "rollouts": ROLLOUTS, "steps": STEPS, "tools": TOOLS,
    "failures": FAILURES, "breakdown": " UNION ALL ".join(map(breakdown_sql, DIMENSIONS)),
}  # fmt: skip
DERIVED: Final = {
    name: f"CREATE OR REPLACE VIEW {name} AS {query}" for name, query in _QUERIES.items()
}
"""Statements that make the views over ``spans``, ``attempts`` and ``facts``; to bind one costs as
much as a small read."""

EMPTY_PRICES: Final = f"CREATE OR REPLACE VIEW prices AS SELECT {NO_PRICES} LIMIT 0"
"""What others than us have instead of prices."""
FACT_VIEWS: Final = frozenset({"attempts", "facts", *DERIVED})
"""Views that stand on facts."""
NAMES: Final = frozenset({"spans", *FACT_VIEWS})
_PRICED: Final = frozenset({"prices", "calls", "rollouts", "breakdown"})
"""The table of prices, and the views that read it."""
_PARAMETER: Final = re.compile(r"\?\d*|\$\w+")
ALIVE: Final = "is_alive"
"""The macro that tells which processes live, which ``rollouts`` reads."""


def list_views(con: "duckdb.DuckDBPyConnection", query: str) -> Collection[str]:
    """Return the names of the views that a query reads; all of them where that cannot be told.

    The connection has no views: with them DuckDB looks into these.
    """
    import duckdb

    check_read_only(con, query)
    try:
        # DuckDB tells no names of a statement with parameters.
        names = {name.lower() for name in con.get_table_names(_PARAMETER.sub("NULL", query))}
    except duckdb.Error:
        return NAMES
    # Whoever names no view of ours, or asks DuckDB for a list of them, shall find them all.
    is_told = names and names <= NAMES | _PRICED and "duckdb_" not in query.lower()
    return names if is_told else NAMES


def alive_macro_sql(alive: Collection[str]) -> str:
    """Return the macro that tells SQL which processes live, as only their locks do."""
    names = quote_text("/".join(["", *alive, ""]))
    return f"CREATE OR REPLACE MACRO is_alive(process) AS contains({names}, '/' || process || '/')"


def create_views(con: "duckdb.DuckDBPyConnection", names: Collection[str]) -> None:
    """Define views on a connection that has ``spans``, ``attempts``, ``facts`` and the macro."""
    if not _PRICED.isdisjoint(names):
        create_prices(con)
    for name in DERIVED.keys() & set(names):
        con.execute(DERIVED[name])
