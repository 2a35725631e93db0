"""What a store costs that has been left on: long conversations, compacting, thousands of files.

Each measurement runs in a process of its own, one after the other, on one core but for the reading.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import peers

REQUIREMENTS = ("duckdb==2.0.0", "opentelemetry-sdk==1.45.2", "-e", str(peers.ROOT))
WORDS = 5_000
BEGIN_NS = 1_700_000_000_000_000_000


class Texts:
    """Random words, frequent and rare ones as in a language."""

    def __init__(self) -> None:
        self._chance = random.Random(5)
        letters = "abcdefghijklmnopqrstuvwxyz"
        self._words = [
            "".join(self._chance.choices(letters, k=self._chance.randint(2, 10)))
            for _ in range(WORDS)
        ]
        self._weights = [1 / (rank + 1) for rank in range(WORDS)]

    def text(self, size: int) -> str:
        return " ".join(self._chance.choices(self._words, self._weights, k=size // 6))


# VmHWM, as ru_maxrss would begin with what the process had that this one was started from.
_APART = """
import json, sys, time
from pathlib import Path
from lightning_otel import Store
store = Store(sys.argv[1])
import duckdb
began = time.process_time()
getattr(store, sys.argv[2])()
seconds = time.process_time() - began
peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
print(json.dumps([seconds, int(peak) / 1024]))
"""


def apart(store: Any, verb: str) -> tuple[float, float]:
    """CPU seconds and peak MB of a process that does nothing but this."""
    done = subprocess.run(
        [sys.executable, "-c", _APART, store.name, verb],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds, peak = json.loads(done.stdout)
    return seconds, peak


def stored_bytes(store: Any) -> int:
    return sum(file.size_bytes for file in store.layout.read_manifest().live_files)


def digest(store: Any) -> Any:
    """The same for the same spans, in whatever order they are stored."""
    # Until what was committed last is in effect for every reader.
    time.sleep(1)
    (row,) = store.sql("SELECT count(*) AS n, bit_xor(hash(COLUMNS(*))) FROM spans")
    return row


def conversations(folder: Path, count: int, turns: int) -> dict[str, float]:
    """Agents that talk at once, each sending its whole history with every turn of 1 KB."""
    from lightning_otel import Store
    from lightning_otel import conventions as c
    from lightning_otel.store.writer import SpanWriter
    from lightning_otel.types import Span

    store, texts = Store(folder / "traces.duckdb"), Texts()
    store.layout.create()
    writer = SpanWriter(store.layout)
    histories: list[list[Any]] = [[] for _ in range(count)]
    traces = [os.urandom(16).hex() for _ in range(count)]
    unique = sent = number = 0
    for _ in range(turns):
        for trace_id, history in zip(traces, histories, strict=True):
            number += 1
            question, answer = texts.text(500), texts.text(500)
            unique += len(question) + len(answer)
            history.append({"role": "user", "parts": [{"type": "text", "content": question}]})
            asked = json.dumps(history)
            history.append({"role": "assistant", "parts": [{"type": "text", "content": answer}]})
            said = json.dumps(history[-1:])
            sent += len(asked) + len(said)
            start_ns = BEGIN_NS + number * 1_000_000_000
            attributes = {
                c.OPERATION: "chat",
                c.AGENT_NAME: "planner",
                c.REQUEST_MODEL: "gpt-5-mini",
                c.RESPONSE_ID: f"chatcmpl-{os.urandom(12).hex()}",
                c.INPUT_TOKENS: len(asked) // 4,
                c.INPUT_MESSAGES: asked,
                c.OUTPUT_MESSAGES: said,
            }
            writer.add(
                Span(trace_id, os.urandom(8).hex(), None, "chat gpt-5-mini", start_ns,
                     start_ns + 500_000_000, attributes=attributes, sequence=number)
            )  # fmt: skip
    writer.seal()
    store.settle()
    found = {"sent": sent / unique, "settled": stored_bytes(store) / unique}
    before = digest(store)
    found["cpu_s"], found["peak_mb"] = apart(store, "compact")
    found["compact"] = stored_bytes(store) / unique
    assert digest(store) == before
    return found


def packing(folder: Path, spans: int) -> dict[str, float]:
    """Spans of 2 KB, ten to a trace, settled and compacted."""
    from lightning_otel import Store
    from lightning_otel import conventions as c
    from lightning_otel.store.writer import SpanWriter
    from lightning_otel.types import Span

    store, texts = Store(folder / "traces.duckdb"), Texts()
    store.layout.create()
    pool = [texts.text(700) for _ in range(20_000)]
    chance = random.Random(7)
    writer = SpanWriter(store.layout)
    for number in range(spans):
        attributes = {
            c.OPERATION: "chat",
            c.AGENT_NAME: "planner",
            c.REQUEST_MODEL: "gpt-5-mini",
            c.RESPONSE_ID: f"chatcmpl-{chance.randbytes(12).hex()}",
            c.INPUT_TOKENS: chance.randrange(5_000),
            **{f"app.key{key}": chance.choice(pool)[:20] for key in range(10)},
            c.INPUT_MESSAGES: json.dumps([{"role": "user", "content": chance.choice(pool)}]),
            c.OUTPUT_MESSAGES: json.dumps([{"role": "a", "content": chance.choice(pool)[:300]}]),
        }
        start_ns = BEGIN_NS + number * 1_000_000
        trace_id = random.Random(number // 10).randbytes(16).hex()
        writer.add(
            Span(trace_id, f"{number + 1:016x}", None, "chat", start_ns, start_ns + 1_000,
                 attributes=attributes, sequence=number)
        )  # fmt: skip
    writer.seal()
    written = sum(path.stat().st_size for path in store.layout.segments())
    found = {"line_bytes": written / spans}
    found["settled_s"], found["settled_mb"] = apart(store, "settle")
    found["settled_bytes"] = stored_bytes(store) / spans
    before = digest(store)
    found["compact_s"], found["compact_mb"] = apart(store, "compact")
    found["compact_bytes"] = stored_bytes(store) / spans
    assert digest(store) == before
    return found


def crowd(folder: Path, files: int, segments: int) -> dict[str, Any]:
    """Ten spans in each of thousands of segments and files; what a look for one trace takes."""
    import duckdb

    from lightning_otel import Store
    from lightning_otel.store.layout import DataFile
    from lightning_otel.store.source import ensure_catalogue
    from lightning_otel.store.writer import SpanWriter

    store, seed = Store(folder / "traces.duckdb"), Store(folder / "seed.duckdb")
    store.layout.create()
    seed.add(_crowd(range(segments * 10, (segments + files) * 10)))
    seed.writer().seal()
    seed.settle()
    for number in range(segments):
        writer = SpanWriter(store.layout)
        for span in _crowd(range(number * 10, number * 10 + 10)):
            writer.add(span)
        writer.seal()
    ensure_catalogue(store.layout)
    con = duckdb.connect()
    con.execute(
        f"CREATE TABLE t AS FROM '{seed.layout.data}/spans-*.parquet' ORDER BY start_ns, span_id"
    )
    made = []
    for number in range(files):
        path = store.layout.data / f"spans-{number:019d}-{number:08x}.parquet"
        con.execute(f"COPY (FROM t LIMIT 10 OFFSET {number * 10}) TO '{path}' (FORMAT parquet)")
        first = BEGIN_NS + (segments + number) * 10_000_000
        made.append(DataFile(path.name, 0, 10, path.stat().st_size, first, first + 10_000_000))
    manifest = store.layout.read_manifest()
    store.layout.write_manifest(replace(manifest, files=tuple(made)))
    found: dict[str, Any] = {"spans": [], "sql": []}
    for trace in (3, segments // 2, segments + 7, segments + files - 1, 9):
        trace_id = _trace(trace)
        began = time.perf_counter()
        assert len(store.spans(trace_id=trace_id).rows()) == 10
        found["spans"].append(time.perf_counter() - began)
        began = time.perf_counter()
        query = "SELECT count(*) AS n FROM spans WHERE trace_id = ?"
        assert list(store.sql(query, [trace_id])) == [{"n": 10}]
        found["sql"].append(time.perf_counter() - began)
    began = time.process_time()
    done = store.compact()
    found |= {"compact_s": time.process_time() - began, "left": done.made}
    began = time.perf_counter()
    assert len(store.spans(trace_id=_trace(3)).rows()) == 10
    found["after_s"] = time.perf_counter() - began
    return found


def _trace(number: int) -> str:
    return random.Random(number).randbytes(16).hex()


def _crowd(numbers: range) -> Iterator[Any]:
    from lightning_otel.types import Span

    for number in numbers:
        start_ns = BEGIN_NS + number * 1_000_000
        yield Span(
            _trace(number // 10), f"{number + 1:016x}", None, "chat", start_ns, start_ns + 1_000,
            attributes={"pad": "x" * 200}, sequence=number,
        )  # fmt: skip


def work(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if options.worker != "crowd":
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        place = Path(folder)
        if options.worker == "conversations":
            peers.report(conversations(place, options.first, options.second))
        elif options.worker == "packing":
            peers.report(packing(place, options.first))
        else:
            peers.report(crowd(place, options.first, options.second))


def main() -> None:
    parser = peers.arguments(__doc__ or "")
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--second", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    python = peers.environment(options.env, "maintenance", REQUIREMENTS)
    quick = options.quick

    def run(part: str, first: int, second: int = 0) -> Any:
        peers.say(f"{part}: {first:,}" + (f" and {second:,}" if second else ""))
        return peers.run(python, __file__, part, "--first", first, "--second", second)

    talks = {count: run("conversations", count, 200) for count in ((4,) if quick else (1, 20))}
    peers.table(
        "Conversations of 200 turns of 1 KB, as multiples of their unique text",
        ("at once", "sent", "settled", "compact", "compact CPU s", "peak MB"),
        [
            (n, *(f"{found[key]:,.2f}" for key in ("sent", "settled", "compact", "cpu_s")),
             f"{found['peak_mb']:,.0f}")
            for n, found in talks.items()
        ],
    )  # fmt: skip
    spans = 100_000 if quick else 1_000_000
    packed = run("packing", spans)
    peers.table(
        f"{spans:,} spans whose line has {packed['line_bytes']:,.0f} bytes, on one core",
        ("step", "spans a CPU second", "peak MB", "bytes a span"),
        [
            (step, f"{spans / packed[f'{step}_s']:,.0f}", f"{packed[f'{step}_mb']:,.0f}",
             f"{packed[f'{step}_bytes']:,.0f}")
            for step in ("settled", "compact")
        ],
    )  # fmt: skip
    files, segments = (500, 1_000) if quick else (5_000, 10_000)
    found = run("crowd", files, segments)
    peers.table(
        f"One trace among {files:,} files and {segments:,} live segments: median s (worst)",
        ("spans(trace_id=…)", "sql(…)", "compact CPU s", "files after", "spans(…) after"),
        [
            (
                *(f"{median(found[key]):.2f} ({max(found[key]):.2f})" for key in ("spans", "sql")),
                f"{found['compact_s']:.1f}", found["left"], f"{found['after_s']:.2f}",
            )
        ],
    )  # fmt: skip
    where = peers.facts(python, "opentelemetry-sdk", "duckdb")
    peers.finish(options.json, where, {"talks": talks, "packed": packed, "crowd": found})


if __name__ == "__main__":
    main()
