"""Spans read into calls; what cannot be read gets a reason.

Actions and observations marked by hand are read as if they were calls: each action is a step, and
what was observed since the previous action is what it answered.
"""

import json
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from lightning_otel.adapter.agent_patterns import is_tracked, join_versions, resources_of
from lightning_otel.adapter.attributes import finish_reason, get_integer, get_text, to_text
from lightning_otel.adapter.tokens import MARKED, NO_IDS, NO_RESPONSE_IDS, read_tokens, sampling_of
from lightning_otel.messages import (
    RULES,
    message,
    parse_messages,
    parse_parts,
    plain_text,
    text_part,
)
from lightning_otel.types import Call, Message, Span, Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.transitions import fast_constructor

if TYPE_CHECKING:
    from lightning_otel.adapter.tree import Tree

ABANDONED = "abandoned: the program left the stream before its end"
INCOMPLETE = "incomplete: the call never ended"
UNANSWERED = "unanswered: it was made in the background, and nothing retrieved its answer"
NO_CONTENT = "no content: neither messages nor token ids were recorded"
EMBEDDING = "an embedding: no action follows from it"
NOT_TRACKED = "not tracked: the agent is not in track_only"
CUT = "cut: the messages were too large to keep whole"
NO_OUTPUT = "no output: the model answered nothing"
UNKNOWN = "unknown convention: it names a model and its tokens, but not what was said as we read it"
UNREADABLE = "unreadable: the messages are not the JSON they should be"
UNREAD = "unreadable: the server's answer is neither JSON nor a stream of events"
BESIDE_CALLS = "marked by hand beside model calls: the calls make the transitions"
INCOMPLETE_MARK = "incomplete: the mark never ended"
IDLE = "idle: its agent saw something and never acted"
HOSTS: Final = frozenset({c.INVOKE_AGENT, c.EXECUTE_TOOL, c.EXECUTE_TASK, c.INVOKE_WORKFLOW})
"""Operations that calls lie in."""
_NO_CALLS: Final = (*HOSTS, c.CREATE_AGENT, c.EXECUTE_NODE, c.RETRIEVAL)
_HALF_PAIR: Final = re.compile(r"\\u[dD][89a-fA-F]")


def is_call(span: Span) -> bool:
    """Return whether the span is a request to a model.

    A rollout's span is none: LiteLLM's callback puts its calls' attributes on the span around.
    """
    operation = span.attributes.get(c.OPERATION)
    is_named = isinstance(operation, str) and operation in c.CALL_OPERATIONS
    return is_named and span.name != c.SPAN_ROLLOUT


def seems_call(span: Span) -> bool:
    """Return whether a foreign span that is no call names a model and its tokens."""
    attributes = span.attributes
    if c.REQUEST_MODEL not in attributes and c.RESPONSE_MODEL not in attributes:
        return False
    return (
        (c.INPUT_TOKENS in attributes or c.OUTPUT_TOKENS in attributes)
        and attributes.get(c.OPERATION) not in _NO_CALLS
        and not is_call(span)
    )


def is_unanswered(span: Span) -> bool:
    """Return whether a call's answer is made in the background, and was not there as it ended."""
    attributes = span.attributes
    return (
        attributes.get(c.REQUEST_BACKGROUND) is True
        and c.FINISH_REASONS not in attributes
        and c.ERROR_TYPE not in attributes
    )


class HistoryParser:
    """The latest input of an agent: a call that goes on from it has only the rest parsed."""

    def __init__(self) -> None:
        self._text = self._instructions_text = ""
        self._messages: tuple[Message, ...] = ()
        self._instructions: tuple[Message, ...] = ()

    def read_messages(self, value: object) -> tuple[Message, ...] | None:
        """Return the messages of an input; None where it cannot be read."""
        if not isinstance(value, str) or _is_escaped(value):
            return _read_messages(value)
        start = self._text[:-1]
        if self._messages and value.startswith(f"{start},"):
            tail = _read_messages(f"[{value[len(start) + 1 :]}")
            messages = self._messages + tail if tail else None
        else:
            messages = _read_messages(value)
        if messages and value.endswith("}]"):
            self._text, self._messages = value, messages
        return messages

    def read_instructions(self, value: object) -> tuple[Message, ...]:
        """Return instructions as a message, the same one as long as they are the same."""
        if not isinstance(value, str) or not value:
            return ()
        if value != self._instructions_text:
            # A copy: what is parsed once is kept for every reader, and a program may change this.
            parts = [dict(part) for part in _parse_repeated(value)]
            self._instructions = (message("system", parts),) if parts else ()
            self._instructions_text = value
        return self._instructions


