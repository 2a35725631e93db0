"""A tool of the plain client's that asks a model itself: 20 lines, as users write them."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from lightning_otel import Store, auto_trace, emit_reward
from lightning_otel.demo.policy import Reply, ToolCall
from lightning_otel.demo.server import DemoServer

PAGES = ["page 1", "page 2"]


class Model:
    """Calls the tool once, answers what it gave, and sums up pages."""

    def reply(self, body: dict[str, Any], rng: Any) -> Reply:
        """A call of the tool, or a few words."""
        said = body["messages"][-1]
        if body.get("tools") and said["role"] == "user":
            call = ToolCall("call_1", "look_up", '{"topic":"apples"}')
            return Reply(text="", tool_calls=(call,), finish_reason="tool_calls")
        return Reply(text=f"of {said['content']}")


TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


def ask(client: openai.OpenAI, page: str) -> str:
    """The tool's own question."""
    asked: Any = [{"role": "system", "content": "Sum up."}, {"role": "user", "content": page}]
    answer = client.chat.completions.create(model="toy", messages=asked)
    return answer.choices[0].message.content or ""


def work(client: openai.OpenAI, *, has_threads: bool) -> None:
    """An agent's loop."""
    messages: Any = [{"role": "user", "content": "What are apples?"}]
    while True:
        answer = client.chat.completions.create(model="toy", messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        if has_threads:
            with ThreadPoolExecutor(2) as pool:
                found = list(pool.map(lambda page: ask(client, page), PAGES))
        else:
            found = [ask(client, page) for page in PAGES]
        messages.append({"role": "tool", "tool_call_id": "call_1", "content": json.dumps(found)})


@pytest.fixture
def server() -> Any:
    """A server that plays the model."""
    with DemoServer(Model()) as running:
        yield running


@pytest.mark.parametrize("has_threads", [False, True])
def test_a_step_sees_what_its_tool_gave(
    client: openai.OpenAI, store: Store, has_threads: bool
) -> None:
    """The agent's path has its own calls alone, and what is asked inside the tool is beside it."""
    with auto_trace(store=store) as recording:
        work(client, has_threads=has_threads)
        emit_reward(1.0)

    agent, *inner = sorted(
        store.trajectories(rollout_id=recording.rollout_id),
        key=lambda path: path.transitions[0].observation[0]["role"] == "system",
    )
    first, last = agent.transitions
    assert [message["role"] for message in first.next_observation or ()] == [
        "user", "assistant", "tool",
    ]  # fmt: skip
    assert (first.done, last.done, last.reward) == (False, True, 1.0)
    assert sum(len(path.transitions) for path in inner) == len(PAGES)
    assert not any(step.is_shared for path in (agent, *inner) for step in path.transitions)
