"""A rollout's reward in SQL: what the adapter's default rule and composition make of an attempt.

The adapter's ``Outcome`` is the definition; both are held to one table of cases. Attempts with one
plain reward are told from two sums; only others are looked at closely. Their ids are hashed:
eight bytes instead of up to sixty in every join.
"""

from typing import Final

from lightning_otel.adapter.linear import HOSTS
from lightning_otel.store.sql import ROLLOUT, attribute_sql, quote_text
from lightning_otel.types import conventions as c

LAST_REWARD: Final = "arg_max_null(reward, start_ns)"
"""A rollout's reward, over the rows of its attempts in the view ``rollouts``: the last one's."""

IS_REWARD_SPAN: Final = (
    f"(reward IS NOT NULL AND operation IS NULL AND name = {quote_text(c.SPAN_ANNOTATION)})"
)
"""A reward and nothing else. An attempt that holds nothing but such waits for what it judges."""

IS_RETRACTION: Final = f"""(reward IS NULL AND name = {quote_text(c.SPAN_ANNOTATION)}
  AND contains(attributes::VARCHAR, {quote_text(c.REWARD_RETRACTED)})
  AND {attribute_sql(c.REWARD_RETRACTED)} IS NOT NULL)"""
IS_RETRACTED: Final = f"({IS_REWARD_SPAN} AND span_id IN (FROM retracted))"

_GENERATIVE: Final = ", ".join(quote_text(name) for name in sorted(c.GENERATIVE_OPERATIONS))
_CALLS: Final = ", ".join(quote_text(name) for name in sorted(c.CALL_OPERATIONS))
_HOSTS: Final = ", ".join(quote_text(name) for name in sorted(HOSTS))
_ATTEMPT: Final = f"hash({ROLLOUT}, coalesce(attempt_id, '1'))"
_PARENT: Final = "CASE WHEN parent_span_id IS NOT NULL THEN hash(parent_span_id) END"
_FARTHEST: Final = 256