def read_call(span: Span, agent: str, history: HistoryParser | None = None) -> Call | str:
    """Return the call a span stands for, or the reason why it makes no transition."""
    reason = _why_unusable(span, agent)
    if reason:
        return reason
    get = span.attributes.get
    prompt_ids, response_ids, logprobs, inexact = read_tokens(span.attributes)
    history = history or HistoryParser()
    prompt = history.read_messages(get(c.INPUT_MESSAGES))
    answered = _read_messages(get(c.OUTPUT_MESSAGES))
    if answered is None and not len(response_ids) and get(c.OUTPUT_MESSAGES) is not None:
        return CUT if get(c.CUT) else UNREADABLE
    if prompt is None and not len(prompt_ids):
        if get(c.INPUT_MESSAGES) is not None:
            return CUT if get(c.CUT) else UNREADABLE
        if answered is None and not len(response_ids):
            return NO_CONTENT if inexact == NO_IDS else inexact
    if not len(response_ids) and not any(item.get("parts") for item in answered or ()):
        if is_unanswered(span):
            return UNANSWERED
        if c.UNREAD_ANSWER in span.attributes:
            return UNREAD
        return NO_OUTPUT if inexact in (NO_IDS, NO_RESPONSE_IDS) else inexact
    tools = get(c.TOOL_DEFINITIONS)
    rules = history.read_instructions(get(c.SYSTEM_INSTRUCTIONS))
    if rules and prompt and _are_told_twice(rules, prompt):
        rules = ()
    if c.PROMPT_MESSAGES in span.attributes:
        rules += _read_messages(get(c.PROMPT_MESSAGES)) or ()
    observation = rules + (prompt or ())
    offered = _parse_repeated(tools) if isinstance(tools, str) else ()
    # By position, in the order of the fields, as calls are many.
    call: Call = fast_constructor(Call)(
        span, agent, observation, answered or (), offered, prompt_ids, response_ids, logprobs, None,
        inexact,
    )  # fmt: skip
    return call


def make_transition(
    key: tuple[str, str],
    call: Call,
    step: int,
    reward: float | None,
    following: tuple[Message, ...] | None,
    rewards: Mapping[str, float],
    *,
    is_last: bool,
    is_shared: bool = False,
) -> Transition:
    """Return the transition that a call makes; ``following`` are the messages seen next."""
    span, attributes = call.span, call.span.attributes
    resources: dict[str, str] = {}
    if c.RESOURCES in attributes:
        resources = resources_of(call.agent, attributes[c.RESOURCES])
    version = get_text(attributes, c.RESOURCE_VERSION) or (
        join_versions(resources) if resources else None
    )
    is_exact = len(call.prompt_ids) and len(call.response_ids)
    # By position, in the order of the fields: names would cost half as much again.
    transition: Transition = fast_constructor(Transition)(
        *key, call.agent, step, call.observation, call.action, reward, following, is_last,
        rewards, is_shared, call.tools, call.prompt_ids, call.response_ids, call.logprobs,
        "exact" if is_exact else "text", version,
        get_text(attributes, c.RESPONSE_MODEL) or get_text(attributes, c.REQUEST_MODEL),
        get_text(attributes, c.RESPONSE_ID), finish_reason(attributes.get(c.FINISH_REASONS)),
        span.trace_id, span.span_id, span.start_ns,
        span.end_ns if span.end_ns is not None else span.start_ns,
        get_integer(attributes, c.INPUT_TOKENS), get_integer(attributes, c.OUTPUT_TOKENS),
        resources, sampling_of(attributes, span.otel_resource), "", None, 1.0,
        get_text(attributes, c.MODE), call.inexact,
    )  # fmt: skip
    return transition


