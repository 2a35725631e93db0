"""What the store's tests share: spans by number, and Python in a process of its own."""

import base64
import contextlib
import itertools
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import Tracer
from tests.listening import Handler, listen

from lightning_otel import Store
from lightning_otel.store import settle
from lightning_otel.store.layout import Layout
from lightning_otel.store.writer import SpanWriter
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

MakeSpan = Callable[..., Span]
Rollout = Callable[..., list[Span]]
Write = Callable[[Iterable[Span]], Path]
Settled = Write
Start = Callable[[str], "subprocess.Popen[str]"]


TEXT = "hunter2-of-alice"
RECORDER = f"""
import contextlib, sys, threading
from lightning_otel import auto_trace, emit_message
from lightning_otel.store.layout import Layout
from lightning_otel.store.maintenance import maintain_store
is_told, kind = threading.Event(), sys.argv[2]
threading.Thread(target=lambda: (sys.stdin.readline(), is_told.set())).start()
served = maintain_store(Layout(sys.argv[1]), period_s=0.05)
with auto_trace(store=sys.argv[1], rollout_id="over"):
    emit_message("{TEXT}")
with auto_trace(store=sys.argv[1], rollout_id="other"):
    emit_message("hello")
    print("ready", flush=True)
    with served if kind == "served" else contextlib.nullcontext():
        while not is_told.wait(0.01):
            if kind == "busy":
                emit_message("and so on")
    emit_message("once more")
    print("more", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def start(layout: Layout) -> Iterator[Start]:
    """``start("busy")``: a process that has recorded ``over``, and writes on; others wait."""
    children: list[subprocess.Popen[str]] = []

    def start(kind: str) -> "subprocess.Popen[str]":
        child = subprocess.Popen(
            [sys.executable, "-c", RECORDER, str(layout.catalogue), kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate(timeout=20)


def go_on(child: "subprocess.Popen[str]") -> None:
    """Have such a process write once more, or end, if it has done that."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("go on\n")
    child.stdin.flush()
    child.stdout.readline()


def find_text(layout: Layout, text: str) -> list[str]:
    """Return the names of files of a store that hold a text, Parquet as it reads."""
    names = []
    for path in sorted([layout.catalogue, *layout.root.rglob("*")]):
        content = path.read_bytes() if path.is_file() else b""
        if path.suffix == ".parquet":
            content = str(duckdb.sql(f"FROM read_parquet('{path}')").fetchall()).encode()
        if text.encode() in content:
            names.append(path.name)
    return names


@contextlib.contextmanager
def refuse_segments(layout: Layout) -> Iterator[None]:
    """A block in which the disk takes no segment."""
    layout.live.rename(layout.root / "away")
    layout.live.write_text("in the way")
    yield
    layout.live.unlink()
    (layout.root / "away").rename(layout.live)


@pytest.fixture
def make_span() -> MakeSpan:
    """A function that makes a span with ids of its own, and whatever else it is told."""
    numbers = itertools.count(1)

    def make(**changes: Any) -> Span:
        number = next(numbers)
        fields: dict[str, Any] = {
            "trace_id": f"{number:032x}",
            "span_id": f"{number:016x}",
            "parent_span_id": None,
            "name": "work",
            "start_ns": 1_000 * number,
            "end_ns": 1_000 * number + 500,
        }
        return Span(**{**fields, **changes})

    return make


class _Feed(SpanProcessor):
    """Hands every span of a provider to one writer."""

    def __init__(self, writer: SpanWriter) -> None:
        self._writer = writer

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._writer.started(span)

    def on_end(self, span: ReadableSpan) -> None:
        self._writer.ended(span, {})


@pytest.fixture
def tracer_of() -> Callable[[SpanWriter], Tracer]:
    """A function that gives a tracer whose spans go to a writer."""

    def make(writer: SpanWriter) -> Tracer:
        provider = TracerProvider()
        provider.add_span_processor(_Feed(writer))
        return provider.get_tracer("test")

    return make


@pytest.fixture(scope="session")
def clickhouse_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of ClickHouse's HTTP interface, with its real engine behind it.

    A server is not to be had from an index, its engine is; so HTTP is spoken here, and every query
    is answered by the engine.
    """
    import chdb

    connection = chdb.connect(str(tmp_path_factory.mktemp("clickhouse")))
    with listen(_ClickHouseDoor, engine=connection) as url:
        yield int(url.rpartition(":")[2])
    connection.close()


@pytest.fixture
def clickhouse_url(request: pytest.FixtureRequest) -> str:
    """The URL of a database of its own in ClickHouse's engine, where that is installed."""
    pytest.importorskip("chdb")
    place = f"127.0.0.1:{request.getfixturevalue('clickhouse_port')}"
    database = f"db{abs(hash(request.node.nodeid))}"
    return f"clickhouse://someone:secret@{place}/{database}?table=otel_traces"


