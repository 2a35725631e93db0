"""MCP's servers and clients under ``lightning-otel run``: one trace, and nothing else changed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_otel import Store
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

pytest.importorskip("mcp_types", reason="needs mcp 2")

SERVER = """
import json, os, sys
from mcp.server import MCPServer

server = MCPServer("tools")

@server.tool()
def add(a: int, b: int) -> int:
    return a + b

@server.tool()
def broken() -> str:
    raise ValueError("no")

@server.tool()
def environment() -> str:
    return json.dumps([sorted(os.environ), sys.path[0]])

server.run()
"""
CLIENT = """
import asyncio, os, sys
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

async def main():
    own = {"PYTHONPATH": "own-path", "OWN": "1"} if "--env" in sys.argv else None
    server = StdioServerParameters(command=sys.executable, args=["server.py"], env=own)
    async with stdio_client(server) as (reading, writing):
        async with ClientSession(reading, writing) as session:
            await session.initialize()
            results = [await session.call_tool("add", {"a": 1, "b": 2})]
            results.append(await session.call_tool("broken", {}))
            results.append(await session.call_tool("environment", {}))
    for result in results:
        print(result.is_error, result.content[0].text)
    print(server.env)

asyncio.run(main())
"""
IN_PROCESS = """
import asyncio
from mcp import Client
from mcp.server import MCPServer

server = MCPServer("tools")

@server.tool()
def add(a: int, b: int) -> int:
    return a + b

async def main():
    async with Client(server) as client:
        print((await client.call_tool("add", {"a": 1, "b": 2})).content[0].text)

asyncio.run(main())
"""


def run(folder: Path, script: str, *args: str, options: tuple[str, ...] = ()) -> list[str]:
    """Run a client under ``run``; return the lines that it prints."""
    (folder / "server.py").write_text(SERVER)
    (folder / "client.py").write_text(script)
    command = [str(Path(sys.executable).with_name("lightning-otel")), "run", "--store"]
    done = subprocess.run(
        [*command, "t.duckdb", *options, sys.executable, "client.py", *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "LIGHTNING_OTEL_ENDPOINT_KEY": "endpoint-secret"},
    )
    assert done.returncode in (0, 3), done.stderr
    return done.stdout.splitlines()


def spans_of(folder: Path) -> list[Span]:
    """Return what MCP's own instrumentation told."""
    return [
        span for span in Store(folder / "t.duckdb").spans().rows() if span.scope == "mcp-python-sdk"
    ]


@pytest.mark.parametrize("args", [(), ("--env",)])
def test_client_server_and_tool_are_one_trace(tmp_path: Path, args: tuple[str, ...]) -> None:
    """Of each request, with the program's own variables and path beside ours, without keys."""
    lines = run(tmp_path, CLIENT, *args)

    assert lines[:2] == ["False 3", "True Error executing tool broken"]
    names, _ = json.loads(lines[2].removeprefix("False "))
    assert ("OWN" in names) == bool(args)
    assert "LIGHTNING_OTEL_ENDPOINT_KEY" not in names
    assert lines[3] == str({"PYTHONPATH": "own-path", "OWN": "1"} if args else None)
    spans = spans_of(tmp_path)
    sent = {span.span_id: span for span in spans if span.kind == "CLIENT"}
    tools = [span for span in spans if span.name.startswith("tools/call")]
    assert [span.name for span in tools] == [
        f"tools/call {n}" for n in ("add", "broken", "environment")
    ]
    for span in tools:
        client = sent[str(span.parent_span_id)]
        assert client.name == f"MCP send {span.name}"
        assert (span.trace_id, span.rollout_id) == (client.trace_id, client.rollout_id)
    with Store(tmp_path / "t.duckdb").connect() as con:
        rows = con.sql("SELECT name FROM spans WHERE operation = 'execute_tool'").fetchall()
    assert len(rows) == 6


def test_reader_names_the_tool_of_a_client_whose_server_is_not_recorded(tmp_path: Path) -> None:
    """As one of another machine; where children are not recorded, the server is none, either."""
    lines = run(tmp_path, CLIENT, options=("--children", "none"))

    assert lines[0] == "False 3"
    assert not any("LIGHTNING" in name for name in json.loads(lines[2].removeprefix("False "))[0])
    spans = spans_of(tmp_path)
    assert {span.kind for span in spans} == {"CLIENT"}
    with Store(tmp_path / "t.duckdb").connect() as con:
        rows = con.sql("SELECT name FROM spans WHERE operation = 'execute_tool'").fetchall()
    assert sorted(name for (name,) in rows) == [
        "MCP send tools/call add", "MCP send tools/call broken", "MCP send tools/call environment",
    ]  # fmt: skip


def test_server_within_the_process_tells_of_its_tools(tmp_path: Path) -> None:
    """The library makes no client's spans there; each tool is once in the rollout."""
    assert run(tmp_path, IN_PROCESS) == ["3"]

    (tool,) = [span for span in spans_of(tmp_path) if "tools/call" in span.name]
    assert tool.rollout_id
    assert tool.attributes[c.OPERATION] == c.EXECUTE_TOOL
