"""A rollout's reward in SQL: what the adapter's default rule and composition make of an attempt.

The adapter's ``Outcome`` is the definition; both are held to one table of cases. Attempts with one
plain reward are told from two sums; only others are looked at closely. Their ids are hashed:
eight bytes instead of up to sixty in every join.
"""

from typing import Final

from lightning_otel.adapter.linear import HOSTS
from lightning_otel.store.sql import (
    CALL_OPERATIONS,
    GENERATIVE_OPERATIONS,
    ROLLOUT,
    attribute_sql,
    quote_text,
)
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

_HOSTS: Final = ", ".join(quote_text(name) for name in sorted(HOSTS))
_ATTEMPT: Final = f"hash({ROLLOUT}, coalesce(attempt_id, '1'))"
_PARENT: Final = "CASE WHEN parent_span_id IS NOT NULL THEN hash(parent_span_id) END"
_FARTHEST: Final = 256

ATTEMPT_REWARDS: Final = f"""
-- The agent of what names none is that of the nearest span above which names one.
-- A call without a parent lies in the innermost agent or tool at work around it.
agent_rollouts AS MATERIALIZED (
  SELECT DISTINCT {ROLLOUT} AS rollout FROM spans
  WHERE agent IS NOT NULL AND {ROLLOUT} IN (SELECT rollout FROM judgments)
),
hosted_calls AS (
  SELECT call.trace_id, call.span_id, arg_max(host.trace_id, host.start_ns) AS above_in,
    arg_max(host.span_id, host.start_ns) AS parent_span_id, call.rollout, NULL AS agent
  FROM (FROM requests SEMI JOIN agent_rollouts USING (rollout)
    WHERE agent IS NULL AND parent_span_id IS NULL) AS call
  JOIN (SELECT *, {ROLLOUT} AS rollout FROM spans WHERE operation IN ({_HOSTS})) AS host
    ON host.rollout = call.rollout AND host.process = call.process
      AND coalesce(host.attempt_id, '1') = coalesce(call.attempt_id, '1')
      AND host.start_ns < call.start_ns AND coalesce(host.end_ns >= call.end_ns, true)
  GROUP BY ALL HAVING bool_and(host.scope IS DISTINCT FROM call.scope)
    AND count(*) - count(DISTINCT host.parent_span_id) = count_if(host.parent_span_id IS NULL)
    AND count_if(host.parent_span_id IS NULL) < 2
),
unnamed_spans AS MATERIALIZED (
  SELECT hash(trace_id) AS trace, hash(span_id) AS span, hash(above_in) AS above_trace,
    hash(parent_span_id) AS above, rollout
  FROM (
    FROM judgments SELECT trace_id, span_id, trace_id AS above_in, parent_span_id, rollout, agent
    UNION ALL FROM requests SELECT trace_id, span_id, trace_id, parent_span_id, rollout, agent
    UNION ALL SELECT trace_id, span_id, trace_id, parent_span_id, {ROLLOUT}, agent FROM spans
    WHERE name = {quote_text(c.SPAN_ACTION)}
    UNION ALL BY NAME FROM hosted_calls
  ) WHERE agent IS NULL AND parent_span_id IS NOT NULL AND rollout IN (FROM agent_rollouts)
),
ancestors AS MATERIALIZED (
  SELECT hash(trace_id) AS trace, hash(span_id) AS span, {_PARENT} AS parent, agent
  FROM spans WHERE {ROLLOUT} IN (SELECT rollout FROM unnamed_spans)
),
owner_search AS (
  SELECT trace, span, above_trace, above, NULL::VARCHAR AS owner, 0 AS level FROM unnamed_spans
  UNION ALL
  SELECT below.trace, below.span, above_trace, ancestors.parent, ancestors.agent, level + 1
  FROM owner_search AS below JOIN ancestors
    ON ancestors.trace = below.above_trace AND ancestors.span = below.above
  WHERE owner IS NULL AND level < {_FARTHEST}
),
span_owners AS MATERIALIZED (
  SELECT trace, span, any_value(owner) AS owner FROM owner_search WHERE owner IS NOT NULL
  GROUP BY ALL
),
failed_calls AS MATERIALIZED (
  SELECT hash(trace_id) AS trace, hash(span_id) AS span FROM requests WHERE NOT is_done
),
-- Rewards that count, each with the attempt it judges and what it names.
finite_rewards AS (
  SELECT hash(trace_id) AS trace, hash(span_id) AS span, span_id AS id, {_PARENT} AS parent,
    hash(coalesce(target_rollout, judgments.rollout)) AS rollout,
    hash(coalesce(target_rollout, judgments.rollout), coalesce(target_attempt, attempt_id, '1'))
      AS attempt,
    coalesce(agent, '') AS agent, start_ns, reward, name, is_sequence, NOT is_bare AS is_odd,
    judgments.links IS NOT NULL AS is_linked, response, linked_rewards.span AS target, link_keys,
    link_values, response IS NULL AND target IS NULL OR coalesce(is_found, false) AS is_known
  FROM judgments LEFT JOIN placements USING (trace_id, span_id)
    LEFT JOIN (SELECT trace_id, span_id, response, span, link_keys, link_values FROM linked_rewards)
      AS linked_rewards USING (trace_id, span_id)
  WHERE isfinite(reward) AND NOT (is_reward_span AND span_id IN (FROM retracted))
),
agent_rewards AS MATERIALIZED (
  SELECT finite_rewards.* REPLACE (
    coalesce(nullif(agent, ''), owner, '') AS agent,
    is_odd OR coalesce((trace, parent) IN (FROM failed_calls), false) AS is_odd)
  FROM finite_rewards LEFT JOIN span_owners USING (trace, span)
),
-- What a reward may be placed on: calls that were answered, and marks of actions.
candidate_steps AS (
  SELECT hash(trace_id) AS trace, hash(span_id) AS span, {_PARENT} AS parent,
    hash(rollout) AS rollout, hash(rollout, coalesce(attempt_id, '1')) AS attempt,
    coalesce(agent, '') AS agent, start_ns, end_ns,
    CASE WHEN response_id IS NOT NULL THEN hash(response_id) END AS response, is_mark
  FROM (
    SELECT *, false AS is_mark FROM requests
    WHERE is_done AND operation IN ({GENERATIVE_OPERATIONS})
      AND (trace_id, span_id) NOT IN (SELECT trace_id, span_id FROM repeated)
    UNION ALL BY NAME
    SELECT trace_id, span_id, parent_span_id, {ROLLOUT} AS rollout, attempt_id, agent, start_ns,
      end_ns, response_id, true AS is_mark
    FROM spans WHERE end_ns IS NOT NULL AND name = {quote_text(c.SPAN_ACTION)}
      AND coalesce(operation NOT IN ({CALL_OPERATIONS}), true)
  )
),
agent_steps AS (
  SELECT candidate_steps.* REPLACE (coalesce(nullif(agent, ''), owner, '') AS agent)
  FROM candidate_steps LEFT JOIN span_owners USING (trace, span)
),
-- Of an attempt with one plain reward that is its reward; where not, it is unclear.
tallies AS MATERIALIZED (
  SELECT rollout, attempt, min(ended) AS first_ns, any_value(given) AS reward,
    count(given) > 1 OR bool_or(is_odd) OR coalesce(first_ns > min(start_ns)
      OR max(agent) FILTER (given IS NOT NULL) <> '' AND min(agent) <> max(agent)
      OR bool_or(is_mark) AND NOT bool_and(is_mark), false) AS is_unclear
  FROM (
    SELECT rollout, attempt, agent, reward AS given, start_ns, is_odd OR is_linked AS is_odd
    FROM agent_rewards
    UNION ALL BY NAME SELECT rollout, attempt, agent, end_ns AS ended, is_mark FROM agent_steps
  ) GROUP BY rollout, attempt HAVING count(given) > 0
),
unclear_rewards AS MATERIALIZED (
  FROM agent_rewards JOIN (SELECT attempt, first_ns FROM tallies WHERE is_unclear) USING (attempt)
),
unclear_rollouts AS MATERIALIZED (
  SELECT DISTINCT rollout FROM tallies WHERE is_unclear AND first_ns IS NOT NULL
),
rollout_spans AS MATERIALIZED (
  SELECT hash(trace_id) AS trace, hash(span_id) AS span, {_PARENT} AS parent
  FROM spans WHERE hash({ROLLOUT}) IN (FROM unclear_rollouts)
),
rollout_calls AS (
  SELECT hash(trace_id) AS trace, hash(span_id) AS parent, true AS is_call FROM requests
  WHERE hash(rollout) IN (FROM unclear_rollouts)
),
rollout_steps AS MATERIALIZED (FROM agent_steps WHERE rollout IN (FROM unclear_rollouts)),
steps AS MATERIALIZED (
  -- A mark is a step of an agent that made no call.
  FROM rollout_steps WHERE NOT is_mark
  UNION ALL
  FROM rollout_steps ANTI JOIN (FROM rollout_steps WHERE NOT is_mark) USING (attempt, agent)
  WHERE is_mark
),
unclear_steps AS (FROM steps SEMI JOIN unclear_rewards USING (attempt)),
-- Links by attributes of spans, and the spans that have these.
attribute_links AS MATERIALIZED (
  SELECT trace, span, attempt, start_ns, link_keys, link_values FROM unclear_rewards
  WHERE is_linked AND response IS NULL AND target IS NULL
),
link_targets AS MATERIALIZED (
  SELECT attribute_links.trace, attribute_links.span,
    hash(coalesce(arg_max(target.span_id, target.start_ns)
      FILTER (target.start_ns <= attribute_links.start_ns),
      arg_min(target.span_id, target.start_ns))) AS matched
  FROM attribute_links
    JOIN (SELECT {_ATTEMPT} AS attempt, span_id, start_ns, attributes
      FROM spans WHERE reward IS NULL AND {_ATTEMPT} IN (
        SELECT DISTINCT attempt FROM attribute_links)
    ) AS target USING (attempt)
  WHERE list_bool_and(list_transform(list_zip(link_keys, link_values), lambda each:
    each[1] IS NULL OR coalesce(
      json_extract_string(attributes, '$."' || each[1] || '"') = each[2], false)))
  GROUP BY ALL
),
linked_subtrees AS MATERIALIZED (
  SELECT unclear_rewards.trace, unclear_rewards.span, attempt,
    CASE WHEN target IS NOT NULL THEN hash(target) ELSE matched END AS subtree
  FROM unclear_rewards LEFT JOIN link_targets USING (trace, span)
  WHERE is_linked AND response IS NULL
),
-- Steps and rewards, each with every span above it.
subtree_members AS (
  SELECT trace, span, span AS subtree, parent AS above, 0 AS level FROM (
    SELECT trace, span, parent FROM unclear_steps
    UNION SELECT trace, span, parent FROM unclear_rewards)
  UNION ALL
  SELECT member.trace, member.span, parent.span, parent.parent, level + 1
  FROM subtree_members AS member JOIN rollout_spans AS parent
    ON parent.trace = member.trace AND parent.span = member.above
  WHERE level < {_FARTHEST}
),
subtree_steps AS MATERIALIZED (
  SELECT attempt, subtree, unnest(list_distinct(['', agent])) AS agent, end_ns, span AS call, level
  FROM (
    SELECT unclear_steps.*, subtree, level FROM unclear_steps
      JOIN subtree_members USING (trace, span)
    UNION ALL SELECT *, 0, {_FARTHEST} FROM unclear_steps)
),
-- By time: the latest step of the agent in the nearest subtree, else in the attempt.
nearest_steps AS (
  SELECT trace, span, arg_min(found, level) AS call FROM (
    SELECT trace, span, level, is_reward, last_value(call IGNORE NULLS) OVER (
      PARTITION BY attempt, subtree, agent ORDER BY ns, is_reward) AS found
    FROM (
      SELECT trace, span, attempt, agent, start_ns AS ns, subtree, level, true AS is_reward
      FROM unclear_rewards JOIN subtree_members USING (trace, span) WHERE level > 0
      UNION ALL BY NAME
      SELECT trace, span, attempt, agent, start_ns AS ns, 0 AS subtree, {_FARTHEST} + 1 AS level,
        true AS is_reward FROM unclear_rewards
      UNION ALL BY NAME
      SELECT attempt, agent, end_ns AS ns, subtree, call, false AS is_reward FROM subtree_steps
    )
  ) WHERE is_reward AND found IS NOT NULL GROUP BY ALL
),
-- By link: the step named, else the latest one in the subtree named.
linked_steps AS (
  SELECT trace, span, arg_max(call, (level = 0, end_ns)) AS call
  FROM linked_subtrees JOIN (FROM subtree_steps WHERE agent = '') USING (attempt, subtree)
  GROUP BY ALL
  UNION ALL
  SELECT reward.trace, reward.span,
    coalesce(arg_max(steps.span, steps.start_ns) FILTER (steps.start_ns <= reward.start_ns),
      arg_min(steps.span, steps.start_ns)) AS call
  FROM (FROM unclear_rewards WHERE response IS NOT NULL) AS reward
    JOIN steps ON steps.attempt = reward.attempt AND steps.response = hash(reward.response)
  GROUP BY ALL
),
-- A reward within a record of a request belongs to the record that is kept, itself or further on.
kept_search AS (
  SELECT hash(trace_id) AS trace, hash(span_id) AS parent, hash(kept_id) AS kept, 0 AS level
  FROM repeated WHERE (hash(trace_id), hash(span_id)) IN (SELECT trace, parent FROM unclear_rewards)
  UNION ALL
  SELECT found.trace, parent, hash(kept_id), level + 1
  FROM kept_search AS found JOIN repeated ON kept = hash(span_id) WHERE level < 8
),
kept_calls AS (
  SELECT trace, span AS parent, span AS given_in FROM steps
  UNION ALL
  SELECT trace, parent, min(kept) FROM kept_search WHERE kept IN (SELECT span FROM steps)
  GROUP BY ALL
),
placed_rewards AS (
  SELECT attempt, reward, unclear_rewards.start_ns, unclear_rewards.id,
    NOT is_linked AND own IS NULL AND NOT coalesce(is_call, false) AND NOT is_sequence AS is_ruled,
    CASE WHEN is_linked THEN linked_steps.call WHEN own IS NOT NULL THEN own
      WHEN is_call THEN given_in ELSE nearest_steps.call END AS call
  FROM (FROM unclear_rewards WHERE first_ns IS NOT NULL) AS unclear_rewards
    LEFT JOIN linked_steps USING (trace, span) LEFT JOIN nearest_steps USING (trace, span)
    LEFT JOIN (SELECT trace, span, span AS own FROM steps) USING (trace, span)
    LEFT JOIN (FROM rollout_calls LEFT JOIN kept_calls USING (trace, parent)) USING (trace, parent)
),
-- The first reward of each step; where no step is, the rewards of the first name.
attempt_rewards AS (
  SELECT attempt, sum(reward) AS reward FROM (
    SELECT attempt, arg_min(reward, (is_ruled, start_ns, id)) AS reward
    FROM placed_rewards WHERE call IS NOT NULL GROUP BY attempt, call
  ) GROUP BY ALL
  UNION ALL
  SELECT attempt, reward FROM tallies WHERE NOT is_unclear
  UNION ALL
  SELECT attempt, sum(reward) FROM (
    SELECT attempt, reward, name,
      first_value(name) OVER (PARTITION BY attempt ORDER BY start_ns, id) AS first
    FROM (
      SELECT unclear_rewards.* FROM unclear_rewards LEFT JOIN link_targets USING (trace, span)
      WHERE first_ns IS NULL AND is_known AND (matched IS NOT NULL OR NOT is_linked
        OR coalesce(response, target) IS NOT NULL)
      QUALIFY row_number() OVER (PARTITION BY attempt,
        coalesce(response, target, link_values::VARCHAR, id) ORDER BY start_ns, id) = 1
    )
  ) WHERE name = first GROUP BY ALL
)"""
"""Common table expressions over ``spans`` and those of the views: ``attempt_rewards`` holds the
reward of each attempt that has one, by the hash of its rollout and its own id."""
