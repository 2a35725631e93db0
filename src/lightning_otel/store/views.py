"""The views: how spans read as calls, rewards and rollouts, and the statements that make them."""

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from lightning_otel.store.attempt_rewards import (
    ATTEMPT_REWARDS,
    IS_RETRACTED,
    IS_RETRACTION,
    IS_REWARD_SPAN,
)
from lightning_otel.store.digest import IRREGULAR, RECEIVED
from lightning_otel.store.schema import NARROW_COLUMNS
from lightning_otel.store.sql import (
    CALL_OPERATIONS,
    ROLLOUT,
    attribute_sql,
    check_read_only,
    quote_text,
)
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    import duckdb


_OVERLAP: Final = "kept.start_ns <= other.end_ns AND other.start_ns <= kept.end_ns"
_HAS_NO_ID: Final = "(kept.response_id IS NULL OR other.response_id IS NULL)"


def _server_of(table: str) -> str:
    host, port = (
        f"{table}.attributes->>'$.\"{key}\"'" for key in (c.SERVER_ADDRESS, c.SERVER_PORT)
    )
    return f"({host} || ':' || coalesce({port}, ''))"


def duplicate_calls(table: str = "spans") -> str:
    """Return common table expressions of what several records tell of one request.

    ``repeated`` holds the calls that stand for a request another record tells of, ``kept_id``: by
    its response id, which of two records of ours says that a server passed the request on to
    another; because the one stands in the other; because it overlaps one of ours that nothing else
    of that instrumentor stands for; or because it tells of no answer, where ours recorded every
    request of its model. The adapter's ``duplicates`` looks at what was asked and answered, which
    no count should have to read.

    Args:
        table: Spans to look at; ``spans`` tells the rest of them.
    """
    return f"""
requests AS MATERIALIZED (
  SELECT trace_id, span_id, parent_span_id, {ROLLOUT} AS rollout, attempt_id, agent, operation,
    scope, process, response_id, model, input_tokens, output_tokens,
    start_ns, coalesce(end_ns, start_ns) AS end_ns,
    end_ns IS NOT NULL AND status IS DISTINCT FROM 'ERROR' AS is_done
  FROM {table} WHERE operation IN ({CALL_OPERATIONS})
),
others AS MATERIALIZED (SELECT * FROM requests WHERE scope <> {quote_text(c.SCOPE)}),
same_answer AS MATERIALIZED (
  SELECT other.trace_id, other.span_id, other.scope, kept.span_id AS kept_id
  FROM others AS other JOIN requests AS kept
    ON kept.rollout = other.rollout AND kept.response_id = other.response_id
  WHERE kept.scope <> other.scope AND {_OVERLAP}
    AND (kept.scope = {quote_text(c.SCOPE)} OR kept.scope < other.scope)
),
passed_on AS MATERIALIZED (
  SELECT other.trace_id, other.span_id, kept.trace_id AS kept_trace, kept.span_id AS kept_id
  FROM requests AS other JOIN requests AS kept
    ON kept.rollout = other.rollout AND kept.response_id = other.response_id
  WHERE kept.scope = {quote_text(c.SCOPE)} AND other.scope = kept.scope AND {_OVERLAP}
    AND (kept.start_ns, kept.span_id) < (other.start_ns, other.span_id)
),
repeated AS MATERIALIZED (
  SELECT trace_id, span_id, min(kept_id) AS kept_id FROM (
    SELECT trace_id, span_id, kept_id FROM same_answer
    UNION ALL
    SELECT passed_on.trace_id, passed_on.span_id, kept_id FROM passed_on
      JOIN spans AS other USING (trace_id, span_id)
      JOIN spans AS kept ON kept.trace_id = kept_trace AND kept.span_id = kept_id
    WHERE {_server_of("kept")} <> {_server_of("other")}
    UNION ALL
    SELECT other.trace_id, other.span_id, kept.span_id FROM others AS other JOIN requests AS kept
      ON kept.trace_id = other.trace_id AND kept.parent_span_id = other.span_id
    WHERE kept.scope <> other.scope AND {_HAS_NO_ID}
    UNION ALL
    SELECT other.trace_id, other.span_id, kept.span_id FROM others AS other JOIN others AS kept
      ON kept.trace_id = other.trace_id AND kept.span_id = other.parent_span_id
    WHERE kept.scope = other.scope AND kept.response_id = other.response_id
    UNION ALL
    SELECT other.trace_id, other.span_id, kept.span_id FROM others AS other JOIN others AS kept
      ON kept.trace_id = other.trace_id AND kept.span_id = other.parent_span_id
    WHERE kept.scope = other.scope AND other.response_id IS NULL
      AND kept.span_id IN (SELECT span_id FROM same_answer)
    QUALIFY row_number() OVER (PARTITION BY kept.trace_id, kept.span_id
      ORDER BY other.is_done DESC, other.end_ns DESC) = 1
    UNION ALL
    SELECT other.trace_id, other.span_id, kept.span_id FROM others AS other JOIN requests AS kept
      ON kept.rollout = other.rollout AND kept.scope = {quote_text(c.SCOPE)}
    WHERE {_HAS_NO_ID} AND {_OVERLAP}
      AND coalesce(
        starts_with(kept.model, other.model) OR starts_with(other.model, kept.model), true)
      AND (kept.span_id, other.scope) NOT IN (SELECT kept_id, scope FROM same_answer)
    UNION ALL
    SELECT trace_id, span_id, NULL FROM others SEMI JOIN (
        SELECT DISTINCT process, model FROM requests WHERE scope = {quote_text(c.SCOPE)}) AS kept
      ON kept.process = others.process
        AND (starts_with(kept.model, others.model) OR starts_with(others.model, kept.model))
    WHERE is_done AND response_id IS NULL AND input_tokens IS NULL AND output_tokens IS NULL
  ) GROUP BY ALL
)"""


