"""``agentlightning``: Agent Lightning's ``Triplet``, one a step.

Source: Agent Lightning 0.3's ``agentlightning.types.Triplet`` and its adapter, which fills it.
"""

from collections.abc import Iterable
from typing import Any, Final

from lightning_otel.dataset.formats.format import Format, Made, distinct
from lightning_otel.messages.chat import messages_of, tools_of
from lightning_otel.types import Trajectory, Transition


def make(trajectories: Iterable[Trajectory]) -> Made:
    """Yield one row a step; without token ids its lists are empty, as Agent Lightning's are."""
    for step, _ in distinct(trajectories):
        given = messages_of(step.observation)
        response: dict[str, Any] = {
            "token_ids": list(step.response_ids),
            "raw_content": messages_of(step.action),
        }
        if len(step.logprobs):
            response["logprobs"] = [{"logprob": value} for value in step.logprobs]
        yield {
            "prompt": {
                "token_ids": list(step.prompt_ids),
                "raw_content": given,
                "image_urls": _image_urls(given),
            },
            "response": response,
            "reward": step.reward,
            "metadata": _make_metadata(step),
        }


def _image_urls(messages: Iterable[dict[str, Any]]) -> list[str]:
    return [
        part["image_url"]["url"]
        for message in messages
        for part in (message["content"] if isinstance(message["content"], list) else ())
        if part.get("type") == "image_url"
    ]


def _make_metadata(step: Transition) -> dict[str, Any]:
    names = ("response_id", "rollout_id", "attempt_id", "trace_id", "span_id", "done")
    found = {"agent_name": step.agent, **{name: getattr(step, name) for name in names}}
    return {**found, "tools": tools_of(step.tools)} if step.tools else found


FORMAT: Final = Format(
    make,
    {"prompt": "JSON", "response": "JSON", "reward": "DOUBLE", "metadata": "JSON"},
    used_by="Agent Lightning 0.3 Triplet",
    needs="nothing",
)
