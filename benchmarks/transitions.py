"""A store of up to a million spans into transitions: how time and memory grow with the spans.

    python benchmarks/transitions.py [--quick] [--store FOLDER]

Each trace is a rollout of ten spans: a root, an agent, four calls of one growing conversation with
a tool's work between them, and a reward. A call's bodies have 2.3 KB on average. Each figure is one
pass in a process of its own over files that were read before.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
from harness import Worker, text

WAYS = {
    "rows": "transitions(bodies=False), each",
    "table": "transitions(bodies=False).to_parquet()",
    "report": "report()",
    "bodies": "transitions(), each",
    "file": "transitions().to_parquet()",
}
PROCESSES = 8
STEP_NS = 100_000_000
CALL = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "openai",
    "openai.api.type": "chat_completions",
    "gen_ai.request.model": "demo-1",
    "gen_ai.request.temperature": 0.7,
    "gen_ai.request.top_p": 1.0,
    "gen_ai.request.max_tokens": 512,
    "gen_ai.response.model": "demo-1",
    "gen_ai.usage.output_tokens": 60,
    "gen_ai.tool.definitions": '[{"type":"function","name":"search","description":"Look it up."}]',
    "lightning.resource.version": "prompt@v3",
    "server.address": "127.0.0.1",
    "server.port": 8000,
}
PLACES = ("root", "agent", *("call", "tool") * 3, "call", "reward")
NAMES = {
    "root": "agentlightning.rollout",
    "agent": "invoke_agent planner",
    "call": "chat demo-1",
    "tool": "execute_tool search",
    "reward": "agentlightning.annotation",
}


def rollout(trace: int) -> Iterator[Any]:
    """Return the spans of a trace, as one of eight processes counted and recorded them."""
    from lightning_otel import Span

    begin_ns = 1_700_000_000_000_000_000 + trace * 250_000_000
    count = trace // PROCESSES * 20
    history = [_message("system", 400, 7), _message("user", 300, trace)]
    for place, kind in enumerate(PLACES):
        ends = {"root": (0, 19), "agent": (1, 16), "reward": (17, 18)}
        opened, closed = ends.get(kind, (2 * place - 2, 2 * place - 1))
        own: dict[str, Any] = {}
        if kind == "call":
            turn = (place - 2) // 2
            asked = f"[{','.join(history)}]"
            history.append(_message("assistant", 250, trace + turn))
            own = {
                **CALL,
                "gen_ai.response.id": f"chatcmpl-{trace}-{turn}",
                "gen_ai.response.finish_reasons": ["tool_calls" if turn < 3 else "stop"],
                "gen_ai.usage.input_tokens": 300 + 250 * turn,
                "gen_ai.input.messages": asked,
                "gen_ai.output.messages": f"[{history[-1]}]",
            }
        elif kind == "tool":
            own = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "search"}
            history.append(_message("tool", 300, trace + place))
        elif kind == "agent":
            own = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "planner"}
        elif kind == "reward":
            own = {"agentlightning.reward.0.name": "primary",
                   "agentlightning.reward.0.value": trace % 11 / 10}  # fmt: skip
        parent = {0: None, 1: 0, 9: 0}.get(place, 1)
        yield Span(
            f"{trace + 1:032x}",
            f"{trace * 10 + place + 1:016x}",
            None if parent is None else f"{trace * 10 + parent + 1:016x}",
            NAMES[kind],
            begin_ns + opened * STEP_NS,
            begin_ns + closed * STEP_NS,
            kind="CLIENT" if kind == "call" else "INTERNAL",
            attributes={
                "agentlightning.rollout_id": f"rollout-{trace}",
                "agentlightning.attempt_id": "1",
                **own,
            },
            otel_resource={"service.name": "agent", "host.name": "one"},
            scope="lightning_otel",
            process=f"5f1e-1-{100 + trace % PROCESSES}",
            sequence=count + opened,
            end_sequence=count + closed,
        )


def _message(role: str, size: int, seed: int) -> str:
    return f'{{"role":"{role}","parts":[{{"type":"text","content":"{text(size, seed)}"}}]}}'


def make(path: str, spans: int) -> None:
    """Write a settled store of about as many spans."""
    from lightning_otel import Store

    store = Store(path)
    for trace in range(max(1, spans // 10)):
        store.add(rollout(trace))
    store.writer().seal()
    store.settle()
    harness.report(None)


def read(path: str, way: str, spans: int) -> None:
    """Make transitions of a store in one way."""
    from lightning_otel import Store

    for file in Path(f"{path}.d").rglob("*.parquet"):
        file.read_bytes()
    resting_mb = harness.peak_mb()
    store, found = Store(path), []

    def work() -> None:
        if way == "report":
            found.append(store.report().transitions)
            return
        table = store.transitions(bodies=way in ("bodies", "file"))
        if way in ("table", "file"):
            with tempfile.TemporaryDirectory() as folder:
                table.to_parquet(os.path.join(folder, "t.parquet"))
            found.append(table.report().transitions)
        else:
            found.append(sum(1 for _ in table))

    cost = harness.cost_of(work)
    assert found == [4 * max(1, spans // 10)], found
    harness.report((*cost, resting_mb))


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--ten-million", action="store_true", help="10M spans, too; 1 GB of disk")
    parser.add_argument("--store", type=Path, help="make the stores in this folder, and keep them")
    options = parser.parse_args()
    parts: dict[str, Callable[..., None]] = {"make": make, "read": read}
    if options.worker:
        parts[options.worker.pop("part")](**options.worker)
        return
    sizes = [100, 1_000, 10_000, 100_000, *([] if options.quick else [1_000_000])]
    small, bodies = (3_000, 10_000) if options.quick else (30_000, 100_000)
    wanted = [("rows", size) for size in sizes]
    wanted += [("report", sizes[-1]), ("table", sizes[-1]), ("bodies", bodies)]
    wanted += [("file", small), ("file", small * 10)]
    wanted += [("rows", 10_000_000)] if options.ten_million else []
    rows, figures = [], []
    with tempfile.TemporaryDirectory(prefix="lightning-otel-") as scratch:
        for way, spans in wanted:
            path = (options.store or Path(scratch)) / f"{spans}.duckdb"
            harness.say(f"{spans:,} spans, {WAYS[way]}")
            if not Path(f"{path}.d").exists():
                Worker(__file__, part="make", path=path, spans=spans).result()
            seconds, cpu_s, peak, resting = Worker(
                __file__, part="read", path=path, way=way, spans=spans
            ).result()
            figures.append({"way": way, "spans": spans, "cpu_s": cpu_s, "peak_mb": peak})
            rows.append(
                (f"{spans:,}", WAYS[way], f"{seconds:,.2f}", f"{cpu_s:,.2f}",
                 f"{cpu_s / spans * 1e6:,.1f}", f"{peak:,.0f}", f"{resting:,.0f}")
            )  # fmt: skip
    head = ["spans", "way", "seconds", "CPU s", "CPU µs a span", "peak MB", "of it at rest"]
    harness.table("Spans of a store into transitions", head, rows)
    harness.finish(options, figures, "duckdb", "lightning-otel")


if __name__ == "__main__":
    main()
