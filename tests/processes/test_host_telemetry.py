"""A program that sets up OpenTelemetry itself, or not at all: its telemetry is as without us."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_otel import Store
from lightning_otel.demo.server import DemoServer

PROGRAM = """\
import asyncio, json, os, sys, threading
import openai
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import set_tracer_provider

when, told = sys.argv[2], []
tracer, exporter = trace.get_tracer("early"), InMemorySpanExporter()

def set_up():
    told.append(type(trace.get_tracer_provider()).__name__)
    own = TracerProvider()
    own.add_span_processor(SimpleSpanProcessor(exporter))
    set_tracer_provider(own)
    told.append(trace.get_tracer_provider() is own)
    set_tracer_provider(TracerProvider())

@tracer.start_as_current_span("decorated")
def work():
    return 1

@tracer.start_as_current_span("decorated async")
async def work_async():
    await asyncio.sleep(0)
    return 2

client = openai.OpenAI(base_url=sys.argv[1], api_key="k")

def ask():
    client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hi"}])
    with tracer.start_as_current_span("mine"):
        propagate.inject(carrier := {})
        told.append(sorted(carrier))

if when == "at once":
    set_up()
if when == "late":
    ask()
    set_up()
if when == "in a thread":
    thread = threading.Thread(target=set_up)
    thread.start()
    thread.join()
ask()
told += [work(), asyncio.run(work_async())]
names = [span.name for span in exporter.get_finished_spans()]
print(json.dumps([told, [name for name in names if name != "chat toy"]]))
if when != "never":
    print(names.count("chat toy"))
"""

MCP = """\
import asyncio, json, sys
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("tools")

@server.tool()
def meta(ctx: Context) -> str:
    return json.dumps(sorted(dict(ctx.request_context.meta or {})))

async def main():
    parameters = StdioServerParameters(command=sys.executable, args=[__file__, "serve"])
    async with Client(stdio_client(parameters)) as client:
        print((await client.call_tool("meta", {})).content[0].text)

if len(sys.argv) > 1:
    server.run()
else:
    asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["never", "at once", "late", "in a thread"])
def test_host_finds_and_sends_what_it_would_without_us(
    when: str, starter: Callable[[str], Any], server: DemoServer, tmp_path: Path
) -> None:
    """Under ``run`` the program's provider wins, and we join it: all of it is stored, too."""
    program = tmp_path / "app.py"
    program.write_text(PROGRAM)
    command = [sys.executable, program, server.base_url, when]
    bare = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    start = starter("run")

    with start(program, server.base_url, when) as child:
        out, err = child.communicate(timeout=50)

    facts, *calls = out.splitlines()
    assert (child.returncode, facts) == (0, bare.stdout.splitlines()[0]), err
    assert calls == ([] if when == "never" else ["1"])
    assert err.count("Overriding") == bare.stderr.count("Overriding")
    asked = 2 if when == "late" else 1
    names = [span.name for span in Store(start.store).spans()]
    assert sorted(names) == sorted(
        ["agentlightning.rollout", "decorated", "decorated async", *["chat toy", "mine"] * asked]
    )


@pytest.mark.parametrize("propagators", ["", "tracecontext"])
def test_ids_of_our_spans_are_sent_to_others_if_asked(
    propagators: str, starter: Callable[[str], Any], tmp_path: Path
) -> None:
    """A request to an MCP server has a ``traceparent`` where the user names propagators."""
    pytest.importorskip("mcp.server.mcpserver")
    program = tmp_path / "app.py"
    program.write_text(MCP)
    start = starter("run")
    start.environment["OTEL_PROPAGATORS"] = propagators

    with start(program) as child:
        out, err = child.communicate(timeout=50)

    assert child.returncode == 0, err
    assert ("traceparent" in json.loads(out)) == bool(propagators)
