"""Programs of ``autogen_core`` alone: agents of the runtime, their messages and their calls."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("autogen_core")
pytest.importorskip("autogen_ext.models.openai")

from autogen_core import (
    AgentId,
    DefaultTopicId,
    FunctionCall,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    default_subscription,
    message_handler,
)
from autogen_core.models import SystemMessage, UserMessage
from autogen_core.tool_agent import ToolAgent
from autogen_core.tools import FunctionTool
from tests.instrumentors.autogen.programs import calculator
from tests.instrumentors.autogen.stage import Stage

from lightning_otel import auto_trace
from lightning_otel.types import conventions as c


@dataclass
class Ask:
    """Something to ask a model."""

    content: str


@dataclass
class Announcement:
    """Something all are to know, with how often it may still be passed on."""

    content: str
    left: int


class Asker(RoutedAgent):
    """Answers by a model."""

    def __init__(self, client: Any) -> None:
        super().__init__("asks")
        self.client = client

    @message_handler
    async def on_ask(self, message: Ask, ctx: MessageContext) -> Ask:
        answer = await self.client.create(
            [
                SystemMessage(content=f"You are {self.id.type}."),
                UserMessage(content=message.content, source="user"),
            ],
            cancellation_token=ctx.cancellation_token,
        )
        return Ask(str(answer.content))


class Boss(Asker):
    """Lets another agent answer, and a tool."""

    @message_handler
    async def on_ask(self, message: Ask, ctx: MessageContext) -> Ask:
        call = FunctionCall(id="c1", name="calculator", arguments='{"expression":"6*7"}')
        await self.send_message(call, AgentId("tools", "default"))
        await self.send_message(message, AgentId("helper", "default"))
        return await super().on_ask(message, ctx)


@default_subscription
class Talker(Asker):
    """Asks a model of what it hears, and passes it on."""

    @message_handler
    async def on_announcement(self, message: Announcement, ctx: MessageContext) -> None:
        await self.on_ask(Ask(message.content), ctx)
        if message.left:
            passed = Announcement(message.content, message.left - 1)
            await self.publish_message(passed, DefaultTopicId())


async def office(client: Any) -> SingleThreadedAgentRuntime:
    runtime = SingleThreadedAgentRuntime()
    tools: Any = [FunctionTool(calculator, "Work out.")]
    await Boss.register(runtime, "boss", lambda: Boss(client))
    await Asker.register(runtime, "helper", lambda: Asker(client))
    await ToolAgent.register(runtime, "tools", lambda: ToolAgent("runs", tools))
    return runtime


@pytest.mark.parametrize("is_started_first", [False, True])
def test_agents_of_a_runtime_stand_under_who_asked(stage: Stage, is_started_first: bool) -> None:
    """Whenever the runtime was started, what is done for a message belongs to its sender."""

    async def program(client: Any) -> Any:
        runtime = await office(client)
        if is_started_first:
            runtime.start()
        with auto_trace(store=stage.store) as stage.recording:
            if not is_started_first:
                runtime.start()
            answer = await runtime.send_message(Ask("go"), AgentId("boss", "default"))
        await runtime.stop_when_idle()
        return answer

    answer = stage.run(program)

    assert answer.content.startswith("boss says")
    stage.check()
    (tool,) = stage.named("execute_tool calculator")
    (boss,) = stage.named("invoke_agent boss")
    assert stage.path(tool) == ["invoke_agent boss"]
    assert sorted(map(stage.path, stage.calls())) == [
        ["invoke_agent boss"],
        ["invoke_agent boss", "invoke_agent helper"],
    ]
    assert boss.attributes[c.AGENT_ID] == "boss/default"
    assert "go" in str(boss.attributes[c.INPUT_MESSAGES])
    assert "boss says" in str(boss.attributes[c.OUTPUT_MESSAGES])


def test_published_messages_are_handled_side_by_side(stage: Stage) -> None:
    """However long agents go on among themselves, none of their spans stands in another's."""

    async def program(client: Any) -> None:
        runtime = SingleThreadedAgentRuntime()
        for name in ("one", "two"):
            await Talker.register(runtime, name, lambda: Talker(client))
        runtime.start()
        with auto_trace(store=stage.store) as stage.recording:
            await runtime.publish_message(Announcement("go", 2), DefaultTopicId())
            await runtime.stop_when_idle()

    stage.run(program)

    stage.check()
    assert len(stage.calls()) == 2 + 2 + 2
    assert {len(stage.path(call)) for call in stage.calls()} == {1}


def test_messages_of_several_recordings_at_once_stay_apart(stage: Stage) -> None:
    """One runtime serves many recordings, and each has what was done for it."""
    recordings = []

    async def one(runtime: Any) -> None:
        with auto_trace(store=stage.store) as recording:
            await runtime.send_message(Ask("go"), AgentId("boss", "default"))
        recordings.append(recording)

    async def program(client: Any) -> None:
        runtime = await office(client)
        runtime.start()
        await asyncio.gather(*(one(runtime) for _ in range(5)))
        await runtime.stop_when_idle()

    stage.run(program)

    for recording in recordings:
        names = [span.name for span in recording.spans()]
        assert sorted(names) == [
            c.SPAN_ROLLOUT,
            "chat toy",
            "chat toy",
            "execute_tool calculator",
            "invoke_agent boss",
            "invoke_agent helper",
        ]