ATTEMPT_REWARDS: Final = f"""
-- The agent of what names none is that of the nearest span above which names one.
-- A call without a parent lies in the innermost agent or tool at work around it.
mixed AS MATERIALIZED (
  SELECT DISTINCT {ROLLOUT} AS rollout FROM spans
  WHERE agent IS NOT NULL AND {ROLLOUT} IN (SELECT rollout FROM given)
),
enclosed AS (
  SELECT call.trace_id, call.span_id, arg_max(host.trace_id, host.start_ns) AS above_in,
    arg_max(host.span_id, host.start_ns) AS parent_span_id, call.rollout, NULL AS agent
  FROM (FROM requests SEMI JOIN mixed USING (rollout)
    WHERE agent IS NULL AND parent_span_id IS NULL) AS call
  JOIN (SELECT *, {ROLLOUT} AS rollout FROM spans WHERE operation IN ({_HOSTS})) AS host
    ON host.rollout = call.rollout AND host.process = call.process
      AND coalesce(host.attempt_id, '1') = coalesce(call.attempt_id, '1')
      AND host.start_ns < call.start_ns AND coalesce(host.end_ns >= call.end_ns, true)
  GROUP BY ALL HAVING bool_and(host.scope IS DISTINCT FROM call.scope)
    AND count(*) - count(DISTINCT host.parent_span_id) = count_if(host.parent_span_id IS NULL)
    AND count_if(host.parent_span_id IS NULL) < 2
),
nameless AS MATERIALIZED (
  SELECT hash(trace_id) AS trace, hash(span_id) AS span, hash(above_in) AS above_trace,
    hash(parent_span_id) AS above, rollout
  FROM (
    FROM given SELECT trace_id, span_id, trace_id AS above_in, parent_span_id, rollout, agent
    UNION ALL FROM requests SELECT trace_id, span_id, trace_id, parent_span_id, rollout, agent
    UNION ALL SELECT trace_id, span_id, trace_id, parent_span_id, {ROLLOUT}, agent FROM spans
    WHERE name = {quote_text(c.SPAN_ACTION)}
    UNION ALL BY NAME FROM enclosed
  ) WHERE agent IS NULL AND parent_span_id IS NOT NULL AND rollout IN (FROM mixed)
),
kin AS MATERIALIZED (
  SELECT hash(trace_id) AS trace, hash(span_id) AS span, {_PARENT} AS parent, agent
  FROM spans WHERE {ROLLOUT} IN (SELECT rollout FROM nameless)
),
owners AS (
  SELECT trace, span, above_trace, above, NULL::VARCHAR AS owner, 0 AS level FROM nameless
  UNION ALL
  SELECT owners.trace, owners.span, above_trace, kin.parent, kin.agent, level + 1
  FROM owners JOIN kin ON kin.trace = owners.above_trace AND kin.span = owners.above
  WHERE owner IS NULL AND level < {_FARTHEST}
),
owned AS MATERIALIZED (
  SELECT trace, span, any_value(owner) AS owner FROM owners WHERE owner IS NOT NULL GROUP BY ALL
),
lost AS MATERIALIZED (
  SELECT hash(trace_id) AS trace, hash(span_id) AS span FROM requests WHERE NOT is_done
),
noted AS (
  SELECT hash(trace_id) AS trace, hash(span_id) AS span, span_id AS id, {_PARENT} AS parent,
    hash(coalesce(home_rollout, given.rollout)) AS rollout,
    hash(coalesce(home_rollout, given.rollout), coalesce(home_attempt, attempt_id, '1'))
      AS attempt,
    coalesce(agent, '') AS agent, start_ns, reward, name, is_sequence, NOT is_bare AS is_odd,
    given.links IS NOT NULL AS is_linked, response, linked.span AS target, link_keys, link_values,
    response IS NULL AND target IS NULL OR coalesce(is_found, false) AS is_known
  FROM given LEFT JOIN homes USING (trace_id, span_id)
    LEFT JOIN (SELECT trace_id, span_id, response, span, link_keys, link_values FROM linked)
      AS linked USING (trace_id, span_id)
  WHERE isfinite(reward) AND NOT (is_lone AND span_id IN (FROM retracted))
),
awards AS MATERIALIZED (
  SELECT noted.* REPLACE (
    coalesce(nullif(agent, ''), owner, '') AS agent,
    is_odd OR coalesce((trace, parent) IN (FROM lost), false) AS is_odd)
  FROM noted LEFT JOIN owned USING (trace, span)
),
named_paces AS (
  SELECT hash(trace_id) AS trace, hash(span_id) AS span, {_PARENT} AS parent,
    hash(rollout) AS rollout, hash(rollout, coalesce(attempt_id, '1')) AS attempt,
    coalesce(agent, '') AS agent, start_ns, end_ns,
    CASE WHEN response_id IS NOT NULL THEN hash(response_id) END AS response, is_mark
  FROM (
    SELECT *, false AS is_mark FROM requests WHERE is_done AND operation IN ({_GENERATIVE})
      AND (trace_id, span_id) NOT IN (FROM repeated)
    UNION ALL BY NAME
    SELECT trace_id, span_id, parent_span_id, {ROLLOUT} AS rollout, attempt_id, agent, start_ns,
      end_ns, response_id, true AS is_mark
    FROM spans WHERE end_ns IS NOT NULL AND name = {quote_text(c.SPAN_ACTION)}
      AND coalesce(operation NOT IN ({_CALLS}), true)
  )
),
paces AS (
  SELECT named_paces.* REPLACE (coalesce(nullif(agent, ''), owner, '') AS agent)
  FROM named_paces LEFT JOIN owned USING (trace, span)
),
tallied AS MATERIALIZED (
  SELECT rollout, attempt, min(ended) AS first_ns, any_value(given) AS reward,
    count(given) > 1 OR bool_or(is_odd) OR coalesce(first_ns > min(start_ns)
      OR max(agent) FILTER (given IS NOT NULL) <> '' AND min(agent) <> max(agent)
      OR bool_or(is_mark) AND NOT bool_and(is_mark), false) AS is_close
  FROM (
    SELECT rollout, attempt, agent, reward AS given, start_ns, is_odd OR is_linked AS is_odd
    FROM awards
    UNION ALL BY NAME SELECT rollout, attempt, agent, end_ns AS ended, is_mark FROM paces
  ) GROUP BY rollout, attempt HAVING count(given) > 0
),
judged AS MATERIALIZED (
  FROM awards JOIN (SELECT attempt, first_ns FROM tallied WHERE is_close) USING (attempt)
),
close AS MATERIALIZED (
  SELECT DISTINCT rollout FROM tallied WHERE is_close AND first_ns IS NOT NULL
),
around AS MATERIALIZED (
  SELECT hash(trace_id) AS trace, hash(span_id) AS span, {_PARENT} AS parent
  FROM spans WHERE hash({ROLLOUT}) IN (FROM close)
),
calls_around AS (
  SELECT hash(trace_id) AS trace, hash(span_id) AS parent, true AS is_call FROM requests
  WHERE hash(rollout) IN (FROM close)
),
nearby AS MATERIALIZED (FROM paces WHERE rollout IN (FROM close)),
steps AS MATERIALIZED (
  FROM nearby WHERE NOT is_mark
  UNION ALL
  FROM nearby ANTI JOIN (FROM nearby WHERE NOT is_mark) USING (attempt, agent) WHERE is_mark
),
latest AS MATERIALIZED (
  -- Windows, for DuckDB may make nested loops of an ASOF join.
  SELECT trace, span, parent, attempt, found.trace AS call_trace, found.call, found.above FROM (
    SELECT trace, span, parent, attempt, is_reward, last_value(step IGNORE NULLS) OVER (
      PARTITION BY attempt, agent ORDER BY ns, is_reward) AS found
    FROM (
      SELECT trace, span, parent, attempt, agent, start_ns AS ns, true AS is_reward FROM judged
      WHERE NOT is_linked
      UNION ALL BY NAME
      SELECT attempt, unnest(list_distinct(['', agent])) AS agent, end_ns AS ns,
        false AS is_reward, {{'trace': trace, 'call': span, 'above': parent}} AS step FROM steps
    )
  ) WHERE is_reward AND found IS NOT NULL
),
climbed AS (
  SELECT trace, span, parent, call, above, 0 AS level FROM latest
  WHERE trace = call_trace AND parent IS NOT NULL
  UNION ALL
  SELECT climbed.trace, climbed.span, climbed.parent, call, around.parent, level + 1
  FROM climbed JOIN around ON around.trace = climbed.trace AND around.span = climbed.above
  WHERE climbed.above <> climbed.parent AND level < {_FARTHEST}
),
reached AS MATERIALIZED (
  SELECT trace, span, call FROM latest WHERE parent IS NULL
  UNION SELECT trace, span, call FROM climbed WHERE above = parent
),
keyed AS MATERIALIZED (
  SELECT trace, span, attempt, start_ns, link_keys, link_values FROM judged
  WHERE is_linked AND response IS NULL AND target IS NULL
),
matched AS MATERIALIZED (
  SELECT keyed.trace, keyed.span,
    hash(coalesce(arg_max(target.span_id, target.start_ns)
      FILTER (target.start_ns <= keyed.start_ns),
      arg_min(target.span_id, target.start_ns))) AS matched
  FROM keyed
    JOIN (SELECT {_ATTEMPT} AS attempt, span_id, start_ns, attributes
      FROM spans WHERE reward IS NULL AND {_ATTEMPT} IN (
        SELECT DISTINCT attempt FROM keyed)
    ) AS target USING (attempt)
  WHERE list_bool_and(list_transform(list_zip(link_keys, link_values), lambda each:
    each[1] IS NULL OR coalesce(
      json_extract_string(attributes, '$."' || each[1] || '"') = each[2], false)))
  GROUP BY ALL
),
named_parts AS MATERIALIZED (
  SELECT judged.trace, judged.span, attempt,
    CASE WHEN target IS NOT NULL THEN hash(target) ELSE matched END AS part
  FROM judged LEFT JOIN matched USING (trace, span) WHERE is_linked AND response IS NULL
),
hard AS MATERIALIZED (
  SELECT attempt FROM latest ANTI JOIN reached USING (trace, span)
  UNION
  SELECT attempt FROM named_parts
    ANTI JOIN (SELECT attempt, span AS part FROM steps) USING (attempt, part)
  WHERE part IS NOT NULL
),
up AS (
  SELECT trace, span, span AS part, parent AS above, 0 AS level FROM (
    SELECT trace, span, parent FROM steps SEMI JOIN hard USING (attempt)
    UNION SELECT trace, span, parent FROM judged SEMI JOIN hard USING (attempt))
  UNION ALL
  SELECT up.trace, up.span, around.span, around.parent, level + 1
  FROM up JOIN around ON around.trace = up.trace AND around.span = up.above
  WHERE level < {_FARTHEST}
),
inside AS MATERIALIZED (
  SELECT attempt, part, unnest(list_distinct(['', agent])) AS agent, end_ns, span AS call, level
  FROM (
    SELECT steps.*, part, level FROM steps JOIN up USING (trace, span)
    UNION ALL SELECT *, 0, {_FARTHEST} FROM steps SEMI JOIN hard USING (attempt))
),
nearest AS (
  SELECT trace, span, arg_min(found, level) AS call FROM (
    SELECT trace, span, level, is_reward, last_value(call IGNORE NULLS) OVER (
      PARTITION BY attempt, part, agent ORDER BY ns, is_reward) AS found
    FROM (
      SELECT trace, span, attempt, agent, start_ns AS ns, part, level, true AS is_reward
      FROM judged JOIN up USING (trace, span) WHERE level > 0
      UNION ALL BY NAME
      SELECT trace, span, attempt, agent, start_ns AS ns, 0 AS part, {_FARTHEST} + 1 AS level,
        true AS is_reward FROM judged SEMI JOIN hard USING (attempt)
      UNION ALL BY NAME
      SELECT attempt, agent, end_ns AS ns, part, call, false AS is_reward FROM inside
    )
  ) WHERE is_reward AND found IS NOT NULL GROUP BY ALL
  UNION ALL
  FROM reached ANTI JOIN (FROM judged SEMI JOIN hard USING (attempt)) USING (trace, span)
),
meant AS (
  SELECT named_parts.trace, named_parts.span, arg_max(call, (level = 0, end_ns)) AS call
  FROM named_parts JOIN (
    SELECT attempt, span AS part, end_ns, span AS call, 0 AS level FROM steps
    UNION ALL SELECT attempt, part, end_ns, call, level FROM inside WHERE agent = ''
  ) USING (attempt, part) GROUP BY ALL
  UNION ALL
  SELECT judged.trace, judged.span,
    coalesce(arg_max(steps.span, steps.start_ns) FILTER (steps.start_ns <= judged.start_ns),
      arg_min(steps.span, steps.start_ns)) AS call
  FROM (FROM judged WHERE response IS NOT NULL) AS judged
    JOIN steps ON steps.attempt = judged.attempt AND steps.response = hash(judged.response)
  GROUP BY ALL
),
placed AS (
  SELECT attempt, reward, judged.start_ns, judged.id,
    NOT is_linked AND own IS NULL AND NOT coalesce(is_call, false) AND NOT is_sequence AS is_ruled,
    CASE WHEN is_linked THEN meant.call WHEN own IS NOT NULL THEN own
      WHEN is_call THEN given_in ELSE nearest.call END AS call
  FROM (FROM judged WHERE first_ns IS NOT NULL) AS judged
    LEFT JOIN meant USING (trace, span) LEFT JOIN nearest USING (trace, span)
    LEFT JOIN (SELECT trace, span, span AS own FROM steps) USING (trace, span)
    LEFT JOIN (SELECT trace, parent, is_call, given_in FROM calls_around
      LEFT JOIN (SELECT trace, span AS parent, span AS given_in FROM steps) USING (trace, parent))
      USING (trace, parent)
),
earned AS (
  SELECT attempt, sum(reward) AS reward FROM (
    SELECT attempt, arg_min(reward, (is_ruled, start_ns, id)) AS reward
    FROM placed WHERE call IS NOT NULL GROUP BY attempt, call
  ) GROUP BY ALL
  UNION ALL
  SELECT attempt, reward FROM tallied WHERE NOT is_close
  UNION ALL
  SELECT attempt, sum(reward) FROM (
    SELECT attempt, reward, name,
      first_value(name) OVER (PARTITION BY attempt ORDER BY start_ns, id) AS first
    FROM (
      SELECT judged.* FROM judged LEFT JOIN matched USING (trace, span)
      WHERE first_ns IS NULL AND is_known AND (matched IS NOT NULL OR NOT is_linked
        OR coalesce(response, target) IS NOT NULL)
      QUALIFY row_number() OVER (PARTITION BY attempt,
        coalesce(response, target, link_values::VARCHAR, id) ORDER BY start_ns, id) = 1
    )
  ) WHERE name = first GROUP BY ALL
)"""
"""Common table expressions over ``spans`` and those of the views: ``earned`` holds the reward of
each attempt that has one, by the hash of its rollout and its own id."""
