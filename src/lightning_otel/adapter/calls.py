"""Spans read into calls and rewards; what cannot be read gets a reason."""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from lightning_otel import conventions as c
from lightning_otel.adapter.messages import message, parse_messages
from lightning_otel.adapter.tokens import decode_ids, decode_logprobs
from lightning_otel.types import Call, Message, Reward, Span

ABANDONED = "abandoned: the program left the stream before its end"
INCOMPLETE = "incomplete: the call never ended"
NO_CONTENT = "no content: neither messages nor token ids were recorded"
EMBEDDING = "an embedding: no action follows from it"
NOT_TRACKED = "not tracked: the agent is not in track_only"
CUT = "cut: the messages were too large to keep whole"
NO_OUTPUT = "no output: the model answered nothing"


def is_call(span: Span) -> bool:
    """Whether the span is a request to a model."""
    return span.attributes.get(c.OPERATION) in c.CALL_OPERATIONS


def read_call(span: Span, agent: str) -> Call | str:
    """The call a span stands for, or the reason why it makes no transition."""
    reason = _unusable(span, agent)
    if reason:
        return reason
    get = span.attributes.get
    prompt_ids, response_ids, logprobs = _tokens(span)
    given = parse_messages(get(c.INPUT_MESSAGES))
    answered = parse_messages(get(c.OUTPUT_MESSAGES))
    if answered is None and not len(response_ids):
        if get(c.CUT) and get(c.OUTPUT_MESSAGES):
            return CUT
        return NO_CONTENT if get(c.OUTPUT_MESSAGES) is None else NO_OUTPUT
    if given is None and get(c.CUT) and get(c.INPUT_MESSAGES) and not len(prompt_ids):
        return CUT
    if not answered and not len(response_ids):
        return NO_OUTPUT
    return Call(
        span=span,
        agent=agent,
        observation=(*_instructions(get(c.SYSTEM_INSTRUCTIONS)), *(given or ())),
        action=answered or (),
        tools=parse_messages(get(c.TOOL_DEFINITIONS)) or (),
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        logprobs=logprobs,
    )


def _unusable(span: Span, agent: str) -> str | None:
    get = span.attributes.get
    if get(c.OPERATION) == c.EMBEDDINGS:
        return EMBEDDING
    if span.is_incomplete:
        return INCOMPLETE
    if get(c.ABANDONED):
        return ABANDONED
    if span.status == "ERROR":
        return f"failed: {get(c.ERROR_TYPE) or span.status_message or 'the call ended in an error'}"
    if not is_tracked(agent, get(c.TRACK_ONLY)):
        return NOT_TRACKED
    return None


def is_tracked(agent: str, names: object) -> bool:
    """Whether an agent's calls are training data: no list, or one of its names or globs matches."""
    if not isinstance(names, (list, tuple)):
        return True
    return any(fnmatchcase(agent, str(name)) for name in names)


def _tokens(span: Span) -> tuple[Sequence[int], Sequence[int], Sequence[float]]:
    """Token ids and logprobs of the first choice; empty where absent or damaged."""
    get = span.attributes.get
    try:
        prompt_ids = decode_ids(get(c.PROMPT_TOKEN_IDS) or "")[0]
        response_ids = decode_ids(get(c.RESPONSE_TOKEN_IDS) or "")[0]
    except (ValueError, TypeError, AttributeError):
        prompt_ids, response_ids = (), ()
    try:
        logprobs = decode_logprobs(get(c.RESPONSE_LOGPROBS) or "")[0]
    except (ValueError, TypeError, AttributeError):
        logprobs = ()
    # A logprob belongs to one token: a list of another length belongs to none.
    if len(response_ids) and len(logprobs) != len(response_ids):
        logprobs = ()
    return prompt_ids, response_ids, logprobs


def _instructions(text: str | None) -> tuple[Message, ...]:
    parts = parse_messages(text)
    return (message("system", [dict(part) for part in parts]),) if parts else ()


def read_reward(span: Span) -> Reward | str | None:
    """The reward a span carries; None if it is no reward, a reason if it is a damaged one."""
    attributes = span.attributes
    if c.REWARD_VALUE not in attributes:
        return None
    values: dict[str, float] = {}
    index = 0
    while (key := f"{c.REWARD_PREFIX}.{index}.value") in attributes:
        number = attributes[key]
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return f"the reward's value is not a number: {number!r}"
        if not math.isfinite(number):
            return f"the reward's value is not finite: {number!r}"
        name = attributes.get(f"{c.REWARD_PREFIX}.{index}.name") or (
            c.PRIMARY_REWARD if index == 0 else f"reward_{index}"
        )
        values[str(name)] = float(number)
        index += 1
    links = _links(attributes)
    return Reward(
        span=span,
        values=values,
        value=float(attributes[c.REWARD_VALUE]),
        span_id=links.get(c.LINK_SPAN_ID),
        response_id=links.get(c.RESPONSE_ID),
    )


def _links(attributes: Mapping[str, Any]) -> dict[str, str]:
    links = {}
    index = 0
    while (key := attributes.get(f"{c.LINK_PREFIX}.{index}.key_match")) is not None:
        links[str(key)] = str(attributes.get(f"{c.LINK_PREFIX}.{index}.value_match", ""))
        index += 1
    return links
