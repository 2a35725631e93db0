"""The table that an OpenTelemetry Collector's ClickHouse exporter fills, and spans in it: SQL only.

Attributes are maps of text to text (``AsString``): which text was a number is known only where a
convention names the key. Spans that we load keep what the table has no column for under two keys
of our own, and come back as they were.

Source: ``clickhouseexporter`` of opentelemetry-collector-contrib, its template of the traces table.
"""

from collections.abc import Collection
from typing import Final

from lightning_otel.store import sql
from lightning_otel.store.schema import BODY_COLUMNS, COLUMNS, NARROW_COLUMNS
from lightning_otel.store.selection import REWARD_ATTRIBUTES, Selection
from lightning_otel.types import conventions as c

STORED_KEY: Final = "lightning.stored"
"""Of a span we loaded: JSON object of the columns that the table has not."""
JSON_KEY: Final = "lightning.json"
"""Of a map we loaded: JSON list of the keys whose text is JSON of something else than text."""

_TYPED_KEYS: Final = (
    r"gen_ai\.usage\..+",
    r"gen_ai\.request\.(temperature|top_p|top_k|max_tokens|frequency_penalty|presence_penalty|seed"
    r"|choice\.count|stream|stop_sequences|encoding_formats)",
    r"gen_ai\.response\.(finish_reasons|time_to_first_chunk)",
    r"gen_ai\.embeddings\.dimension\.count",
    r"lightning\.request\..+",
    r"agentlightning\.reward\.\d+\.value",
    r"agentlightning\.(tag|span_sequence_id).*",
    r"lightning\.(abandoned|track_only|guardrail\.triggered)",
    r"llm\.(token_count|usage)\..+",
    r"(server\.port|process\.pid|exception\.escaped)",
)
"""Keys whose values are never text, as regular expressions."""


