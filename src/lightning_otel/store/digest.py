"""The digest of a span: what transitions without bodies need of its wide columns, in narrow ones.

Settled files have these columns beside those of the ``spans`` view, in which they do not show. What
a file or a segment lacks is computed when it is asked for. The numbers are DuckDB's own hashes: if
a later version makes other ones, an attempt that lies in files of both is read whole, and no more.
"""

from collections.abc import Iterable
from typing import Final

from lightning_otel.adapter.call_facts import CALL_KEYS, REWARD_KEYS, REWARDS
from lightning_otel.store.sql import CALL_OPERATIONS, GENERATIVE_OPERATIONS, quote_text
from lightning_otel.types import conventions as c

DIGEST: Final = {
    "gist_kind": "TINYINT",
    "gist_before": "UBIGINT",
    "gist_after": "UBIGINT",
    "gist_facts": "VARCHAR",
}
"""The columns: what the span is (one of the kinds below, and flags); one number for the messages up
to the last of a model, none if there is none, and one for all of them and the answer; and the
attributes that tell the rest, a JSON array, none if they do not suffice."""
OTHER, CALL, REWARD, IRREGULAR = range(4)
RECEIVED, TOKENS = 4, 8
"""Flags: it came over the network or was imported; it has token ids or logprobs."""
KIND: Final = "gist_kind & 3"

_MARKS: Final = ", ".join(quote_text(name) for name in (c.SPAN_ACTION, c.SPAN_OBSERVATION))

# Messages as this package writes them. Whatever is written otherwise is not looked into here.
_GIVEN: Final = '[{"role":"'
_BETWEEN: Final = ',{"role":"'
_ANSWER: Final = 'assistant","parts":['
_FINISH: Final = '],"finish_reason":'


def _says_sql(key: str) -> str:
    return f"contains(attributes::VARCHAR, {quote_text(key)})"


_IS_CALL: Final = f"""(operation IN ({GENERATIVE_OPERATIONS}) AND scope = {quote_text(c.SCOPE)}
  AND name <> {quote_text(c.SPAN_ROLLOUT)} AND status <> 'ERROR' AND response_id <> ''
  AND starts_with(input_messages, {quote_text(_GIVEN)}) AND ends_with(input_messages, '}}]')
  AND starts_with(output_messages, {quote_text(_GIVEN + _ANSWER + "{")})
  AND NOT contains(output_messages, {quote_text(_BETWEEN)})
  AND json_valid(input_messages) AND json_valid(output_messages)
  AND NOT {_says_sql(c.REQUEST_PREVIOUS_RESPONSE)} AND NOT {_says_sql(c.REQUEST_CONVERSATION)}
  AND NOT {_says_sql(c.ABANDONED)} AND NOT {_says_sql(c.CUT)}
  AND NOT {_says_sql(c.REWARD_PREFIX + ".")})"""
_IS_REWARD: Final = f"""(reward IS NOT NULL AND operation IS NULL AND scope = {quote_text(c.SCOPE)}
  AND name = {quote_text(c.SPAN_ANNOTATION)} AND NOT {_says_sql(c.LINK_PREFIX + ".")}
  AND NOT {_says_sql('"lightning.reward.')})"""
_IS_OTHER: Final = f"""(coalesce(operation NOT IN ({CALL_OPERATIONS}), true) AND reward IS NULL
  AND name NOT IN ({_MARKS}) AND (name <> {quote_text(c.SPAN_ANNOTATION)}
    OR NOT {_says_sql(c.REWARD_RETRACTED)}) AND NOT {_says_sql(c.REWARD_PREFIX + ".")}
  AND (scope = {quote_text(c.SCOPE)} OR (operation IS NULL AND agent IS NULL AND model IS NULL)))"""

# What a model said parts the conversation: "said" are the texts between. To the last but one of
# them an answer is appended by closing the list of messages before it.
_BEGINS: Final = len(_GIVEN + _ANSWER) + 1
_ANSWERED: Final = f"""CASE len(string_split(output_messages, {quote_text(_FINISH)}))
    WHEN 1 THEN output_messages[{_BEGINS}:-2]
    WHEN 2 THEN
      split_part(output_messages, {quote_text(_FINISH)}, 1)[{_BEGINS}:] || ']}}' END"""
# A model's message that is not found where it should be, and letters that are escaped.
_IS_ODD: Final = f"""(answer IS NULL OR contains(said[-1], '"assistant"')
  OR (len(said) > 1 AND NOT contains(said[-1], {quote_text(_BETWEEN)}))
  OR (contains(input_messages, '\\u00')
    AND (contains(input_messages, '\\u006') OR contains(input_messages, '\\u007'))))"""


def _values_sql(keys: Iterable[str]) -> str:
    paths = ", ".join(quote_text(f'$."{key}"') for key in keys)
    return f"to_json(json_extract(attributes, [{paths}]))::VARCHAR"


_FACTS: Final = f"""CASE found
    WHEN {CALL} THEN CASE WHEN contains(otel_resource::VARCHAR, {quote_text(c.LOGPROBS_MODE)})
        OR {_says_sql(c.LOGPROB_TOKEN_IDS)}
      THEN NULL ELSE {_values_sql(CALL_KEYS)} END
    WHEN {REWARD} THEN CASE WHEN {_says_sql("null")} OR {_says_sql(f"{c.REWARD_PREFIX}.{REWARDS}.")}
      THEN NULL ELSE {_values_sql(REWARD_KEYS)} END END"""


def digest_sql(source: str, columns: Iterable[str]) -> str:
    """Return a query for columns of spans and, after them, their digest."""
    return f"""
SELECT {", ".join(columns)},
  (CASE WHEN found = {CALL} AND {_IS_ODD} THEN {IRREGULAR} ELSE found END
    + CASE WHEN {_says_sql(c.RECEIVED)} THEN {RECEIVED} ELSE 0 END
    + CASE WHEN coalesce(prompt_token_ids, response_token_ids, response_logprobs) IS NULL
      THEN 0 ELSE {TOKENS} END)::TINYINT AS gist_kind,
  CASE WHEN len(said) > 1 THEN hash(said[:-3], said[-2] || ']',
    split_part(said[-1], {quote_text(_BETWEEN)}, 1), instructions) END AS gist_before,
  CASE WHEN found = {CALL} THEN hash(said[:-2], said[-1], answer, instructions) END AS gist_after,
  {_FACTS} AS gist_facts
FROM (
  SELECT *, CASE WHEN found = {CALL}
      THEN string_split(input_messages, {quote_text(_BETWEEN + _ANSWER)}) END AS said,
    CASE WHEN found = {CALL} THEN {_ANSWERED} END AS answer,
    coalesce(system_instructions, '') AS instructions
  FROM (
    SELECT *, CASE WHEN {_IS_CALL} THEN {CALL} WHEN {_IS_REWARD} THEN {REWARD}
      WHEN {_IS_OTHER} THEN {OTHER} ELSE {IRREGULAR} END AS found
    FROM {source}
  )
)"""