class _ClickHouseDoor(Handler):
    """Passes on what comes over HTTP to the engine."""

    protocol_version = "HTTP/1.1"
    engine: Any
    turn = threading.Lock()  # the engine's settings are those of one query

    def do_POST(self) -> None:
        body = self.read_body()
        options = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        status, answer = 200, b""
        expected = "Basic " + base64.b64encode(b"someone:secret").decode()
        if self.headers.get("Authorization") != expected:
            status, answer = 403, b"Code: 516. DB::Exception: Authentication failed."
        else:
            try:
                answer = self._asked(body, options)
            except Exception as exc:  # noqa: BLE001  # whatever it says is the answer
                status, answer = 500, str(exc).encode()
        self.send(answer, status=status)

    def _asked(self, body: bytes, options: dict[str, str]) -> bytes:
        head, _, data = body.partition(b"FORMAT Parquet\n")
        with self.turn, tempfile.NamedTemporaryFile(suffix=".parquet") as file:
            for name, value in options.items():
                self.engine.query(f"SET {name} = '{value}'")
            text = body.decode("utf-8", "replace")
            if data:
                file.write(data)
                file.flush()
                text = f"{head.decode()} SELECT * FROM file('{file.name}', Parquet)"
            answer: bytes = self.engine.query(text, "TabSeparated").bytes()
            return answer


@pytest.fixture(scope="session")
def rollout() -> Rollout:
    """A function that makes the spans of the rollout of a number, told apart by it."""
    return _rollout


def _rollout(number: int, calls: int = 3) -> list[Span]:
    """A rollout of two agents with tool calls, and a reward each."""
    ids = (f"{number + 1:08x}{each:08x}" for each in itertools.count(1))
    clock = itertools.count((1_790_000_000 + number * 100) * 10**9, 1_000_001)
    sequence = itertools.count(1)
    found: list[Span] = []

    def add(name: str, parent: Span | None, attributes: dict[str, Any], **more: Any) -> Span:
        span = Span(
            trace_id=f"{number + 1:032x}",
            span_id=next(ids),
            parent_span_id=parent and parent.span_id,
            name=name,
            start_ns=next(clock),
            end_ns=next(clock),
            attributes={c.ROLLOUT_ID: f"rollout-{number}", c.ATTEMPT_ID: "1", **attributes},
            otel_resource={"service.name": "träger", "process.pid": 4711, "sdk.version": "1.45"},
            scope=c.SCOPE,
            process="boot-1-2",
            sequence=next(sequence),
            end_sequence=next(sequence),
            **more,
        )
        found.append(span)
        return span

    message = '[{"role":"%s","parts":[{"type":"text","content":"%s"}]}]'
    root = add(c.SPAN_ROLLOUT, None, {c.TASK: '{"question": "wie viele?"}'})
    said = f"rollout {number}: ünï 😀"
    for index in range(calls):
        said += f" turn {index}"
        told = {
            c.OPERATION: c.CHAT, c.AGENT_NAME: f"agent-{index % 2}", c.PROVIDER: "openai",
            c.REQUEST_MODEL: "model", c.RESPONSE_MODEL: "model-1",
            c.RESPONSE_ID: f"response-{number}-{index}", c.REQUEST_TEMPERATURE: 1.0,
            c.INPUT_TOKENS: 100 + index, c.OUTPUT_TOKENS: 7, c.FINISH_REASONS: ["stop"],
            c.INPUT_MESSAGES: message % ("user", said),
            c.OUTPUT_MESSAGES: message % ("assistant", "so"),
            c.SYSTEM_INSTRUCTIONS: '[{"type":"text","content":"be brief"}]',
        }  # fmt: skip
        call = add("chat model-1", root, told, kind="CLIENT")
        add("execute_tool add", call, {c.OPERATION: c.EXECUTE_TOOL})
        add(c.SPAN_ANNOTATION, root, {c.REWARD_NAME: "primary", c.REWARD_VALUE: index / 4})
    return found


@pytest.fixture
def write(store: Store) -> Write:
    """A function that writes spans into a sealed segment of their own."""
    layout = store.layout
    assert layout is not None
    layout.create()

    def write(spans: Iterable[Span]) -> Path:
        writer = SpanWriter(layout)
        for span in spans:
            writer.add(span)
        writer.seal()
        return writer.paths[0]

    return write


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is settled counts from the next look on, and is unlinked by the next settler."""
    monkeypatch.setattr(settle, "COMMIT_AHEAD_US", 2)
    monkeypatch.setattr(settle, "GRACE_US", 0)


@pytest.fixture
def settled(store: Store, write: Write, monkeypatch: pytest.MonkeyPatch) -> Write:
    """A function that has spans settled into a file of their own, in effect; gives the file."""
    layout = store.layout
    assert layout is not None
    monkeypatch.setattr(settle, "COMMIT_AHEAD_US", 2_000)

    def settled(spans: Iterable[Span]) -> Path:
        write(spans)
        store.settle()
        settle.wait_until_visible(layout)
        return layout.data / layout.read_manifest().live_files[-1].name

    return settled
