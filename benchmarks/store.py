"""What keeping spans costs: on the caller's thread, in settling, and with four writers at once.

Every writer is fed by the OpenTelemetry SDK. Each measurement runs in a process of its own, one
after the other; nothing is synced to the platter by any of them, all survive the death of the
process from the moment named in the table.
"""

import argparse
import gc
import itertools
import json
import os
import random
import resource
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import peers

REQUIREMENTS = (
    "duckdb==2.0.0",
    "opentelemetry-sdk==1.45.2",
    "opentelemetry-instrumentation==0.66b2",
    "opentelemetry-semantic-conventions==0.66b2",
    "pyarrow==26.0.1",
    "-e",
    str(peers.ROOT),
)
OURS = "lightning-otel"
BARE = "no processor"
BATCH = "BatchSpanProcessor, file"
SIMPLE = "SimpleSpanProcessor, file"
DUCKDB_ARROW = "DuckDB, Arrow batches"
DUCKDB_ROWS = "DuckDB, executemany"
SQLITE = "SQLite WAL, batches"
DURABLE = {
    OURS: "at once",
    BATCH: "≤ 5 s later",
    SIMPLE: "at once",
    DUCKDB_ARROW: "with the batch",
    DUCKDB_ROWS: "with the batch",
    SQLITE: "with the batch",
    BARE: "never",
}
SIZES_KB = (0, 2, 16, 64)
BATCH_SPANS = 512
INSERT_BATCH = 2048
COLUMNS = (
    *("trace_id", "span_id", "parent_span_id", "name", "kind", "start_ns", "end_ns", "status"),
    *("attributes", "events", "otel_resource"),
)
_INTEGERS = ("start_ns", "end_ns")
TABLE = "CREATE TABLE IF NOT EXISTS spans ({})".format(
    ", ".join(f"{name} {'BIGINT' if name in _INTEGERS else 'TEXT'}" for name in COLUMNS)
)
INSERT = f"INSERT INTO spans VALUES ({', '.join('?' * len(COLUMNS))})"


# --- where spans can go --------------------------------------------------------------------------


class FileExporter:
    """Appends each span's own JSON to a file."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"spans-{os.getpid()}.jsonl").open("a")

    def export(self, spans: Any) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._file.write("".join(span.to_json(indent=None) + "\n" for span in spans))
        self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


def row_of(span: Any) -> tuple[Any, ...]:
    """A span's columns."""
    import orjson

    context, parent = span.context, span.parent
    return (
        format(context.trace_id, "032x"),
        format(context.span_id, "016x"),
        format(parent.span_id, "016x") if parent is not None else None,
        span.name,
        span.kind.name,
        span.start_time,
        span.end_time,
        span.status.status_code.name,
        orjson.dumps(dict(span.attributes)).decode(),
        orjson.dumps([event.name for event in span.events]).decode(),
        orjson.dumps(dict(span.resource.attributes)).decode(),
    )


def duckdb_connection(folder: Path) -> Any:
    import duckdb

    con = duckdb.connect(str(folder / "peer.duckdb"))
    con.execute(TABLE)
    return con


def sqlite_connection(folder: Path) -> sqlite3.Connection:
    con = sqlite3.connect(folder / "peer.sqlite", timeout=60, isolation_level=None)
    con.execute("PRAGMA journal_mode = WAL")
    # Like ours it then survives the death of the process, not of the machine.
    con.execute("PRAGMA synchronous = NORMAL")
    con.execute(TABLE)
    return con


Inserter = Callable[[Sequence[tuple[Any, ...]]], None]


def arrow_inserter(con: Any) -> Inserter:
    import pyarrow as pa

    schema = pa.schema([(n, pa.int64() if n in _INTEGERS else pa.string()) for n in COLUMNS])

    def insert(rows: Sequence[tuple[Any, ...]]) -> None:
        batch = pa.table(list(map(list, zip(*rows, strict=True))), schema=schema)
        con.register("batch", batch)
        con.execute("INSERT INTO spans SELECT * FROM batch")
        con.unregister("batch")

    return insert


def rows_inserter(con: Any) -> Inserter:
    def insert(rows: Sequence[tuple[Any, ...]]) -> None:
        # IMMEDIATE: two SQLite writers that both begin by reading would deadlock.
        con.execute("BEGIN IMMEDIATE" if isinstance(con, sqlite3.Connection) else "BEGIN")
        con.executemany(INSERT, rows)
        con.execute("COMMIT")

    return insert


