"""Tools of AutoGen's that ask a model themselves, in threads or in a server of MCP's."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("autogen_agentchat")

from tests.instrumentors.autogen.programs import agent
from tests.instrumentors.autogen.stage import Stage

PAGES = ["page 1", "page 2"]


def asking(base_url: str, at_once: int = 1) -> Any:
    """A function that asks about a page; its requests wait until so many are made."""
    barrier = threading.Barrier(at_once, timeout=30)

    def ask(page: str) -> str:
        http = httpx.Client(event_hooks={"request": [lambda request: barrier.wait()]})
        with openai.OpenAI(
            base_url=base_url, api_key="k", max_retries=0, http_client=http
        ) as client:
            asked: Any = [{"role": "system", "content": "Sum up."}]
            asked.append({"role": "user", "content": page})
            answer = client.chat.completions.create(model="toy", messages=asked)
            return answer.choices[0].message.content or ""

    return ask


def check(stage: Stage) -> None:
    """Assert that the agent has a path of its own, which sees what the tool gave."""
    assert stage.recording is not None
    by_instructions = {
        path.transitions[0].observation[0]["parts"][0]["content"]: path
        for path in stage.recording.trajectories()
    }
    first, last = by_instructions["You are calc."].transitions
    assert first.next_observation == last.observation
    assert last.observation[-1]["role"] == "tool"
    assert (first.is_shared, last.done) == (False, True)
    inner = [path for path in stage.recording.trajectories() if len(path.transitions) == 1]
    assert "Sum up." in by_instructions
    assert {path.transitions[0].observation[0]["parts"][0]["content"] for path in inner} == {
        "Sum up."
    }


def test_a_tool_asks_in_threads(stage: Stage) -> None:
    """Two questions at once are two branches."""
    ask = asking(stage.server.base_url, at_once=len(PAGES))

    def sum_up(task: str) -> str:
        """Sum up two pages."""
        with ThreadPoolExecutor(2) as pool:
            return "\n".join(pool.map(ask, PAGES))

    async def program(client: Any) -> Any:
        return await agent("calc", client, tools=[sum_up], reflect_on_tool_use=True).run(task="go")

    stage.trace(program)

    assert len(stage.calls()) == 2 + len(PAGES)
    check(stage)


def test_a_tool_of_a_server_asks(stage: Stage) -> None:
    """A server in the program's own process, whose tasks know nothing of the tool's span."""
    mcp_tools = pytest.importorskip(
        "autogen_ext.tools.mcp", reason="needs mcp < 2", exc_type=ImportError
    )
    from mcp.server.fastmcp import FastMCP
    from mcp.shared.memory import create_connected_server_and_client_session

    ask = asking(stage.server.base_url)
    server: Any = FastMCP("tools")

    @server.tool()
    def sum_up(task: str) -> str:
        """Sum up a page."""
        return str(ask(PAGES[0]))

    async def program(client: Any) -> Any:
        unused = mcp_tools.StdioServerParams(command="true")
        async with create_connected_server_and_client_session(server._mcp_server) as session:
            tools = await mcp_tools.mcp_server_tools(unused, session=session)
            calc = agent("calc", client, tools=tools, reflect_on_tool_use=True)
            return await calc.run(task="go")

    stage.trace(program)

    assert len(stage.calls()) == 3
    check(stage)
