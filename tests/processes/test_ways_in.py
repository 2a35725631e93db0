"""One agent that knows nothing of us, in each way in: each request one span, as the server saw it.

And the same spans at an OTLP endpoint: each once, without what people wrote.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import duckdb
import pytest

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.demo.server import DemoServer, Exchange
from lightning_otel.messages import parse_messages, plain_text
from lightning_otel.types import Span

AGENT = Path(__file__).with_name("unaware_agent.py")
WAYS = ["auto_trace", "run", "opentelemetry-instrument"]
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


def matched(spans: list[Span], log: list[Exchange]) -> list[tuple[Span, Exchange]]:
    """Each exchange with its span: by response id, else by what was asked."""
    by_id = {
        span.attributes[c.RESPONSE_ID]: span for span in spans if c.RESPONSE_ID in span.attributes
    }
    others = {
        span.attributes[c.REQUEST_MODEL] + str(span.operation): span
        for span in spans
        if c.RESPONSE_ID not in span.attributes
    }
    found = []
    for exchange in log:
        assert exchange.request is not None
        operation = "embeddings" if "embeddings" in exchange.path else "chat"
        key = exchange.request["model"] + operation
        found.append(
            (by_id[exchange.response_id] if exchange.response_id else others[key], exchange)
        )
    return found


def asked(request: Mapping[str, Any]) -> list[str]:
    """The texts of a request, in order, as the API spells them."""
    if "input" in request:
        return [str(request.get("instructions")), request["input"]]
    return [message["content"] for message in request["messages"] if message.get("content")]


def answered(response: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The text and the names of the tools in an answer of either API."""
    if "output" in response:
        items = response["output"]
        return "", [item["name"] for item in items if item["type"] == "function_call"]
    message = response["choices"][0]["message"]
    tools = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    return message.get("content") or "", tools


def check_facts(span: Span, exchange: Exchange) -> None:
    """Everything the span says is what the server saw and answered."""
    request, response = exchange.request, exchange.response
    assert request is not None
    get = span.attributes.get
    assert get(c.REQUEST_MODEL) == request["model"]
    assert get(c.REQUEST_TEMPERATURE) == request.get("temperature")
    assert get(c.SERVER_ADDRESS) == "127.0.0.1"
    assert bool(get(c.REQUEST_STREAM)) == exchange.is_stream
    assert span.kind == "CLIENT"
    assert span.end_ns is not None
    if exchange.status != 200:
        assert (span.status, get(c.ERROR_TYPE)) == ("ERROR", "openai.RateLimitError")
        return
    assert span.status == "UNSET"
    if "embeddings" in exchange.path:
        assert response is not None
        assert get(c.INPUT_TOKENS) == response["usage"]["prompt_tokens"]
        return
    messages = parse_messages(get(c.INPUT_MESSAGES)) or ()
    system = [part["content"] for part in json.loads(get(c.SYSTEM_INSTRUCTIONS, "[]"))]
    texts = [part.get("content", part.get("response")) for m in messages for part in m["parts"]]
    assert [*system, *filter(None, texts)] == asked(request)
    if get(c.ABANDONED):
        assert request["model"] == "big"
        return
    assert response is not None
    check_answer(span, response)


def check_answer(span: Span, response: Mapping[str, Any]) -> None:
    """The answer, its usage, its ids."""
    get = span.attributes.get
    text, tools = answered(response)
    (message,) = parse_messages(get(c.OUTPUT_MESSAGES)) or ()
    assert [part["name"] for part in message["parts"] if part["type"] == "tool_call"] == tools
    if not tools:
        assert plain_text([message]) == text
    usage = response["usage"]
    assert get(c.INPUT_TOKENS) == usage.get("prompt_tokens", usage.get("input_tokens"))
    assert get(c.OUTPUT_TOKENS) == usage.get("completion_tokens", usage.get("output_tokens"))
    assert (c.PROMPT_TOKEN_IDS in span.attributes) == bool(response.get("prompt_token_ids"))
    wanted = "tool_calls" if tools else "stop"
    assert list(get(c.FINISH_REASONS, ())) == [wanted]


