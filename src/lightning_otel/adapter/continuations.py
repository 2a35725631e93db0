"""Calls that refer to what a server keeps: joined with what they say, where it is recorded.

Where what was said before is not there, a part says so in its place.

Source: ``previous_response_id``, ``conversation`` and ``background`` of OpenAI's Responses API:
messages and answers are carried on, and instructions are not.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from lightning_otel.adapter.attributes import get_text
from lightning_otel.adapter.calls import is_call, is_unanswered, read_call
from lightning_otel.messages import message, parse_messages
from lightning_otel.types import Call, Message, Span
from lightning_otel.types import conventions as c

SERVER_HISTORY: Final = "openai.previous_response"
"""The kind of the part that stands for a history which is on the server alone."""
NOT_HERE: Final = "its history is on the server"
_REFUSED: Final = (
    "openai.BadRequestError", "openai.AuthenticationError", "openai.PermissionDeniedError",
    "openai.NotFoundError", "openai.ConflictError", "openai.UnprocessableEntityError",
    "openai.RateLimitError",
)  # fmt: skip
"""Errors of requests that a conversation does not hold, as the server took none of them."""
_ANSWERED: Final = (
    c.OUTPUT_MESSAGES, c.PROMPT_MESSAGES, c.FINISH_REASONS, c.ERROR_TYPE, c.INPUT_TOKENS,
    c.OUTPUT_TOKENS, c.CACHED_TOKENS, c.REASONING_TOKENS, c.RESPONSE_MODEL, c.PROMPT_TOKEN_IDS,
    c.RESPONSE_TOKEN_IDS, c.RESPONSE_LOGPROBS,
)  # fmt: skip
Reference = tuple[str, str]
"""The attribute that names something on the server where it is recorded, and its id."""


def goes_on(span: Span) -> bool:
    """Return whether a call is told more than it says."""
    attributes = span.attributes
    return c.REQUEST_PREVIOUS_RESPONSE in attributes or c.REQUEST_CONVERSATION in attributes


def is_source(span: Span) -> bool:
    """Return whether a span tells what others may refer to."""
    operation = span.attributes.get(c.OPERATION)
    return is_call(span) or operation in (
        c.RETRIEVE_RESPONSE, c.CREATE_CONVERSATION, c.UPDATE_CONVERSATION,
    )  # fmt: skip


def find_references(spans: Iterable[Span]) -> tuple[set[Reference], set[Reference]]:
    """Return what spans refer to, and what of it is told by them in full."""
    references, answers = set[Reference](), set[Reference]()
    for span in spans:
        attributes = span.attributes
        if response_id := get_text(attributes, c.RESPONSE_ID):
            answers.add((c.RESPONSE_ID, response_id))
            if is_unanswered(span):
                references.add((c.RETRIEVED_RESPONSE, response_id))
        for key, place, names in (
            (c.REQUEST_PREVIOUS_RESPONSE, references, c.RESPONSE_ID),
            (c.REQUEST_CONVERSATION, references, c.REQUEST_CONVERSATION),
            (c.RETRIEVED_RESPONSE, answers, c.RETRIEVED_RESPONSE),
        ):
            if key in attributes and (server_id := get_text(attributes, key)):
                place.add((names, server_id))
    return references, answers


def complete_calls(spans: Sequence[Span], sources: Iterable[Span]) -> Sequence[Span]:
    """Return spans, the calls that were answered in the background with their answers."""
    if not any(map(is_unanswered, spans)):
        return spans
    key = c.RETRIEVED_RESPONSE
    answers = {get_text(span.attributes, key): span for span in sources if key in span.attributes}
    return [
        _complete_call(span, answers.get(get_text(span.attributes, c.RESPONSE_ID)))
        if is_unanswered(span)
        else span
        for span in spans
    ]


def _complete_call(call: Span, answer: Span | None) -> Span:
    if answer is None:
        return call
    attributes = {key: value for key, value in call.attributes.items() if key != c.ABANDONED}
    attributes |= {key: answer.attributes[key] for key in _ANSWERED if key in answer.attributes}
    status, text = answer.status, answer.status_message
    return replace(call, attributes=attributes, status=status, status_message=text)


class Answers:
    """The calls of many attempts by the id of their response, each read once."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._calls: dict[str, Span | Call | str] = {}
        self._known: dict[str, tuple[Message, ...]] = {}
        self._before: dict[str, str] = {}
        conversations: dict[str, dict[str, Span]] = {}
        for span in spans:
            if conversation_id := get_text(span.attributes, c.REQUEST_CONVERSATION):
                conversations.setdefault(conversation_id, {})[_key_of(span)] = span
            elif response_id := get_text(span.attributes, c.RESPONSE_ID):
                self._calls[response_id] = span
        for conversation_id, calls in conversations.items():
            self._order_conversation(conversation_id, calls.values())

    def _order_conversation(self, conversation_id: str, spans: Iterable[Span]) -> None:
        before = conversation_id
        for span in sorted(spans, key=lambda span: (span.start_ns, span.sequence)):
            key = _key_of(span)
            self._calls[key] = span
            if span.attributes.get(c.OPERATION) != c.CREATE_CONVERSATION:
                self._before[key] = before
            if span.attributes.get(c.ERROR_TYPE) not in _REFUSED:
                before = key

    def join_histories(self, steps: Mapping[int, Call]) -> dict[int, Call]:
        """Return the calls of an attempt with all that the model was told."""
        for call in steps.values():
            if get_text(call.span.attributes, c.RESPONSE_ID):
                key = _key_of(call.span)
                self._calls[key] = call  # of several records it is what they say together
                self._known.pop(key, None)
        return {position: self._join(call) for position, call in steps.items()}

    def _join(self, call: Call) -> Call:
        before = self._find_before(call.span)
        if not before:
            return call
        rules, messages = _split_rules(call)
        return replace(call, observation=rules + self._tell(before) + messages)

    def _tell(self, key: str) -> tuple[Message, ...]:
        path: list[str] = []
        at: str | None = key
        while at and at not in self._known:
            if at in path:  # nothing can go on from itself
                self._known[at] = _tell_missing(at)
                del path[path.index(at) :]
                break
            path.append(at)
            call = self._find(at)
            at = self._find_before(call.span) if isinstance(call, Call) else None
        for at in reversed(path):
            call = self._find(at)
            if isinstance(call, Call):
                before = self._known.get(self._find_before(call.span) or "", ())
                self._known[at] = before + _split_rules(call)[1] + call.action[:1]
            else:
                self._known[at] = _tell_missing(at)
        return self._known[key]

    def _find(self, key: str) -> Call | str:
        call = self._calls.get(key, NOT_HERE)
        if isinstance(call, Span):
            call = self._calls[key] = read_call(call, "") if is_call(call) else _read_items(call)
        return call

    def _find_before(self, span: Span) -> str | None:
        return get_text(span.attributes, c.REQUEST_PREVIOUS_RESPONSE) or self._before.get(
            _key_of(span)
        )


def _key_of(span: Span) -> str:
    return get_text(span.attributes, c.RESPONSE_ID) or f"{span.trace_id}:{span.span_id}"


def _tell_missing(server_id: str) -> tuple[Message, ...]:
    return (message("user", [{"type": SERVER_HISTORY, "id": server_id}]),)


def _read_items(span: Span) -> Call | str:
    items = parse_messages(span.attributes.get(c.INPUT_MESSAGES))
    return NOT_HERE if items is None else Call(span, "", items, ())


def _split_rules(call: Call) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Return the instructions of one request, which no later one is given, and the rest."""
    first, attributes = call.observation[:1], call.span.attributes
    is_told = c.SYSTEM_INSTRUCTIONS in attributes and first
    count = 1 if is_told and first[0].get("role") == "system" else 0
    count += len(parse_messages(attributes.get(c.PROMPT_MESSAGES)) or ())
    return call.observation[:count], call.observation[count:]
