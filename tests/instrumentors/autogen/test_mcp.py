"""Tools of MCP servers, which AutoGen runs without objects of their own."""

import sys
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("autogen_agentchat")
pytest.importorskip("autogen_ext.tools.mcp", reason="needs mcp < 2", exc_type=ImportError)

from autogen_ext.tools import mcp
from tests.instrumentors.autogen.programs import agent
from tests.instrumentors.autogen.stage import Stage

from lightning_otel.types import conventions as c

SERVER = '''
from mcp.server.fastmcp import FastMCP

server = FastMCP("tools")

@server.tool()
def calculator(expression: str) -> str:
    """Work out a product."""
    left, right = expression.split("*")
    return str(int(left) * int(right))

@server.tool()
def broken(expression: str) -> str:
    """Never work."""
    raise ValueError("no")

server.run()
'''


def test_tools_of_a_server_are_spans_with_content(stage: Stage, tmp_path: Path) -> None:
    """What was called, with what, what it gave, and whether it failed, once each."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    parameters = mcp.StdioServerParams(command=sys.executable, args=[str(script)])

    async def program(client: Any) -> Any:
        async with mcp.McpWorkbench(parameters) as workbench:
            return await agent("calc", client, workbench=workbench).run(task="go")

    stage.trace(program)

    stage.check()
    (good,) = stage.named("execute_tool calculator")
    (bad,) = stage.named("execute_tool broken")
    assert "42" in str(good.attributes[c.TOOL_RESULT])
    assert good.attributes[c.TOOL_ARGUMENTS] == '{"expression":"6*7"}'
    assert str(good.attributes[c.TOOL_CALL_ID]).startswith("call_")
    assert (good.status, bad.status) == ("UNSET", "ERROR")
    assert stage.path(good) == ["invoke_agent calc"]


def test_a_tool_of_a_server_asks(stage: Stage) -> None:
    """A server in the program's own process, whose tasks know nothing of the tool's span."""
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
        unused = mcp.StdioServerParams(command="true")
        async with create_connected_server_and_client_session(server._mcp_server) as session:
            tools = await mcp.mcp_server_tools(unused, session=session)
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
