"""What agents, teams and tools were given and gave: kept beside their spans, in any state."""

import dataclasses
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")
pytest.importorskip("autogen_ext.models.openai")

from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.messages import (
    BaseChatMessage,
    StructuredMessage,
    TextMessage,
)
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken
from autogen_core.tools import BaseStreamTool, BaseTool
from pydantic import BaseModel
from tests.instrumentors.autogen import programs
from tests.instrumentors.autogen.stage import Stage

from lightning_otel import conventions as c
from lightning_otel.types import Span


class Hostile:
    """Raises wherever it is looked at."""

    def __str__(self) -> str:
        raise RuntimeError("looked at")

    __repr__ = __str__

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")


class Arguments(BaseModel):
    """What the tools below take."""

    text: str = ""


class GivingTool(BaseTool[Arguments, Any]):
    """Gives one thing."""

    def __init__(self, gift: Any) -> None:
        super().__init__(Arguments, object, "giving", "Gives.")
        self.gift = gift

    async def run(self, args: Arguments, cancellation_token: CancellationToken) -> Any:
        """The one thing."""
        return self.gift

    def return_value_as_string(self, value: Any) -> str:
        """Nothing that looks at it."""
        return "given"


class CountingTool(BaseStreamTool[Arguments, int, int]):
    """Counts to three."""

    def __init__(self) -> None:
        super().__init__(Arguments, int, "counting", "Counts.")

    async def run(self, args: Arguments, cancellation_token: CancellationToken) -> int:
        """At once."""
        return 3

    async def run_stream(
        self, args: Arguments, cancellation_token: CancellationToken
    ) -> AsyncGenerator[int, None]:
        """One by one."""
        for number in (1, 2, 3):
            yield number


class Echo(BaseChatAgent):
    """Answers with a message of the test's choice."""

    def __init__(self, name: str, answer: BaseChatMessage) -> None:
        super().__init__(name, "echoes")
        self.answer = answer

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        """Of the answer's type."""
        return (type(self.answer),)

    async def on_messages(
        self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken
    ) -> Response:
        """The answer."""
        return Response(chat_message=self.answer)

    async def on_reset(self, cancellation_token: CancellationToken) -> None:
        """Nothing is kept."""


def content(span: Span, key: str) -> Any:
    """Messages of a span."""
    return json.loads(str(span.attributes[key]))


def said(text: str, **more: Any) -> list[dict[str, Any]]:
    """One message of text."""
    return [{"role": "user", "parts": [{"type": "text", "content": text}], **more}]


def test_team_has_its_task_its_answer_and_why_it_stopped(stage: Stage) -> None:
    """What went into the team, what came out, and its stop reason."""
    result = stage.trace(programs.nested_teams)

    (outer,) = stage.named("invoke_workflow outer")
    (inner,) = stage.named("invoke_workflow inner")
    assert outer.attributes[c.OPERATION] == "invoke_workflow"
    assert outer.attributes[c.WORKFLOW_NAME] == "outer"
    assert outer.attributes[c.PROVIDER] == "autogen"
    assert content(outer, c.INPUT_MESSAGES) == content(inner, c.INPUT_MESSAGES) == said("go")
    assert outer.attributes[c.STOP_REASON] == result.stop_reason
    answer = content(outer, c.OUTPUT_MESSAGES)[0]
    assert answer["parts"][0]["content"] == result.messages[-1].content
    assert answer["name"] == "critic"


def test_agent_has_its_name_description_messages_and_answer(stage: Stage) -> None:
    """In a team an agent is given what was said since it last spoke."""
    result = stage.trace(programs.round_robin)

    first, second = stage.named("invoke_agent writer")
    (critic,) = stage.named("invoke_agent critic")
    assert critic.attributes[c.AGENT_NAME] == "critic"
    assert str(critic.attributes[c.AGENT_DESCRIPTION])
    assert str(critic.attributes[c.AGENT_ID]).startswith("critic_")
    assert (critic.kind, critic.scope) == ("INTERNAL", c.SCOPE)
    assert content(first, c.INPUT_MESSAGES) == said("go")
    spoken = result.messages[1].content
    given = content(critic, c.INPUT_MESSAGES)
    assert given == said("go") + said(spoken, name="writer")
    assert content(first, c.OUTPUT_MESSAGES)[0]["parts"][0]["content"] == spoken
    assert second.start_ns >= (critic.end_ns or 0)


def test_hand_off_names_whom_it_goes_to(stage: Stage) -> None:
    """The agent that hands over says to whom, and its transfer is a tool."""
    stage.trace(programs.swarm)

    (writer,) = stage.named("invoke_agent writer")
    (critic,) = stage.named("invoke_agent critic")
    (tool,) = stage.named("execute_tool transfer_to_critic")
    assert writer.attributes[c.HANDOFF_TARGET] == "critic"
    assert critic.attributes[c.HANDOFF_TARGET] == "user"
    assert stage.path(tool) == ["invoke_workflow Swarm", "invoke_agent writer"]


def test_agent_and_team_as_tools_give_what_the_model_reads(stage: Stage) -> None:
    """The result of such a tool is the text that goes back to the model."""
    for program, name in ((programs.agent_tool, "helper"), (programs.team_tool, "helpers")):
        result = stage.trace(program)

        (tool,) = stage.named(f"execute_tool {name}")
        executed = next(m for m in result.messages if m.type == "ToolCallExecutionEvent")
        assert tool.attributes[c.TOOL_RESULT] == executed.content[0].content


