"""Exports of other tools as spans: a table for each tool says where its records hold what.

A record is a span of theirs, or a score, which becomes a reward. Fields that a table does not name
become JSON below the tool's name.

Source: LangSmith's run data format and the feedback schema of ``langsmith`` 0.15; Langfuse's field
reference of blob storage exports and the API models of ``langfuse`` 5.0; ``Trace.to_dict()`` of
``mlflow`` 3.17; spans and span annotations of Phoenix's REST API, ``arize-phoenix-client`` 3.5.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from lightning_otel.adapter import readers
from lightning_otel.messages import object_of, objects, read_settings
from lightning_otel.messages.exchanges import is_cut, read_exchange
from lightning_otel.messages.media import to_text
from lightning_otel.receivers.builder import MOST_BYTES, Builder, read_time
from lightning_otel.receivers.otlp import InvalidSpanError, Object, read_integer
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import json_text, parse_json, text_or_none, write_json


class FieldTable(NamedTuple):
    """The places of a tool's fields: a name, or several, of which the first that is there counts.

    Names of objects within objects are joined by ``/``; alternatives by a blank.

    Attributes:
        marks: A span has all fields of one of these; alternatives are joined by ``|``.
        scored: A score has all of these.
        tokens: Tokens given, sampled, and read from a cache; ``*`` adds up what begins so.
        settings: Sampling parameters.
        scores: Of a score: its id, the span it judges, its time, its name, and its number.
        author: Of a score: who gave it, and of what kind they are.
        attributes: Attributes of a convention that the adapter reads: these are kept as they are.
        averages: Of a span: its scores by name, each an object with its ``avg``.
        sole: What is alone in an object around an output that was none.
    """

    marks: tuple[str, ...]
    scored: str
    trace: str
    span: str
    parent: str
    start: str
    end: str
    kind: str
    given: str
    made: str
    model: str
    tokens: tuple[str, str, str]
    error: str
    session: str
    scores: tuple[str, str, str, str, str]
    author: tuple[str, str]
    settings: str = ""
    attributes: str = ""
    averages: str = ""
    sole: str = ""


TABLES: Final[Mapping[str, FieldTable]] = {
    "langsmith": FieldTable(
        marks=("run_type id start_time",), scored="key run_id score", trace="trace_id id",
        span="id", parent="parent_run_id", start="start_time", end="end_time", kind="run_type",
        given="inputs", made="outputs",
        model="extra/metadata/ls_model_name extra/invocation_params/model",
        tokens=("prompt_tokens outputs/usage_metadata/input_tokens",
                "completion_tokens outputs/usage_metadata/output_tokens",
                "prompt_token_details/cache_read"),
        error="error", session="extra/metadata/thread_id extra/metadata/session_id",
        scores=("id", "run_id", "created_at", "key", "score"),
        author=("feedback_source/user_name feedback_source/user_id", "feedback_source/type"),
        settings="extra/invocation_params", averages="feedback_stats", sole="output",
    ),
    "langfuse": FieldTable(
        marks=("type traceId|trace_id startTime|start_time",
               "id timestamp name projectId|project_id|userId|user_id|sessionId"),
        scored="name value dataType|data_type timestamp", trace="traceId trace_id id",
        span="id", parent="parentObservationId parent_observation_id",
        start="startTime start_time timestamp", end="endTime end_time timestamp", kind="type",
        given="input", made="output", model="model providedModelName provided_model_name",
        tokens=("usageDetails/input* usage_details/input* usage/input inputUsage promptTokens",
                "usageDetails/output* usage_details/output* usage/output outputUsage"
                " completionTokens",
                "usageDetails/cache_read_input_tokens usage_details/cache_read_input_tokens"
                " usageDetails/input_cache* usage_details/input_cache*"),
        error="statusMessage status_message", session="sessionId session_id",
        scores=("id", "observationId observation_id", "timestamp", "name", "value"),
        author=("authorUserId author_user_id", "source"),
        settings="modelParameters model_parameters",
    ),
    "mlflow": FieldTable(
        marks=("trace_id span_id start_time_unix_nano attributes",),
        scored="assessment_name trace_id create_time", trace="trace_id", span="span_id",
        parent="parent_span_id", start="start_time_unix_nano", end="end_time_unix_nano",
        kind="attributes/mlflow.spanType", given="attributes/mlflow.spanInputs",
        made="attributes/mlflow.spanOutputs", model="attributes/mlflow.llm.model",
        tokens=("attributes/mlflow.chat.tokenUsage/input_tokens",
                "attributes/mlflow.chat.tokenUsage/output_tokens",
                "attributes/mlflow.chat.tokenUsage/cache_read_input_tokens"),
        error="status/message", session="info/trace_metadata/mlflow.trace.session",
        scores=("assessment_id", "span_id", "create_time", "assessment_name", "feedback/value"),
        author=("source/source_id", "source/source_type"),
    ),
    "phoenix": FieldTable(
        marks=("span_kind name start_time attributes",), scored="annotator_kind name span_id",
        trace="context/trace_id trace_id", span="context/span_id span_id", parent="parent_id",
        start="start_time", end="end_time", kind="span_kind",
        given="attributes/input.value attributes/input/value", made="", model="",
        tokens=("", "", ""), error="status_message", session="",
        scores=("id", "span_id", "created_at", "name", "result/score"),
        author=("user_id identifier", "annotator_kind"), attributes="attributes",
    ),
}  # fmt: skip
_KINDS: Final = {
    "llm": c.CHAT, "chat_model": c.CHAT, "generation": c.CHAT, "tool": c.EXECUTE_TOOL,
    "agent": c.INVOKE_AGENT, "embedding": c.EMBEDDINGS, "retriever": c.RETRIEVAL,
}  # fmt: skip
"""Operations by a tool's kind of span, in lower case."""
_OFFERS: Final = "tools extra/invocation_params/tools attributes/mlflow.chat.tools metadata/tools"
"""Where a record holds the tools of a call, but for its input."""
_WRAPPED: Final = "OpenAI-generation"
"""Calls as Langfuse's wrapper of OpenAI names them, also within those that its callbacks record."""
_VERCEL: Final = re.compile(r"ai\.(generate|stream)(Text|Object)")
_VERCEL_IDS: Final = "metadata/attributes/ai.operationId metadata/attributes.ai.operationId"
_TOLD: Final = "attributes"
"""Where Langfuse keeps the attributes of a span that it got by OTLP, in its metadata."""
_KEPT: Final = (c.RESPONSE_ID, c.FINISH_REASONS, c.PROVIDER)
_OPENINFERENCE: Final = "openinference.span.kind"
_COUNTS: Final = (c.INPUT_TOKENS, c.OUTPUT_TOKENS, c.CACHED_TOKENS)


