"""An agent in each way in, and programs with OpenTelemetry of their own: all is as without us."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest
from tests.examples.checker import Host, call_problems, recorded_in
from tests.forwarding.collector import Endpoint, Reply
from tests.processes.conftest import WAYS

from lightning_otel import Store
from lightning_otel.demo.server import DemoServer
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

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
import asyncio, json, socket, sys, threading
import uvicorn
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("tools")

@server.tool()
def meta(ctx: Context) -> str:
    return json.dumps("traceparent" in dict(ctx.request_context.meta or {}))

async def ask(place):
    async with Client(place) as client:
        print((await client.call_tool("meta", {})).content[0].text)

def ask_by_http():
    listener = socket.create_server(("127.0.0.1", 0))
    serving = uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error"))
    thread = threading.Thread(target=serving.run, args=([listener],))
    thread.start()
    asyncio.run(ask(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"))
    serving.should_exit = True
    thread.join()

if len(sys.argv) > 1:
    server.run()
else:
    ask_by_http()
    child = StdioServerParameters(command=sys.executable, args=[__file__, "serve"])
    asyncio.run(ask(stdio_client(child)))
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
    """An MCP server has a ``traceparent`` where the user names propagators, or it is a child."""
    pytest.importorskip("mcp.server.mcpserver")
    program = tmp_path / "app.py"
    program.write_text(MCP)
    start = starter("run")
    start.environment["OTEL_PROPAGATORS"] = propagators

    with start(program) as child:
        out, err = child.communicate(timeout=50)

    assert child.returncode == 0, err
    assert list(map(json.loads, out.splitlines())) == [bool(propagators), True]


AGENT = Path(__file__).with_name("unaware_agent.py")
REQUESTS = 2 + 20 + 2 + 1 + 1 + 1
DOES_NOTHING_BUT_WAIT = """\
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="k")
def call():
    client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hello"}])
call()
print("ready", flush=True)
sys.stdin.readline()
call()
print("done")
sys.exit(4)
"""


def calls_of(store: Store) -> list[Span]:
    """Every span that is a request to a model."""
    return [span for span in store.spans() if span.operation in c.CALL_OPERATIONS]


@pytest.mark.parametrize("way", [*WAYS, "opentelemetry-instrument with a configurator"])
def test_agent_is_kept_and_exported(
    way: str, starter: Callable[[str], Any], server: DemoServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    """Each request is one span with the server's facts, and the collector gets each span once."""
    start = starter(way.partition(" with ")[0])
    if " with " in way:
        start.configure_sdk(tmp_path / "site")
    start.export_to(endpoint.url)

    with start(AGENT, server.base_url) as child:
        out, err = child.communicate(timeout=50)

    assert child.returncode == 0, err
    assert json.loads(out)["items"] == ["function_call"]
    assert json.loads(out)["error"] == 429
    with duckdb.connect(str(start.store), read_only=True) as con:  # before we look at it
        assert con.sql("SELECT count(*) FROM calls").fetchall() == [(REQUESTS,)]
    spans = Store(start.store).spans().rows()
    recorded = recorded_in(start.store, Host(0, out, err, tuple(server.log)))
    assert len(recorded.calls) == len(server.log) == REQUESTS
    assert call_problems(recorded) == []
    assert {span.kind for span in recorded.calls} == {"CLIENT"}
    assert {span.attributes[c.SERVER_ADDRESS] for span in recorded.calls} == {"127.0.0.1"}
    assert {span.attributes.get(c.ERROR_TYPE) for span in recorded.calls} == {
        *(None, "openai.RateLimitError"),
    }
    assert len({(span.trace_id, span.span_id) for span in spans}) == len(spans)
    assert endpoint.counts() == {span.span_id: 1 for span in spans}
    keys = {attribute.key for span in endpoint.spans for attribute in span.attributes}
    assert not keys & c.CONTENT_KEYS
    assert len({span.rollout_id for span in spans}) == 1


@pytest.mark.parametrize("way", ["auto_trace", "run"])
def test_collector_that_is_down_breaks_nothing(
    way: str, starter: Callable[[str], Any], server: DemoServer, tmp_path: Path
) -> None:
    """Nobody listens at the endpoint: the program ends as it would, its spans are in the store."""
    program = tmp_path / "app.py"
    program.write_text(DOES_NOTHING_BUT_WAIT)
    start = starter(way)
    start.export_to("http://127.0.0.1:9")

    with start(program, server.base_url) as child:
        out, err = child.communicate("\n", timeout=50)

    assert (child.returncode, out) == (4, "ready\ndone\n")
    assert len(calls_of(Store(start.store))) == 2
    assert "Connection refused" in err
    assert "Traceback" not in err
    if way == "run":
        assert "OTLP: 0 spans delivered, 3 NOT delivered: " in err


