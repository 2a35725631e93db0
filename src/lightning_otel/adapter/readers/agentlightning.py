"""Agent Lightning 0.3: calls as AgentOps tells them, token ids beside, rollouts in the resource.

Its rewards, messages, objects and operations have the keys of ours and need no reader.

Source: Agent Lightning 0.3.0, ``semconv.py``, ``instrumentation/agentops.py``, ``tracer/otel.py``.
"""

from collections.abc import Mapping
from typing import Any, Final

from lightning_otel.adapter.readers import chat
from lightning_otel.adapter.tokens import token_content
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import parse_json

_PROMPT_IDS: Final = "prompt_token_ids"
_RESPONSE_IDS: Final = "response_token_ids"
_LOGPROBS: Final = "logprobs.content"
_OUTPUTS: Final = ("agentops.task.output", "agentops.entity.output")
"""Where the deprecated ``@reward`` leaves a reward, as JSON."""
_OLD_REWARD: Final = "reward"
"""Where 0.2 left it, on spans of its own name."""

MARKS = (_PROMPT_IDS, _RESPONSE_IDS, _LOGPROBS, *_OUTPUTS, _OLD_REWARD)


def summary(name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A reward that was given in the old way."""
    for key in _OUTPUTS:
        text = attributes.get(key)
        if isinstance(text, str) and '"reward"' in text:
            body = parse_json(text)
            if isinstance(body, Mapping) and body.get("type") == "reward":
                value = body.get("value")
                return {} if value is None else {c.REWARD_VALUE: value}
    old = attributes.get(_OLD_REWARD)
    is_old = old is not None and name.startswith("agentlightning.")
    return {c.REWARD_VALUE: old} if is_old and c.REWARD_VALUE not in attributes else {}


def content(span: Span) -> dict[str, Any]:
    """Token ids and logprobs of a call."""
    get = span.attributes.get
    logprobs = chat.logprobs_of(parse_json(get(_LOGPROBS)))
    return dict(token_content(get(_PROMPT_IDS), [get(_RESPONSE_IDS)], [logprobs]))


def ids_of(attributes: Mapping[str, Any], otel_resource: Mapping[str, Any]) -> dict[str, Any]:
    """Rollout and attempt of a span whose resource names them and whose attributes do not."""
    if not otel_resource.get(c.ROLLOUT_ID) or attributes.get(c.ROLLOUT_ID):
        return {}
    ids = {c.ROLLOUT_ID: otel_resource[c.ROLLOUT_ID]}
    if otel_resource.get(c.ATTEMPT_ID):
        ids[c.ATTEMPT_ID] = otel_resource[c.ATTEMPT_ID]
    return ids
