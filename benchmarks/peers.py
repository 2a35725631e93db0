"""What the benchmarks share: environments for peers, workers in their own processes, tables."""

import argparse
import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_RESULT = "benchmark-result:"


def arguments(description: str) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a short run: right, but noisier")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there too")
    parser.add_argument(
        "--env",
        type=Path,
        metavar="DIR",
        default=Path(tempfile.gettempdir()) / "lightning-otel-benchmarks",
        help="where the environments of the peers are made and kept (default: %(default)s)",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def environment(folder: Path, name: str, requirements: Sequence[str]) -> Path:
    """The Python of a virtual environment that holds the requirements; made if it is not there."""
    home = folder.resolve() / name
    python = home / "bin" / "python"
    stamp = home / "requirements.sha256"
    digest = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        say(f"making the environment {home} ({len(requirements)} requirements)")
        venv.create(home, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *requirements], check=True)
        stamp.write_text(digest)
    return python


def start(
    python: Path | str,
    script: str,
    worker: str,
    *options: object,
    settings: Mapping[str, str] | None = None,
) -> "subprocess.Popen[str]":
    """A worker, which is a benchmark's script in a process of its own."""
    inherited = {
        name: value
        for name, value in os.environ.items()  # noqa: TID251  # the rule is the package's own
        if not name.startswith(("OTEL_", "LIGHTNING_"))
    }
    return subprocess.Popen(
        [str(python), script, "--worker", worker, *map(str, options)],
        env={**inherited, **(settings or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def result(process: "subprocess.Popen[str]") -> Any:
    """What a worker reports, once it has ended."""
    output, _ = process.communicate()
    lines = [line for line in output.splitlines() if line.startswith(_RESULT)]
    if process.returncode or not lines:
        raise SystemExit(f"{process.args} failed with {process.returncode}: {output[-2000:]}")
    return json.loads(lines[-1].removeprefix(_RESULT))


def run(
    python: Path | str,
    script: str,
    worker: str,
    *options: object,
    settings: Mapping[str, str] | None = None,
) -> Any:
    """What a worker reports; nothing else runs meanwhile."""
    return result(start(python, script, worker, *options, settings=settings))


def report(result: object) -> None:
    """Hand a worker's result to its driver."""
    print(_RESULT + json.dumps(result), flush=True)


def answer(process: "subprocess.Popen[str]", question: object = None) -> Any:
    """A worker's next report, after a question if one is given; the worker goes on living."""
    assert process.stdin is not None
    assert process.stdout is not None
    if question is not None:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    for line in process.stdout:
        if line.startswith(_RESULT):
            return json.loads(line.removeprefix(_RESULT))
    raise SystemExit(f"{process.args} ended with {process.wait()}")


def questions() -> Iterator[Any]:
    """In a worker: what its driver asks, until it asks no more."""
    for line in sys.stdin:
        yield json.loads(line)


def say(text: str) -> None:
    """Tell what is going on, beside the tables."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table whose source is aligned."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}\n")
    for number, row in enumerate(cells):
        padded = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print(f"| {' | '.join(padded)} |")
        if number == 0:
            rules = ("-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:]))
            print(f"| {' | '.join(rules)} |")


def with_spread(values: Sequence[float], digits: int = 0) -> str:
    """The median of several rounds, with the lowest and the highest."""
    if len(values) == 1:
        return f"{values[0]:,.{digits}f}"
    low, high = min(values), max(values)
    return f"{median(values):,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def with_quartiles(values: Sequence[float]) -> str:
    """The median of many turns, with the first and the third quartile."""
    low, middle, high = quantiles(values, n=4)
    return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"


def ratio(ours: float, theirs: float) -> str:
    """How many times theirs ours is."""
    return f"{ours / theirs:.2f}"


def facts(python: Path | str, *packages: str) -> dict[str, str]:
    """When, where and with what a table was made."""
    code = (
        "import json, sys, importlib.metadata as m;"
        "print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    )
    found = subprocess.run([python, "-c", code, *packages], capture_output=True, check=True)
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
        **json.loads(found.stdout),
    }


def _commit() -> str:
    def git(*command: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True)
        return done.stdout.strip()

    head = git("rev-parse", "--short", "HEAD") or "unknown"
    return f"{head} with changes" if git("status", "--porcelain", "--", "src") else head


def finish(path: Path | None, where: Mapping[str, str], figures: object) -> None:
    """Print when, where and with what; write everything to a file if one is named."""
    print("\n" + ", ".join(f"{name} {value}" for name, value in where.items()))
    if path is not None:
        path.write_text(json.dumps({"facts": where, "figures": figures}, indent=1) + "\n")