_FARTHEST: Final = 256
_CALL_OWNERS: Final = f"""
WITH RECURSIVE ancestors AS MATERIALIZED (
  SELECT hash(trace_id, span_id) AS span, agent,
    CASE WHEN parent_span_id IS NOT NULL THEN hash(trace_id, parent_span_id) END AS above,
    coalesce(operation IN ({CALL_OPERATIONS}), false) AS is_call
  FROM spans
),
owner_search AS (
  SELECT span, above, NULL::VARCHAR AS owner, 0 AS level FROM ancestors
  WHERE is_call AND agent IS NULL AND above IS NOT NULL
    AND EXISTS (FROM ancestors WHERE agent IS NOT NULL)
  UNION ALL
  SELECT below.span, ancestors.above, ancestors.agent, level + 1
  FROM owner_search AS below JOIN ancestors ON ancestors.span = below.above
  WHERE owner IS NULL AND level < {_FARTHEST}
)
SELECT span, any_value(owner) AS owner FROM owner_search WHERE owner IS NOT NULL GROUP BY ALL"""
"""The agent of each call that names none: that of the nearest span above which names one."""

# The common table expressions stand within: on top of a view they have a mere count(*) read every
# column, message bodies and all (DuckDB 2.0).
CALLS: Final = f"""
SELECT trace_id, span_id, parent_span_id, {ROLLOUT} AS rollout_id, attempt_id,
  coalesce(agent, owner) AS agent, operation,
  provider, model, response_id, start_ns, end_ns, (end_ns - start_ns) / 1e6 AS duration_ms, status,
  {attribute_sql(c.ERROR_TYPE)} AS error_type, input_tokens, output_tokens,
  attributes->'$."{c.FINISH_REASONS}"' AS finish_reasons,
  system_instructions, input_messages, output_messages, tool_definitions,
  prompt_token_ids, response_token_ids, response_logprobs, process, sequence
FROM spans ANTI JOIN (WITH {duplicate_calls()} FROM repeated) AS repeated USING (trace_id, span_id)
  LEFT JOIN ({_CALL_OWNERS}) AS owners ON owners.span = hash(trace_id, span_id)
WHERE operation IN ({CALL_OPERATIONS})"""

