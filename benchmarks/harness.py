"""Common parts of the benchmarks: environments, workers, paired turns, tables.

A script starts itself again as workers. Those that are compared take turns, the order reversed with
each turn, so that other work on the machine meets all of them.
"""

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from string import ascii_lowercase
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS = "lightning-otel"
SDK = (
    "opentelemetry-sdk==1.45.2", "opentelemetry-instrumentation==0.66b2",
    "opentelemetry-semantic-conventions==0.66b2",
)  # fmt: skip
_RESULT = "benchmark-result:"


@cache
def pool() -> str:
    chance = random.Random(0)
    words = ["".join(chance.choices(ascii_lowercase, k=chance.randint(2, 10))) for _ in range(8192)]
    return " ".join(chance.choices(words, k=150_000))


def text(size: int, seed: int = 0) -> str:
    start = seed * 7919 % (len(pool()) - size)
    return pool()[start : start + size]


def run(drive: Callable[..., object], *work: Callable[..., Any], **flags: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    for flag, facts in flags.items():
        parser.add_argument(f"--{flag.replace('_', '-')}", **facts)
    parser.add_argument("--quick", action="store_true", help="a short, noisier run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there, too")
    parser.add_argument("--only", action="append", metavar="NAME", help="these peers or parts only")
    parser.add_argument(
        "--env", type=Path, metavar="DIR",
        default=Path(tempfile.gettempdir()) / "lightning-otel-benchmarks",
        help="folder of the peers' environments, kept between runs (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        part = options.worker.pop("part", work[0].__name__ if work else "")
        report({each.__name__: each for each in work}[part](**options.worker))
    else:
        drive(options)


def environment(folder: Path, name: str, requirements: Sequence[str]) -> Path:
    home = folder.resolve() / name
    python = home / "bin" / "python"
    stamp, wanted = home / "requirements.txt", "\n".join([sys.version, *requirements])
    if not stamp.exists() or stamp.read_text() != wanted:
        say(f"making the environment {home}")
        venv.create(home, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *requirements], check=True)
        stamp.write_text(wanted)
    return python


def settings_of(**more: str) -> dict[str, str]:
    shell = os.environ.items()  # noqa: TID251  # the rule is the package's own
    return {k: v for k, v in shell if not k.startswith(("OTEL_", "LIGHTNING_"))} | more


class Worker:
    def __init__(self, script: str, *, python: Any = "", env: Any = None, **work: Any) -> None:
        self.process: Any = subprocess.Popen(
            [python or sys.executable, script, "--worker", json.dumps(work, default=str)],
            env=settings_of(**env or {}), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def answer(self, question: object = None) -> Any:
        if question is not None:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(_RESULT):
                return json.loads(line.removeprefix(_RESULT))
        raise SystemExit(f"{self.process.args} ended with {self.process.wait()}")

    def result(self) -> Any:
        found = self.answer()
        self.process.communicate()
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def report(result: object) -> None:
    print(_RESULT + json.dumps(result), flush=True)


def take_turns(runs: Mapping[str, Callable[[], object]], settle: Callable[[], object]) -> None:
    for name, count in map(json.loads, sys.stdin):
        run = runs[name]
        for _ in range(3):  # the caches are those of other workers
            run()
        began = time.thread_time_ns()
        for _ in range(count):
            run()
        took = (time.thread_time_ns() - began) / count / 1e3
        settle()
        gc.collect()
        report(took)


Times = dict[str, dict[str, list[float]]]  # microseconds of turns, by worker and scenario


def compare(workers: Mapping[str, Worker], scenarios: Mapping[str, int], turns: int) -> Times:
    times: Times = {name: {scenario: [] for scenario in scenarios} for name in workers}
    try:
        for turn in range(turns):
            if turn % 10 == 0:
                say(f"turn {turn + 1} of {turns}")
            for scenario, count in scenarios.items():
                for name in workers if turn % 2 else reversed(list(workers)):
                    times[name][scenario].append(workers[name].answer([scenario, count]))
    finally:
        for worker in workers.values():
            worker.kill()
    return times


def show_added(title: str, times: Times, plain: str, peers: Sequence[str]) -> None:
    rows, names = [], [name for name in times if name != plain]
    for scenario, base in times[plain].items():
        added = {
            name: [one - other for one, other in zip(times[name][scenario], base, strict=True)]
            for name in names
        }
        ratio = by_best(added, peers)
        rows.append([f"{scenario} ({median(base):,.0f})", *map(spread, added.values()), ratio])
    table(title, [f"scenario ({plain})", *names, "ours / best peer"], rows)


def by_best(found: Mapping[str, Sequence[float]], peers: Iterable[str]) -> str:
    best = min((median(found[name]) for name in peers), default=float("nan"))
    return f"{median(found[OURS]) / best:.2f}" if OURS in found else ""


def cost_of(work: Callable[[], object]) -> tuple[float, float, float]:
    began, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - used, peak_mb()


def peak_mb() -> float:
    # ru_maxrss begins with the memory of the process that started this one.
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


def messages(*said: tuple[str, str]) -> str:
    found = [{"role": role, "parts": [{"type": "text", "content": text}]} for role, text in said]
    return json.dumps(found, separators=(",", ":"))


class Requests:
    def __init__(self, size: int, library: str = "") -> None:
        self.made: list[Any] = []
        self._size, self._library = size, library
        self._scope: Any = None

    def add(self, name: str, times_ns: tuple[int, int], *ids: bytes, kind: int, **own: Any) -> None:
        # Not above: what a worker holds at rest is measured.
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp

        if self._scope is None or len(self._scope.spans) == self._size:
            self.made.append(otlp.ExportTraceServiceRequest())
            resource = self.made[-1].resource_spans.add()
            resource.resource.attributes.add(key="service.name").value.string_value = "bench"
            self._scope = resource.scope_spans.add()
            self._scope.scope.name = self._library
        named = dict(zip(("trace_id", "span_id", "parent_span_id"), ids, strict=True))
        span = self._scope.spans.add(
            name=name, kind=kind, start_time_unix_nano=times_ns[0],
            end_time_unix_nano=times_ns[1], **named,
        )  # fmt: skip
        for key, value in own.items():
            kept = span.attributes.add(key=key.replace("__", ".")).value
            setattr(kept, "int_value" if isinstance(value, int) else "string_value", value)


class Server(contextlib.AbstractContextManager["Server"]):
    def __init__(self, command: Sequence[str], port: int, env: Any = None) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self.log = folder / "log"
        began = time.perf_counter()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=settings_of(HOME=str(folder), **env or {}), stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        while not self._answers():
            if time.perf_counter() - began > 180 or self.process.poll() is not None:
                said = self.log.read_text()[-2000:]
                self.__exit__()
                raise SystemExit(f"{command[0]} did not start: {said}")
            time.sleep(0.05)
        self.start_s = time.perf_counter() - began

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.url, timeout=5).close()
        except OSError as exc:
            return isinstance(exc, urllib.error.HTTPError)
        return True

    def ask(self, path: str, body: bytes | None = None, **headers: str) -> bytes:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, body, named)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return bytes(answer.read())

    def memory_mb(self) -> float:
        sessions = [_stat_of(each.name) for each in Path("/proc").glob("[0-9]*")]
        pages = sum(int(each[21]) for each in sessions if each and int(each[3]) == self.process.pid)
        return pages * os.sysconf("SC_PAGE_SIZE") / 1024**2

    def cpu_s(self) -> float:
        fields = _stat_of(self.process.pid)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, number)
                self.process.wait(10)
        self._folder.cleanup()


def _stat_of(pid: object) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def spread(values: Sequence[float], digits: int = 0) -> str:
    middle, low, high = (f"{f(values):,.{digits}f}" for f in (median, min, max))
    return f"{middle} ({low} to {high})" if len(values) > 1 else middle


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    print(f"\n{title}\n")
    for first, *rest in (cells[0], rule, *cells[1:]):
        padded = [first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]
        print(f"| {' | '.join(padded)} |")


def finish(options: argparse.Namespace, figures: object, *packages: str, python: Any = "") -> None:
    code = (
        "import json, sys, importlib.metadata as m;"
        "print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    )
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    asked = (git, [python or sys.executable, "-c", code, *packages])
    commit, versions = (subprocess.run(each, capture_output=True).stdout for each in asked)
    facts = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit.decode().strip(),
        "python": platform.python_version(), "cores": os.cpu_count(), **json.loads(versions),
    }  # fmt: skip
    print("\n" + ", ".join(f"{name} {value}" for name, value in facts.items()))
    if options.json:
        options.json.write_text(json.dumps({"facts": facts, "figures": figures}, indent=1) + "\n")
