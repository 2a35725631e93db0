"""The SQL of the store: how files and segments read as spans, calls, rewards and rollouts.

What counts is decided at each query by the manifest, as of the start of the query's own
transaction; so a catalogue, once written, stays right whatever is recorded or settled after.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from lightning_otel import conventions as c
from lightning_otel.store.layout import EMPTY_DATA, SCHEMA_VERSION, DataFile, Layout
from lightning_otel.store.lines import MAX_RECORD_BYTES
from lightning_otel.store.schema import COLUMNS, SOURCES

ROLLOUT: Final = "coalesce(nullif(rollout_id, ''), trace_id)"
"""The rollout a span belongs to: the one it names, else its trace."""

SAME_SPAN_NS: Final = 86_400_000_000_000
"""Of two spans with one id that start within a day the first wins; older files are not asked."""

_MANIFEST_COLUMNS: Final = {
    "kind": "VARCHAR",
    "name": "VARCHAR",
    "schema": "BIGINT",
    "added_us": "BIGINT",
    "dropped_us": "BIGINT",
    "settled_us": "BIGINT",
    "rows": "BIGINT",
    "size_bytes": "BIGINT",
    "damaged": "BIGINT",
    "conflicts": "BIGINT",
    "lost": "BIGINT",
}
UNKNOWN: Final = {"kind": "'INTERNAL'", "status": "'UNSET'", "sequence": "-1", "end_sequence": "-1"}
"""What stands in a column that a file of an older schema lacks and no attribute tells."""
SEGMENT_COLUMNS: Final = {
    "record": "VARCHAR",
    **COLUMNS,
    "rotated": "BOOLEAN",
    "lost": "BIGINT",
    "counts": "JSON",
}

IS_SPAN: Final = (
    "(record IN ('span', 'start', 'drop') AND trace_id IS NOT NULL AND span_id IS NOT NULL "
    "AND start_ns IS NOT NULL)"
)
"""Whether a line of a segment is a span that can be told from others, or takes a start back."""


_ONE_LINE_EACH: Final = """QUALIFY row_number() OVER (
    PARTITION BY trace_id, span_id
    ORDER BY record <> 'span', record <> 'drop', filename, sequence) = 1 AND record <> 'drop'"""
"""Of the lines of segments about one span: its end, unless it was dropped, else its start."""


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


def read_many_ndjson(paths: str, columns: dict[str, str]) -> str:
    """As :func:`read_ndjson`, for thousands of small files.

    ``read_json`` takes a millisecond a file to bind our columns; this takes none, and three times
    as long for each megabyte.
    """
    shape = quoted(json.dumps(columns))
    return (
        f"(SELECT unnest(json_transform(json, {shape})), filename "
        f"FROM read_ndjson_objects({paths}, "
        f"ignore_errors=true, filename=true, maximum_object_size={2 * MAX_RECORD_BYTES}))"
    )


def _attribute(key: str) -> str:
    return f"""json_extract_string(attributes, '$."{key}"')"""


def same_span(one: str, other: str) -> str:
    """Whether two rows with the same ids are taken for one span; see ``SAME_SPAN_NS``."""
    return (
        f"{one}.start_ns BETWEEN {other}.start_ns - {SAME_SPAN_NS} "
        f"AND {other}.start_ns + {SAME_SPAN_NS}"
    )


def _settled_and_live() -> str:
    """What the two queries for spans end with: those settled, and those that only segments hold."""
    columns = ", ".join(COLUMNS)
    return f"""SELECT {columns} FROM settled