def test_collector_that_comes_back_gets_each_span_once(
    starter: Callable[[str], Any], server: DemoServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    """What a refusing collector did not take is offered again, and taken once."""
    program = tmp_path / "app.py"
    program.write_text(DOES_NOTHING_BUT_WAIT)
    start = starter("run")
    start.export_to(endpoint.url)
    endpoint.reply = lambda spans, size: Reply(503)

    with start(program, server.base_url) as child:
        assert child.stdout.readline() == "ready\n"
        assert endpoint.asked.acquire(timeout=30)
        endpoint.reply = lambda spans, size: Reply()
        _, err = child.communicate("\n", timeout=50)

    spans = Store(start.store).spans().rows()
    assert child.returncode == 4
    assert len(spans) == 3
    assert endpoint.counts() == {span.span_id: 1 for span in spans}
    assert "  OTLP: 3 spans delivered\n" in err


@pytest.mark.parametrize(
    "way", ["auto_trace", "auto_trace in run", "opentelemetry-instrument in run"]
)
def test_two_ways_at_once_keep_one_span(
    way: str, starter: Callable[[str], Any], server: DemoServer, endpoint: Endpoint, tmp_path: Path
) -> None:
    """One way within another neither doubles a span nor loses one; allowed to, content goes out."""
    program = tmp_path / "app.py"
    program.write_text(DOES_NOTHING_BUT_WAIT)
    start = starter(way.partition(" in ")[0])
    start.export_to(endpoint.url)
    start.environment["LIGHTNING_OTEL_EXPORT_CONTENT"] = "1"
    if way.endswith(" in run"):
        start.put_under_run()

    with start(program, server.base_url) as child:
        child.communicate("\n", timeout=50)

    spans = Store(start.store).spans().rows()
    said = [
        attribute.value.string_value
        for span in endpoint.spans
        for attribute in span.attributes
        if attribute.key == c.INPUT_MESSAGES
    ]
    assert child.returncode == 4
    assert len(calls_of(Store(start.store))) == len(server.log) == len(said) == 2
    assert all("hello" in text for text in said)
    assert len({(span.trace_id, span.span_id) for span in spans}) == len(spans)
    assert endpoint.counts() == {span.span_id: 1 for span in spans}
    assert len({span.rollout_id for span in spans}) == 1


AUTOGEN = """\
import asyncio
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.replay import ReplayChatCompletionClient

agent = AssistantAgent("ann", ReplayChatCompletionClient(["hello"]))
print(asyncio.run(agent.run(task="hi")).messages[-1].content)
"""


@pytest.mark.parametrize("way", WAYS)
def test_making_of_an_agent_is_recorded_in_each_way(
    way: str, starter: Callable[[str], Any], tmp_path: Path
) -> None:
    """Also where the process has no span of its own around it."""
    pytest.importorskip("autogen_agentchat")
    program = tmp_path / "app.py"
    program.write_text(AUTOGEN)
    start = starter(way)

    with start(program) as child:
        out, err = child.communicate(timeout=50)

    assert (child.returncode, out) == (0, "hello\n"), err
    spans = [span for span in Store(start.store).spans() if span.name != c.SPAN_ROLLOUT]
    assert sorted(span.name for span in spans) == ["chat", "create_agent ann", "invoke_agent ann"]
    assert len({span.rollout_id for span in spans}) == 1


@pytest.mark.parametrize(
    ("exporters", "messages"),
    [
        ("duckdbb", ["no exporter 'duckdbb' is installed; did you mean 'duckdb'?"]),
        ("duckdb,xyz", ["no exporter 'xyz' is installed; there are console, duckdb, otlp"]),
        ("console, duckdb", ["no span is sent to console: "]),
        ("console,otlp", ["no span is sent to console, otlp: "]),
        ("duckdb", []),
        ("none", []),
    ],
)
def test_exporter_that_nothing_serves_is_named(
    exporters: str, messages: list[str], starter: Callable[[str], Any], tmp_path: Path
) -> None:
    """Under ``opentelemetry-instrument`` without a distribution; the program runs as ever."""
    program = tmp_path / "app.py"
    program.write_text("print('done')")
    start = starter("opentelemetry-instrument")
    start.command = tuple(exporters if word == "duckdb" else word for word in start.command)

    with start(program) as child:
        out, err = child.communicate(timeout=50)

    assert (child.returncode, out) == (0, "done\n")
    lines = err.splitlines()
    assert len(lines) == len(messages), err
    assert all(message in line for message, line in zip(messages, lines, strict=True)), err