@pytest.mark.parametrize("way", [*WAYS, "opentelemetry-instrument with a configurator"])
def test_agent_is_kept_and_exported(
    way: str, starter: Callable[[str], Any], server: DemoServer, collector: Any, tmp_path: Path
) -> None:
    """Each request is one span with the server's facts, and the collector gets each span once."""
    start = starter(way.partition(" with ")[0])
    if " with " in way:
        start.configure_sdk(tmp_path / "site")
    start.export_to(collector.endpoint)

    with start(AGENT, server.base_url) as child:
        out, err = child.communicate(timeout=50)

    assert child.returncode == 0, err
    assert json.loads(out)["items"] == ["function_call"]
    assert json.loads(out)["error"] == 429
    with duckdb.connect(str(start.store), read_only=True) as con:  # before we look at it
        assert con.sql("SELECT count(*) FROM calls").fetchall() == [(REQUESTS,)]
    store = Store(start.store)
    spans = store.spans().rows()
    calls = calls_of(store)
    assert len(calls) == len(server.log) == REQUESTS
    assert len({(span.trace_id, span.span_id) for span in spans}) == len(spans)
    pairs = matched(calls, server.log)
    assert len({span.span_id for span, _ in pairs}) == REQUESTS
    for span, exchange in pairs:
        check_facts(span, exchange)
    assert collector.counts() == {(span.trace_id, span.span_id): 1 for span in spans}
    assert not collector.keys() & c.CONTENT_KEYS
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
    starter: Callable[[str], Any], server: DemoServer, collector: Any, tmp_path: Path
) -> None:
    """What a refusing collector did not take is offered again, and taken once."""
    program = tmp_path / "app.py"
    program.write_text(DOES_NOTHING_BUT_WAIT)
    start = starter("run")
    start.export_to(collector.endpoint)
    collector.is_refusing = True

    with start(program, server.base_url) as child:
        assert child.stdout.readline() == "ready\n"
        assert collector.refused.wait(30)
        collector.is_refusing = False
        _, err = child.communicate("\n", timeout=50)

    spans = Store(start.store).spans().rows()
    assert child.returncode == 4
    assert len(spans) == 3
    assert collector.counts() == {(span.trace_id, span.span_id): 1 for span in spans}
    assert "  OTLP: 3 spans delivered\n" in err


@pytest.mark.parametrize(
    "way", ["auto_trace", "auto_trace in run", "opentelemetry-instrument in run"]
)
def test_two_ways_at_once_keep_one_span(
    way: str, starter: Callable[[str], Any], server: DemoServer, collector: Any, tmp_path: Path
) -> None:
    """One way within another neither doubles a span nor loses one; allowed to, content goes out."""
    program = tmp_path / "app.py"
    program.write_text(DOES_NOTHING_BUT_WAIT)
    start = starter(way.partition(" in ")[0])
    start.export_to(collector.endpoint)
    start.environment["LIGHTNING_OTEL_EXPORT_CONTENT"] = "1"
    if way.endswith(" in run"):
        start.put_under_run()

    with start(program, server.base_url) as child:
        child.communicate("\n", timeout=50)

    spans = Store(start.store).spans().rows()
    said = [
        attribute.value.string_value
        for span in collector.spans
        for attribute in span.attributes
        if attribute.key == c.INPUT_MESSAGES
    ]
    assert child.returncode == 4
    assert len(calls_of(Store(start.store))) == len(server.log) == len(said) == 2
    assert all("hello" in text for text in said)
    assert len({(span.trace_id, span.span_id) for span in spans}) == len(spans)
    assert collector.counts() == {(span.trace_id, span.span_id): 1 for span in spans}
    assert len({span.rollout_id for span in spans}) == 1