def inserter(name: str, folder: Path) -> tuple[Any, Inserter]:
    """A connection and what inserts a batch into it."""
    con = sqlite_connection(folder) if name == SQLITE else duckdb_connection(folder)
    return con, arrow_inserter(con) if name == DUCKDB_ARROW else rows_inserter(con)


class Inserting:
    """A span processor that inserts every full batch on the caller's thread."""

    def __init__(self, name: str, folder: Path) -> None:
        self._con, self._insert = inserter(name, folder)
        self._rows: list[tuple[Any, ...]] = []

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Nothing to do."""

    def _on_ending(self, span: Any) -> None:
        """Nothing to do."""

    def on_end(self, span: Any) -> None:
        self._rows.append(row_of(span))
        if len(self._rows) >= BATCH_SPANS:
            self._insert(self._rows)
            self._rows.clear()

    def shutdown(self) -> None:
        if self._rows:
            self._insert(self._rows)
        self._con.close()

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


class Writer:
    """One way of keeping spans, switched on in this process."""

    def __init__(self, name: str, folder: Path) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        self.name = name
        self.folder = folder
        self.provider = TracerProvider()
        trace.set_tracer_provider(self.provider)
        if name == BATCH:
            self.provider.add_span_processor(BatchSpanProcessor(FileExporter(folder)))
        elif name == SIMPLE:
            self.provider.add_span_processor(SimpleSpanProcessor(FileExporter(folder)))
        elif name in (DUCKDB_ARROW, DUCKDB_ROWS, SQLITE):
            self.provider.add_span_processor(Inserting(name, folder))
        # Under the name and in the JSON of our own instrumentors: such calls cost the settler most.
        self.tracer = self.provider.get_tracer("lightning_otel")

    def recording(self) -> Any:
        """What a rollout is recorded in: its root span."""
        if self.name == OURS:
            import lightning_otel

            return lightning_otel.auto_trace(store=str(self.folder / "traces.duckdb"))
        return self.tracer.start_as_current_span("rollout")

    def kept(self) -> int:
        """Shut down, and count what this process kept."""
        self.provider.shutdown()
        if self.name == OURS:
            live = self.folder / "traces.duckdb.d" / "live"
            paths = live.glob(f"*-{os.getpid()}-*.ndjson")
            return sum(path.read_bytes().count(b'{"record":"span"') for path in paths)
        if self.name in (BATCH, SIMPLE):
            return (self.folder / f"spans-{os.getpid()}.jsonl").read_bytes().count(b"\n")
        if self.name == BARE:
            return 0
        con, _ = inserter(self.name, self.folder)
        return int(con.execute("SELECT count(*) FROM spans").fetchone()[0])


# --- what is recorded ----------------------------------------------------------------------------


Step = tuple[str, dict[str, Any], dict[str, Any]]
"""A span's name, its attributes at the start and those set before its end."""


class Agent:
    """Makes rollouts of ten spans with a growing message history of random words."""

    def __init__(self, seed: int) -> None:
        letters = "abcdefghijklmnopqrstuvwxyz"
        fixed = random.Random(0)
        self._words = ["".join(fixed.choices(letters, k=fixed.randint(2, 10))) for _ in range(8192)]
        self._rng = random.Random(seed)

    def text(self, size: int) -> str:
        """Random words of about as many bytes."""
        return " ".join(self._rng.choices(self._words, k=max(1, size // 7)))

    def rollout(self, writer: Writer) -> int:
        """Record a rollout of new text; return how many spans it has."""
        return record_rollout(writer, self.write_steps())

    def write_steps(self) -> list[Step]:
        """Return the spans of an agent's run: five model calls, two tools and a reward."""
        history = [_message("system", self.text(200)), _message("user", self.text(300))]
        steps: list[Step] = []
        for turn in range(5):
            reply = _message("assistant", self.text(230))
            messages = {
                "gen_ai.input.messages": _json(history),
                "gen_ai.output.messages": _json([reply]),
            }
            steps.append(("chat demo-1", self._call(turn), messages))
            history.append(reply)
            if turn in (1, 3):
                result = self.text(400)
                steps.append(("execute_tool search", _tool(result), {}))
                history.append(_message("tool", result))
            else:
                history.append(_message("user", self.text(250)))
        reward = {
            "agentlightning.reward.0.name": "primary",
            "agentlightning.reward.0.value": self._rng.random(),
        }
        steps.append(("agentlightning.annotation", reward, {}))
        return steps

    def _call(self, turn: int) -> dict[str, Any]:
        return {**CALL, "gen_ai.response.id": f"chatcmpl-{self._rng.getrandbits(96):x}-{turn}"}


def record_rollout(writer: Writer, steps: list[Step]) -> int:
    """Record a root, an agent and the spans in it; return how many there are."""
    tracer = writer.tracer
    agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "planner"}
    *calls, (name, reward, _) = steps
    with writer.recording():
        with tracer.start_as_current_span("invoke_agent planner", attributes=agent):
            for step, attributes, later in calls:
                span = tracer.start_span(step, attributes=attributes)
                if later:
                    span.set_attributes(later)
                span.end()
        tracer.start_span(name, attributes=reward).end()
    return 2 + len(steps)


CALL: dict[str, Any] = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "openai",
    "gen_ai.request.model": "demo-1",
    "gen_ai.response.model": "demo-1-2026-11",
    "gen_ai.request.temperature": 0.7,
    "gen_ai.request.max_tokens": 256,
    "gen_ai.usage.input_tokens": 512,
    "gen_ai.usage.output_tokens": 128,
    "gen_ai.response.finish_reasons": ["stop"],
    "openai.api.type": "chat_completions",
    "server.address": "127.0.0.1",
    "server.port": 8000,
}


def _tool(result: str) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "search",
        "gen_ai.tool.call.id": "call_1",
        "gen_ai.tool.call.result": result,
    }


