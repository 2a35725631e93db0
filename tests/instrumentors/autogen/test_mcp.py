"""Tools of MCP servers, which AutoGen runs without objects of their own."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")
pytest.importorskip("autogen_ext.tools.mcp", reason="needs mcp < 2", exc_type=ImportError)

from autogen_ext.tools import mcp
from tests.instrumentors.autogen.programs import agent
from tests.instrumentors.autogen.stage import Stage

from lightning_otel import conventions as c

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
