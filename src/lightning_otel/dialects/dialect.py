"""The base of dialects: what is asked of one, bodies read, messages written once per process."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import orjson

from lightning_otel.messages import flatten_tools
from lightning_otel.redact import Scrubbed, scrub
from lightning_otel.types import Prompt, values
from lightning_otel.types import conventions as c

Json: TypeAlias = Mapping[str, Any]
Attributes: TypeAlias = dict[str, Any]

_REMEMBERED: Final = 512
_LONGEST_REMEMBERED: Final = 8192
"""Messages whose JSON is kept, and their bytes: some MB at most."""


def read_events(body: bytes) -> list[Json]:
    """The JSON objects in a body of server-sent events; the closing ``[DONE]`` as ``done``.

    Source: the event stream format of the HTML standard, section 9.2.6; an event of several data
    lines is joined by newlines.
    """
    texts: list[bytes] = []
    data: list[bytes] = []
    is_done = False
    for line in (*body.splitlines(), b""):
        if line.startswith(b"data:"):
            data.append(line[5:])
        elif data and not line:
            text = data[0] if len(data) == 1 else b"\n".join(data)
            data.clear()
            if text.lstrip(b" ").startswith(b"[DONE]"):
                is_done = True
            else:
                texts.append(text)
    try:
        # One call for all: a call for each costs half as much again.
        values: list[Any] = orjson.loads(b"[%s]" % b",".join(texts))
    except ValueError:
        values = [parse_object(text) for text in texts]
    events: list[Json] = [event for event in values if isinstance(event, dict)]
    return [*events, {"done": True}] if is_done else events


def parse_object(data: bytes) -> Json | None:
    """Return the JSON object in a text; None if there is none."""
    value = parse_value(data)
    return value if isinstance(value, dict) else None


def parse_value(data: bytes) -> Any:
    """Return the value of a JSON text; None if it is none."""
    try:
        return orjson.loads(data)
    except ValueError:
        # What orjson refuses and the client accepts, such as an escaped lone surrogate or NaN.
        try:
            return json.loads(data)
        except ValueError:
            return None


class Answer(NamedTuple):
    """The answer that a body holds.

    Attributes:
        body: The whole answer, as one that is not streamed.
        is_stream: Whether it came as a stream.
        is_complete: Whether the stream said that it is over.
    """

    body: Json
    is_stream: bool = False
    is_complete: bool = False


class Dialect:
    """A reader of one API's requests and answers; a subclass says what differs.

    Content is messages and tools as JSON texts, token ids and logprobs, by attribute key.

    Attributes:
        operation: The operation's name in the conventions.
        provider: The provider's name there.
        end_marks: Types of the events that end a stream.
    """

    operation: str = c.CHAT
    provider: str = ""
    end_marks: ClassVar[frozenset[str]] = frozenset()

    def model_of(self, body: Json, path: str) -> str | None:
        """Return the model that a request names."""
        model = body.get("model")
        return model if isinstance(model, str) else None

    def is_stream(self, body: Json, path: str) -> bool:
        """Return whether a request asks for a stream."""
        return bool(body.get("stream"))

    def request_attributes(self, body: Json) -> Attributes:
        """Return what a request says of sampling and the like."""
        return {}

    def request_content(self, body: Json) -> dict[str, str]:
        """Return instructions, messages and tools of a request."""
        return {}

    def response_attributes(self, body: Json) -> Attributes:
        """Return id, model, counts and finish reasons of an answer."""
        return {}

    def response_content(self, body: Json) -> dict[str, str]:
        """Return messages, token ids and logprobs of an answer."""
        return {}

    def is_complete(self, events: Sequence[Json]) -> bool:
        """Return whether an event that ends a stream came."""
        has_mark = bool(events) and "[DONE]" in self.end_marks and bool(events[-1].get("done"))
        return has_mark or any(event.get("type") in self.end_marks for event in reversed(events))

    def is_ended(self, body: bytes) -> bool:
        """Return whether the last event of a body came whole, and ends the stream."""
        text = body.replace(b"\r\n", b"\n")
        last = text.rstrip(b"\n")
        lines = last[last.rfind(b"\n\n") + 1 :].strip(b"\n").split(b"\n")
        if lines[-1].strip() == b"data: [DONE]":
            return "[DONE]" in self.end_marks
        if not text.endswith(b"\n\n"):
            return False
        types = {line[6:].strip().decode() for line in lines if line.startswith(b"event:")}
        event = parse_object(lines[-1][5:]) if lines[-1].startswith(b"data:") else None
        types.add(str((event or {}).get("type")))
        return not self.end_marks.isdisjoint(types)

    def assemble(self, events: Sequence[Json]) -> Json:
        """Return the whole answer that a stream's events add up to."""
        return dict(events[-1]) if events else {}

    def error_of(self, body: Json) -> tuple[str, str] | None:
        """Return kind and message of the error that a body holds."""
        error = body.get("error")
        if not isinstance(error, dict):
            return None
        kind = error.get("type") or error.get("status") or error.get("code") or "error"
        return str(kind), str(error.get("message") or "")

    def write_error(self, status: int, message: str) -> Json:
        """Return the body of an error in the API's own shape."""
        return {"error": {"message": message, "type": "api_error", "param": None, "code": status}}

    def read_body(self, data: bytes) -> Answer:
        """Return the answer in a body: a JSON document, a list of events, or server-sent ones."""
        value = parse_value(data) if data.lstrip()[:1] in (b"{", b"[") else None
        if isinstance(value, dict):
            return Answer(value)
        events = value if isinstance(value, list) else read_events(data)
        events = [event for event in events if isinstance(event, dict)]
        if not events:
            return Answer({})
        return Answer(self.assemble(events), is_stream=True, is_complete=self.is_complete(events))

    def instruct(self, body: Json, prompt: Prompt, task: object) -> dict[str, Any]:
        """Return the fields of a request that say a prompt instead of the agent's own.

        Raises:
            ConfigError: The request cannot take the prompt.
        """
        return {}

    def sample(self, body: Json, endpoint: Json) -> dict[str, Any]:
        """Return the fields of a request that say the model and sampling of an endpoint.

        Raises:
            ConfigError: The request cannot take them.
        """
        return {}

    def wanted_ids(self, body: Json) -> dict[str, Any]:
        """Return the fields that ask for token ids, where this API may give them."""
        return {}

    def read_message(self, item: Any) -> Mapping[str, Any]:
        """Return a message of a request in the conventions' form."""
        raise NotImplementedError

    def write_messages(self, items: Sequence[Any]) -> str:
        """Return messages as a JSON list without secrets."""
        return Scrubbed(f"[{','.join(self.write_each(items))}]")

    def write_each(self, items: Sequence[Any]) -> list[str]:
        """Return messages as JSON texts without secrets.

        Each message of a long history comes again with every call: most are known by what is sent.
        """
        try:
            sent = list(map(orjson.dumps, items))
        except TypeError:  # a lone surrogate, or what the client makes JSON of
            return [_write_message(self, item) for item in items]
        return [
            _remembered(self, text)
            if len(text) <= _LONGEST_REMEMBERED
            else _write_message(self, item)
            for text, item in zip(sent, items, strict=True)
        ]