UNION ALL BY NAME
SELECT {columns} FROM live ANTI JOIN settled ON settled.trace_id = live.trace_id
  AND settled.span_id = live.span_id AND {same_span("settled", "live")}"""


def spans_query(
    layout: Layout,
    settled: Iterable[str] = (),
    avoided: Iterable[str] = (),
    *,
    are_small: bool = False,
) -> str:
    """The ``spans`` view: every span once, an unended one with an empty ``end_ns``.

    The manifest is read where it is needed, not materialized: with that, DuckDB 2.0 reads every
    column of every file for a mere count.

    Args:
        layout: The store's paths.
        settled: Names of segments known to be settled, which DuckDB then does not even open.
        avoided: Names of damaged files and segments, which it shall not open.
        are_small: Whether the segments are many and small; see :func:`read_many_ndjson`.
    """
    manifest = read_ndjson(quoted(str(layout.whole_manifest())), _MANIFEST_COLUMNS)
    read = read_many_ndjson if are_small else read_ndjson
    segments = read(quoted(str(layout.live / "*.ndjson")), SEGMENT_COLUMNS)
    data = quoted(str(layout.data / "*.parquet"))
    columns = ", ".join(COLUMNS)
    # One text, not a list of values: DuckDB looks into that for each file, a list takes it longer.
    known = quoted("/".join(["", *settled, *avoided, ""]))
    damaged = [name for name in avoided if name.endswith(".parquet")]
    is_mixed = any(file.schema < SCHEMA_VERSION for file in layout.read_manifest().live_files)
    return f"""
WITH manifest AS NOT MATERIALIZED (
  SELECT kind, name, coalesce(schema, 1) AS schema FROM {manifest}
  WHERE coalesce(added_us, settled_us) <= epoch_us(now())
    AND (dropped_us IS NULL OR dropped_us > epoch_us(now()))
),
settled AS NOT MATERIALIZED (
  {_settled(data, damaged, is_mixed=is_mixed)}
),
live AS NOT MATERIALIZED (
  SELECT {columns} FROM {segments}
  WHERE {IS_SPAN} AND NOT contains({known}, '/' || parse_filename(filename) || '/')
    AND parse_filename(filename) NOT IN (SELECT name FROM manifest WHERE kind = 'segment')
  {_ONE_LINE_EACH}
)
{_settled_and_live()}"""


def traces_query(files: Iterable[Path], segments: Iterable[Path], trace_ids: Iterable[str]) -> str:
    """What :func:`spans_query` gives of a few traces, from the only places that hold some of them.

    Args:
        files: Data files, at least one.
        segments: Segments.
        trace_ids: Whole ids.
    """
    columns = ", ".join(COLUMNS)
    wanted = f"trace_id IN ({', '.join(map(quoted, trace_ids))})"
    return f"""
