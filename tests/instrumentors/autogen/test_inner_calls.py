"""A tool of a server of MCP's that asks a model itself."""

from typing import Any

import openai
import pytest

pytest.importorskip("autogen_agentchat")

from tests.instrumentors.autogen.programs import agent
from tests.instrumentors.autogen.stage import Stage


def test_a_tool_of_a_server_asks(stage: Stage) -> None:
    """A server in the program's own process, whose tasks know nothing of the tool's span.

    The agent has a path of its own, which sees what the tool gave.
    """
    mcp_tools = pytest.importorskip(
        "autogen_ext.tools.mcp", reason="needs mcp < 2", exc_type=ImportError
    )
    from mcp.server.fastmcp import FastMCP
    from mcp.shared.memory import create_connected_server_and_client_session

    server: Any = FastMCP("tools")
    asked: Any = [{"role": "system", "content": "Sum up."}, {"role": "user", "content": "page 1"}]

    @server.tool()
    def sum_up(task: str) -> str:
        """Sum up a page."""
        with openai.OpenAI(base_url=stage.server.base_url, api_key="k") as client:
            answer = client.chat.completions.create(model="toy", messages=asked)
        return answer.choices[0].message.content or ""

    async def program(client: Any) -> Any:
        unused = mcp_tools.StdioServerParams(command="true")
        async with create_connected_server_and_client_session(server._mcp_server) as session:
            tools = await mcp_tools.mcp_server_tools(unused, session=session)
            calc = agent("calc", client, tools=tools, reflect_on_tool_use=True)
            return await calc.run(task="go")

    stage.trace(program)

    assert len(stage.calls()) == 3
    assert stage.recording is not None
    paths = {
        path.transitions[0].observation[0]["parts"][0]["content"]: path.transitions
        for path in stage.recording.trajectories()
    }
    assert paths.keys() == {"You are calc.", "Sum up."}
    assert len(paths["Sum up."]) == 1
    first, last = paths["You are calc."]
    assert first.next_observation == last.observation
    assert last.observation[-1]["role"] == "tool"
    assert (first.is_shared, last.done) == (False, True)