def find_tool(document: Object) -> str:
    """Return the name of the tool that a record is of; empty if it is of none."""
    tools = (tool for tool, table in TABLES.items() if _has(document, *table.marks, table.scored))
    return next(tools, "")


def open_trace(document: Object) -> Object:
    """Return a trace of MLflow or Langfuse as a page of its records; anything else as one."""
    trace, parts = document.get("trace"), document.get("observations")
    if isinstance(trace, dict) and isinstance(parts, list):  # as Langfuse's page saves it
        trace_fields = {"traceId": trace.get("id")}
        records = [{**trace_fields, **part} if isinstance(part, dict) else part for part in parts]
        return {**document, "observations": records, "items": [trace]}
    if any(name.startswith("attributes.") for name in document):
        document = _nest_columns(document)
    info, spans = document.get("info"), object_of(document.get("data")).get("spans")
    if not isinstance(info, dict) or not isinstance(spans, list):
        return document
    fields = {name: value for name, value in info.items() if name != "assessments"}
    items = [
        {**span, "info": fields}  # of the trace: with its root
        if isinstance(span, dict) and not span.get("parent_span_id")
        else span
        for span in spans
    ]
    return {"items": items, "feedback": info.get("assessments") or []}


def _nest_columns(row: Object) -> Object:
    """Return a row of a data frame of Phoenix's, whose columns are such as ``context.span_id``."""
    nested: dict[str, Any] = {}
    for column, value in row.items():
        name, mark, path = column.partition(".")
        if mark and value is not None:
            nested.setdefault(name, {})[path] = value
        elif not mark:
            nested[name] = value
    return nested


def read_record(record: Object, tool: str) -> Iterator[Span]:
    """Yield the span of a record, or its reward.

    Raises:
        InvalidSpanError: It cannot be kept.
    """
    table = TABLES[tool]
    builder = Builder(tool, _find(record, table.trace), {})
    if _has(record, table.scored):
        yield _read_score(record, tool, table, builder)
        return
    span = _read_span(record, tool, table, builder)
    yield span
    for name, stats in object_of(parse_json(_find(record, table.averages))).items():
        value, judged = object_of(stats).get("avg"), _find(record, table.span)
        if isinstance(value, (int, float)):
            key, time_ns = f"average {name} of {judged}", span.end_ns or span.start_ns
            yield builder.make_reward(key, judged, {name: value}, time_ns)


