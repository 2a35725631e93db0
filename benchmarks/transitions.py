"""A store of up to a million spans into transitions, and questions to one of 600,000 spans.

Each figure is one pass in a process of its own over files that were read before.
"""

import argparse
import tempfile
import time
from pathlib import Path

import harness
from harness import Worker

WAYS = {
    "rows": "transitions(bodies=False), each", "bodies": "transitions(), each",
    "step": 'transitions(credit="step"), each', "file": "transitions().to_parquet()",
    "cold": "stats, no facts yet", "warm": "stats, again", "more": "stats, 1 % more spans",
    "rollouts": "FROM rollouts", "group": "SELECT rollout_id, count(*) FROM spans GROUP BY 1",
}  # fmt: skip
VIEWS = ("rollouts", "group")


def make(folder: Path, spans: int) -> None:
    import store  # not above: what a worker holds at rest is measured

    folder.mkdir(exist_ok=True)
    store.record(folder, spans)
    Worker(store.__file__, part="settle", folder=folder, compact=False).result()
    time.sleep(1)  # before, readers take the segments, not what they were settled into


def read(folder: str, way: str) -> object:
    from lightning_otel import Store
    from lightning_otel.views.summary import store_stats

    for file in Path(folder).rglob("*.parquet"):
        file.read_bytes()
    resting_mb = harness.peak_mb()
    opened, found = Store(Path(folder) / "traces.duckdb"), []
    con = opened.connect() if way in VIEWS else None

    def work() -> None:
        if con is not None:
            found.append(len(con.execute(WAYS[way]).fetchall()))
        elif way in ("cold", "warm", "more"):
            found.append(store_stats(opened)["funnel"]["transitions"])
        elif way == "file":
            opened.transitions().to_parquet(Path(folder) / "t.parquet")
            found.append(True)
        else:
            credit = "step" if way == "step" else "previous"
            found.append(sum(1 for _ in opened.transitions(bodies=way != "rows", credit=credit)))

    cost = harness.cost_of(work)
    assert found[0], way
    return *cost, resting_mb


def main(options: argparse.Namespace) -> None:
    most, asked = (100_000, 60_000) if options.quick else (1_000_000, 600_000)
    small, bodies = (3_000, 10_000) if options.quick else (30_000, 100_000)
    wanted = [*(("rows", 10**n) for n in range(2, 7) if 10**n <= most), ("bodies", bodies)]
    wanted += [("step", bodies), ("file", small), ("file", small * 10)]
    wanted += [(way, asked) for way in list(WAYS)[4:]] + [(way, 100) for way in VIEWS]
    rows, figures = [], []
    with tempfile.TemporaryDirectory(prefix="lightning-otel-") as scratch:
        for way, spans in wanted:
            folder = Path(scratch) / str(spans)
            harness.say(f"{spans:,} spans, {WAYS[way]}")
            if way == "more" or not folder.exists():
                make(folder, spans // 100 if way == "more" else spans)
            seconds, cpu_s, peak, resting = Worker(__file__, folder=folder, way=way).result()
            figures.append({"way": way, "spans": spans, "cpu_s": cpu_s, "peak_mb": peak})
            rows.append(
                (f"{spans:,}", WAYS[way], f"{seconds:,.2f}", f"{cpu_s:,.3f}",
                 f"{cpu_s / spans * 1e6:,.1f}", f"{peak:,.0f}", f"{resting:,.0f}")
            )  # fmt: skip
    head = ["spans", "way", "seconds", "CPU s", "CPU µs a span", "peak MB", "of it at rest"]
    harness.table("Spans of a store into transitions, and questions", head, rows)
    harness.finish(options, figures, "duckdb", "lightning-otel")


if __name__ == "__main__":
    harness.run(main, read)
