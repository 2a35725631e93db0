"""Whole programs: every call once, under its agent, and nothing changed for the program."""

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")
pytest.importorskip("autogen_ext.models.openai")

from autogen_ext.models.replay import ReplayChatCompletionClient
from pydantic import BaseModel
from tests.facts import sent
from tests.instrumentors.autogen import programs
from tests.instrumentors.autogen.stage import INFO, Cast, Stage

from lightning_otel import Store, uninstrument
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import conventions as c

CALLS: dict[str, dict[str, int]] = {
    "one_agent": {"calc": 2},
    "streamed": {"calc": 2},
    "parallel_tools": {"calc": 1},
    "round_robin": {"writer": 2, "critic": 1},
    "streamed_team": {"writer": 2, "critic": 2},
    "selector": {"SelectorGroupChatManager": 2, "writer": 2},
    "swarm": {"writer": 1, "critic": 1},
    # Facts, plan, ledger, ledger again, and the final answer.
    "magentic_one": {"MagenticOneOrchestrator": 5, "writer": 1},
    "agent_tool": {"boss": 1, "helper": 1},
    "team_tool": {"boss": 2, "helper": 1},
    "society_of_mind": {"writer": 1, "critic": 1, "society": 1},
    "nested_teams": {"writer": 1, "critic": 1},
    "graph": {"writer": 1, "critic": 1, "third": 1},
    "with_user": {"writer": 2},
    "own_methods": {"writer": 2},
}


def message(text: str, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}], **more}


def done(name: str) -> str:
    return f"{name} says that the work is done"


GO = [message("go")]
OWN_METHODS = {
    c.INPUT_MESSAGES: GO,
    c.OUTPUT_MESSAGES: [message(done("writer"), "assistant", name="writer")],
}
FACTS: list[tuple[Any, str, dict[str, Any]]] = [
    (programs.own_methods, "invoke_agent writer", OWN_METHODS),
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
"""What a span of a program says, at least."""


Program = Callable[[Any], Awaitable[Any]]
every_program = pytest.mark.parametrize("program", programs.ALL, ids=lambda found: found.__name__)

# AutoGen writes its log of a structured answer through pydantic, which warns, traced or not.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")


@every_program
@pytest.mark.pain(15)
def test_program_is_recorded_whole(
    stage: Stage, store: Store, facts: Any, program: Program
) -> None:
    """Each request is one call with the server's facts and one transition, under its agent."""
    traced = stage.trace(program)

    stage.check()
    assert stage.recording is not None
    found = Counter(path.agent for path in stage.recording.trajectories() for _ in path.transitions)
    assert found == CALLS[program.__name__]
    for _, name, wanted in [each for each in FACTS if each[0] is program]:
        for span in stage.named(name):
            told = {key: span.attributes.get(key) for key in wanted}
            read = {key: json.loads(str(told[key])) for key in wanted if "messages" in key}
            assert told | read == wanted
    uninstrument()
    with DemoServer(Cast()) as other:
        plain = Stage(other, store, facts).run(program)
    results = [seen(traced), seen(plain)]
    if program is programs.graph:  # two speak at once, and either may be heard first
        results = [sorted(one, key=str) for one in results]
    assert results[0] == results[1]
    assert sorted(map(sent, stage.server.log)) == sorted(map(sent, other.log))


def seen(result: Any) -> Any:
    """A result without what differs from run to run."""
    if isinstance(result, list):
        return [seen(item) for item in result]
    if hasattr(result, "messages"):
        return [result.stop_reason, *(seen(item) for item in result.messages)]
    left = {"id", "created_at", "full_message_id", "request_id"}
    return type(result), result.model_dump_json(exclude=left)


def test_huge_task_passes(stage: Stage) -> None:
    """100 MB reach whom they are for, as they are, and a bounded part of them is kept."""
    huge = "x" * 100_000_000

    async def program(client: Any) -> Any:
        return await programs.agent("writer", ReplayChatCompletionClient(["one"])).run(task=huge)

    assert stage.trace(program).messages[0].content is huge
    for span in [*stage.named("invoke_agent writer"), *stage.calls()]:
        assert 1000 < len(str(span.attributes[c.INPUT_MESSAGES])) < 9_000_000


class Answer(BaseModel):
    """A structured answer."""

    text: str


def test_structured_message_is_kept_by_its_fields(stage: Stage) -> None:
    """The program has the object, and the span its fields."""
    info: Any = {**INFO, "structured_output": True}
    replay = ReplayChatCompletionClient(['{"text":"a"}'], model_info=info)

    async def program(client: Any) -> Any:
        return await programs.agent("writer", replay, output_content_type=Answer).run(task="go")

    assert stage.trace(program).messages[-1].content == Answer(text="a")
    (writer,) = stage.named("invoke_agent writer")
    (said,) = json.loads(str(writer.attributes[c.OUTPUT_MESSAGES]))
    assert said["parts"] == [{"type": "text", "content": '{"text":"a"}'}]
