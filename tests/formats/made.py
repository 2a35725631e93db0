"""Trajectories made by hand for the formats' tests."""

from collections.abc import Sequence
from typing import Any

from tests.adapter.forest import said

from lightning_otel.types import Message, Trajectory, Transition

TOOL = {
    "type": "function",
    "name": "look_up",
    "description": "Look something up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
}


def step(
    answer: str = "yes",
    asked: str = "is it?",
    reward: float | None = None,
    *,
    span_id: str = "s1",
    rollout_id: str = "r1",
    **given: Any,
) -> Transition:
    """A step of plain text."""
    found: dict[str, Any] = {
        "rollout_id": rollout_id,
        "attempt_id": "1",
        "agent": "calc",
        "step": 0,
        "observation": (said("user", asked),),
        "action": (said("assistant", answer),),
        "reward": reward,
        "next_observation": None,
        "done": True,
        "trace_id": rollout_id,
        "span_id": span_id,
        **given,
    }
    return Transition(**found)


def exact(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    reward: float | None = None,
    *,
    logprobs: Sequence[float] | None = None,
    **given: Any,
) -> Transition:
    """A step with token ids and logprobs; exact where it has some of both."""
    found = [-0.5] * len(response_ids) if logprobs is None else logprobs
    tokens = {"prompt_ids": tuple(prompt_ids), "response_ids": tuple(response_ids)}
    capture = "exact" if prompt_ids and response_ids else "text"
    return step(reward=reward, **{**tokens, "logprobs": tuple(found), "capture": capture, **given})


def path(*steps: Transition, branch: int = 0) -> Trajectory:
    """A trajectory of steps."""
    first = steps[0]
    given = [step.reward for step in steps if step.reward is not None]
    reward = sum(given) if given else None
    return Trajectory(first.rollout_id, first.attempt_id, first.agent, branch, steps, reward=reward)


def parts(role: str, *found: dict[str, Any]) -> Message:
    return {"role": role, "parts": list(found)}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "content": content}


def called(call_id: str, name: str = "look_up", **arguments: Any) -> dict[str, Any]:
    """A part that calls a tool."""
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}


def result(call_id: str, response: Any) -> dict[str, Any]:
    """A part with a tool's answer."""
    return {"type": "tool_call_response", "id": call_id, "response": response}


IMAGE = {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "aW1n"}
LINKED = {"type": "uri", "modality": "image", "uri": "https://example.org/a.png"}
AUDIO = {"type": "blob", "modality": "audio", "mime_type": "audio/wav", "content": "c291bmQ="}
VIDEO = {"type": "uri", "modality": "video", "uri": "https://example.org/a.mp4"}
THOUGHT = {"type": "reasoning", "content": "let me think"}