def quoted(text: str) -> str:
    """Return a string literal of ClickHouse's."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _list_sql(texts: Collection[str]) -> str:
    return ", ".join(map(quoted, texts))


def table_statements(table: str) -> list[str]:
    """Return what makes a table, and that of the times of traces, as the Collector does."""
    times = table[:-1] + "_trace_id_ts`"
    view = table[:-1] + "_trace_id_ts_mv`"
    text, words = "String CODEC(ZSTD(1))", "LowCardinality(String) CODEC(ZSTD(1))"
    attributes = "Map(LowCardinality(String), String)"
    columns = {
        "Timestamp": "DateTime64(9) CODEC(Delta(8), ZSTD(1))",
        **dict.fromkeys(("TraceId", "SpanId", "ParentSpanId", "TraceState"), text),
        **dict.fromkeys(("SpanName", "SpanKind", "ServiceName"), words),
        "ResourceAttributes": f"{attributes} CODEC(ZSTD(1))",
        **dict.fromkeys(("ScopeName", "ScopeVersion"), text),
        "SpanAttributes": f"{attributes} CODEC(ZSTD(1))",
        "Duration": "UInt64 CODEC(T64, ZSTD(1))",
        "StatusCode": words,
        "StatusMessage": text,
        "Events": "Nested (Timestamp DateTime64(9), Name LowCardinality(String), "
        f"Attributes {attributes}) CODEC(ZSTD(1))",
        "Links": "Nested (TraceId String, SpanId String, TraceState String, "
        f"Attributes {attributes}) CODEC(ZSTD(1))",
    }
    filters = {
        "idx_trace_id": "TraceId TYPE bloom_filter(0.001)",
        "idx_res_attr_key": "mapKeys(ResourceAttributes) TYPE bloom_filter(0.01)",
        "idx_res_attr_value": "mapValues(ResourceAttributes) TYPE bloom_filter(0.01)",
        "idx_span_attr_key": "mapKeys(SpanAttributes) TYPE bloom_filter(0.01)",
        "idx_span_attr_value": "mapValues(SpanAttributes) TYPE bloom_filter(0.01)",
        "idx_duration": "Duration TYPE minmax",
    }
    lines = [f"{name} {kind}" for name, kind in columns.items()]
    lines += [f"INDEX {name} {of} GRANULARITY 1" for name, of in filters.items()]
    order = "ServiceName, SpanName, toDateTime(Timestamp)"
    settings = "SETTINGS index_granularity = 8192, ttl_only_drop_parts = 1"
    return [
        f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(lines)}) ENGINE = MergeTree "
        f"PARTITION BY toDate(Timestamp) PRIMARY KEY ({order}) "
        f"ORDER BY ({order}, Timestamp) {settings}",
        f"CREATE TABLE IF NOT EXISTS {times} (TraceId {text}, "
        "Start SimpleAggregateFunction(min, DateTime) CODEC(ZSTD(1)), "
        "End SimpleAggregateFunction(max, DateTime) CODEC(ZSTD(1))) ENGINE = AggregatingMergeTree "
        f"PARTITION BY toStartOfWeek(Start) ORDER BY TraceId {settings}",
        f"CREATE MATERIALIZED VIEW IF NOT EXISTS {view} TO {times} AS SELECT TraceId, "
        f"min(Timestamp) AS Start, max(Timestamp) AS End FROM {table} WHERE TraceId != '' "
        "GROUP BY TraceId",
    ]


# --- out of the table: the one view, in ClickHouse's SQL ------------------------------------------


def _attribute_sql(key: str) -> str:
    return f"SpanAttributes[{quoted(key)}]"


def _text_sql(*keys: str) -> str:
    texts = [f"nullIf({_attribute_sql(key)}, '')" for key in keys]
    return f"coalesce({', '.join(texts)})" if len(texts) > 1 else texts[0]


def _from_resource(key: str) -> str:
    resource = f"ResourceAttributes[{quoted(key)}]"
    return f"coalesce(nullIf({_attribute_sql(key)}, ''), nullIf({resource}, ''))"


def _number_sql(kind: str, key: str) -> str:
    return f"to{kind}OrNull({_attribute_sql(key)})"


_FINITE: Final = _number_sql("Float64", c.REWARD_VALUE)
_DERIVED: Final = {
    "operation": _text_sql(c.OPERATION),
    "agent": _text_sql(c.AGENT_NAME),
    "provider": _text_sql(c.PROVIDER),
    "model": _text_sql(c.RESPONSE_MODEL, c.REQUEST_MODEL),
    "response_id": _text_sql(c.RESPONSE_ID),
    "input_tokens": _number_sql("Int64", c.INPUT_TOKENS),
    "output_tokens": _number_sql("Int64", c.OUTPUT_TOKENS),
    "rollout_id": _from_resource(c.ROLLOUT_ID),
    "attempt_id": _from_resource(c.ATTEMPT_ID),
    "reward": f"if(isFinite({_FINITE}), {_FINITE}, NULL)",
    "process": "''",
    "sequence": "-1",
    "end_sequence": "-1",
}
"""What the columns hold of a span that the Collector wrote."""
_KINDS: Final = {"VARCHAR": "String", "BIGINT": "Int64", "DOUBLE": "Float64"}


def _stored_sql(column: str, kind: str) -> str:
    return f"JSONExtract({_attribute_sql(STORED_KEY)}, {quoted(column)}, 'Nullable({kind})')"


def _hot_sql(column: str) -> str:
    kind = _KINDS[NARROW_COLUMNS[column]]
    return (
        f"if({_attribute_sql(STORED_KEY)} = '', CAST({_DERIVED[column]} AS Nullable({kind})), "
        f"{_stored_sql(column, kind)})"
    )


def _json_keys(attributes: str) -> str:
    return f"JSONExtract({attributes}[{quoted(JSON_KEY)}], 'Array(String)')"


def _json_of(attributes: str, without: str = f"k = {quoted(JSON_KEY)}") -> str:
    """Return JSON of a map; ``without`` tells of a key ``k`` if it is left out."""
    typed = quoted(f"^({'|'.join(_TYPED_KEYS)})$")
    value = (
        f"if(has({_json_keys(attributes)}, k) OR (match(k, {typed}) AND isValidJSON(v)), v, "
        "toJSONString(toValidUTF8(v)))"
    )
    items = f"mapFilter((k, v) -> NOT ({without}), {attributes})"
    return (
        "concat('{', arrayStringConcat(arrayMap((k, v) -> concat(toJSONString(toString(k)), ':', "
        f"{value}), mapKeys({items}), mapValues({items})), ','), '}}')"
    )


_BODY_KEYS: Final = f"[{_list_sql(tuple(BODY_COLUMNS.values()))}]"
_IS_BODY: Final = f"(has({_BODY_KEYS}, k) AND NOT has({_json_keys('SpanAttributes')}, k))"
_START: Final = "toUnixTimestamp64Nano(Timestamp)"
_VIEW: Final = {
    "trace_id": "TraceId",
    "span_id": "SpanId",
    "parent_span_id": "nullIf(ParentSpanId, '')",
    "name": "toValidUTF8(SpanName)",
    "kind": "if(SpanKind IN ('', 'Unspecified'), 'INTERNAL', upper(SpanKind))",
    "start_ns": _START,
    "end_ns": f"multiIf({_stored_sql('is_incomplete', 'Bool')}, NULL, "
    f"coalesce({_stored_sql('end_ns', 'Int64')}, {_START} + toInt64(Duration)))",
    "status": "if(StatusCode = '', 'UNSET', upper(StatusCode))",
    "status_message": "toValidUTF8(StatusMessage)",
    **{column: _hot_sql(column) for column in _DERIVED},
    "scope": "toValidUTF8(ScopeName)",
    "attributes": _json_of(
        "SpanAttributes", f"k IN ({_list_sql((STORED_KEY, JSON_KEY))}) OR {_IS_BODY}"
    ),
    "events": "concat('[', arrayStringConcat(arrayMap((t, n, a) -> concat('{\"name\":', "
    "toJSONString(toValidUTF8(n)), ',\"time_ns\":', toString(toUnixTimestamp64Nano(t)), "
    f"',\"attributes\":', {_json_of('a')}, '}}'), "
    "Events.Timestamp, Events.Name, Events.Attributes), ','), ']')",
    "links": "concat('[', arrayStringConcat(arrayMap((t, s, a) -> concat('{\"trace_id\":', "
    "toJSONString(t), ',\"span_id\":', toJSONString(s), "
    f"',\"attributes\":', {_json_of('a')}, '}}'), "
    "Links.TraceId, Links.SpanId, Links.Attributes), ','), ']')",
    "otel_resource": _json_of("ResourceAttributes"),
    **{
        column: f"if(mapContains(SpanAttributes, {quoted(key)}) AND NOT "
        f"has({_json_keys('SpanAttributes')}, {quoted(key)}), "
        f"toValidUTF8({_attribute_sql(key)}), NULL)"
        for column, key in BODY_COLUMNS.items()
    },
}
"""Every column of ``spans`` as an expression over the Collector's table."""

