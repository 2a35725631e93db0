"""What a transition says beside its content, made of the few attributes that tell it.

A thousand calls of one agent share one text of these, so that each text is read once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import orjson

from lightning_otel import conventions as c
from lightning_otel.adapter import trajectories
from lightning_otel.adapter.attributes import text
from lightning_otel.adapter.exactness import (
    SAMPLING_KEYS,
    notes_of,
    read_tokens,
    sampling_of,
)
from lightning_otel.adapter.quick import maker
from lightning_otel.adapter.rewards import read_reward
from lightning_otel.adapter.tracking import is_tracked, one_version, resources_of
from lightning_otel.types import CaptureLevel, Span, Transition

CALL_KEYS: Final = (
    c.TRACK_ONLY, c.RESOURCES, c.RESOURCE_VERSION, c.MODE, c.RESPONSE_MODEL, c.REQUEST_MODEL,
    c.FINISH_REASONS, c.LOGPROBS_MODE, *SAMPLING_KEYS,
    c.PROMPT_TOKEN_IDS, c.RESPONSE_TOKEN_IDS, c.RESPONSE_LOGPROBS,
)  # fmt: skip
"""Attributes of a call that are read here, in the order of their text: a JSON array."""
REWARDS: Final = 4
"""So many named rewards of one span are read here."""
REWARD_KEYS: Final = tuple(
    f"{c.REWARD_PREFIX}.{index}.{part}" for index in range(REWARDS) for part in ("name", "value")
)
"""Likewise of a reward."""
_TOKENS: Final = (c.PROMPT_TOKEN_IDS, c.RESPONSE_TOKEN_IDS, c.RESPONSE_LOGPROBS)


class CallFacts(NamedTuple):
    """What the attributes of a call say, by the names of a transition's fields."""

    resource_version: str | None
    resources: Mapping[str, str]
    mode: str | None
    model: str | None
    finish_reason: str | None
    sampling: Mapping[str, Any]


class _Given:
    """As much of a span as a reward is read from."""

    __slots__ = ("attributes",)
    name = c.SPAN_ANNOTATION

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self.attributes = attributes


def call_facts(values: str, agent: str) -> CallFacts | None:
    """What is known of an agent's calls with these attributes; None if they need a closer look.

    Args:
        values: Those of ``CALL_KEYS``, a JSON array with null for what is not there.
        agent: The agent.
    """
    attributes = _attributes(CALL_KEYS, values)
    if not is_tracked(agent, attributes.get(c.TRACK_ONLY)) or any(
        key in attributes for key in _TOKENS
    ):
        return None
    resources = resources_of(agent, attributes.get(c.RESOURCES))
    return CallFacts(
        text(attributes, c.RESOURCE_VERSION) or one_version(resources),
        resources,
        text(attributes, c.MODE),
        text(attributes, c.RESPONSE_MODEL) or text(attributes, c.REQUEST_MODEL),
        trajectories.finish_reason(attributes.get(c.FINISH_REASONS)),
        sampling_of(attributes, {}),
    )


def reward_facts(values: str) -> Mapping[str, float] | None:
    """The named rewards, the primary one first; None if they need a closer look.

    Args:
        values: Those of ``REWARD_KEYS``, as :func:`call_facts` takes them.
    """
    reward = read_reward(cast(Span, _Given(_attributes(REWARD_KEYS, values))))
    return None if reward is None or isinstance(reward, str) else reward.values


class _Step:
    """As much of a transition as notes are made of."""

    __slots__ = ("capture", "finish_reason", "output_tokens", "sampling")

    def __init__(self, capture: CaptureLevel, call: CallFacts, output_tokens: int | None) -> None:
        self.capture = capture
        self.finish_reason = call.finish_reason
        self.sampling = call.sampling
        self.output_tokens = output_tokens


class TokenFacts(NamedTuple):
    """What the tokens of a call say: how it was captured, why not exactly, and what is noted."""

    capture: CaptureLevel
    inexact: str
    notes: Sequence[str]


def token_facts(
    texts: Sequence[str | None], call: CallFacts, output_tokens: int | None
) -> TokenFacts:
    """What is known of a call with token ids or logprobs.

    Args:
        texts: The prompt's ids, the response's and its logprobs, as they are stored.
        call: What its attributes say.
        output_tokens: How many the server counted.
    """
    given = {key: text for key, text in zip(_TOKENS, texts, strict=True) if text is not None}
    tokens = read_tokens(given)
    is_exact = bool(len(tokens.prompt_ids) and len(tokens.response_ids))
    step = _Step("exact" if is_exact else "text", call, output_tokens)
    return TokenFacts(step.capture, tokens.inexact, notes_of(cast(Transition, step), tokens))


def _attributes(keys: tuple[str, ...], values: str) -> dict[str, Any]:
    pairs = zip(keys, orjson.loads(values), strict=True)
    return {key: value for key, value in pairs if value is not None}


class Place(NamedTuple):
    """Where a transition stands, in the order in which it is fetched."""

    rollout_id: str
    attempt_id: str
    agent: str
    step: int
    done: bool
    response_id: str
    trace_id: str
    span_id: str
    start_ns: int
    end_ns: int
    input_tokens: int | None
    output_tokens: int | None
    capture: CaptureLevel
    inexact: str


_make: Callable[..., Transition] = maker(Transition)


def transition(
    place: tuple[Any, ...], facts: CallFacts, rewards: Mapping[str, float] | None
) -> Transition:
    """A transition without its content.

    Args:
        place: The fields of :class:`Place`, and maybe more: a plain tuple, as there are many.
        facts: What its call says.
        rewards: Its named rewards, the primary one first; None if there is none.
    """
    (rollout, attempt, agent, step, done, response, trace, span, start, end, given, made,
     capture, inexact) = place[:14]  # fmt: skip
    named = dict(rewards) if rewards else {}
    # By position, in the order of the fields: names would cost half as much again.
    return _make(
        rollout, attempt, agent, step, (), (), next(iter(named.values())) if named else None,
        None if done else (), done, named, False, (), (), (), (), capture, facts.resource_version,
        facts.model, response, facts.finish_reason, trace, span, start, end, given, made,
        dict(facts.resources), dict(facts.sampling), "", None, 1.0, facts.mode, inexact,
    )  # fmt: skip