@lru_cache(_REMEMBERED)
def _remembered(dialect: Dialect, sent: bytes) -> str:
    return _write_message(dialect, orjson.loads(sent))


def _write_message(dialect: Dialect, item: Any) -> str:
    return scrub(dump(dialect.read_message(item)))


def _as_sent(value: Any) -> Any:
    """Return a value in the form the client sends it in, if it can send it at all."""
    if type(value) is orjson.Fragment:
        return json.loads(orjson.dumps(value))
    dump_model = getattr(value, "model_dump", None)
    if dump_model is not None:
        return dump_model(mode="json", exclude_unset=True, by_alias=True)
    return value.isoformat() if isinstance(value, datetime) else f"<{type(value).__name__}>"


dump = partial(values.dump, default=_as_sent)
"""Write JSON text of what a client sends or was sent."""


def pick_texts(fields: Json, keys: Mapping[str, str]) -> Attributes:
    """Return the fields that are texts, by the attribute keys that their names have."""
    return {key: text for name, key in keys.items() if isinstance(text := fields.get(name), str)}


def add_tools(content: dict[str, str], tools: object) -> dict[str, str]:
    """Content with a request's tools in the conventions' flat form, if it has some."""
    if tools and (flat := flatten_tools(tools)):
        content[c.TOOL_DEFINITIONS] = dump(flat)
    return content
