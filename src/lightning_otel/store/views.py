"""The SQL of the store: how files and live segments read as ``spans``, ``calls``, ``rewards``, ``rollouts``.

The views never change with the data, so a catalogue is written once per place and schema; what
counts is decided at each query by the manifest, as of the start of the query's own transaction.
"""

from typing import Final

from lightning_otel import conventions as c
from lightning_otel.store.layout import EMPTY_DATA, Layout
from lightning_otel.store.schema import COLUMNS, MAX_RECORD_BYTES

ROLLOUT: Final = "coalesce(rollout_id, trace_id)"
"""The rollout a span belongs to: the one it names, else its trace."""

_MANIFEST_COLUMNS: Final = {
    "kind": "VARCHAR",
    "name": "VARCHAR",
    "added_us": "BIGINT",
    "dropped_us": "BIGINT",
    "settled_us": "BIGINT",
    "rows": "BIGINT",
    "size_bytes": "BIGINT",
    "damaged": "BIGINT",
    "conflicts": "BIGINT",
    "lost": "BIGINT",
}
SEGMENT_COLUMNS: Final = {
    "record": "VARCHAR",
    **COLUMNS,
    "rotated": "BOOLEAN",
    "lost": "BIGINT",
}


def quoted(text: str) -> str:
    """A SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def _struct(columns: dict[str, str]) -> str:
    return (
        "{" + ", ".join(f"{quoted(name)}: {quoted(kind)}" for name, kind in columns.items()) + "}"
    )


def read_ndjson(paths: str, columns: dict[str, str]) -> str:
    """A ``read_json`` call that steps over damaged lines; ``paths`` is SQL."""
    # The buffer is twice the object size and one stands open per thread: the default of 16 MiB fits
    # our 8 MiB records.
    return (
        f"read_json({paths}, format='newline_delimited', columns={_struct(columns)}, "
        f"ignore_errors=true, filename=true, maximum_object_size={2 * MAX_RECORD_BYTES})"
    )


def _span_columns(prefix: str = "") -> str:
    return ", ".join(prefix + name for name in COLUMNS)


def _attribute(key: str) -> str:
    return f"""json_extract_string(attributes, '$."{key}"')"""


def spans_query(layout: Layout) -> str:
    """The ``spans`` view: every span once, an unended one with an empty ``end_ns``."""
    manifest = read_ndjson(quoted(str(layout.manifest_path)), _MANIFEST_COLUMNS)
    segments = read_ndjson(quoted(str(layout.live / "*.ndjson")), SEGMENT_COLUMNS)
    columns = _span_columns()
    return f"""
WITH manifest AS MATERIALIZED (
  SELECT kind, name FROM {manifest}
  WHERE coalesce(added_us, settled_us) <= epoch_us(now())
    AND (dropped_us IS NULL OR dropped_us > epoch_us(now()))
)
SELECT {columns} FROM read_parquet({quoted(str(layout.data / "*.parquet"))}, filename=true, union_by_name=true)
WHERE parse_filename(filename) IN (SELECT name FROM manifest WHERE kind = 'file')
UNION ALL BY NAME
SELECT {columns} FROM (
  SELECT {columns}, record FROM {segments}
  WHERE record IN ('span', 'start') AND span_id IS NOT NULL
    AND parse_filename(filename) NOT IN (SELECT name FROM manifest WHERE kind = 'segment')
  QUALIFY row_number() OVER (PARTITION BY trace_id, span_id ORDER BY record = 'start', filename, sequence) = 1
)"""


CALLS: Final = f"""
SELECT trace_id, span_id, parent_span_id, {ROLLOUT} AS rollout_id, attempt_id, agent, operation,
  provider, model, response_id, start_ns, end_ns, (end_ns - start_ns) / 1e6 AS duration_ms, status,
  {_attribute(c.ERROR_TYPE)} AS error_type, input_tokens, output_tokens,
  attributes->'$."{c.FINISH_REASONS}"' AS finish_reasons,
  system_instructions, input_messages, output_messages, tool_definitions,
  prompt_token_ids, response_token_ids, response_logprobs, process, sequence
FROM spans WHERE operation IN ({", ".join(quoted(name) for name in sorted(c.CALL_OPERATIONS))})"""

REWARDS: Final = f"""
SELECT trace_id, span_id, parent_span_id, {ROLLOUT} AS rollout_id, attempt_id, agent, start_ns,
  reward AS value, {_attribute(c.REWARD_NAME)} AS name,
  {_attribute(f"{c.LINK_PREFIX}.0.key_match")} AS link_key,
  {_attribute(f"{c.LINK_PREFIX}.0.value_match")} AS link_value, process, sequence
FROM spans WHERE reward IS NOT NULL"""

ROLLOUTS: Final = f"""
SELECT {ROLLOUT} AS rollout_id, coalesce(attempt_id, '1') AS attempt_id,
  CASE WHEN count(*) FILTER (name = '{c.SPAN_ROLLOUT}') = 0 THEN
         CASE WHEN bool_or(end_ns IS NULL) THEN 'running' ELSE 'succeeded' END
       WHEN bool_or(name = '{c.SPAN_ROLLOUT}' AND status = 'ERROR') THEN 'failed'
       WHEN bool_or(name = '{c.SPAN_ROLLOUT}' AND end_ns IS NULL) THEN 'running'
       ELSE 'succeeded' END AS status,
  min(start_ns) AS start_ns, max(coalesce(end_ns, start_ns)) AS end_ns,
  count(*) AS spans, count(DISTINCT trace_id) AS traces,
  count(*) FILTER (operation IN ({", ".join(quoted(name) for name in sorted(c.CALL_OPERATIONS))})) AS calls,
  count(reward) AS rewards, arg_max(reward, start_ns) AS reward,
  sum(input_tokens) FILTER (operation IN ('chat', 'text_completion', 'generate_content', 'embeddings'))
    AS input_tokens,
  sum(output_tokens) FILTER (operation IN ('chat', 'text_completion', 'generate_content', 'embeddings'))
    AS output_tokens,
  string_agg(DISTINCT agent, ', ') AS agents,
  any_value({_attribute(c.TASK)}) FILTER (name = '{c.SPAN_ROLLOUT}') AS task
FROM spans GROUP BY 1, 2"""


def view_statements(layout: Layout) -> list[str]:
    """``CREATE VIEW`` for each view, in order."""
    return [
        f"CREATE OR REPLACE VIEW spans AS {spans_query(layout)}",
        *derived_view_statements(),
    ]


def derived_view_statements() -> list[str]:
    """``CREATE VIEW`` for the views over ``spans``, be that a view or a table."""
    return [
        f"CREATE OR REPLACE VIEW calls AS {CALLS}",
        f"CREATE OR REPLACE VIEW rewards AS {REWARDS}",
        f"CREATE OR REPLACE VIEW rollouts AS {ROLLOUTS}",
    ]


def empty_data_statement(layout: Layout) -> str:
    """Writes the data file without rows that keeps the glob from matching nothing."""
    columns = ", ".join(f"NULL::{kind} AS {name}" for name, kind in COLUMNS.items())
    made = layout.new / EMPTY_DATA
    return f"COPY (SELECT {columns} LIMIT 0) TO {quoted(str(made))} (FORMAT parquet)"