def _read_score(record: Object, tool: str, table: FieldTable, builder: Builder) -> Span:
    score_id, judged, time, name, value = (_find(record, path) for path in table.scores)
    value, kind = parse_json(value), _find(record, "dataType data_type")
    # A category of Langfuse's has a number, too: 0.
    if not isinstance(value, (int, float)) or kind not in (None, "NUMERIC", "BOOLEAN"):
        raise InvalidSpanError(f"score {name!r} is {kind or repr(value)}, no number")
    if record.get("valid") is False:  # MLflow keeps what was corrected
        raise InvalidSpanError(f"score {name!r} was replaced by another one")
    trace_id = builder.trace if builder.trace != score_id else None
    if not trace_id and not judged:
        session = _find(record, table.session)
        raise InvalidSpanError(f"score {name!r} is of no trace, but of session {session!r}")
    trace, key = trace_id or f"score of {judged}", f"score {score_id or (name, judged)}"
    author, author_kind = (text_or_none(_find(record, path)) for path in table.author)
    names = {*" ".join([table.trace, *table.scores, *table.author]).split()}
    attributes = {
        **_find_rest(record, names, tool),
        c.REWARD_AUTHOR: author,
        c.REWARD_AUTHOR_KIND: author_kind,
    }
    span = builder._replace(trace=trace).make_reward(
        key, judged, {to_text(name): value}, read_time(time), attributes
    )
    return span if trace_id else replace(span, parent_span_id=None)


def _read_span(record: Object, tool: str, table: FieldTable, builder: Builder) -> Span:
    span, parent = _find(record, table.span), _find(record, table.parent)
    if not isinstance(span, str) or not isinstance(builder.trace, str):
        raise InvalidSpanError("the id of the span or of its trace is no text")
    kind, name = str(parse_json(_find(record, table.kind))).lower(), to_text(record.get("name"))
    request, answer, end = (_find(record, at) for at in (table.given, table.made, table.end))
    if table.made.startswith("attributes/"):  # MLflow writes each as JSON
        request, answer = parse_json(request), parse_json(answer)
    envelope = object_of(parse_json(answer))
    if table.sole and envelope.keys() == {table.sole}:
        answer = envelope[table.sole]
    operation, start_ns = _KINDS.get(kind), read_time(_find(record, table.start))
    if operation == c.CHAT:
        _check_call(answer, end)
        # The Vercel AI SDK's whole loop, whose calls are below it.
        operation = None if _VERCEL.fullmatch(_find(record, _VERCEL_IDS) or name) else operation
    attributes: dict[str, Any] = {
        c.OPERATION: operation,
        c.CONVERSATION_ID: text_or_none(_find(record, table.session)),
        c.TASK: None if parent or request is None else _write_task(request),
        **_find_rest(record, _name_places(table), tool),
    }
    if table.attributes:
        attributes |= {c.OPERATION: None, _OPENINFERENCE: kind.upper()}
        attributes |= _flatten(record[table.attributes])
    else:
        attributes |= _read_content(operation, name, record, request, answer)
    if operation in c.CALL_OPERATIONS and not table.attributes:
        attributes[c.REQUEST_MODEL] = text_or_none(parse_json(_find(record, table.model)))
        counts = (read_integer(_find(record, at), "a count of tokens") for at in table.tokens)
        attributes |= {key: count or None for key, count in zip(_COUNTS, counts, strict=True)}
        attributes |= read_settings(object_of(parse_json(_find(record, table.settings))))
    if sum(len(write_json(value)) for value in attributes.values()) > MOST_BYTES:
        raise InvalidSpanError(
            f"the record takes more than {MOST_BYTES} bytes, which no span can hold"
        )
    end_ns = None if end is None else read_time(end)
    error = _find(record, table.error)
    status = _find(record, "level status/code status_code") or ("ERROR" if error else "OK")
    return builder.make_span(
        span, parent, name, start_ns, start_ns if kind == "event" else end_ns,
        attributes=attributes, status="ERROR" if "ERROR" in str(status) else "OK",
        status_message="" if error is None else to_text(error),
        scope=tool if table.attributes else _read_scope(record),
    )  # fmt: skip


def _write_task(request: Any) -> str:
    value = parse_json(request)
    return json_text(value if isinstance(value, (dict, list)) else request)


