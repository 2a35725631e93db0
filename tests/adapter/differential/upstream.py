"""Agent Lightning 0.3's own adapters, and both sides' results on the same spans in one form.

Its adapters run from its own files as they were released. What its packages import beside them (an
LLM gateway, trainers, servers: 400 MB) is left out; ``LIGHTNING_TEST_WHOLE`` imports all of it.
"""

import importlib.machinery
import importlib.util
import json
import os
import sys
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from tests.adapter.forest import steps_of
from tests.adapter.readers.test_readers import AGENTS

from lightning_otel.adapter import Adaptation, TripletAdapter
from lightning_otel.receivers import Rejected, documents
from lightning_otel.types import Message, Span, Transition

_LOOSE = ("agentlightning", "agentlightning.store", "agentlightning.tracer")
"""Packages whose ``__init__`` imports what no adapter needs."""


def _make_loose() -> None:
    spec = importlib.util.find_spec("agentlightning")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("agentlightning is not installed here", allow_module_level=True)
    folder = spec.submodule_search_locations[0]
    for name in _LOOSE:
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(folder, *name.split(".")[1:])]
        # For whoever asks whether it is there.
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module


if not os.environ.get("LIGHTNING_TEST_WHOLE"):
    _make_loose()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from agentlightning.adapter.messages import TraceToMessages
    from agentlightning.adapter.triplet import (
        LlmProxyTraceToTriplet,
        RewardMatchPolicy,
        TracerTraceToTriplet,
    )
    from agentlightning.emitter.reward import find_final_reward
    from agentlightning.types import OtelResource, TraceStatus
    from agentlightning.types import Span as TheirSpan

__all__ = [
    "LlmProxyTraceToTriplet",
    "Step",
    "TraceToMessages",
    "find_final_reward",
    "ours",
    "steps",
    "stored_there",
    "their_span",
    "theirs",
]


class Step(NamedTuple):
    """One call as either side tells it."""

    agent: str
    asked: tuple[tuple[str, str, str], ...]
    answered: tuple[tuple[str, str], ...]
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float | None
    response_id: str | None

    @property
    def label(self) -> str:
        """What the first choice said."""
        return self.answered[0][0] if self.answered else ""


def their_span(fact: Mapping[str, Any]) -> TheirSpan:
    """A fact as their tracer stores it."""
    return TheirSpan(
        rollout_id="rollout-1",
        attempt_id="1",
        sequence_id=fact["number"],
        trace_id=fact.get("trace_id", "1" * 32),
        span_id=fact["span_id"],
        parent_id=fact["parent_id"],
        name=fact["name"],
        status=TraceStatus(status_code=fact.get("status", "OK")),
        attributes=dict(fact["attributes"]),
        events=[],
        links=[],
        start_time=fact["start"],
        end_time=fact["end"],
        context=None,
        parent=None,
        resource=OtelResource(attributes={}, schema_url=""),
        **({"instrumentation_scope": fact["scope"]} if "scope" in fact else {}),
    )


def theirs(facts: Iterable[Mapping[str, Any]]) -> list[Step]:
    """What their adapter makes of the facts, in its order."""
    adapter = TracerTraceToTriplet(reward_match=RewardMatchPolicy.FIRST_OCCURRENCE)
    return [
        Step(
            agent="" if triplet.metadata["agent_name"] == "*" else triplet.metadata["agent_name"],
            asked=tuple(
                (row.get("role", ""), row.get("content") or "", _their_calls(row))
                for row in triplet.prompt["raw_content"] or ()
            ),
            answered=tuple(
                (row.get("content") or "", _their_calls(row))
                for row in triplet.response["raw_content"] or ()
            ),
            prompt_ids=tuple(triplet.prompt["token_ids"]),
            response_ids=tuple(triplet.response["token_ids"]),
            logprobs=tuple(each["logprob"] for each in triplet.response.get("logprobs", ())),
            reward=triplet.reward,
            response_id=triplet.metadata["response_id"],
        )
        for triplet in adapter.adapt([their_span(fact) for fact in facts])
    ]


def stored_there(name: str) -> dict[str | None, tuple[str, float | None]]:
    """Agent and reward of each call of a file of their spans, by its response id."""
    lines = (AGENTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    found = TracerTraceToTriplet().adapt([TheirSpan.model_validate_json(line) for line in lines])
    told = [triplet.metadata for triplet in found]
    return {
        each["response_id"]: (each["agent_name"], triplet.reward)
        for each, triplet in zip(told, found, strict=True)
    }


def _their_calls(row: Mapping[str, Any]) -> str:
    return json.dumps(
        [[call["name"], json.loads(call["arguments"])] for call in row.get("tool_calls", ())]
    )


def ours(facts: Iterable[Mapping[str, Any]]) -> Adaptation:
    """What our adapter makes of the same spans, read from their JSON as ``import`` reads it."""
    text = "[" + ",".join(their_span(fact).model_dump_json() for fact in facts) + "]"
    spans: list[Span] = []
    for found in documents.decode_spans(text.encode()):
        assert not isinstance(found, Rejected), found
        spans.append(found)
    return TripletAdapter().explain(spans)


def steps(found: Adaptation) -> list[Step]:
    """Each of our transitions once, in order of their start."""
    return [_step(each) for each in steps_of(found)]


def _step(step: Transition) -> Step:
    return Step(
        agent=step.agent,
        asked=tuple((item["role"], _text(item), _calls(item)) for item in step.observation),
        answered=tuple((_text(item), _calls(item)) for item in step.action),
        prompt_ids=tuple(step.prompt_ids),
        response_ids=tuple(step.response_ids),
        logprobs=tuple(step.logprobs),
        reward=step.reward,
        response_id=step.response_id,
    )


def _text(item: Message) -> str:
    parts: Sequence[Mapping[str, Any]] = item["parts"]
    return "".join(str(part["content"]) for part in parts if part["type"] == "text")


def _calls(item: Message) -> str:
    return json.dumps(
        [[p["name"], p["arguments"]] for p in item["parts"] if p["type"] == "tool_call"]
    )
