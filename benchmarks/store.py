"""Cost of keeping spans: for the caller, in settling, with four writers, and over time.

Parts are latency, settle, writers and chats; nothing is synced to the platter.
"""

import argparse
import itertools
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import harness
import orjson
from harness import OURS, Worker, spread, text
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

import lightning_otel
from lightning_otel.types import conventions as c

BARE = "no processor"
BATCH = "BatchSpanProcessor, file"
ARROW = "DuckDB, Arrow batches"
SQLITE = "SQLite WAL, batches"
NAMES = (BARE, OURS, BATCH, ARROW, SQLITE)
SIZES_KB = {0: 200, 2: 200, 16: 100, 64: 50}  # spans of a turn
BATCH_SPANS, INSERT_SPANS = 512, 2048
TIMES = ("start_ns", "end_ns")
COLUMNS = (
    "trace_id", "span_id", "parent_span_id", "name", "kind", *TIMES, "status", "attributes",
    "events", "otel_resource",
)  # fmt: skip
CALL: dict[str, Any] = {
    "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai",
    "gen_ai.request.model": "demo-1", "gen_ai.response.model": "demo-1-2026-11",
    "gen_ai.request.temperature": 0.7, "gen_ai.request.max_tokens": 256,
    "gen_ai.usage.input_tokens": 512, "gen_ai.usage.output_tokens": 128,
    "gen_ai.response.finish_reasons": ["stop"], "openai.api.type": "chat_completions",
    "server.address": "127.0.0.1", "server.port": 8000,
}  # fmt: skip
Row = tuple[Any, ...]
Insert = Callable[[Sequence[Row]], None]


def inserter(name: str, folder: Path) -> tuple[Any, Insert]:
    if name == SQLITE:
        con: Any = sqlite3.connect(folder / "peer.sqlite", timeout=60, isolation_level=None)
        con.execute("PRAGMA journal_mode = WAL")
        con.execute("PRAGMA synchronous = NORMAL")  # survives the process, like ours
    else:
        con = import_module("duckdb").connect(str(folder / "peer.duckdb"))
    types = [f"{name} {'BIGINT' if name in TIMES else 'TEXT'}" for name in COLUMNS]
    con.execute(f"CREATE TABLE IF NOT EXISTS spans ({', '.join(types)})")

    def insert_rows(rows: Sequence[Row]) -> None:
        # IMMEDIATE: two SQLite writers that both begin by reading would deadlock.
        con.execute("BEGIN IMMEDIATE")
        con.executemany(f"INSERT INTO spans VALUES ({', '.join('?' * len(COLUMNS))})", rows)
        con.execute("COMMIT")

    def insert_arrow(rows: Sequence[Row]) -> None:
        columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
        con.register("batch", import_module("pyarrow").table(columns))
        con.execute("INSERT INTO spans SELECT * FROM batch")
        con.unregister("batch")

    return con, insert_arrow if name == ARROW else insert_rows


def row_of(span: Any) -> Row:
    context, parent = span.context, span.parent
    return (
        format(context.trace_id, "032x"), format(context.span_id, "016x"),
        format(parent.span_id, "016x") if parent is not None else None, span.name,
        span.kind.name, span.start_time, span.end_time, span.status.status_code.name,
        orjson.dumps(dict(span.attributes)).decode(),
        orjson.dumps([event.name for event in span.events]).decode(),
        orjson.dumps(dict(span.resource.attributes)).decode(),
    )  # fmt: skip


class Inserting(SpanProcessor):
    def __init__(self, insert: Insert, size: int) -> None:
        self._insert, self._size = insert, size
        self._rows: list[Row] = []

    def on_end(self, span: Any) -> None:
        self._rows.append(row_of(span))
        if len(self._rows) >= self._size:
            self.shutdown()

    def shutdown(self) -> None:
        if self._rows:
            self._insert(self._rows)
            self._rows = []


