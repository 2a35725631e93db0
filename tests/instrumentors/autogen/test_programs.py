"""Whole programs: every call once, under its agent, and nothing changed for the program."""

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")
pytest.importorskip("autogen_ext.models.openai")

from tests.instrumentors.autogen import programs
from tests.instrumentors.autogen.stage import Cast, Stage

from lightning_otel import Store, provider
from lightning_otel.demo.server import DemoServer

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
}
Program = Callable[[Any], Awaitable[Any]]
every_program = pytest.mark.parametrize("program", programs.ALL, ids=lambda found: found.__name__)

# AutoGen writes its log of a structured answer through pydantic, which warns, traced or not.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")


@every_program
@pytest.mark.pain(15)
def test_program_is_recorded_whole(
    stage: Stage, store: Store, facts: Any, program: Program
) -> None:
    """Each request is one call with the server's facts and one transition, under its agent.

    The program's result and the bytes of its requests are those of an unrecorded run.
    """
    traced = stage.trace(program)

    stage.check()
    assert stage.recording is not None
    found = Counter(path.agent for path in stage.recording.trajectories() for _ in path.transitions)
    assert found == CALLS[program.__name__]
    provider.uninstrument()
    with DemoServer(Cast()) as other:
        plain = Stage(other, store, facts).run(program)
    said = [seen(traced), seen(plain)]
    if program is programs.graph:  # two speak at once, and either may be heard first
        said = [sorted(one, key=str) for one in said]
    assert said[0] == said[1]
    assert sent(stage.server) == sent(other)


def seen(result: Any) -> Any:
    """A result without what differs from run to run."""
    if isinstance(result, list):
        return [seen(item) for item in result]
    if hasattr(result, "messages"):
        return [result.stop_reason, *(seen(item) for item in result.messages)]
    left = {"id", "created_at", "full_message_id", "request_id"}
    return type(result), result.model_dump_json(exclude=left)


def sent(server: DemoServer) -> list[str]:
    """The requests a server got, with their headers, in an order of their own."""
    return sorted(
        json.dumps([exchange.path, exchange.request, headers_of(exchange.headers)])
        for exchange in server.log
    )


def headers_of(headers: Any) -> dict[str, str]:
    """The headers but the server's own address."""
    return {name: value for name, value in headers.items() if name != "host"}