def test_agent_called_by_its_own_methods_is_a_run(stage: Stage) -> None:
    """``on_messages`` and its stream, called by the program itself, are runs of the agent."""

    async def program(client: Any) -> None:
        writer = programs.agent("writer", client)
        asked = [TextMessage(content="go", source="user")]
        await writer.on_messages(asked, CancellationToken())
        async for _ in writer.on_messages_stream(asked, CancellationToken()):
            pass
        await Echo("echo", asked[0]).on_messages(asked, CancellationToken())

    stage.trace(program)

    stage.check()
    assert len(stage.named("invoke_agent writer")) == 2
    (echo,) = stage.named("invoke_agent echo")
    assert content(echo, c.INPUT_MESSAGES) == said("go")
    assert content(echo, c.OUTPUT_MESSAGES)[0]["parts"][0]["content"] == "go"


class OwnMessage(TextMessage):
    """A message that minds being converted."""

    def to_text(self) -> str:
        """Must not be called."""
        raise AssertionError("converted")


MESSAGES: list[tuple[BaseChatMessage, str]] = [
    (StructuredMessage[Arguments](content=Arguments(text="typed"), source="a"), '{"text":"typed"}'),
    (OwnMessage(content="said", source="a"), "said"),
    (TextMessage(content="half \ud800 of it", source="a"), "half ? of it"),
]


@pytest.mark.parametrize(("answer", "text"), MESSAGES)
def test_message_is_kept_by_its_fields(stage: Stage, answer: BaseChatMessage, text: str) -> None:
    """Its methods, which may do anything, are not called; the program has it as it is."""

    async def program(client: Any) -> Any:
        return await Echo("echo", answer).run(task=TextMessage(content="go", source="user"))

    assert stage.trace(program).messages[-1] is answer
    (echo,) = stage.named("invoke_agent echo")
    (part,) = content(echo, c.OUTPUT_MESSAGES)[0]["parts"]
    assert part["content"] == text


def test_streaming_tool_gives_its_last(stage: Stage) -> None:
    """A tool that streams has the last of what it gave as its result."""

    async def program(client: Any) -> Any:
        tool = CountingTool()
        return [n async for n in tool.run_json_stream({"text": "x"}, CancellationToken(), "id-1")]

    assert stage.trace(program) == [1, 2, 3]
    (tool,) = stage.named("execute_tool counting")
    assert tool.attributes[c.TOOL_RESULT] == "3"
    assert tool.attributes[c.TOOL_CALL_ID] == "id-1"


@dataclasses.dataclass
class Node:
    """Holds itself."""

    inner: Any = None


def gifts() -> dict[str, Any]:
    """Results no tracer should trip over."""
    own: dict[str, Any] = {}
    own["own"] = own
    node = Node()
    node.inner = node
    return {
        "hostile": Hostile(),
        "self": own,
        "node": node,
        "surrogate": "half \ud800",
        "generator": (n for n in (1, 2)),
        "bytes": b"\xff",
        "class": Hostile,
        "set": {1, Hostile()},
        "keys": {Hostile(): 1, 3: None, None: 2},
        "nothing": None,
    }


@pytest.mark.parametrize("name", gifts())
def test_odd_result_reaches_the_program_as_it_is(stage: Stage, name: str) -> None:
    """The same object comes back, and the span holds a safe form of it."""
    gift = gifts()[name]

    async def program(client: Any) -> Any:
        return await GivingTool(gift).run_json({"text": "x"}, CancellationToken())

    assert stage.trace(program) is gift
    stage.check_shape()
    (tool,) = stage.named("execute_tool giving")
    assert tool.status == "UNSET"
    if name == "generator":
        assert list(gift) == [1, 2]
    elif name == "nothing":
        assert tool.attributes[c.TOOL_RESULT] == "null"


def test_huge_task_passes(stage: Stage) -> None:
    """100 MB reach whom they are for, as they are."""
    huge = "x" * 100_000_000

    async def program(client: Any) -> Any:
        return await Echo("echo", TextMessage(content="x", source="echo")).run(task=huge)

    assert stage.trace(program).messages[0].content is huge
    (echo,) = stage.named("invoke_agent echo")
    assert 1000 < len(str(echo.attributes[c.INPUT_MESSAGES])) < 9_000_000


@pytest.mark.parametrize("task", [5, Ellipsis, [], ["text"], b"x", (1,)], ids=repr)
@pytest.mark.parametrize("kind", ["agent", "team"])
def test_wrong_task_is_refused_as_without_us(stage: Stage, kind: str, task: Any) -> None:
    """A task of a wrong type raises what AutoGen raises, and the span says so."""

    async def program(client: Any) -> Any:
        writer = programs.agent("writer", client)
        runner = writer if kind == "agent" else RoundRobinGroupChat([writer], max_turns=1)
        try:
            await runner.run(task=task)
        except Exception as exc:  # noqa: BLE001  # whatever it is, it is compared
            return type(exc), str(exc)

    assert stage.trace(program) == stage.run(program)
    failed = stage.named("invoke_agent writer", "invoke_workflow RoundRobinGroupChat")
    assert [span.status for span in failed] == ["ERROR"]