_IS_BARE: Final = f"({_VIEW['reward']}) IS NOT NULL AND ({_VIEW['operation']}) IS NULL"
_JUDGES: Final = f"({_IS_BARE} OR {_VIEW['name']} = {quoted(c.SPAN_ANNOTATION)})"


def select(table: str, selection: Selection) -> str:
    """Return the query for the selected spans, each once.

    Of several rows with one id the one that begins first counts, of these the shortest.
    """
    columns = [f"{_VIEW[column]} AS {column}_" for column in COLUMNS if column in selection.columns]
    if REWARD_ATTRIBUTES in selection.columns and "attributes" not in selection.columns:
        columns.append(f"if({_JUDGES}, {_VIEW['attributes']}, NULL) AS attributes_")
    names = [text.rpartition(" AS ")[2] for text in columns]
    # Names of their own: ClickHouse would take ``name`` in a condition for the result's column.
    renamed = ", ".join(f"{name} AS {name.removesuffix('_')}" for name in names)
    return (
        f"SELECT {renamed} FROM (SELECT {', '.join(columns)} FROM (SELECT * FROM {table} "
        f"WHERE {_where_sql(selection)} ORDER BY Timestamp, Duration "
        "LIMIT 1 BY TraceId, SpanId))"
    )


def _where_sql(selection: Selection) -> str:
    terms = ["true"]
    if selection.trace_ids:
        terms.append(f"TraceId IN ({_list_sql(selection.trace_ids)})")
    if selection.rollout_ids:
        rollout = f"coalesce(nullIf({_VIEW['rollout_id']}, ''), TraceId)"
        terms.append(f"{rollout} IN ({_list_sql(selection.rollout_ids)})")
    for word, names in (("IN", selection.only), ("NOT IN", selection.without)):
        if names:
            pairs = ", ".join(f"({_list_sql(pair)})" for pair in names)
            terms.append(f"(TraceId, SpanId) {word} ({pairs})")
    for sign, time_ns in ((">=", selection.since_ns), ("<=", selection.until_ns)):
        if time_ns is not None:
            terms.append(f"Timestamp {sign} fromUnixTimestamp64Nano({int(time_ns)})")
    return " AND ".join(terms)


# --- into the table: the same backwards, in DuckDB's SQL ------------------------------------------

