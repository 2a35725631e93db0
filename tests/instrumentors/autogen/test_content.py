"""What agents, teams and tools were given and gave: kept beside their spans, in any state."""

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")
pytest.importorskip("autogen_ext.models.openai")

from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.messages import BaseChatMessage, StructuredMessage, TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken
from autogen_core.tools import BaseStreamTool
from pydantic import BaseModel
from tests.instrumentors.autogen import programs
from tests.instrumentors.autogen.stage import Stage

from lightning_otel import conventions as c


def message(text: str, role: str = "user", **more: Any) -> dict[str, Any]:
    """One message of text."""
    return {"role": role, "parts": [{"type": "text", "content": text}], **more}


def done(name: str) -> str:
    """Return what an agent of the cast says."""
    return f"{name} says that the work is done"


GO = [message("go")]
FACTS: list[tuple[Any, str, dict[str, Any]]] = [
    (
        programs.nested_teams,
        "invoke_workflow outer",
        {
            c.OPERATION: "invoke_workflow",
            c.WORKFLOW_NAME: "outer",
            c.PROVIDER: "autogen",
            c.INPUT_MESSAGES: GO,
            c.OUTPUT_MESSAGES: [message(done("critic"), "assistant", name="critic")],
            c.STOP_REASON: "Maximum number of turns 2 reached.",
        },
    ),
    (programs.nested_teams, "invoke_workflow inner", {c.INPUT_MESSAGES: GO}),
    (
        programs.round_robin,
        "invoke_agent critic",
        {
            c.AGENT_NAME: "critic",
            c.AGENT_DESCRIPTION: "An agent that provides assistance with ability to use tools.",
            # What was said since it last spoke.
            c.INPUT_MESSAGES: [*GO, message(done("writer"), name="writer")],
        },
    ),
    (programs.swarm, "invoke_agent writer", {c.HANDOFF_TARGET: "critic"}),
    (programs.swarm, "invoke_agent critic", {c.HANDOFF_TARGET: "user"}),
    (programs.swarm, "execute_tool transfer_to_critic", {c.TOOL_ARGUMENTS: "{}"}),
    # The text that goes back to the model.
    (programs.agent_tool, "execute_tool helper", {c.TOOL_RESULT: done("helper")}),
    (programs.team_tool, "execute_tool helpers", {c.TOOL_RESULT: f"helper: {done('helper')}"}),
    (programs.parallel_tools, "execute_tool calculator", {c.TOOL_RESULT: "42"}),
    (
        programs.parallel_tools,
        "execute_tool broken",
        {c.ERROR_TYPE: "ValueError", c.TOOL_RESULT: None},
    ),
    (programs.parallel_tools, "invoke_agent calc", {c.ERROR_TYPE: None}),
]


@pytest.mark.parametrize(
    ("program", "name", "facts"),
    FACTS,
    ids=lambda value: getattr(value, "__name__", str(value))[:40],
)
def test_span_says_what_was_given_and_came_of_it(
    stage: Stage, program: Any, name: str, facts: dict[str, Any]
) -> None:
    """Of teams, agents, hand-offs and tools."""
    stage.trace(program)

    span = stage.named(name)[0]
    found = {key: span.attributes.get(key) for key in facts}
    assert {
        key: json.loads(str(value)) if "messages" in key else value for key, value in found.items()
    } == facts
    if name == "invoke_agent critic" and program is programs.round_robin:
        assert str(span.attributes[c.AGENT_ID]).startswith("critic_")


class Hostile:
    """Raises wherever it is looked at."""

    def __str__(self) -> str:
        raise RuntimeError("looked at")

    __repr__ = __str__

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")


class Arguments(BaseModel):
    """What the tool below takes."""

    text: str = ""