class Writer:
    def __init__(self, name: str, folder: Path, seed: int = 0, processor: Any = None) -> None:
        self.name, self.folder = name, folder
        self.provider = TracerProvider()
        trace.set_tracer_provider(self.provider)
        if name == BATCH:
            file = (folder / f"spans-{os.getpid()}.jsonl").open("a")
            write_line = lambda span: span.to_json(indent=None) + "\n"  # noqa: E731
            processor = BatchSpanProcessor(ConsoleSpanExporter(out=file, formatter=write_line))
        elif name in (ARROW, SQLITE) and processor is None:
            processor = Inserting(inserter(name, folder)[1], BATCH_SPANS)
        if processor is not None:
            self.provider.add_span_processor(processor)
        # Under the name and in the JSON of our own instrumentors: such calls cost us most.
        self.tracer = self.provider.get_tracer("lightning_otel")
        self._seed = seed * 1_000_003

    def recording(self) -> Any:
        if self.name == OURS:
            return lightning_otel.auto_trace(store=str(self.folder / "traces.duckdb"))
        return self.tracer.start_as_current_span("rollout")

    def make(self, spans: int) -> int:
        return sum(self.rollout() for _ in range(0, spans, 10))

    def rollout(self) -> int:
        tracer = self.tracer
        history = f"{self._message('system', 200)},{self._message('user', 300)}"
        with self.recording():
            agent = {c.OPERATION: "invoke_agent", c.AGENT_NAME: "planner"}
            with tracer.start_as_current_span("invoke_agent planner", attributes=agent):
                for turn in range(5):
                    reply = self._message("assistant", 230)
                    span = start_call(tracer, self._seed)
                    said = {c.INPUT_MESSAGES: f"[{history}]", c.OUTPUT_MESSAGES: f"[{reply}]"}
                    span.set_attributes(said)
                    span.end()
                    given = self._message("tool" if turn in (1, 3) else "user", 300)
                    history = f"{history},{reply},{given}"
                    if turn in (1, 3):
                        tool = {c.OPERATION: "execute_tool", c.TOOL_NAME: "search"}
                        tool[c.TOOL_RESULT] = given
                        tracer.start_span("execute_tool search", attributes=tool).end()
            reward = {c.REWARD_NAME: "primary", c.REWARD_VALUE: 0.5}
            tracer.start_span("agentlightning.annotation", attributes=reward).end()
        return 10

    def _message(self, role: str, size: int) -> str:
        self._seed += 1
        return message(role, size, self._seed)


def start_call(tracer: Any, number: int) -> Any:
    attributes = {**CALL, "gen_ai.response.id": f"chatcmpl-{number}"}
    return tracer.start_span("chat demo-1", attributes=attributes)


def message(role: str, size: int, seed: int) -> str:
    return f'{{"role":"{role}","parts":[{{"type":"text","content":"{text(size, seed)}"}}]}}'


def kept(name: str, folder: Path) -> int:
    if name == BATCH:
        return sum(path.read_bytes().count(b"\n") for path in folder.glob("*.jsonl"))
    query = "SELECT count(*) AS n FROM spans"
    if name == OURS:
        return int(lightning_otel.Store(folder / "traces.duckdb").sql(query).rows()[0]["n"])
    return int(inserter(name, folder)[0].execute(query).fetchone()[0])


def time_ends(name: str, folder: str) -> None:
    writer = Writer(name, Path(folder))
    texts = {size: [json.dumps(text(size << 10, n)) for n in range(32)] for size in SIZES_KB}
    numbers = itertools.count(1)

    def make(size: int) -> None:
        span = start_call(writer.tracer, number := next(numbers))
        if size:
            span.set_attribute(c.INPUT_MESSAGES, texts[size][number % 32])
        span.end()

    with writer.recording():
        runs = {f"{size} KB": lambda size=size: make(size) for size in SIZES_KB}
        harness.take_turns(runs, writer.provider.force_flush)