_NAME: Final = f"coalesce({attribute_sql(c.REWARD_NAME)}, {attribute_sql(c.EVALUATION_NAME)})"
IS_BARE_REWARD: Final = "(reward IS NOT NULL AND operation IS NULL)"
"""A span that is a reward and nothing else: only such a one moves to another attempt."""

MAY_MOVE: Final = f"""({IS_BARE_REWARD} AND
  (attempt_id IS NULL OR contains(attributes::VARCHAR, {quote_text(c.LINK_PREFIX)}))
  OR reward IS NULL AND name = {quote_text(c.SPAN_ANNOTATION)})"""
"""A reward that may belong to another attempt than the one it was recorded in, or a retraction."""

IS_ANNOTATION: Final = f"({IS_BARE_REWARD} OR name = {quote_text(c.SPAN_ANNOTATION)})"
"""A reward or a retraction, and maybe another annotation: all that ``placements`` looks into."""

_LINKS: Final = 4


def _links_sql(field: str) -> str:
    paths = [quote_text(f'$."{c.LINK_PREFIX}.{index}.{field}"') for index in range(_LINKS)]
    return f"json_extract_string(links, [{', '.join(paths)}])"


def _linked_sql(key: str) -> str:
    return f"nullif(link_values[list_position(link_keys, {quote_text(key)})], '')"


def _nearest_sql(column: str) -> str:
    """Return SQL for the latest attempt before a reward that holds its target, else the first."""
    order = "PARTITION BY kind, id ORDER BY start_ns, is_reward, rollout, attempt"
    target = f"CASE WHEN NOT is_reward THEN {column} END"
    return (
        f"coalesce(last_value({target} IGNORE NULLS) OVER ({order}), "
        f"first_value({target} IGNORE NULLS) OVER ({order} "
        "ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING))"
    )


def _is_named(kind: str, column: str) -> str:
    return f"{column} IN (SELECT id FROM targets WHERE kind = {quote_text(kind)})"


