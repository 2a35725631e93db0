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


class Table(NamedTuple):
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


TABLES: Final[Mapping[str, Table]] = {
    "langsmith": Table(
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
    "langfuse": Table(
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
    "mlflow": Table(
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
    "phoenix": Table(
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
    found = (tool for tool, each in TABLES.items() if _has(document, *each.marks, each.scored))
    return next(found, "")


def open_trace(document: Object) -> Object:
    """Return a trace of MLflow or Langfuse as a page of its records; anything else as one."""
    trace, parts = document.get("trace"), document.get("observations")
    if isinstance(trace, dict) and isinstance(parts, list):  # as Langfuse's page saves it
        own = {"traceId": trace.get("id")}
        held = [{**own, **each} if isinstance(each, dict) else each for each in parts]
        return {**document, "observations": held, "items": [trace]}
    if any(name.startswith("attributes.") for name in document):
        document = _nest_columns(document)
    info, spans = document.get("info"), object_of(document.get("data")).get("spans")
    if not isinstance(info, dict) or not isinstance(spans, list):
        return document
    rest = {name: value for name, value in info.items() if name != "assessments"}
    items = [
        {**span, "info": rest}  # of the trace: with its root
        if isinstance(span, dict) and not span.get("parent_span_id")
        else span
        for span in spans
    ]
    return {"items": items, "feedback": info.get("assessments") or []}


def _nest_columns(row: Object) -> Object:
    """Return a row of a data frame of Phoenix's, whose columns are such as ``context.span_id``."""
    found: dict[str, Any] = {}
    for column, value in row.items():
        name, mark, rest = column.partition(".")
        if mark and value is not None:
            found.setdefault(name, {})[rest] = value
        elif not mark:
            found[name] = value
    return found


def read_record(found: Object, tool: str) -> Iterator[Span]:
    """Yield the span of a record, or its reward.

    Raises:
        InvalidSpanError: It cannot be kept.
    """
    table = TABLES[tool]
    builder = Builder(tool, _find(found, table.trace), {})
    if _has(found, table.scored):
        yield _read_score(found, tool, table, builder)
        return
    span = _read_span(found, tool, table, builder)
    yield span
    for name, stats in object_of(parse_json(_find(found, table.averages))).items():
        value, judged = object_of(stats).get("avg"), _find(found, table.span)
        if isinstance(value, (int, float)):
            key, time_ns = f"average {name} of {judged}", span.end_ns or span.start_ns
            yield builder.make_reward(key, judged, {name: value}, time_ns)


def _read_score(found: Object, tool: str, table: Table, builder: Builder) -> Span:
    score_id, judged, time, name, value = (_find(found, path) for path in table.scores)
    value, kind = parse_json(value), _find(found, "dataType data_type")
    # A category of Langfuse's has a number, too: 0.
    if not isinstance(value, (int, float)) or kind not in (None, "NUMERIC", "BOOLEAN"):
        raise InvalidSpanError(f"score {name!r} is {kind or repr(value)}, no number")
    if found.get("valid") is False:  # MLflow keeps what was corrected
        raise InvalidSpanError(f"score {name!r} was replaced by another one")
    own = builder.trace if builder.trace != score_id else None
    if not own and not judged:
        session = _find(found, table.session)
        raise InvalidSpanError(f"score {name!r} is of no trace, but of session {session!r}")
    trace, key = own or f"score of {judged}", f"score {score_id or (name, judged)}"
    author, author_kind = (text_or_none(_find(found, path)) for path in table.author)
    named = {*" ".join([table.trace, *table.scores, *table.author]).split()}
    attributes = {
        **_find_rest(found, named, tool),
        c.REWARD_AUTHOR: author,
        c.REWARD_AUTHOR_KIND: author_kind,
    }
    made = builder._replace(trace=trace).make_reward(
        key, judged, {to_text(name): value}, read_time(time), attributes
    )
    return made if own else replace(made, parent_span_id=None)


def _read_span(found: Object, tool: str, table: Table, builder: Builder) -> Span:
    span, parent = _find(found, table.span), _find(found, table.parent)
    if not isinstance(span, str) or not isinstance(builder.trace, str):
        raise InvalidSpanError("the id of the span or of its trace is no text")
    kind, name = str(parse_json(_find(found, table.kind))).lower(), to_text(found.get("name"))
    given, made, end = (_find(found, at) for at in (table.given, table.made, table.end))
    if table.made.startswith("attributes/"):  # MLflow writes each as JSON
        given, made = parse_json(given), parse_json(made)
    around = object_of(parse_json(made))
    if table.sole and around.keys() == {table.sole}:
        made = around[table.sole]
    operation, start_ns = _KINDS.get(kind), read_time(_find(found, table.start))
    if operation == c.CHAT:
        _check_call(made, end)
        # The Vercel AI SDK's whole loop, whose calls are below it.
        operation = None if _VERCEL.fullmatch(_find(found, _VERCEL_IDS) or name) else operation
    attributes: dict[str, Any] = {
        c.OPERATION: operation,
        c.CONVERSATION_ID: text_or_none(_find(found, table.session)),
        c.TASK: None if parent or given is None else _write_task(given),
        **_find_rest(found, _name_places(table), tool),
    }
    if table.attributes:
        attributes |= {c.OPERATION: None, _OPENINFERENCE: kind.upper()}
        attributes |= _flatten(found[table.attributes])
    else:
        attributes |= _read_content(operation, name, found, given, made)
    if operation in c.CALL_OPERATIONS and not table.attributes:
        attributes[c.REQUEST_MODEL] = text_or_none(parse_json(_find(found, table.model)))
        counts = (read_integer(_find(found, at), "a count of tokens") for at in table.tokens)
        attributes |= {key: count or None for key, count in zip(_COUNTS, counts, strict=True)}
        attributes |= read_settings(object_of(parse_json(_find(found, table.settings))))
    if sum(len(write_json(each)) for each in attributes.values()) > MOST_BYTES:
        raise InvalidSpanError(
            f"the record takes more than {MOST_BYTES} bytes, which no span can hold"
        )
    end_ns = None if end is None else read_time(end)
    error = _find(found, table.error)
    told = _find(found, "level status/code status_code") or ("ERROR" if error else "OK")
    return builder.make_span(
        span, parent, name, start_ns, start_ns if kind == "event" else end_ns,
        attributes=attributes, status="ERROR" if "ERROR" in str(told) else "OK",
        status_message="" if error is None else to_text(error),
        scope=tool if table.attributes else _read_scope(found),
    )  # fmt: skip


def _write_task(given: Any) -> str:
    value = parse_json(given)
    return json_text(value if isinstance(value, (dict, list)) else given)


def _check_call(made: Any, end: Any) -> None:
    if made is None and end is None:
        raise InvalidSpanError("the call was not over yet; export it again and import that")
    batch = object_of(parse_json(made)).get("generations")
    if isinstance(batch, list) and len(batch) > 1 and all(isinstance(each, list) for each in batch):
        raise InvalidSpanError(f"the record holds answers to {len(batch)} prompts; a call has one")


def _read_scope(found: Object) -> str:
    if found.get("name") == _WRAPPED:
        return _WRAPPED
    scope = _find(found, "metadata/scope/name metadata/scope.name")
    return scope if isinstance(scope, str) else c.SCOPE


def _read_content(
    operation: str | None, name: str, found: Object, given: Any, made: Any
) -> dict[str, Any]:
    texts = [None if each is None else to_text(each) for each in (given, made)]
    known = _read_told(name, object_of(parse_json(found.get("metadata"))))
    if operation == c.CHAT:
        offers = parse_json(known.get(c.TOOL_DEFINITIONS)) or _find(found, _OFFERS)
        said = read_exchange(given, made, offers, known.get(c.SYSTEM_INSTRUCTIONS))
        return {
            **{key: known.get(key) for key in _KEPT},
            c.INPUT_MESSAGES: _write_messages(given, said.messages),
            c.OUTPUT_MESSAGES: _write_messages(made, said.answer),
            c.TOOL_DEFINITIONS: json_text(said.tools) if said.tools else None,
        }
    if operation == c.EXECUTE_TOOL:
        named = {c.TOOL_NAME: known.get(c.TOOL_NAME) or name}
        named[c.TOOL_CALL_ID] = known.get(c.TOOL_CALL_ID)
        return {**named, c.TOOL_ARGUMENTS: texts[0], c.TOOL_RESULT: texts[1]}
    named = {c.AGENT_NAME: name} if operation == c.INVOKE_AGENT else {}
    return {**named, c.OPERATION_INPUT: texts[0], c.OPERATION_OUTPUT: texts[1]}


def _write_messages(content: Any, messages: list[dict[str, Any]]) -> str | None:
    """Return messages as JSON; what is cut as it is, which makes the call unreadable."""
    if is_cut(content):
        return str(content)
    return json_text(messages) if messages else None


def _read_told(name: str, metadata: Object) -> Object:
    start = f"{_TOLD}."
    flat = {key[len(start) :]: each for key, each in metadata.items() if key.startswith(start)}
    held = {**flat, **object_of(parse_json(metadata.get(_TOLD)))}
    (span,) = readers.read([Span("", "", None, name, 1, 1, attributes=held)])
    return span.attributes


def _find(found: Object, places: str) -> Any:
    for place in places.split():
        value: Any = found
        for name in place.split("/"):
            value = parse_json(value)
            if name.endswith("*"):
                value = _add_up(value, name[:-1])
            else:
                value = value.get(name) if isinstance(value, dict) else None
        if value not in (None, ""):
            return value
    return None


def _add_up(held: Any, start: str) -> Any:
    counts = [each for name, each in object_of(held).items() if name.startswith(start)]
    whole = [count for count in counts if type(count) is int]
    return sum(whole) if whole == counts and whole else next(iter(counts), None)


def _name_places(table: Table) -> set[str]:
    fields = [*table[2:11], *table.tokens, table.error]
    return {"name", table.attributes, *" ".join(fields).split()}


def _find_rest(found: Object, named: set[str], tool: str) -> dict[str, str]:
    rest: dict[str, str] = {}
    for name in sorted(found.keys() - named):
        value = found[name]
        if isinstance(value, dict):
            value = {key: each for key, each in value.items() if f"{name}/{key}" not in named}
        if value not in (None, "", [], {}):
            rest[f"{tool}.{name}"] = json_text(value)
    return rest


def _flatten(found: Any, name: str = "") -> dict[str, Any]:
    if isinstance(found, list) and found and len(objects(found)) == len(found):
        found = {str(index): each for index, each in enumerate(found)}
    if not isinstance(found, dict):
        return {name: found}
    return {
        key: value
        for step, each in found.items()
        for key, value in _flatten(each, f"{name}.{step}" if name else step).items()
    }


def _has(found: Object, *marks: str) -> bool:
    return any(
        all(any(each in found for each in mark.split("|")) for mark in every.split())
        for every in marks
    )
