"""How long programs take to start and to end, and how much is installed; how soon many short ones
are listed (``--only starts|ends|short``).

A program that ends prints the time before it does, while its collector refuses connections, or
takes them and never answers.
"""

import argparse
import itertools
import os
import resource
import shlex
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import harness
from harness import spread

KEPT_OUT = ("openai", "duckdb", "torch", "starlette", "fastapi", "flask", "aiohttp")
STARTS = {
    "python -c pass": "python -c pass",
    "import lightning_otel": "python -c 'import lightning_otel'",
    "import and auto_trace": "python -c 'import lightning_otel; lightning_otel.auto_trace'",
    "lightning-otel --help": "lightning-otel --help",
    "opentelemetry-instrument": "opentelemetry-instrument --traces_exporter none python -c pass",
    "lightning-otel run": "lightning-otel run -- python -c pass",
}
_FACTS = f"""
import importlib.metadata as m, sys, lightning_otel
names = [d.metadata["Name"] for d in m.distributions()]
print(sum(name not in ("pip", "setuptools") for name in names), "packages;")
print("import loads of {", ".join(KEPT_OUT)}:")
print(", ".join(name for name in {KEPT_OUT!r} if name in sys.modules) or "none")
"""
_SPANS = """
for number in range(2_000):
    tracer.start_span("work", attributes={"text": "x" * 2000}).end()
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
_FORKS = """
import os, sys
from lightning_otel import Store, auto_trace, emit_action, emit_reward
with auto_trace(store=":memory:"):  # what is imported here is there in every child
    emit_reward(0.0)
for number in range(int(sys.argv[2])):
    if not os.fork():
        with auto_trace(store=Store(sys.argv[1]), rollout_id=f"r{number}"):
            emit_action("done")
            emit_reward(1.0)
        os._exit(0)
    os.wait()
"""
_GET = "from opentelemetry import trace\ntracer = trace.get_tracer('program')\n"
_AROUND = "import lightning_otel\nwith lightning_otel.auto_trace():"
RUN, BLOCK, BATCH = "lightning-otel run", "auto_trace, no collector", "BatchSpanProcessor, OTLP"
ENDS = {
    "no processor": _SDK + _SPANS, BLOCK: "\n    ".join([_AROUND, *(_GET + _SPANS).split("\n")]),
    RUN: _GET + _SPANS,
    BATCH: _SDK + _BATCHES + _SPANS,
}  # fmt: skip


def starts(python: Path, rounds: int) -> dict[str, list[float]]:
    folder = Path(tempfile.mkdtemp())
    times: dict[str, list[float]] = {name: [] for name in STARTS}
    for number in range(-2, rounds):  # the first ones compile
        for name, command in STARTS.items():
            program, *words = shlex.split(command)
            began = time.perf_counter()
            subprocess.run(
                [python.with_name(program), *words], cwd=folder, check=True, capture_output=True,
                env=harness.settings_of(PATH=f"{python.parent}{os.pathsep}{os.defpath}"),
            )  # fmt: skip
            if number >= 0:
                times[name].append((time.perf_counter() - began) * 1e3)
    rows = [(name, spread(found)) for name, found in times.items()]
    harness.table("Milliseconds of a process: median (range)", ["command", "ms"], rows)
    packages = next((python.parent.parent / "lib").glob("python*")) / "site-packages"
    others = {"pip", "setuptools", "__pycache__"}
    files = (each for each in packages.rglob("*") if not others & {*each.parts})
    ours = [each.stat().st_size for each in files if each.is_file()]
    facts = subprocess.run([python, "-c", _FACTS], check=True, capture_output=True, text=True)
    print(f"\n{sum(ours) / 1e6:.0f} MB in {' '.join(facts.stdout.split())}")
    return times


def ends(python: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    ways = ("refuses", "never answers")
    times: dict[str, dict[str, list[float]]] = {name: {} for name in ENDS}
    for way, (name, code) in itertools.product(ways, ENDS.items()):
        harness.say(f"{name}; the collector {way}")
        # The system takes connections for who listens, which nobody does once the door is shut.
        with socket.create_server(("127.0.0.1", 0), backlog=128) as door:
            settings = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
            settings["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{door.getsockname()[1]}"
            if way == "refuses":
                door.close()
            settings = {} if name == BLOCK else settings
            around = [python.with_name("lightning-otel"), "run", "--"] if name == RUN else []
            # What waits for a timeout is not worth waiting for many times.
            for _ in range(1 if name == BATCH else rounds):
                with tempfile.TemporaryDirectory() as folder:
                    program = Path(folder, "program.py")
                    program.write_text(f"{code}\nimport time\nprint(time.monotonic(), flush=True)")
                    done = subprocess.run(
                        [*around, python, program], cwd=folder, check=True, capture_output=True,
                        text=True, timeout=120, env=harness.settings_of(**settings),
                    )  # fmt: skip
                    took = time.monotonic() - float(done.stdout.split()[-1])
                times[name].setdefault(way, []).append(took)
    rows = [[name, *(spread(found[way], 3) for way in ways)] for name, found in times.items()]
    head = ["program", *(f"the collector {way}" for way in ways)]
    harness.table("Seconds from the last statement to the end: median (range)", head, rows)
    return times


def short(python: Path, count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder, "traces.duckdb"))
        subprocess.run([python, "-c", _FORKS, place, str(count)], check=True)
        figures: dict[str, float] = {}
        for look in ("ls", "ls again", "stats", "stats again"):
            command = [python.with_name("lightning-otel"), look.split()[0], "--store", place]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, capture_output=True, env=harness.settings_of())
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            user_s, system_s = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
            figures[look] = user_s + system_s
    rows = [(look, f"{taken:.2f}") for look, taken in figures.items()]
    harness.table(f"CPU seconds after {count:,} short processes", ["command", "CPU s"], rows)
    return figures


def main(options: argparse.Namespace) -> None:
    python = harness.environment(options.env, "core", [*harness.SDK, str(harness.ROOT)])
    ours = ["-q", "--force-reinstall", "--no-deps", str(harness.ROOT)]  # else an earlier commit's
    subprocess.run([python, "-m", "pip", "install", *ours], check=True)
    parts = {"starts": (starts, 5, 30), "ends": (ends, 3, 9), "short": (short, 1_000, 10_000)}
    chosen = {name: parts[name] for name in options.only or parts}
    figures = {name: do(python, n[not options.quick]) for name, (do, *n) in chosen.items()}
    harness.finish(options, figures, "lightning-otel", "opentelemetry-sdk", "duckdb", python=python)


if __name__ == "__main__":
    harness.run(main)
