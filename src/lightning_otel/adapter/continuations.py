"""Calls that go on from an answer by its id: what was said before it is joined with what they say.

Where that answer is not there, a part says so in place of what the server keeps.

Source: ``previous_response_id`` of OpenAI's Responses API: messages and answers are carried on, and
instructions are not.
"""

from collections.abc import Iterable, Mapping
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
Answers = Mapping[str, Span]
"""Calls by the id of their response."""


def index_answers(spans: Iterable[Span]) -> Answers:
    """Return the calls that others may go on from; none if no call goes on from another."""
    calls = [span for span in spans if is_call(span)]
    if not any(c.REQUEST_PREVIOUS_RESPONSE in span.attributes for span in calls):
        return {}
    named = ((get_text(span.attributes, c.RESPONSE_ID), span) for span in calls)
    return {response_id: span for response_id, span in named if response_id}


def find_missing(spans: Iterable[Span]) -> set[str]:
    """Return the ids of answers that calls go on from and that are not among them."""
    spans = list(spans)
    asked = {get_text(span.attributes, c.REQUEST_PREVIOUS_RESPONSE) for span in spans}
    known = {get_text(span.attributes, c.RESPONSE_ID) for span in spans}
    return {response_id for response_id in asked - known if response_id}


def join_histories(steps: Mapping[int, Call], answers: Answers) -> dict[int, Call]:
    """Return the calls with all that the model was told."""
    joiner = _Joiner(steps.values(), answers)
    return {position: joiner.join(call) for position, call in steps.items()}


class _Joiner:
    """Joins calls with what they go on from; each answer's conversation is put together once."""

    def __init__(self, calls: Iterable[Call], answers: Answers) -> None:
        named = ((get_text(call.span.attributes, c.RESPONSE_ID), call) for call in calls)
        self._calls: dict[str, Call | str] = {key: call for key, call in named if key}
        self._answers = answers
        self._known: dict[str, tuple[Message, ...]] = {}

    def join(self, call: Call) -> Call:
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
        if response_id not in self._calls:
            span = self._answers.get(response_id)
            self._calls[response_id] = NOT_HERE if span is None else read_call(span, "")
        return self._calls[response_id]


def _previous_of(call: Call) -> str | None:
    return get_text(call.span.attributes, c.REQUEST_PREVIOUS_RESPONSE) or None


def _split_rules(call: Call) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Return the instructions of one request, which no later one is given, and the rest."""
    first, attributes = call.observation[:1], call.span.attributes
    is_told = c.SYSTEM_INSTRUCTIONS in attributes and first
    count = 1 if is_told and first[0].get("role") == "system" else 0
    count += len(parse_messages(attributes.get(c.PROMPT_MESSAGES)) or ())
    return call.observation[:count], call.observation[count:]