WITH settled AS MATERIALIZED (
  SELECT {columns} FROM read_parquet({listed(files)}, union_by_name=true) WHERE {wanted}
),
live AS NOT MATERIALIZED (
  SELECT {columns} FROM {read_ndjson(listed(segments), SEGMENT_COLUMNS)}
  WHERE {wanted} AND {IS_SPAN}
  {_ONE_LINE_EACH}
)
{_settled_and_live()}"""


def listed(paths: Iterable[Path]) -> str:
    """A SQL list of paths."""
    return "[" + ", ".join(quoted(str(path)) for path in paths) + "]"


def _settled(data: str, damaged: Collection[str], *, is_mixed: bool) -> str:
    """Spans of the files listed; with ``is_mixed`` those of older schemas are made into ours.

    Apart from the others: what a column lacks is looked for in the attributes, which cost 150 times
    more to read than a narrow column.
    """
    is_whole = ""
    if damaged:
        names = quoted("/".join(["", *damaged, ""]))
        is_whole = f"NOT contains({names}, '/' || parse_filename(filename) || '/') AND "
    options = "filename=true, union_by_name=true" if is_mixed else "filename=true"
    listed = f"""FROM read_parquet({data}, {options})
  WHERE {is_whole}parse_filename(filename) IN (SELECT name FROM manifest WHERE kind = 'file'"""
    ours = f"SELECT {', '.join(COLUMNS)} {listed}"
    if not is_mixed:
        return f"{ours})"
    older = f"SELECT {', '.join(map(_rebuilt, COLUMNS))} {listed}"
    return (
        f"{ours} AND schema >= {SCHEMA_VERSION})\n  UNION ALL\n"
        f"  {older} AND schema < {SCHEMA_VERSION})"
    )


def rows_of(layout: Layout, files: Sequence[DataFile]) -> str:
    """A subquery over the rows of some data files, in our columns, and where each row stands.

    Args:
        layout: The store's paths.
        files: At least one.
    """
    options = "filename=true, file_row_number=true, union_by_name=true"
    ours = [layout.data / file.name for file in files if file.schema >= SCHEMA_VERSION]
    older = [layout.data / file.name for file in files if file.schema < SCHEMA_VERSION]
    parts = []
    if ours:
        parts.append(
            f"SELECT {', '.join(COLUMNS)}, filename, file_row_number "
            f"FROM read_parquet({listed(ours)}, {options})"
        )
    if older:
        # The file without rows names every column.
        parts.append(
            f"SELECT {', '.join(map(_rebuilt, COLUMNS))}, filename, file_row_number "
            f"FROM read_parquet({listed([*older, layout.data / EMPTY_DATA])}, {options})"
        )
    return f"({' UNION ALL '.join(parts)})"


def _rebuilt(column: str) -> str:
    """A column of an older file: from the attributes, or a value that says it is not known."""
    found = [f"TRY_CAST({_attribute(key)} AS {COLUMNS[column]})" for key in SOURCES.get(column, ())]
    if column in UNKNOWN:
        found.append(UNKNOWN[column])
    return f"coalesce({', '.join([column, *found])}) AS {column}" if found else column


_CALL_OPERATIONS: Final = ", ".join(quoted(name) for name in sorted(c.CALL_OPERATIONS))


_OVERLAP: Final = "kept.start_ns <= other.end_ns AND other.start_ns <= kept.end_ns"
_HAS_NO_ID: Final = "(kept.response_id IS NULL OR other.response_id IS NULL)"

_REPEATED: Final = f"""
requests AS MATERIALIZED (
  SELECT trace_id, span_id, parent_span_id, {ROLLOUT} AS rollout, scope, response_id, model,
    start_ns, coalesce(end_ns, start_ns) AS end_ns
  FROM spans WHERE operation IN ({_CALL_OPERATIONS})
),
others AS MATERIALIZED (SELECT * FROM requests WHERE scope <> {quoted(c.SCOPE)}),
same_answer AS MATERIALIZED (
  SELECT other.trace_id, other.span_id, other.scope, kept.span_id AS kept_id
  FROM others AS other JOIN requests AS kept
    ON kept.rollout = other.rollout AND kept.response_id = other.response_id
  WHERE kept.scope <> other.scope AND {_OVERLAP}
    AND (kept.scope = {quoted(c.SCOPE)} OR kept.scope < other.scope)
),
repeated AS MATERIALIZED (
  SELECT trace_id, span_id FROM same_answer
  UNION
  SELECT other.trace_id, other.span_id FROM others AS other JOIN requests AS kept
    ON kept.trace_id = other.trace_id AND kept.parent_span_id = other.span_id
  WHERE kept.scope <> other.scope AND {_HAS_NO_ID}
  UNION
  SELECT other.trace_id, other.span_id FROM others AS other JOIN requests AS kept
    ON kept.rollout = other.rollout AND kept.scope = {quoted(c.SCOPE)}
  WHERE {_HAS_NO_ID} AND {_OVERLAP}
    AND coalesce(starts_with(kept.model, other.model) OR starts_with(other.model, kept.model), true)
    AND (kept.span_id, other.scope) NOT IN (SELECT kept_id, scope FROM same_answer)
)"""
"""Common table expressions over ``spans``: ``repeated`` holds the calls of others' instrumentors
that stand for a request another record tells of: by its response id; because the one stands in the
other; or because it overlaps one of ours that nothing else of that instrumentor stands for. The
adapter's ``duplicates`` looks at what was asked and answered, which no count should have to
read."""

# The common table expressions stand within: on top of a view they have a mere count(*) read every
# column, message bodies and all (DuckDB 2.0).
CALLS: Final = f"""
SELECT trace_id, span_id, parent_span_id, {ROLLOUT} AS rollout_id, attempt_id, agent, operation,
  provider, model, response_id, start_ns, end_ns, (end_ns - start_ns) / 1e6 AS duration_ms, status,
  {_attribute(c.ERROR_TYPE)} AS error_type, input_tokens, output_tokens,
  attributes->'$."{c.FINISH_REASONS}"' AS finish_reasons,
  system_instructions, input_messages, output_messages, tool_definitions,
  prompt_token_ids, response_token_ids, response_logprobs, process, sequence
FROM spans ANTI JOIN (WITH {_REPEATED} FROM repeated) AS repeated USING (trace_id, span_id)
WHERE operation IN ({_CALL_OPERATIONS})"""

BARE: Final = "(reward IS NOT NULL AND operation IS NULL)"
"""A span that is a reward and nothing else: only such a one moves to another attempt."""

_LINKS: Final = 4


def _links(field: str) -> str:
    paths = [quoted(f'$."{c.LINK_PREFIX}.{index}.{field}"') for index in range(_LINKS)]
    return f"json_extract_string(links, [{', '.join(paths)}])"


def _linked(key: str) -> str:
    return f"nullif(link_values[list_position(link_keys, {quoted(key)})], '')"


def _nearest(column: str) -> str:
    """Of several attempts that hold what a reward names, the latest before it, else the first."""
    order = "PARTITION BY kind, id ORDER BY start_ns, is_reward, rollout, attempt"
    target = f"CASE WHEN NOT is_reward THEN {column} END"
    return (
        f"coalesce(last_value({target} IGNORE NULLS) OVER ({order}), "
        f"first_value({target} IGNORE NULLS) OVER ({order} "
        "ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING))"
    )


def _is_named(kind: str, column: str) -> str:
    return f"{column} IN (SELECT id FROM named WHERE kind = {quoted(kind)})"


HOMES: Final = f"""
bare AS MATERIALIZED (
  SELECT trace_id, span_id, {ROLLOUT} AS rollout, attempt_id, start_ns,
    -- Few have a link, and a look for its text costs a third of parsing the JSON.
    CASE WHEN contains(attributes::VARCHAR, {quoted(c.LINK_PREFIX)}) THEN attributes END AS links
  FROM spans WHERE {BARE}
),
linked AS (
  SELECT *, {_linked(c.RESPONSE_ID)} AS response, {_linked(c.LINK_SPAN_ID)} AS span FROM (
    SELECT *, {_links("key_match")} AS link_keys, {_links("value_match")} AS link_values
    FROM bare WHERE links IS NOT NULL)
),
named AS MATERIALIZED (
  SELECT 'response' AS kind, response AS id, trace_id, span_id, rollout, attempt_id, start_ns
  FROM linked WHERE response IS NOT NULL
  UNION ALL
  SELECT 'span', span, trace_id, span_id, rollout, attempt_id, start_ns
  FROM linked WHERE response IS NULL AND span IS NOT NULL
  UNION ALL
  SELECT 'rollout', rollout, trace_id, span_id, rollout, attempt_id, start_ns
  FROM bare WHERE attempt_id IS NULL
),
near AS MATERIALIZED (
  -- One look at the spans for all three: each costs a parse of every live segment.
  SELECT response_id, span_id, {ROLLOUT} AS rollout, coalesce(attempt_id, '1') AS attempt, start_ns
  FROM spans WHERE NOT {BARE} AND ({_is_named("response", "response_id")}
    OR {_is_named("span", "span_id")} OR {_is_named("rollout", ROLLOUT)})
),
held AS (
  SELECT 'response' AS kind, response_id AS id, rollout, attempt, start_ns FROM near
  WHERE {_is_named("response", "response_id")}
  UNION ALL
  SELECT 'span', span_id, rollout, attempt, start_ns FROM near WHERE {_is_named("span", "span_id")}
  UNION ALL
  SELECT 'rollout', rollout, rollout, attempt, min(start_ns) FROM near
  WHERE {_is_named("rollout", "rollout")} GROUP BY ALL
),
events AS (
  SELECT kind, id, rollout, attempt, start_ns, false AS is_reward, '' AS trace_id, '' AS span_id
  FROM held
  UNION ALL
  SELECT kind, id, rollout, coalesce(attempt_id, '1'), start_ns, true, trace_id, span_id FROM named
),
found AS (
  SELECT kind, trace_id, span_id, is_reward, rollout AS own_rollout, start_ns,
    CASE WHEN is_own THEN rollout ELSE near_rollout END AS rollout,
    CASE WHEN is_own THEN attempt ELSE near_attempt END AS attempt
  FROM (SELECT *, {_nearest("rollout")} AS near_rollout, {_nearest("attempt")} AS near_attempt,
    kind <> 'rollout' AND bool_or(NOT is_reward) OVER (PARTITION BY kind, id, rollout, attempt)
      AS is_own FROM events)
),
homes AS (
  SELECT trace_id, span_id, any_value(own_rollout) AS own_rollout, any_value(start_ns) AS given_ns,
    arg_min(rollout, kind = 'rollout') AS home_rollout,
    arg_min(attempt, kind = 'rollout') AS home_attempt
  FROM found WHERE is_reward AND rollout IS NOT NULL GROUP BY 1, 2
)"""
"""Common table expressions over ``spans``: ``homes`` holds the attempt that a reward judges, where
it has a link or names no attempt. The adapter's ``attempts`` says the same."""

REWARDS: Final = f"""
WITH {HOMES}
SELECT trace_id, span_id, parent_span_id, coalesce(home_rollout, {ROLLOUT}) AS rollout_id,
  coalesce(home_attempt, attempt_id) AS attempt_id, agent, start_ns, reward AS value,
  {_attribute(c.REWARD_NAME)} AS name,
  {_attribute(f"{c.LINK_PREFIX}.0.key_match")} AS link_key,
  {_attribute(f"{c.LINK_PREFIX}.0.value_match")} AS link_value, process, sequence
FROM spans LEFT JOIN homes USING (trace_id, span_id)
WHERE reward IS NOT NULL"""

_IS_CALL: Final = f"operation IN ({_CALL_OPERATIONS}) AND is_repeated IS NULL"

_IS_ROLLOUT: Final = f"name = '{c.SPAN_ROLLOUT}'"
_IS_OPEN: Final = "end_ns IS NULL"
_IS_ENDED_ROOT: Final = "parent_span_id IS NULL AND end_ns IS NOT NULL AND reward IS NULL"

_STATUS: Final = f"""
  CASE WHEN bool_or({_IS_ROLLOUT} AND status = 'ERROR') THEN 'failed'
       WHEN bool_or({_IS_ROLLOUT}) AND NOT bool_or({_IS_ROLLOUT} AND {_IS_OPEN}) THEN 'succeeded'
       -- Something inside that never ended does not leave open what is around it.
       WHEN NOT bool_or({_IS_OPEN}) OR (NOT bool_or({_IS_ROLLOUT}) AND bool_or({_IS_ENDED_ROOT})
         AND NOT bool_or({_IS_OPEN} AND parent_span_id IS NULL)) THEN 'succeeded'
       WHEN bool_or({_IS_OPEN} AND is_alive(process)) THEN 'running'
       ELSE 'incomplete' END"""

UNENDED: Final = f"""
SELECT DISTINCT {ROLLOUT} AS rollout_id, coalesce(attempt_id, '1') AS attempt_id FROM spans
WHERE {_IS_OPEN} AND NOT is_alive(process)"""
"""Attempts with a span that its dead process never ended: those that may be incomplete."""

ROLLOUTS: Final = f"""
WITH {HOMES}, {_REPEATED}
SELECT coalesce(home_rollout, {ROLLOUT}) AS rollout_id,
  coalesce(home_attempt, attempt_id, '1') AS attempt_id,
  {_STATUS} AS status,
  min(start_ns) AS start_ns,
  -- A reward given days later does not prolong the rollout.
  coalesce(max(coalesce(end_ns, start_ns)) FILTER (home_rollout IS NULL),
    max(coalesce(end_ns, start_ns))) AS end_ns,
  count(*) AS spans, count(DISTINCT trace_id) FILTER (home_rollout IS NULL) AS traces,
  count(*) FILTER ({_IS_CALL}) AS calls,
  count(reward) AS rewards, arg_max(reward, start_ns) AS reward,
  sum(input_tokens) FILTER ({_IS_CALL}) AS input_tokens,
  sum(output_tokens) FILTER ({_IS_CALL}) AS output_tokens,
  string_agg(DISTINCT agent, ', ' ORDER BY agent) AS agents,
  any_value({_attribute(c.TASK)}) FILTER (name = '{c.SPAN_ROLLOUT}') AS task
FROM spans LEFT JOIN homes USING (trace_id, span_id)
  LEFT JOIN (SELECT *, true AS is_repeated FROM repeated) USING (trace_id, span_id)
GROUP BY 1, 2"""


DERIVED: Final = {"calls": CALLS, "rewards": REWARDS, "rollouts": ROLLOUTS}
"""The views over ``spans``."""

NAMES: Final = frozenset({"spans", *DERIVED})


def view_statements(
    layout: Layout,
    settled: Iterable[str] = (),
    names: Collection[str] = NAMES,
    avoided: Collection[str] = (),
    alive: Collection[str] | None = None,
    *,
    are_small: bool = False,
) -> list[str]:
    """``CREATE VIEW`` for the views wanted, in order; see :func:`spans_query`.

    To bind a view takes as long as to read a little, so ask for no more than are looked at.
    ``spans`` is always among them: the others stand on it.

    Args:
        layout: The store's paths.
        settled: As :func:`spans_query` takes it.
        names: The views.
        avoided: As :func:`spans_query` takes it.
        alive: Processes that live; by default those with a segment that nobody settled.
        are_small: As :func:`spans_query` takes it.
    """
    query = spans_query(layout, settled, avoided, are_small=are_small)
    spans = f"CREATE OR REPLACE VIEW spans AS {query}"
    macro = _alive_statement(_unsettled(layout)) if alive is None else alive_statement(alive)
    return [spans, macro, *_derived(names)]


def derived_view_statements(
    names: Collection[str] = NAMES, alive: Collection[str] = ()
) -> list[str]:
    """``CREATE VIEW`` for the views over ``spans``, be that a view or a table.

    Args:
        names: Which.
        alive: Processes that may still end what they began.
    """
    return [alive_statement(alive), *_derived(names)]


def alive_statement(alive: Collection[str]) -> str:
    """What tells SQL which processes live, as only their locks do."""
    return _alive_statement(
        f"contains({quoted('/'.join(['', *alive, '']))}, '/' || process || '/')"
    )


def _alive_statement(condition: str) -> str:
    return f"CREATE OR REPLACE MACRO is_alive(process) AS {condition}"


def _unsettled(layout: Layout) -> str:
    """Whether a process has a segment that nobody settled: as near as SQL comes to its lock."""
    manifest = read_ndjson(quoted(str(layout.whole_manifest())), _MANIFEST_COLUMNS)
    return rf"""process IN (
  SELECT regexp_extract(parse_filename(file), '^(.+)-[0-9]+\.ndjson$', 1)
  FROM glob({quoted(str(layout.live / "*.ndjson"))})
  WHERE parse_filename(file) NOT IN (SELECT name FROM {manifest} WHERE kind = 'segment'))"""


def _derived(names: Collection[str]) -> list[str]:
    return [
        f"CREATE OR REPLACE VIEW {name} AS {query}"
        for name, query in DERIVED.items()
        if name in names
    ]


def empty_data_statement(path: Path) -> str:
    """Writes the data file without rows that keeps the glob from matching nothing."""
    columns = ", ".join(f"NULL::{kind} AS {name}" for name, kind in COLUMNS.items())
    return f"COPY (SELECT {columns} LIMIT 0) TO {quoted(str(path))} (FORMAT parquet)"
