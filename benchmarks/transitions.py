"""A store of a million spans into transitions, and how time and memory grow with the spans.

The store holds rollouts of ten spans, four of them calls of one conversation; see ``recorded.py``.
Each figure is one pass in a process of its own over files that were read before.
"""

import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import peers
from recorded import write_store

GROWTH = (100, 1_000, 10_000, 100_000, 1_000_000)
WAYS = {
    "rows": "transitions(bodies=False), each",
    "table": "transitions(bodies=False).to_parquet()",
    "report": "report()",
    "bodies": "transitions(), each",
}
OURS_NEED = (
    "opentelemetry-sdk==1.45.2",
    "opentelemetry-instrumentation==0.66b2",
    "opentelemetry-semantic-conventions==0.66b2",
    "duckdb==2.0.0",
    "-e",
    str(peers.ROOT),
)


def timed(way: str, path: str, spans: int) -> dict[str, Any]:
    """Seconds, CPU seconds and peak memory of one pass."""
    from lightning_otel import Store

    if way == "made":  # in a process of its own: its memory is none of theirs
        return {"bytes": write_store(Path(path), spans)}
    store = Store(path)
    assert store.layout is not None
    for file in store.layout.data.iterdir():
        file.read_bytes()
    resting = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, used = time.perf_counter(), time.process_time()
    if way == "report":
        found = store.report().transitions
    elif way == "table":
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "t.parquet")
            table = store.transitions(bodies=False)
            table.to_parquet(out)
            found = table.report().transitions
    else:
        found = sum(1 for _ in store.transitions(bodies=way == "bodies"))
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    assert found == 4 * max(1, spans // 10), found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "cpu": cpu, "peak_mb": peak / 1024, "resting_mb": resting / 1024}


def main() -> None:
    parser = peers.arguments(__doc__ or "")
    parser.add_argument("--way")
    parser.add_argument("--path")
    parser.add_argument("--spans", type=int)
    parser.add_argument("--ten-million", action="store_true", help="10M spans too; 1 GB of disk")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the growth there as SVG")
    options = parser.parse_args()
    if options.worker:
        peers.report(timed(options.way, options.path, options.spans))
        return
    python = peers.environment(options.env, "transitions", OURS_NEED)
    sizes = GROWTH[:-1] if options.quick else GROWTH
    wanted = [("rows", size) for size in sizes]
    wanted += [(way, sizes[-1]) for way in ("report", "table")]
    wanted += [("bodies", 10_000 if options.quick else 100_000)]
    wanted += [("rows", 10_000_000)] if options.ten_million else []
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="lightning-otel-") as folder:
        for way, spans in wanted:
            peers.say(f"{spans:,} spans, {WAYS[way]}")
            path = Path(folder) / f"{spans}.duckdb"
            given = ("--path", path, "--spans", spans)
            if not path.exists():
                peers.run(python, __file__, "one", "--way", "made", *given)
            given = ("--way", way, *given)
            figures.append(
                {"way": way, "spans": spans, **peers.run(python, __file__, "one", *given)}
            )
    show(figures)
    if options.plot:
        options.plot.write_text(growth([f for f in figures if f["way"] == "rows"]))
    peers.finish(options.json, peers.facts(python, "duckdb", "lightning-otel"), figures)


def show(figures: list[dict[str, Any]]) -> None:
    """The table."""
    rows = [
        [
            f"{each['spans']:,}",
            WAYS[each["way"]],
            f"{each['seconds']:,.2f}",
            f"{each['cpu']:,.2f}",
            f"{each['cpu'] / each['spans'] * 1e6:,.1f}",
            f"{each['peak_mb']:,.0f}",
        ]
        for each in figures
    ]
    head = ["spans", "way", "seconds", "CPU seconds", "CPU µs a span", "peak MB"]
    peers.table("Spans of a store into transitions", head, rows)


def growth(figures: list[dict[str, Any]]) -> str:
    """CPU seconds over spans, both on scales of powers of ten, as an SVG picture."""
    from math import log10

    left, right, top, bottom = 70, 560, 40, 320
    low, high = log10(min(f["spans"] for f in figures)), log10(max(f["spans"] for f in figures))
    floor = int(log10(min(f["cpu"] for f in figures)) // 1)
    ceiling = int(-(-log10(max(f["cpu"] for f in figures)) // 1))

    def x(spans: float) -> float:
        return left + (log10(spans) - low) / (high - low) * (right - left)

    def y(seconds: float) -> float:
        return bottom - (log10(seconds) - floor) / (ceiling - floor) * (bottom - top)

    last = figures[-1]
    a_span = last["cpu"] / last["spans"]
    points = [(x(f["spans"]), y(f["cpu"])) for f in figures]
    lines = []
    for power in range(floor, ceiling + 1):
        at = y(10.0**power)
        lines.append(f'<path d="M{left} {at:.1f}H{right}" stroke="#ddd"/>')
        lines.append(
            f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        )
    for each, (at, _) in zip(figures, points, strict=True):
        label = f"{each['spans']:,}"
        lines.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    # What it would be if each span took as long as one of the largest store.
    ends = [
        f"{x(f['spans']):.1f} {y(a_span * f['spans']):.1f}"
        for f in figures
        if a_span * f["spans"] >= 10.0**floor
    ]
    lines.append(f'<path d="M{"L".join(ends)}" stroke="#999" stroke-dasharray="4" fill="none"/>')
    path = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
    lines.append(f'<path d="M{path}" stroke="#0a66c2" stroke-width="2" fill="none"/>')
    lines += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="#0a66c2"/>' for a, b in points]
    title = "CPU seconds of transitions(bodies=False) over spans in the store; dashed: proportional"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 360" '
        'font-family="sans-serif" font-size="11">\n<rect width="600" height="360" fill="#fff"/>\n'
        f'<text x="{left}" y="22" font-size="13">{title}</text>\n' + "\n".join(lines) + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