def _json(messages: Sequence[dict[str, Any]]) -> str:
    return json.dumps(messages, separators=(",", ":"))


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


# --- workers -------------------------------------------------------------------------------------


def latency(name: str, folder: Path, size_kb: int, spans: int) -> dict[str, float]:
    """Microseconds in ``start_span()`` and in ``end()``, spans made one after the other."""
    writer = Writer(name, folder)
    agent = Agent(1)
    texts = [json.dumps([_message("user", agent.text(size_kb << 10))]) for _ in range(32)]
    clock = time.perf_counter_ns
    starts, ends = [], []
    with writer.recording():
        for number in range(-spans // 10, spans):
            attributes = {**CALL, "gen_ai.response.id": f"chatcmpl-{number}"}
            before = clock()
            span = writer.tracer.start_span("chat demo-1", attributes=attributes)
            started = clock()
            if size_kb:
                span.set_attribute("gen_ai.input.messages", texts[number % 32])
            ending = clock()
            span.end()
            ended = clock()
            if number >= 0:
                starts.append(started - before)
                ends.append(ended - ending)
    made = spans + spans // 10 + (name != BARE)
    return {
        "start_us": median(starts) / 1e3,
        "end_us": median(ends) / 1e3,
        "end_p90_us": quantiles(ends, n=10)[-1] / 1e3,
        "mean_us": mean(ends) / 1e3,
        "worst_us": max(ends) / 1e3,
        "kept": writer.kept() / made,
    }


def write(folder: Path, spans: int, seed: int) -> dict[str, float]:
    """Record about as many spans into our store."""
    writer = Writer(OURS, folder)
    agent = Agent(seed)
    began = time.perf_counter()
    made = 0
    while made < spans:
        made += agent.rollout(writer)
    return {"spans": made, "seconds": time.perf_counter() - began}


def on_one_core() -> None:
    """Keep this process on one core where the system knows how."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def peak_mb() -> float:
    """The most memory this process ever held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def settle(folder: Path) -> dict[str, float]:
    """Settle everything in the store, on one core."""
    from lightning_otel.store.layout import Layout
    from lightning_otel.store.settle import settle as settle_all

    layout = Layout(folder / "traces.duckdb")
    lines = (line for path in layout.segments() for line in path.open("rb"))
    sizes = [len(line) for line in lines if line.startswith(b'{"record":"span"')]
    on_one_core()
    began = time.perf_counter()
    done = settle_all(layout)
    seconds = time.perf_counter() - began
    held = sum(path.stat().st_size for path in layout.data.glob("spans-*.parquet"))
    return {
        "spans": done.rows,
        "seconds": seconds,
        "peak_mb": peak_mb(),
        "bytes": held,
        "line_bytes": mean(sizes),
    }


def recorded_rows(folder: Path, spans: int) -> Iterator[list[tuple[Any, ...]]]:
    """The spans in our segments as batches of rows."""
    import orjson

    batch: list[tuple[Any, ...]] = []
    for path in sorted((folder / "traces.duckdb.d" / "live").glob("*.ndjson")):
        with path.open("rb") as lines:
            for line in lines:
                if spans <= 0:
                    break
                if not line.startswith(b'{"record":"span"'):
                    continue
                record = orjson.loads(line)
                attributes = record["attributes"]
                for key in ("input_messages", "output_messages"):
                    if key in record:
                        attributes[key] = record[key]
                for key in ("attributes", "events", "otel_resource"):
                    record[key] = orjson.dumps(record[key]).decode()
                batch.append(tuple(record[name] for name in COLUMNS))
                spans -= 1
                if len(batch) == INSERT_BATCH:
                    yield batch
                    batch = []
    if batch:
        yield batch


def insert(name: str, folder: Path, spans: int) -> dict[str, float]:
    """Insert the recorded spans directly, on one core; only the inserting is timed."""
    on_one_core()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        con, insert_batch = inserter(name, Path(scratch))
        clock = time.perf_counter
        seconds = worst = 0.0
        done = 0
        for batch in recorded_rows(folder, spans):
            began = clock()
            insert_batch(batch)
            took = clock() - began
            seconds, worst, done = seconds + took, max(worst, took), done + len(batch)
        began = clock()
        con.close()
        seconds += clock() - began
        held = sum(path.stat().st_size for path in Path(scratch).iterdir())
    return {
        "spans": done,
        "seconds": seconds,
        "peak_mb": peak_mb(),
        "bytes": held,
        "worst_s": worst,
    }


def flat_out(
    name: str, folder: Path, begin_s: float, seconds: float, seed: int
) -> dict[str, float]:
    """Record rollouts as fast as it goes, from a common beginning on."""
    writer = Writer(name, folder)
    agent = Agent(seed)
    ready = [agent.write_steps() for _ in range(16)]
    made = record_rollout(writer, ready[0])
    gc.collect()
    time.sleep(max(0.0, begin_s - time.time()))
    before = time.process_time(), made
    for steps in itertools.cycle(ready):
        if time.time() >= begin_s + seconds:
            break
        made += record_rollout(writer, steps)
    cpu_s = time.process_time() - before[0]
    kept = -1 if name == SQLITE else writer.kept()
    return {"made": made, "kept": kept, "made_a_cpu_s": (made - before[1]) / cpu_s}


def work(options: argparse.Namespace) -> None:
    folder = options.folder
    if options.worker == "latency":
        peers.report(latency(options.writer, folder, options.size_kb, options.spans))
    elif options.worker == "write":
        peers.report(write(folder, options.spans, options.seed))
    elif options.worker == "settle":
        peers.report(settle(folder))
    elif options.worker == "insert":
        peers.report(insert(options.writer, folder, options.spans))
    else:
        peers.report(
            flat_out(options.writer, folder, options.begin_s, options.seconds, options.seed)
        )


# --- the driver ----------------------------------------------------------------------------------


def main() -> None:
    parser = peers.arguments(__doc__ or "")
    parser.add_argument("--spans", type=int, help="spans to settle (default 1,000,000)")
    parser.add_argument("--peer-spans", type=int, help="spans to insert (default 200,000)")
    parser.add_argument("--only", choices=("latency", "settle", "writers"))
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--writer", help=argparse.SUPPRESS)
    parser.add_argument("--size-kb", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--begin-s", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    python = peers.environment(options.env, "store", REQUIREMENTS)
    parts = {"latency": latencies, "settle": settling, "writers": writers}
    figures = {}
    for name, part in parts.items():
        if options.only in (None, name):
            figures[name] = part(python, options)
    where = peers.facts(python, "opentelemetry-sdk", "duckdb", "pyarrow")
    peers.finish(options.json, {**where, "sqlite": sqlite3.sqlite_version}, figures)


def latencies(python: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The table of what ending a span costs its caller."""
    figures: dict[str, Any] = {name: {} for name in DURABLE}
    for size_kb in SIZES_KB:
        spans = (2048 if size_kb < 16 else 1024) // (4 if options.quick else 1)
        for name in figures:
            peers.say(f"ending a span of {size_kb} KB: {name}")
            rounds = []
            for _ in range(1 if options.quick else 3):
                with tempfile.TemporaryDirectory() as folder:
                    given = ("--writer", name, "--size-kb", size_kb, "--spans", spans)
                    rounds.append(
                        peers.run(python, __file__, "latency", "--folder", folder, *given)
                    )
            figures[name][size_kb] = {key: median(r[key] for r in rounds) for key in rounds[0]}
    rows = []
    for name, by_size in figures.items():
        two, ours = by_size[2], figures[OURS][2]
        rows.append(
            [
                name,
                *(
                    f"{by_size[kb]['end_us']:.1f} / {by_size[kb]['end_p90_us']:.1f}"
                    for kb in by_size
                ),
                f"{two['mean_us']:.1f}",
                f"{two['worst_us'] / 1e3:.1f}",
                f"{two['start_us']:.1f}",
                DURABLE[name],
                f"{two['kept']:.0%}",
                peers.ratio(ours["mean_us"], two["mean_us"]),
            ]
        )
    peers.table(
        "`span.end()` on the caller's thread, µs: median / p90 by size of the span; at 2 KB also "
        "the mean, the worst in ms, `start_span()`, the share kept, and our mean by theirs",
        [
            *("writer", *(f"{kb} KB" for kb in SIZES_KB)),
            *("mean", "worst", "start", "durable", "kept", "ours / theirs"),
        ],
        rows,
    )
    return figures


def settling(python: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The table of what it costs to bring spans into their final form."""
    spans = options.spans or (20_000 if options.quick else 1_000_000)
    limit = options.peer_spans or min(spans, 200_000)
    with tempfile.TemporaryDirectory() as folder:
        share = spans // 2
        peers.say(f"recording {spans:,} spans in two processes")
        given = ("--folder", folder, "--spans", share)
        recorders = [
            peers.start(python, __file__, "write", *given, "--seed", seed) for seed in (1, 2)
        ]
        for recorder in recorders:
            peers.result(recorder)
        figures: dict[str, Any] = {}
        for name in (SQLITE, DUCKDB_ARROW, DUCKDB_ROWS):
            number = min(limit, 10_000) if name == DUCKDB_ROWS else limit
            peers.say(f"inserting {number:,} spans directly: {name}")
            given = ("--folder", folder, "--writer", name, "--spans", number)
            figures[name] = peers.run(python, __file__, "insert", *given)
        peers.say(f"settling {spans:,} spans")
        figures = {OURS: peers.run(python, __file__, "settle", "--folder", folder), **figures}
    rates = {name: one["spans"] / one["seconds"] for name, one in figures.items()}
    ours = figures[OURS]
    peers.table(
        f"Spans into their final form on one core; an ended span's line has "
        f"{ours['line_bytes']:,.0f} bytes on average, and its start has a line too",
        ["way", "spans", "spans/s", "peak MB", "bytes a span", "longest stall s", "ours / theirs"],
        [
            [
                f"{name}, settle" if name == OURS else name,
                f"{one['spans']:,}",
                f"{rates[name]:,.0f}",
                f"{one['peak_mb']:,.0f}",
                f"{one['bytes'] / one['spans']:,.0f}",
                f"{one['worst_s']:.2f}" if "worst_s" in one else "none: not the caller's",
                peers.ratio(rates[OURS], rates[name]),
            ]
            for name, one in figures.items()
        ],
    )
    return figures


def writers(python: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The table of four processes that record as fast as they can."""
    seconds, rounds = (2, 1) if options.quick else (8, 3)
    names = (OURS, BATCH, SQLITE, BARE)
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in figures:
            peers.say(f"round {number + 1} of {rounds}, four writers for {seconds} s: {name}")
            figures[name].append(four_writers(python, name, seconds))
    rates = {
        # Without a processor, what is made is the most that could be kept.
        name: [one["made" if name == BARE else "kept"] / seconds for one in found]
        for name, found in figures.items()
    }
    peers.table(
        f"Four processes recording flat out for {seconds} s on {os.cpu_count()} cores, the making "
        "of the spans included, their text ready: median of rounds (lowest to highest); made in a "
        "second of one core's time, which other work on the machine changes little",
        ["writer", "spans kept a second", "lost", "ours / theirs", "made a CPU second"],
        [
            [
                f"{name}: only made" if name == BARE else name,
                peers.with_spread(rates[name]),
                f"{1 - sum(one['kept'] for one in found) / sum(one['made'] for one in found):.1%}",
                peers.ratio(median(rates[OURS]), median(rates[name])),
                peers.with_spread([one["made_a_cpu_s"] for one in found]),
            ]
            for name, found in figures.items()
        ],
    )
    return figures


def four_writers(python: Path, name: str, seconds: float) -> dict[str, float]:
    """Spans made and kept by four processes that begin together."""
    with tempfile.TemporaryDirectory() as folder:
        given = ("--folder", folder, "--writer", name, "--seconds", seconds)
        given += ("--begin-s", time.time() + 5)
        recorders = [
            peers.start(python, __file__, "flat-out", *given, "--seed", seed) for seed in range(4)
        ]
        found = [peers.result(recorder) for recorder in recorders]
        kept = sum(one["kept"] for one in found)
        if name == SQLITE:
            con = sqlite_connection(Path(folder))
            kept = con.execute("SELECT count(*) FROM spans").fetchone()[0]
            con.close()
    return {
        "made": sum(one["made"] for one in found),
        "kept": kept,
        "made_a_cpu_s": mean(one["made_a_cpu_s"] for one in found),
    }


if __name__ == "__main__":
    main()