def write(folder: str, spans: int, seed: int) -> int:
    return Writer(OURS, Path(folder), seed).make(spans)


def record(folder: object, spans: int) -> int:
    work = {"part": "write", "folder": folder, "spans": spans // 2}
    return sum(each.result() for each in [Worker(__file__, seed=seed, **work) for seed in (1, 2)])


def settle(folder: str, *, compact: bool = True) -> object:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    store = lightning_otel.Store(Path(folder) / "traces.duckdb")
    found: dict[str, object] = {}
    old: dict[Path, int] = {}
    for verb in ("settle", "compact") if compact else ("settle",):
        cost = harness.cost_of(getattr(store, verb))
        files = {path: path.stat().st_size for path in Path(folder).rglob("*.parquet")}
        # Files that were replaced stay for a while.
        new = {path: size for path, size in files.items() if path not in old}
        old = new or old
        found[verb] = (*cost, sum(old.values()))
    return found


def insert(name: str, folder: str, spans: int) -> object:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    con, insert_batch = inserter(name, Path(folder))
    used = worst = 0.0

    def timed(rows: Sequence[Row]) -> None:
        nonlocal used, worst
        began = time.process_time()
        insert_batch(rows)
        took = time.process_time() - began
        used, worst = used + took, max(worst, took)

    writer = Writer(name, Path(folder), processor=Inserting(timed, INSERT_SPANS))
    made = writer.make(spans)
    writer.provider.shutdown()
    used += harness.cost_of(con.close)[1]
    size = sum(path.stat().st_size for path in Path(folder).iterdir())
    return made, used, harness.peak_mb(), size, worst


def write_flat_out(name: str, folder: str, begin_s: float, seconds: float, seed: int) -> object:
    writer = Writer(name, Path(folder), seed)
    warm = writer.rollout()
    time.sleep(max(0.0, begin_s - time.time()))
    used, made = time.process_time(), 0
    while time.time() < begin_s + seconds:
        made += writer.rollout()
    used = time.process_time() - used
    writer.provider.shutdown()
    return made + warm, made / used


def chat(folder: str, count: int, turns: int) -> float:
    store = lightning_otel.Store(Path(folder) / "traces.duckdb")
    histories: list[list[str]] = [[] for _ in range(count)]
    sent = number = 0
    for turn in range(turns):
        for chat, history in enumerate(histories):
            number += 1
            history.append(message("user", 500, 2 * number))
            answer = message("assistant", 500, 2 * number + 1)
            said = {c.INPUT_MESSAGES: f"[{','.join(history)}]", c.OUTPUT_MESSAGES: f"[{answer}]"}
            history.append(answer)
            sent += sum(map(len, said.values()))
            start_ns = 1_700_000_000_000_000_000 + number * 1_000_000_000
            attributes = {**CALL, c.AGENT_NAME: "planner", **said}
            ids, ends = (f"{chat + 1:032x}", f"{number:016x}", None), start_ns + 500_000_000
            facts: dict[str, Any] = {"attributes": attributes, "sequence": turn}
            store.add([lightning_otel.Span(*ids, "chat demo-1", start_ns, ends, **facts)])
    return sent / (1000 * count * turns)


def latency(options: argparse.Namespace) -> object:
    with tempfile.TemporaryDirectory() as folder:
        start = partial(Worker, __file__, part="time_ends")
        workers = {name: start(name=name, folder=tempfile.mkdtemp(dir=folder)) for name in NAMES}
        scenarios = {f"{size} KB": count for size, count in SIZES_KB.items()}
        times = harness.compare(workers, scenarios, 4 if options.quick else 20)
    peers = [name for name in NAMES if name not in (BARE, OURS)]
    title = "Microseconds of CPU that keeping adds to a span in its thread: median of turns (range)"
    harness.show_added(title, times, BARE, peers)
    return times


def settling(options: argparse.Namespace) -> object:
    spans = 20_000 if options.quick else 200_000
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        made = record(folder, spans)
        found = Worker(__file__, part="settle", folder=folder).result()
        for verb, (_, cpu_s, peak, size) in found.items():
            figures[f"{OURS}, {verb}"] = (made, cpu_s, peak, size, 0.0)
    for name in (SQLITE, ARROW):
        with tempfile.TemporaryDirectory() as folder:
            work = {"name": name, "folder": folder, "spans": spans}
            figures[name] = Worker(__file__, part="insert", **work).result()
    ours = figures[f"{OURS}, settle"]
    harness.table(
        "Spans into their final form, on one core",
        ["way", "spans", "spans a CPU s", "peak MB", "bytes a span", "stall s", "settle / this"],
        [
            (name, f"{n:,}", f"{n / cpu:,.0f}", f"{peak:,.0f}", f"{size / n:,.0f}", f"{worst:.2f}",
             f"{ours[1] / ours[0] / (cpu / n):.2f}")
            for name, (n, cpu, peak, size, worst) in figures.items()
        ],
    )  # fmt: skip
    return figures


def writers(options: argparse.Namespace) -> object:
    seconds, rounds = (2, 1) if options.quick else (8, 3)
    names = (BARE, OURS, BATCH, SQLITE)
    made, rates = ({name: list[float]() for name in names} for _ in range(2))
    lost: dict[str, float] = {}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            harness.say(f"round {number + 1} of {rounds}, four writers for {seconds} s: {name}")
            with tempfile.TemporaryDirectory() as folder:
                inserter(SQLITE, Path(folder))[0].close()
                work = {"part": "write_flat_out", "folder": folder, "begin_s": time.time() + 6}
                work |= {"name": name, "seconds": seconds}
                crew = [Worker(__file__, seed=seed, **work) for seed in range(4)]
                found = [each.result() for each in crew]
                total = sum(one for one, _ in found)
                lost[name] = 0.0 if name == BARE else 1 - kept(name, Path(folder)) / total
            made[name].append(total / seconds)
            rates[name].append(sum(rate for _, rate in found) / 4)
    rows = []
    for name in names:
        ratio = f"{median(rates[name]) / median(rates[BARE]):.2f}"
        rows.append((name, spread(made[name]), f"{lost[name]:.1%}", spread(rates[name]), ratio))
    title = "Four processes that record flat out, the making of the spans included: median (range)"
    head = ["writer", "spans/s", "lost", "made a CPU s", "of the SDK alone"]
    harness.table(title, head, rows)
    return {"spans_s": made, "made_a_cpu_s": rates}


def chats(options: argparse.Namespace) -> object:
    figures, turns = {}, 40 if options.quick else 200
    for count in (4,) if options.quick else (1, 20):
        with tempfile.TemporaryDirectory() as folder:
            sent = Worker(__file__, part="chat", folder=folder, count=count, turns=turns).result()
            found = Worker(__file__, part="settle", folder=folder).result()
        sizes = [found[verb][3] / (1000 * count * turns) for verb in ("settle", "compact")]
        figures[count] = [sent, *sizes, *found["compact"][1:3]]
    rows = [(count, *(f"{value:,.2f}" for value in found)) for count, found in figures.items()]
    head = ("at once", "sent", "settled", "compact", "compact CPU s", "peak MB")
    harness.table(f"Chats of {turns} turns of 1 KB, as multiples of their unique text", head, rows)
    return figures


def main(options: argparse.Namespace) -> None:
    parts = {"latency": latency, "settle": settling, "writers": writers, "chats": chats}
    figures = {name: parts[name](options) for name in options.only or parts}
    harness.finish(options, figures, "opentelemetry-sdk", "duckdb", "pyarrow")


if __name__ == "__main__":
    harness.run(main, time_ends, write, settle, insert, write_flat_out, chat)
