"""Calls that go on from an answer by its id: what was said before it is joined with what they say.

Where that answer is not there, a part says so in place of what the server keeps.

Source: ``previous_response_id`` of OpenAI's Responses API: messages and answers are carried on, and
instructions are not.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from lightning_otel.adapter.attributes import get_text
from lightning_otel.adapter.calls import is_call, read_call
from lightning_otel.messages import message, parse_messages
from lightning_otel.types import Call, Message, Span
from lightning_otel.types import conventions as c

SERVER_HISTORY: Final = "openai.previous_response"
"""The kind of the part that stands for a history which is on the server alone."""
NOT_HERE: Final = "its history is on the server"


def find_ids(spans: Iterable[Span]) -> tuple[set[str], set[str]]:
    """Return the ids of the answers that calls go on from, and of those that are among them."""
    keys = c.REQUEST_PREVIOUS_RESPONSE, c.RESPONSE_ID
    pairs = [[get_text(span.attributes, key) for key in keys] for span in spans]
    return {asked for asked, _ in pairs if asked}, {known for _, known in pairs if known}


def index_answers(spans: Sequence[Span]) -> "Answers | None":
    """Return the calls that others may go on from; None if no span goes on from another."""
    if not any(c.REQUEST_PREVIOUS_RESPONSE in span.attributes for span in spans):
        return None
    return Answers(filter(is_call, spans))


class Answers:
    """The calls of many attempts by the id of their response.

    Each is read once, and the conversation up to each is put together once.
    """

    def __init__(self, calls: Iterable[Span]) -> None:
        named = ((get_text(span.attributes, c.RESPONSE_ID), span) for span in calls)
        self._calls: dict[str, Span | Call | str] = {key: span for key, span in named if key}
        self._known: dict[str, tuple[Message, ...]] = {}

    def join_histories(self, steps: Mapping[int, Call]) -> dict[int, Call]:
        """Return the calls of an attempt with all that the model was told."""
        for call in steps.values():
            if response_id := get_text(call.span.attributes, c.RESPONSE_ID):
                self._calls[response_id] = call  # of several records it is what they say together
                self._known.pop(response_id, None)
        return {position: self._join(call) for position, call in steps.items()}

    def _join(self, call: Call) -> Call:
        previous_id = _previous_of(call)
        if not previous_id:
            return call
        rules, own = _split_rules(call)
        return replace(call, observation=rules + self._tell(previous_id) + own)

    def _tell(self, response_id: str) -> tuple[Message, ...]:
        """Return the conversation up to an answer."""
        path: list[str] = []
        at: str | None = response_id
        while at and at not in self._known and at not in path:
            path.append(at)
            call = self._find(at)
            at = _previous_of(call) if isinstance(call, Call) else None
        for at in reversed(path):
            call = self._find(at)
            if isinstance(call, Call):
                before = self._known.get(_previous_of(call) or "", ())
                self._known[at] = before + _split_rules(call)[1] + call.action[:1]
            else:
                part = {"type": SERVER_HISTORY, "id": at}
                self._known[at] = (message("user", [part]),)
        return self._known[response_id]

    def _find(self, response_id: str) -> Call | str:
        call = self._calls.get(response_id, NOT_HERE)
        if isinstance(call, Span):
            call = self._calls[response_id] = read_call(call, "")
        return call


def _previous_of(call: Call) -> str | None:
    return get_text(call.span.attributes, c.REQUEST_PREVIOUS_RESPONSE)


def _split_rules(call: Call) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Return the instructions of one request, which no later one is given, and the rest."""
    first, attributes = call.observation[:1], call.span.attributes
    is_told = c.SYSTEM_INSTRUCTIONS in attributes and first
    count = 1 if is_told and first[0].get("role") == "system" else 0
    count += len(parse_messages(attributes.get(c.PROMPT_MESSAGES)) or ())
    return call.observation[:count], call.observation[count:]
