"""``agentlightning``: Agent Lightning's ``Triplet``, one a step.

Source: Agent Lightning 0.3's ``agentlightning.types.Triplet`` and its adapter, which fills it.
"""

from collections.abc import Iterable
from typing import Any, Final

from lightning_otel.dataset.formats.format import Format, Made, Row, step_rows
from lightning_otel.messages import object_of
from lightning_otel.messages.chat import messages_of, tools_of
from lightning_otel.types import Trajectory, Transition


def make(trajectories: Iterable[Trajectory]) -> Made:
    """Yield one row a step; without token ids its lists are empty, as Agent Lightning's are."""
    return step_rows(trajectories, _make_row, lambda _: iter(()))


def _make_row(step: Transition) -> Row:
    messages = messages_of(step.observation)
    response: dict[str, Any] = {
        "token_ids": list(step.response_ids),
        "raw_content": messages_of(step.action),
    }
    if len(step.logprobs):
        response["logprobs"] = [{"logprob": value} for value in step.logprobs]
    return {
        "prompt": {
            "token_ids": list(step.prompt_ids),
            "raw_content": messages,
            "image_urls": _image_urls(messages),
        },
        "response": response,
        "reward": step.reward,
        "metadata": _make_metadata(step),
    }


def _image_urls(messages: Iterable[dict[str, Any]]) -> list[str]:
    images = (
        object_of(part.get("image_url")).get("url")
        for message in messages
        for part in (message["content"] if isinstance(message["content"], list) else ())
        if part.get("type") == "image_url"
    )
    return [url for url in images if isinstance(url, str)]


def _make_metadata(step: Transition) -> dict[str, Any]:
    names = ("response_id", "rollout_id", "attempt_id", "trace_id", "span_id", "done")
    metadata = {"agent_name": step.agent, **{name: getattr(step, name) for name in names}}
    return {**metadata, "tools": tools_of(step.tools)} if step.tools else metadata


FORMAT: Final = Format(
    make,
    {"prompt": "JSON", "response": "JSON", "reward": "DOUBLE", "metadata": "JSON"},
    used_by="Agent Lightning 0.3 Triplet",
    needs="nothing",
    steps_of=lambda row: [row["metadata"]["span_id"]],
)
