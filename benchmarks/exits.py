"""How long a program takes to end while its collector is down.

A program makes spans, prints the time and ends; what is measured lies between that print and the
moment its parent has it. The collector refuses connections, or takes them and never answers.
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import peers

REQUIREMENTS = ("opentelemetry-sdk==1.45.2", "opentelemetry-exporter-otlp==1.45.2", str(peers.ROOT))
BUDGET_S = 0.1
SPANS = 2_000
LIMIT_S = 120
_MADE = f"""
for number in range({SPANS}):
    tracer.start_span("work", attributes={{"text": "x" * 2000}}).end()
"""
_LEAVE = """
import time
print(time.monotonic(), flush=True)
"""
_SDK = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
provider = TracerProvider()
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("program")
"""
_BATCHES = """
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import BatchSpanProcessor
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
"""
_UNAWARE = """
from opentelemetry import trace
tracer = trace.get_tracer("program")
"""
_BLOCK = f"""
import lightning_otel
from opentelemetry import trace
with lightning_otel.auto_trace():
    tracer = trace.get_tracer("program")
    for number in range({SPANS}):
        tracer.start_span("work", attributes={{"text": "x" * 2000}}).end()
"""
RUN = "lightning-otel run -- program"
PROGRAMS = {
    "no processor": _SDK + _MADE,
    "auto_trace, no collector": _BLOCK,
    RUN: _UNAWARE + _MADE,
    "BatchSpanProcessor, OTLP": _SDK + _BATCHES + _MADE,
}


def exit_s(python: Path, name: str, folder: Path, endpoint: str) -> float:
    """Seconds from a program's last statement to its end, or that of the command around it."""
    program = folder / "program.py"
    program.write_text(PROGRAMS[name] + _LEAVE)
    settings = {
        key: value
        for key, value in os.environ.items()  # noqa: TID251  # the rule is the package's own
        if not key.startswith(("OTEL_", "LIGHTNING_"))
    }
    if name != "auto_trace, no collector":
        settings["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
        settings["OTEL_EXPORTER_OTLP_PROTOCOL"] = "http/protobuf"
    around = [python.with_name("lightning-otel"), "run", "--"] if name == RUN else []
    done = subprocess.run(
        [*map(str, around), str(python), str(program)],
        env=settings,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    ended = time.monotonic()
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
    return ended - float(done.stdout.split()[-1])


class Silent:
    """A collector that takes connections and never answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._held: list[Any] = []
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._hold, daemon=True).start()

    def _hold(self) -> None:
        while True:
            self._held.append(self._socket.accept())


def refusing() -> str:
    """Where nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{found.getsockname()[1]}"


def main() -> None:
    options = peers.arguments(__doc__ or "").parse_args()
    python = peers.environment(options.env, "exits", REQUIREMENTS)
    ways: dict[str, Callable[[], str]] = {
        "refuses": refusing,
        "never answers": lambda: Silent().url,
    }
    times: dict[str, dict[str, list[float]]] = {}
    for way, endpoint in ways.items():
        for name in PROGRAMS:
            peers.say(f"{name}; the collector {way}")
            # What waits for a timeout is not worth waiting for many times.
            rounds = 1 if name.startswith("Batch") else 3 if options.quick else 9
            for _ in range(rounds):
                with tempfile.TemporaryDirectory() as folder:
                    taken = exit_s(python, name, Path(folder), endpoint())
                times.setdefault(name, {}).setdefault(way, []).append(taken)
    rows = [
        [name, *(f"{median(found[way]):.3f} ({max(found[way]):.3f})" for way in ways)]
        for name, found in times.items()
    ]
    head = ["program", *(f"the collector {way}" for way in ways)]
    peers.table("Seconds from the last statement to the end: median (worst)", head, rows)
    print(f"\nBudget: {BUDGET_S} s more than without a processor.")
    where = peers.facts(python, "lightning-otel", "opentelemetry-sdk")
    peers.finish(options.json, where, times)


if __name__ == "__main__":
    sys.exit(main())