REWARD_TARGETS: Final = f"""
judgments AS MATERIALIZED (
  SELECT trace_id, span_id, parent_span_id, {ROLLOUT} AS rollout, attempt_id, agent, start_ns,
    reward, {IS_BARE_REWARD} AS is_bare, {IS_REWARD_SPAN} AS is_reward_span,
    CASE WHEN {IS_RETRACTION} THEN coalesce({attribute_sql(f"{c.LINK_PREFIX}.0.value_match")}, '')
      END AS retracts,
    coalesce({_NAME}, {quote_text(c.PRIMARY_REWARD)}) AS name,
    contains(attributes::VARCHAR, {quote_text(c.REWARD_STEPS)}) AS is_sequence,
    -- Few have a link, and a look for its text costs a third of parsing the JSON.
    CASE WHEN is_bare AND contains(attributes::VARCHAR, {quote_text(c.LINK_PREFIX)})
      THEN attributes END AS links
  FROM spans WHERE reward IS NOT NULL OR name = {quote_text(c.SPAN_ANNOTATION)}
),
retracted AS (SELECT retracts FROM judgments WHERE retracts IS NOT NULL),
unplaced AS (FROM judgments WHERE is_bare AND (attempt_id IS NULL OR links IS NOT NULL)),
linked_rewards AS (
  SELECT *, {_linked_sql(c.RESPONSE_ID)} AS response, {_linked_sql(c.LINK_SPAN_ID)} AS span FROM (
    SELECT *, {_links_sql("key_match")} AS link_keys, {_links_sql("value_match")} AS link_values
    FROM unplaced WHERE links IS NOT NULL)
),
targets AS MATERIALIZED (
  SELECT 'response' AS kind, response AS id, trace_id, span_id, rollout, attempt_id, start_ns
  FROM linked_rewards WHERE response IS NOT NULL
  UNION ALL
  SELECT 'span', span, trace_id, span_id, rollout, attempt_id, start_ns
  FROM linked_rewards WHERE response IS NULL AND span IS NOT NULL
  UNION ALL
  SELECT 'rollout', rollout, trace_id, span_id, rollout, attempt_id, start_ns
  FROM unplaced WHERE attempt_id IS NULL
),
target_spans AS MATERIALIZED (
  -- One look at the spans for all three: each costs a parse of every live segment.
  SELECT response_id, span_id, {ROLLOUT} AS rollout, coalesce(attempt_id, '1') AS attempt, start_ns
  FROM spans WHERE NOT {IS_BARE_REWARD} AND span_id NOT IN (
    SELECT span_id FROM judgments WHERE retracts IS NOT NULL)
    AND ({_is_named("response", "response_id")}
    OR {_is_named("span", "span_id")} OR {_is_named("rollout", ROLLOUT)})
),
target_times AS (
  SELECT 'response' AS kind, response_id AS id, rollout, attempt, start_ns FROM target_spans
  WHERE {_is_named("response", "response_id")}
  UNION ALL
  SELECT 'span', span_id, rollout, attempt, start_ns FROM target_spans
  WHERE {_is_named("span", "span_id")}
  UNION ALL
  SELECT 'rollout', rollout, rollout, attempt, min(start_ns) FROM target_spans
  WHERE {_is_named("rollout", "rollout")} GROUP BY ALL
),
timeline AS (
  SELECT kind, id, rollout, attempt, start_ns, false AS is_reward, '' AS trace_id, '' AS span_id
  FROM target_times
  UNION ALL
  SELECT kind, id, rollout, coalesce(attempt_id, '1'), start_ns, true, trace_id, span_id
  FROM targets
),
matches AS (
  SELECT kind, trace_id, span_id, is_reward, rollout AS own_rollout, start_ns,
    CASE WHEN is_own THEN rollout ELSE near_rollout END AS rollout,
    CASE WHEN is_own THEN attempt ELSE near_attempt END AS attempt
  FROM (SELECT *, {_nearest_sql("rollout")} AS near_rollout,
    {_nearest_sql("attempt")} AS near_attempt,
    kind <> 'rollout' AND bool_or(NOT is_reward) OVER (PARTITION BY kind, id, rollout, attempt)
      AS is_own FROM timeline)
),
reward_targets AS (
  SELECT trace_id, span_id, any_value(own_rollout) AS own_rollout, any_value(start_ns) AS reward_ns,
    bool_or(kind <> 'rollout') AS is_found, arg_min(rollout, kind = 'rollout') AS target_rollout,
    arg_min(attempt, kind = 'rollout') AS target_attempt
  FROM matches WHERE is_reward AND rollout IS NOT NULL GROUP BY 1, 2
),
placements AS (
  FROM reward_targets
  UNION ALL
  SELECT each.trace_id, each.span_id, any_value(each.rollout), any_value(each.start_ns), true,
    min(coalesce(target_rollout, reward.rollout)), min(coalesce(target_attempt, reward.attempt_id))
  FROM judgments AS each JOIN judgments AS reward
      ON each.retracts = reward.span_id AND reward.is_reward_span
    LEFT JOIN reward_targets AS target
      ON target.trace_id = reward.trace_id AND target.span_id = reward.span_id
  GROUP BY 1, 2
)"""
"""Common table expressions over ``spans``: ``placements`` holds the attempt that a reward judges,
where it has a link or names no attempt, and that of what a retraction names. The adapter's
``attempts`` says the same."""

REWARDS: Final = f"""
WITH {REWARD_TARGETS}
SELECT trace_id, span_id, parent_span_id, coalesce(target_rollout, {ROLLOUT}) AS rollout_id,
  coalesce(target_attempt, attempt_id) AS attempt_id, agent, start_ns, reward AS value,
  {_NAME} AS name,
  {attribute_sql(f"{c.LINK_PREFIX}.0.key_match")} AS link_key,
  {attribute_sql(f"{c.LINK_PREFIX}.0.value_match")} AS link_value, process, sequence
FROM spans LEFT JOIN placements USING (trace_id, span_id)
WHERE reward IS NOT NULL AND NOT {IS_RETRACTED}"""

