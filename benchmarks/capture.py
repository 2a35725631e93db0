"""What capturing a call of the ``openai`` client adds to it, beside three other instrumentors.

Each instrumentor has a process of its own, with two copies of the ``openai`` package in it: one
instrumented, one plain. Plain and instrumented calls alternate, the order flips with each pair, and
the median of the paired differences is what counts. The network is a transport in memory. Peers
hand their spans to a ``BatchSpanProcessor`` with an exporter that does nothing; ours are recorded
into a segment file on disk.
"""

import argparse
import asyncio
import gc
import json
import random
import re
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import peers

OURS = "lightning-otel"
CONTROL = "control (none)"
PEERS = {
    "official": "opentelemetry-instrumentation-genai-openai",
    "openinference": "openinference-instrumentation-openai",
    "openllmetry": "opentelemetry-instrumentation-openai",
}
REQUIREMENTS = (
    "openai==3.52.0",
    # openai breaks when a pre-release of the old httpx is importable.
    "httpx<1",
    "opentelemetry-sdk==1.45.2",
    "opentelemetry-instrumentation==0.66b2",
    "opentelemetry-semantic-conventions==0.66b2",
    "opentelemetry-util-genai==1.3b0",
    "opentelemetry-instrumentation-genai-openai==1.3b0",
    "openinference-instrumentation-openai==0.1.66",
    "opentelemetry-instrumentation-openai==0.62.4",
    "-e",
    str(peers.ROOT),
)
SETTINGS = {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "SPAN_ONLY"}
"""Content on spans: off by default in the official one, on by default in the other two."""
PLAIN = "plain_openai"
MARK = "the-last-words-of-the-request"
CHUNKS = 200


class Scenario(NamedTuple):
    """One shape of call."""

    name: str
    request: dict[str, Any]
    pairs: int
    is_stream: bool = False
    is_async: bool = False