def _check_call(answer: Any, end: Any) -> None:
    if answer is None and end is None:
        raise InvalidSpanError("the call was not over yet; export it again and import that")
    batch = object_of(parse_json(answer)).get("generations")
    if isinstance(batch, list) and len(batch) > 1 and all(isinstance(item, list) for item in batch):
        raise InvalidSpanError(f"the record holds answers to {len(batch)} prompts; a call has one")


def _read_scope(record: Object) -> str:
    if record.get("name") == _WRAPPED:
        return _WRAPPED
    scope = _find(record, "metadata/scope/name metadata/scope.name")
    return scope if isinstance(scope, str) else c.SCOPE


def _read_content(
    operation: str | None, name: str, record: Object, request: Any, answer: Any
) -> dict[str, Any]:
    texts = [None if content is None else to_text(content) for content in (request, answer)]
    facts = _read_told(name, object_of(parse_json(record.get("metadata"))))
    if operation == c.CHAT:
        offers = parse_json(facts.get(c.TOOL_DEFINITIONS)) or _find(record, _OFFERS)
        exchange = read_exchange(request, answer, offers, facts.get(c.SYSTEM_INSTRUCTIONS))
        return {
            **{key: facts.get(key) for key in _KEPT},
            c.INPUT_MESSAGES: _write_messages(request, exchange.messages),
            c.OUTPUT_MESSAGES: _write_messages(answer, exchange.answer),
            c.TOOL_DEFINITIONS: json_text(exchange.tools) if exchange.tools else None,
        }
    if operation == c.EXECUTE_TOOL:
        attributes = {c.TOOL_NAME: facts.get(c.TOOL_NAME) or name}
        attributes[c.TOOL_CALL_ID] = facts.get(c.TOOL_CALL_ID)
        return {**attributes, c.TOOL_ARGUMENTS: texts[0], c.TOOL_RESULT: texts[1]}
    attributes = {c.AGENT_NAME: name} if operation == c.INVOKE_AGENT else {}
    return {**attributes, c.OPERATION_INPUT: texts[0], c.OPERATION_OUTPUT: texts[1]}


def _write_messages(content: Any, messages: list[dict[str, Any]]) -> str | None:
    """Return messages as JSON; what is cut as it is, which makes the call unreadable."""
    if is_cut(content):
        return str(content)
    return json_text(messages) if messages else None


def _read_told(name: str, metadata: Object) -> Object:
    start = f"{_TOLD}."
    flat = {key[len(start) :]: value for key, value in metadata.items() if key.startswith(start)}
    fields = {**flat, **object_of(parse_json(metadata.get(_TOLD)))}
    (span,) = readers.read([Span("", "", None, name, 1, 1, attributes=fields)])
    return span.attributes


def _find(record: Object, places: str) -> Any:
    for place in places.split():
        value: Any = record
        for name in place.split("/"):
            value = parse_json(value)
            if name.endswith("*"):
                value = _add_up(value, name[:-1])
            else:
                value = value.get(name) if isinstance(value, dict) else None
        if value not in (None, ""):
            return value
    return None


def _add_up(value: Any, start: str) -> Any:
    counts = [count for name, count in object_of(value).items() if name.startswith(start)]
    whole = [count for count in counts if type(count) is int]
    return sum(whole) if whole == counts and whole else next(iter(counts), None)


def _name_places(table: FieldTable) -> set[str]:
    fields = [*table[2:11], *table.tokens, table.error]
    return {"name", table.attributes, *" ".join(fields).split()}


def _find_rest(record: Object, names: set[str], tool: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for name in sorted(record.keys() - names):
        value = record[name]
        if isinstance(value, dict):
            value = {key: item for key, item in value.items() if f"{name}/{key}" not in names}
        if value not in (None, "", [], {}):
            fields[f"{tool}.{name}"] = json_text(value)
    return fields


def _flatten(content: Any, name: str = "") -> dict[str, Any]:
    if isinstance(content, list) and content and len(objects(content)) == len(content):
        content = {str(index): item for index, item in enumerate(content)}
    if not isinstance(content, dict):
        return {name: content}
    return {
        key: value
        for step, item in content.items()
        for key, value in _flatten(item, f"{name}.{step}" if name else step).items()
    }


def _has(record: Object, *marks: str) -> bool:
    return any(
        all(any(field in record for field in mark.split("|")) for mark in alternatives.split())
        for alternatives in marks
    )