_IS_CALL: Final = f"operation IN ({CALL_OPERATIONS}) AND NOT is_repeated"

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

ROLLOUTS: Final = f"""
WITH RECURSIVE {REWARD_TARGETS}, {duplicate_calls()}, {ATTEMPT_REWARDS}
SELECT found.* EXCLUDE (input_tokens, output_tokens, agents, task), attempt_rewards.reward,
  input_tokens, output_tokens, agents, task
FROM (SELECT coalesce(target_rollout, {ROLLOUT}) AS rollout_id,
  coalesce(target_attempt, attempt_id, '1') AS attempt_id,
  {_STATUS} AS status,
  min(start_ns) AS start_ns,
  -- A reward given days later does not prolong the rollout.
  coalesce(max(coalesce(end_ns, start_ns)) FILTER (target_rollout IS NULL),
    max(coalesce(end_ns, start_ns))) AS end_ns,
  count(*) AS spans, count(DISTINCT trace_id) FILTER (target_rollout IS NULL) AS traces,
  count(*) FILTER ({_IS_CALL}) AS calls,
  count(*) FILTER (reward IS NOT NULL AND NOT {IS_RETRACTED}) AS rewards,
  sum(input_tokens) FILTER ({_IS_CALL}) AS input_tokens,
  sum(output_tokens) FILTER ({_IS_CALL}) AS output_tokens,
  string_agg(DISTINCT agent, ', ' ORDER BY agent) AS agents,
  -- Not FILTER: before that DuckDB parses the JSON of every span.
  arg_min(CASE WHEN {_IS_ROLLOUT} THEN {attribute_sql(c.TASK)} END, start_ns) AS task
-- IN, for of a join DuckDB may hold the spans rather than the few repeated.
FROM (SELECT *, (trace_id, span_id) IN (SELECT trace_id, span_id FROM repeated) AS is_repeated
    FROM spans)
  LEFT JOIN placements USING (trace_id, span_id)
GROUP BY 1, 2 HAVING count(*) > count(*) FILTER ({IS_REWARD_SPAN} OR {IS_RETRACTION})) AS found
LEFT JOIN attempt_rewards ON attempt_rewards.attempt = hash(found.rollout_id, found.attempt_id)"""


DERIVED: Final = {
    name: f"CREATE OR REPLACE VIEW {name} AS {query}"
    for name, query in {"calls": CALLS, "rewards": REWARDS, "rollouts": ROLLOUTS}.items()
}
"""Statements that make the views over ``spans``; to bind one costs as much as a small read."""

NAMES: Final = frozenset({"spans", *DERIVED})
_PARAMETER: Final = re.compile(r"\?\d*|\$\w+")
ALIVE: Final = "is_alive"
"""The macro that tells which processes live, which ``rollouts`` reads."""
NARROW: Final = "narrow"
"""A view for our own readers: the narrow columns of ``spans`` and their digest, if known."""
_NARROW: Final = f"""{", ".join(NARROW_COLUMNS)},
  {IRREGULAR} + CASE WHEN {attribute_sql(c.RECEIVED)} IS NULL THEN 0 ELSE {RECEIVED} END
    AS gist_kind
FROM spans"""


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
    is_told = names and names <= NAMES and "duckdb_" not in query.lower()
    return names if is_told else NAMES


def alive_macro_sql(alive: Collection[str]) -> str:
    """Return the macro that tells SQL which processes live, as only their locks do."""
    known = quote_text("/".join(["", *alive, ""]))
    return f"CREATE OR REPLACE MACRO is_alive(process) AS contains({known}, '/' || process || '/')"


def create_views(
    con: "duckdb.DuckDBPyConnection", names: Collection[str], alive: Collection[str] = ()
) -> None:
    """Define the views over ``spans`` on a connection."""
    derived = (statement for name, statement in DERIVED.items() if name in names)
    for statement in (alive_macro_sql(alive), *derived):
        con.execute(statement)
    if NARROW in names:
        con.execute(f"CREATE OR REPLACE VIEW {NARROW} AS SELECT {_NARROW}")