def scenarios(*, is_quick: bool) -> list[Scenario]:
    """The calls to time, and how many pairs of each in a round."""
    less = 5 if is_quick else 1
    return [
        Scenario("2 KB history", short_history(), 1000 // less),
        Scenario("2 KB history, async", short_history(), 1000 // less, is_async=True),
        Scenario("50 KB history, tools", long_history(), 250 // less),
        Scenario(f"stream of {CHUNKS} chunks", short_history(), 100 // less, is_stream=True),
    ]


def words(size: int, seed: int) -> str:
    """Random words of about as many bytes in all."""
    rng = random.Random(seed)
    found: list[str] = []
    while size > 0:
        found.append("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))))
        size -= len(found[-1]) + 1
    return " ".join(found)


def short_history() -> dict[str, Any]:
    """Six messages of 2 KB in all."""
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    messages = [{"role": role, "content": words(290, seed)} for seed, role in enumerate(roles)]
    messages[-1]["content"] += " " + MARK
    return {"model": "demo-1", "messages": messages, "temperature": 0.7, "max_tokens": 256}


def long_history() -> dict[str, Any]:
    """66 messages of 50 KB in all, every other exchange through a tool, and four tools."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": words(900, 0)}]
    for turn in range(16):
        call = {
            "id": f"call_{turn}",
            "type": "function",
            "function": {"name": "search", "arguments": json.dumps({"query": words(400, turn)})},
        }
        messages += [
            {"role": "user", "content": words(700, 100 + turn)},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": words(900, 200 + turn)},
            {"role": "assistant", "content": words(700, 300 + turn)},
        ]
    messages.append({"role": "user", "content": words(300, 1) + " " + MARK})
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": words(120, seed),
                "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
            },
        }
        for seed, name in enumerate(("search", "read", "write", "run"))
    ]
    return {"model": "demo-1", "messages": messages, "tools": tools, "temperature": 0.7}


def answer() -> bytes:
    """A whole answer of 400 bytes of text."""
    message = {"role": "assistant", "content": words(400, 7)}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 500, "completion_tokens": 80, "total_tokens": 580}
    return json.dumps({**_head("chat.completion"), "choices": [choice], "usage": usage}).encode()


def chunks() -> list[bytes]:
    """The same as server-sent events."""
    events: list[dict[str, Any]] = []
    for number in range(CHUNKS):
        is_last = number == CHUNKS - 1
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": f"word{number} "},
            "finish_reason": "stop" if is_last else None,
        }
        events.append({**_head("chat.completion.chunk"), "choices": [choice]})
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [
        b"data: [DONE]\n\n"
    ]


def _head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-benchmark", "object": kind, "created": 1, "model": "demo-1"}


# --- the worker: one instrumentor, one process ---------------------------------------------------


class Calls:
    """The calls of one copy of ``openai``, over a transport in memory."""

    def __init__(self, openai: Any) -> None:
        import httpx2

        self._client = openai.OpenAI(
            api_key="none", http_client=httpx2.Client(transport=httpx2.MockTransport(_handle))
        )
        self._async_client = openai.AsyncOpenAI(
            api_key="none",
            http_client=httpx2.AsyncClient(transport=httpx2.MockTransport(_handle_async)),
        )

    def plain(self, request: dict[str, Any]) -> None:
        self._client.chat.completions.create(**request)

    def stream(self, request: dict[str, Any]) -> None:
        for _ in self._client.chat.completions.create(**request, stream=True):
            pass

    async def asynchronous(self, request: dict[str, Any]) -> None:
        await self._async_client.chat.completions.create(**request)


_ANSWER = answer()
_CHUNKS = chunks()


def _handle(request: Any) -> Any:
    import httpx2

    if b'"stream":true' in request.content:
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=headers, content=_one_by_one())
    return httpx2.Response(200, headers={"content-type": "application/json"}, content=_ANSWER)


def _one_by_one() -> Iterator[bytes]:
    yield from _CHUNKS


async def _handle_async(request: Any) -> Any:
    return _handle(request)


def two_copies(start: Callable[[], None]) -> tuple[Calls, Calls]:
    """A plain and an instrumented set of calls, each on its own copy of ``openai``.

    Switching one copy on and off between calls would time the interpreter's caches instead.
    """
    plain = Calls(import_module(PLAIN))
    start()
    return plain, Calls(import_module("openai"))


def copy_openai() -> None:
    """Put a second copy of ``openai`` beside the first, under a name no instrumentor looks for."""
    packages = Path(sysconfig.get_path("purelib"))
    if (packages / PLAIN).exists():
        return
    made = packages / f"{PLAIN}.new"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(packages / "openai", made, ignore=shutil.ignore_patterns("__pycache__"))
    for path in made.rglob("*.py"):
        text = path.read_text()
        path.write_text(re.sub(r"(?<![\w./@-])openai(?=[. \n])", PLAIN, text))
    made.rename(packages / PLAIN)


def warm_up(calls: Calls) -> None:
    """Each kind of call once."""
    calls.plain(long_history())
    calls.plain(short_history())
    calls.stream(short_history())
    asyncio.run(calls.asynchronous(short_history()))


class Counter:
    """An exporter that only counts, and looks whether the content is there."""

    def __init__(self) -> None:
        self.spans = 0
        self.with_content = 0

    def export(self, spans: Any) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self.spans += len(spans)
        if not self.with_content:
            self.with_content = sum(MARK in str(dict(span.attributes)) for span in spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing to do."""

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


def start_peer(name: str, exporter: Counter) -> Callable[[], None]:
    """Switches one of the peers on, its spans going to the exporter in batches."""

    def start() -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        if name == "official":
            from opentelemetry.instrumentation.genai.openai import OpenAIInstrumentor
        elif name == "openinference":
            from openinference.instrumentation.openai import OpenAIInstrumentor
        else:
            from opentelemetry.instrumentation.openai import OpenAIInstrumentor
        OpenAIInstrumentor().instrument(tracer_provider=provider)

    return start


def worker(name: str, *, is_quick: bool) -> None:
    """Time every scenario under one instrumentor."""
    copy_openai()
    exporter = Counter()
    with tempfile.TemporaryDirectory() as folder:
        if name == OURS:
            import lightning_otel

            recording = lightning_otel.auto_trace(store=str(Path(folder) / "traces.duckdb"))
            plain, instrumented = two_copies(lambda: None)
        else:
            recording = nullcontext()
            plain, instrumented = two_copies(
                (lambda: None) if name == CONTROL else start_peer(name, exporter)
            )
        figures = {}
        with recording as recorded:
            warm_up(plain)
            warm_up(instrumented)
            for scenario in scenarios(is_quick=is_quick):
                figures[scenario.name] = timed(scenario, plain, instrumented)
        calls = 4 + sum(scenario.pairs for scenario in scenarios(is_quick=is_quick))
        check(name, calls, exporter, recorded)
    peers.report(figures)


def check(name: str, calls: int, exporter: Counter, recorded: Any) -> None:
    """Stop if an instrumentor did not do its work, or did it on the plain calls too."""
    if name == CONTROL:
        return
    if name == OURS:
        spans = [span for span in recorded.spans() if span.kind == "CLIENT"]
        found, with_content = len(spans), sum(MARK in str(span.attributes) for span in spans)
    else:
        from opentelemetry import trace

        trace.get_tracer_provider().force_flush()
        found, with_content = exporter.spans, exporter.with_content
    # A peer's queue may have dropped some; one span too many would be a plain call's.
    if not 0.9 * calls < found <= calls or not with_content:
        raise SystemExit(f"{name}: {found} spans of {calls} calls, {with_content} with content")


def timed(scenario: Scenario, plain: Calls, instrumented: Calls) -> dict[str, float]:
    """Median of the paired differences and of the plain calls, in microseconds."""
    gc.collect()
    if scenario.is_async:
        pairs = asyncio.run(_async_pairs(scenario, plain, instrumented))
    else:
        kind = "stream" if scenario.is_stream else "plain"
        pairs = _pairs(scenario, getattr(plain, kind), getattr(instrumented, kind))
    return {
        "added_us": median(after - before for before, after in pairs) / 1e3,
        "plain_us": median(before for before, _ in pairs) / 1e3,
    }


def _pairs(
    scenario: Scenario, plain: Callable[..., None], instrumented: Callable[..., None]
) -> list[tuple[int, int]]:
    clock = time.perf_counter_ns
    pairs = []
    for number in range(scenario.pairs):
        order = (plain, instrumented) if number % 2 else (instrumented, plain)
        marks = [clock()]
        for call in order:
            call(scenario.request)
            marks.append(clock())
        first, second = marks[1] - marks[0], marks[2] - marks[1]
        pairs.append((first, second) if number % 2 else (second, first))
    return pairs


async def _async_pairs(
    scenario: Scenario, plain: Calls, instrumented: Calls
) -> list[tuple[int, int]]:
    clock = time.perf_counter_ns
    pairs = []
    for number in range(scenario.pairs):
        order = (plain, instrumented) if number % 2 else (instrumented, plain)
        marks = [clock()]
        for calls in order:
            await calls.asynchronous(scenario.request)
            marks.append(clock())
        first, second = marks[1] - marks[0], marks[2] - marks[1]
        pairs.append((first, second) if number % 2 else (second, first))
    return pairs


# --- the driver ----------------------------------------------------------------------------------


def main() -> None:
    parser = peers.arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="how often each process is run (default 3)")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, is_quick=options.quick)
        return
    python = peers.environment(options.env, "capture", REQUIREMENTS)
    rounds = options.rounds or (1 if options.quick else 3)
    figures = measured(python, rounds, options)
    show(figures)
    where = peers.facts(python, "openai", "opentelemetry-sdk", *PEERS.values())
    peers.finish(options.json, where, figures)


def measured(
    python: Path, rounds: int, options: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Every round of every instrumentor, one process after the other."""
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in (CONTROL, OURS, *PEERS)}
    flags = ["--quick"] if options.quick else []
    for number in range(rounds):
        for name in figures:
            peers.say(f"round {number + 1} of {rounds}: {name}")
            settings = {} if name == OURS else SETTINGS
            figures[name].append(peers.run(python, __file__, name, *flags, settings=settings))
    return figures


def show(figures: dict[str, list[dict[str, Any]]]) -> None:
    """The table: added microseconds, and ours as a multiple of the best peer."""
    rows = []
    for scenario in figures[OURS][0]:
        added = {
            name: [one[scenario]["added_us"] for one in rounds] for name, rounds in figures.items()
        }
        base = [one[scenario]["plain_us"] for rounds in figures.values() for one in rounds]
        rows.append(
            [
                f"{scenario} ({median(base):,.0f})",
                *(peers.with_spread(added[name]) for name in figures),
                *(
                    peers.ratio(middle(added[OURS]), min(middle(added[name]) for name in PEERS))
                    for middle in (median, min)
                ),
            ]
        )
    peers.table(
        "Microseconds added to a call, content on: median of rounds (lowest to highest)",
        ["scenario (plain call)", *figures, "ours / best peer", "by lowest rounds"],
        rows,
    )


if __name__ == "__main__":
    main()