class GivingTool(BaseStreamTool[Arguments, Any, Any]):
    """Gives one thing, as a stream after two others."""

    def __init__(self, gift: Any) -> None:
        super().__init__(Arguments, object, "giving", "Gives.")
        self.gift = gift

    async def run(self, args: Arguments, cancellation_token: CancellationToken) -> Any:
        """The one thing."""
        return self.gift

    async def run_stream(
        self, args: Arguments, cancellation_token: CancellationToken
    ) -> AsyncGenerator[Any, None]:
        """One by one."""
        for each in (1, 2, self.gift):
            yield each

    def return_value_as_string(self, value: Any) -> str:
        """Nothing that looks at it."""
        return "given"


@pytest.mark.parametrize(
    ("gift", "kept"),
    [
        (3, "3"),
        ("half \ud800", "half ?"),
        (Hostile(), '"<Hostile>"'),
        ((n for n in (1, 2)), '"<generator>"'),
        (None, "null"),
    ],
    ids=["number", "surrogate", "hostile", "generator", "nothing"],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_any_result_reaches_the_program_as_it_is(
    stage: Stage, gift: Any, kept: str, is_stream: bool
) -> None:
    """The same object comes back, and the span holds a safe form of it."""

    async def program(client: Any) -> Any:
        call: Any = ({"text": "x"}, CancellationToken(), "id-1")
        if is_stream and gift is not None:
            return [each async for each in GivingTool(gift).run_json_stream(*call)][-1]
        return await GivingTool(gift).run_json(*call)

    assert stage.trace(program) is gift
    stage.check_shape()
    (tool,) = stage.named("execute_tool giving")
    assert (tool.status, tool.attributes[c.TOOL_CALL_ID]) == ("UNSET", "id-1")
    assert tool.attributes[c.TOOL_RESULT] == kept


class Echo(BaseChatAgent):
    """Answers with a message of the test's choice."""

    def __init__(self, answer: BaseChatMessage) -> None:
        super().__init__("echo", "echoes")
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


class OwnMessage(TextMessage):
    """A message that minds being converted."""

    def to_text(self) -> str:
        """Must not be called."""
        raise AssertionError("converted")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (StructuredMessage[Arguments](content=Arguments(text="a"), source="a"), '{"text":"a"}'),
        (OwnMessage(content="said", source="a"), "said"),
        (TextMessage(content="half \ud800 of it", source="a"), "half ? of it"),
    ],
)
def test_message_is_kept_by_its_fields(stage: Stage, answer: BaseChatMessage, text: str) -> None:
    """Its methods, which may do anything, are not called; the program has it as it is."""
    asked = TextMessage(content="go", source="user")

    async def program(client: Any) -> Any:
        return await Echo(answer).run(task=asked)

    assert stage.trace(program).messages[-1] is answer
    (echo,) = stage.named("invoke_agent echo")
    assert json.loads(str(echo.attributes[c.INPUT_MESSAGES])) == GO
    (part,) = json.loads(str(echo.attributes[c.OUTPUT_MESSAGES]))[0]["parts"]
    assert part["content"] == text


def test_agent_called_by_its_own_methods_is_a_run(stage: Stage) -> None:
    """``on_messages`` and its stream, called by the program itself, are runs of the agent."""

    async def program(client: Any) -> None:
        writer = programs.agent("writer", client)
        asked = [TextMessage(content="go", source="user")]
        await writer.on_messages(asked, CancellationToken())
        async for _ in writer.on_messages_stream(asked, CancellationToken()):
            pass

    stage.trace(program)

    stage.check()
    for run in stage.named("invoke_agent writer"):
        assert json.loads(str(run.attributes[c.INPUT_MESSAGES])) == GO
        answer = json.loads(str(run.attributes[c.OUTPUT_MESSAGES]))
        assert answer == [message(done("writer"), "assistant", name="writer")]
    assert len(stage.calls()) == 2


def test_huge_task_passes(stage: Stage) -> None:
    """100 MB reach whom they are for, as they are."""
    huge = "x" * 100_000_000

    async def program(client: Any) -> Any:
        return await Echo(TextMessage(content="x", source="echo")).run(task=huge)

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
