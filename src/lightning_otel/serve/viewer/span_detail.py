"""One span with all that is written on it: what was said, its values, its tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from lightning_otel.adapter import readers
from lightning_otel.adapter.calls import is_call, observation_of
from lightning_otel.adapter.tokens import read_tokens, sampling_of
from lightning_otel.dataset import Store
from lightning_otel.errors import NotFoundError
from lightning_otel.messages import parse_messages
from lightning_otel.store.schema import COLUMNS, build_span
from lightning_otel.store.selection import Selection
from lightning_otel.types import Message, Span
from lightning_otel.types import conventions as c
from lightning_otel.views.messages import (
    read_text,
    show_messages,
    show_value,
    value_text,
)
from lightning_otel.views.previews import task_words

GIVEN: Final = 8
"""Messages that a call was given which stand beside its row: the last ones."""
VALUES: Final = 400
"""Attributes that are shown."""
TOKENS: Final = 2_000
"""Tokens of the prompt, and of the response, that are shown."""
_VALUE: Final = 2_000
_INPUTS: Final = (
    c.TOOL_ARGUMENTS, c.OPERATION_INPUT, c.TASK, "input.value", c.MESSAGE_BODY, c.OBJECT_JSON,
    c.OBJECT_LITERAL,
)  # fmt: skip
_OUTPUTS: Final = (c.TOOL_RESULT, c.OPERATION_OUTPUT, "output.value")
_NOT_SHOWN: Final = frozenset({"sequence", "end_sequence"})
_PROBABLE: Final = (-0.1, -0.7, -2.3, -4.6)
"""Logprobs between the classes of a token: probabilities of 0.9, 0.5, 0.1 and 0.01."""


def read_span(store: Store, trace_id: str, span_id: str) -> Span:
    """Return a span, in today's conventions.

    Raises:
        NotFoundError: There is none.
    """
    row = record_of(store, trace_id, span_id)
    for span in readers.read([build_span(row)] if row else []):
        return span
    raise NotFoundError(f"there is no span {span_id!r} in trace {trace_id!r}; see the trace")


def detail(span: Span) -> Mapping[str, Any]:
    """Collect what a span's template shows; ``_more`` and ``_before`` count what it does not."""
    inputs, answered = messages_of(span, "input"), messages_of(span, "output")
    before = max(0, len(inputs) - GIVEN)
    hidden = {*c.BODY_KEYS, c.LOGPROB_TOKEN_IDS}
    # Messages too large to be kept whole are no JSON any more: they are shown as the text left.
    hidden -= set() if inputs else {c.INPUT_MESSAGES}
    hidden -= set() if answered else {c.OUTPUT_MESSAGES}
    others = {key: value for key, value in span.attributes.items() if key not in hidden}
    return {
        "span": span,
        "given": show_messages(inputs, span.span_id, "input", before),
        "given_before": before,
        "answered": show_messages(answered, span.span_id, "output"),
        "input": _find_value(span, _INPUTS),
        "output": _find_value(span, _OUTPUTS),
        "values": _list_values(others),
        "values_more": max(0, len(others) - VALUES),
        "otel_resource": _list_values(span.otel_resource),
        "events": [
            {
                "name": event.name,
                "after_ns": event.time_ns - span.start_ns,
                "values": _list_values(event.attributes),
            }
            for event in span.events[:VALUES]
        ],
        "tokens": read_tokens(span.attributes) if is_call(span) else None,
        "sampling": sampling_of(span.attributes, span.otel_resource),
        "tools": _list_tools(span.attributes.get(c.TOOL_DEFINITIONS)),
    }


def _find_value(span: Span, keys: Sequence[str]) -> Mapping[str, Any] | None:
    key = next((key for key in keys if span.attributes.get(key) is not None), None)
    if key is None:
        return None
    value = span.attributes[key]
    is_text = key == c.OPERATION_OUTPUT and str(value).startswith('"')
    if isinstance(value, str) and (key == c.TASK or is_text):
        value = task_words(value)
    return {"key": key, "part": show_value(value)}


def messages_of(span: Span, side: str) -> Sequence[Message]:
    """The messages that a call was given, instructions first, or that it answered."""
    if side == "input":
        return observation_of(span)
    return parse_messages(span.attributes.get(c.OUTPUT_MESSAGES)) or ()


def text_of(span: Span, query: Mapping[str, str]) -> str | tuple[str, bytes]:
    """Return the whole of a text that was cut, or an image's type and bytes.

    The query names an ``attribute``; or ``side`` and ``message``, whose JSON it is, or of it a
    ``part``.

    Raises:
        NotFoundError: There is no such text.
    """
    key = query.get("attribute")
    if key is not None:
        if key not in span.attributes:
            raise NotFoundError(f"the span has no attribute {key!r}; see the span")
        return value_text(span.attributes[key])
    try:
        message = messages_of(span, query["side"])[int(query["message"])]
        return read_text(message, int(query["part"])) if "part" in query else value_text(message)
    except (KeyError, ValueError, IndexError) as exc:
        raise NotFoundError("the span has no such message; see the span") from exc


def show_tokens(ids: Sequence[int], logprobs: Sequence[float] = ()) -> list[dict[str, Any]]:
    """The first tokens of a sequence, and how probable each was, 0 to 4, where that is known."""
    rows = []
    for at in range(min(len(ids), TOKENS)):
        logprob = logprobs[at] if at < len(logprobs) else None
        level = None if logprob is None else sum(logprob < bound for bound in _PROBABLE)
        rows.append({"id": ids[at], "logprob": logprob, "level": level})
    return rows


def record_of(store: Store, trace_id: str, span_id: str) -> Mapping[str, Any]:
    """A span as it is stored; empty if it is not there any more."""
    selection = Selection(trace_ids=(trace_id,), only=((trace_id, span_id),))
    return next(iter(store.source.fetch(selection).dicts()), {})


def decode_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its JSON columns as what they hold, and without what it has not."""
    values: dict[str, Any] = {}
    for name, value in row.items():
        if value is None or name in _NOT_SHOWN:
            continue
        is_json = COLUMNS[name] == "JSON" and isinstance(value, str)
        values[name] = orjson.Fragment(value) if is_json else value
    return values


def json_of(row: Mapping[str, Any]) -> str:
    """A stored span as JSON for people."""
    value = orjson.loads(orjson.dumps(decode_row(row)))
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


def _list_values(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    keys = sorted(attributes)[:VALUES]
    return [{"key": key, "part": show_value(attributes[key], _VALUE)} for key in keys]


def _list_tools(value: object) -> list[str]:
    offered = parse_messages(value) or ()
    names = []
    for tool in offered:
        function = tool.get("function")
        flat = function if isinstance(function, Mapping) else tool
        names.append(str(flat.get("name") or tool.get("type") or "tool"))
    return names