def observation_of(span: Span) -> tuple[Message, ...]:
    """Return a call's input, instructions first; empty if it cannot be read."""
    messages = _read_messages(span.attributes.get(c.INPUT_MESSAGES))
    instructions = HistoryParser().read_instructions(span.attributes.get(c.SYSTEM_INSTRUCTIONS))
    return instructions + messages if messages else ()


def _why_unusable(span: Span, agent: str) -> str | None:
    get = span.attributes.get
    if get(c.OPERATION) == c.EMBEDDINGS:
        return EMBEDDING
    if span.end_ns is None:
        return INCOMPLETE
    if get(c.ABANDONED):
        return UNANSWERED if is_unanswered(span) else ABANDONED
    # With a finish reason the model's answer is whole: what failed is what the client made of it,
    # such as a structured output that did not validate.
    reasons = get(c.FINISH_REASONS)
    if span.status == "ERROR" and (not reasons or finish_reason(reasons) == "error"):
        why = to_text(get(c.ERROR_TYPE) or span.status_message or "the call ended in an error")
        return f"failed: {why}"
    if c.TRACK_ONLY in span.attributes and not is_tracked(agent, get(c.TRACK_ONLY)):
        return NOT_TRACKED
    return None


def _are_told_twice(rules: tuple[Message, ...], prompt: tuple[Message, ...]) -> bool:
    first = takewhile(lambda message: message.get("role") in RULES, prompt)
    texts = ["".join(plain_text(list(messages)).split()) for messages in (rules, first)]
    return texts[0] == texts[1] != ""


def _is_escaped(text: str) -> bool:
    return "\\" in text and "\\u" in text  # one letter is looked for at twenty times the speed


def _read_messages(
    value: object, parse: Callable[[object], tuple[Message, ...] | None] = parse_messages
) -> tuple[Message, ...] | None:
    if not isinstance(value, str):
        return None
    messages = parse(value)
    # JSON may escape half of a surrogate pair, which no file or frame would take further.
    if messages and _is_escaped(value) and _HALF_PAIR.search(value):
        whole = json.dumps(messages, ensure_ascii=False).encode("utf-8", "replace")
        return parse(whole.decode("utf-8"))
    return messages


@lru_cache(maxsize=16)
def _parse_repeated(text: str) -> tuple[Message, ...]:
    return _read_messages(text, parse_parts) or ()


def is_mark(span: Span) -> bool:
    """Return whether the span is an action or observation marked by hand."""
    return span.name in (c.SPAN_ACTION, c.SPAN_OBSERVATION)


def read_marks(
    tree: "Tree", callers: Container[str]
) -> tuple[dict[int, Call], list[tuple[Span, str]]]:
    """Return calls by the position of their action, and why other marks make none.

    Marks of agents with model calls make none.
    """
    actions: dict[int, Call] = {}
    pending: dict[str, list[Span]] = {}
    latest: dict[str, int] = {}
    dropped: list[tuple[Span, str]] = []
    for position, span in enumerate(tree.spans):
        if not is_mark(span):
            continue
        agent = tree.agents[position]
        if agent in callers:
            dropped.append((span, BESIDE_CALLS))
        elif span.is_incomplete:
            dropped.append((span, INCOMPLETE_MARK))
        elif not is_tracked(agent, span.attributes.get(c.TRACK_ONLY)):
            dropped.append((span, NOT_TRACKED))
        elif span.name == c.SPAN_OBSERVATION:
            pending.setdefault(agent, []).append(span)
        else:
            observation = tuple(map(mark_message, pending.pop(agent, ())))
            actions[position] = Call(
                span, agent, observation, (mark_message(span),), inexact=MARKED
            )
            latest[agent] = position
    for agent, spans in pending.items():
        if agent in latest:
            at = latest[agent]
            actions[at] = replace(actions[at], ending=tuple(map(mark_message, spans)))
        else:
            dropped += [(span, IDLE) for span in spans]
    return actions, dropped


def mark_message(span: Span) -> Message:
    """Return a mark's message: the agent speaks in actions, the world in observations."""
    value = span.attributes.get(c.OBJECT_JSON, span.attributes.get(c.OBJECT_LITERAL, ""))
    role = "assistant" if span.name == c.SPAN_ACTION else "user"
    return message(role, [text_part(to_text(value))], name=span.attributes.get(c.MARK_NAME))