_KEYS: Final = "list_distinct(json_keys(j))"
_VALUE: Final = (
    "CASE WHEN json_type(e.v) = 'VARCHAR' THEN e.v->>'$' ELSE coalesce(e.v::VARCHAR, 'null') END"
)
_POINTER: Final = "'/' || replace(replace(key, '~', '~0'), '/', '~1')"
MACROS: Final = (
    # Keys and values of an object; slowly where a key is there twice, which no MAP can hold.
    "CREATE TEMP MACRO entries_of(j) AS coalesce("
    "TRY(list_transform(map_entries(CAST(j AS MAP(VARCHAR, JSON))), "
    "lambda e: {'k': e.key, 'v': e.value})), "
    f"list_transform({_KEYS}, lambda key: {{'k': key, 'v': json_extract(j, {_POINTER})}}), [])",
    f"CREATE TEMP MACRO texts_of(es) AS map_from_entries(list_transform(es, "
    f"lambda e: {{'k': e.k, 'v': {_VALUE}}}))",
    "CREATE TEMP MACRO json_keys_of(es) AS list_transform(list_filter(es, "
    "lambda e: coalesce(json_type(e.v), 'NULL') <> 'VARCHAR'), lambda e: e.k)",
    "CREATE TEMP MACRO map_of(j) AS map_concat(texts_of(entries_of(j)), "
    "CASE WHEN len(json_keys_of(entries_of(j))) > 0 "
    f"THEN MAP {{'{JSON_KEY}': to_json(json_keys_of(entries_of(j)))::VARCHAR}} "
    "ELSE MAP {}::MAP(VARCHAR, VARCHAR) END)",
)
"""What :func:`load_query` stands on."""

_BODIES: Final = ", ".join(
    f"{{'k': {sql.quote_text(key)}, 'v': {column}}}" for column, key in BODY_COLUMNS.items()
)
_HIDDEN: Final = ", ".join(
    (
        *(f"'{name}': {name}" for name in _DERIVED),
        "'is_incomplete': CASE WHEN end_ns IS NULL THEN true END",
        "'end_ns': CASE WHEN end_ns < start_ns THEN end_ns END",
    )
)
_EVENT: Final = '[{"name":"VARCHAR","time_ns":"BIGINT","attributes":"JSON"}]'
_LINK: Final = '[{"trace_id":"VARCHAR","span_id":"VARCHAR","attributes":"JSON"}]'


def _list_of(column: str, shape: str, item: str) -> str:
    return f"list_transform(coalesce(from_json({column}, '{shape}'), []), lambda each: {item})"


LOADED: Final = {
    "Timestamp": "make_timestamp_ns(start_ns)",
    "TraceId": "trace_id",
    "SpanId": "span_id",
    "ParentSpanId": "coalesce(parent_span_id, '')",
    "SpanName": "name",
    "SpanKind": "upper(kind[1]) || lower(kind[2:])",
    "ServiceName": "coalesce(otel_resource->>'$.\"service.name\"', '')",
    "ResourceAttributes": "map_of(otel_resource)",
    "ScopeName": "coalesce(scope, '')",
    "SpanAttributes": "map_concat(map_of(attributes), "
    f"map_from_entries(list_filter([{_BODIES}], lambda e: e.v IS NOT NULL)), "
    f"MAP {{'{STORED_KEY}': json_merge_patch('{{}}', to_json({{{_HIDDEN}}}))::VARCHAR}})",
    "Duration": "greatest(coalesce(end_ns, start_ns) - start_ns, 0)::UBIGINT",
    "StatusCode": "upper(status[1]) || lower(status[2:])",
    "StatusMessage": "coalesce(status_message, '')",
    "Events.Timestamp": _list_of("events", _EVENT, "make_timestamp_ns(each.time_ns)"),
    "Events.Name": _list_of("events", _EVENT, "each.name"),
    "Events.Attributes": _list_of("events", _EVENT, "map_of(each.attributes)"),
    "Links.TraceId": _list_of("links", _LINK, "each.trace_id"),
    "Links.SpanId": _list_of("links", _LINK, "each.span_id"),
    "Links.TraceState": _list_of("links", _LINK, "''"),
    "Links.Attributes": _list_of("links", _LINK, "map_of(each.attributes)"),
}
"""The Collector's columns as expressions over ``spans``."""


def load_query(rows: str) -> str:
    """Return a query for rows of ``spans`` as the Collector's table has them."""
    chosen = ", ".join(f'{value} AS "{name}"' for name, value in LOADED.items())
    return f"SELECT {chosen} FROM {rows}"
