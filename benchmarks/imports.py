"""What the package weighs: installed, imported, asked for help.

The core is installed into an environment of its own, made anew each time; times are medians over
processes, bare ones and others alternating.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path
from statistics import median

import peers

KEPT_OUT = ("openai", "duckdb", "torch", "starlette", "fastapi", "flask", "aiohttp")
BUDGETS = {
    "import over bare Python, ms": 60,
    "lightning-otel --help, ms": 250,
    "packages": 45,
    "size, MB": 120,
}
_USED = "import lightning_otel; lightning_otel.auto_trace"
_LOADED = f"""
import sys
import lightning_otel
print(" ".join(name for name in {KEPT_OUT!r} if name in sys.modules))
"""
_PACKAGES = """
import importlib.metadata as m
print(sum(d.metadata["Name"] not in ("pip", "setuptools") for d in m.distributions()))
"""


def seconds(*command: object) -> float:
    """How long a process takes."""
    began = time.perf_counter()
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def output(python: Path, code: str) -> str:
    """What a piece of code prints."""
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def size_mb(home: Path) -> float:
    """The files of an environment without pip's and compiled ones."""
    packages = next((home / "lib").glob("python*")) / "site-packages"
    found = 0
    for folder, names, files in os.walk(packages):
        names[:] = [n for n in names if not n.startswith(("pip", "setuptools", "__pycache__"))]
        found += sum((Path(folder) / name).stat().st_size for name in files)
    return found / 1e6


def main() -> None:
    options = peers.arguments(__doc__ or "").parse_args()
    home = options.env / "core"
    shutil.rmtree(home, ignore_errors=True)
    python = peers.environment(options.env, "core", [str(peers.ROOT)])
    size, packages = size_mb(home), int(output(python, _PACKAGES))
    tool = python.with_name("lightning-otel")
    bare, imported, used, helped = [], [], [], []
    for number in range(-2, 6 if options.quick else 30):
        times = (
            seconds(python, "-c", "pass"),
            seconds(python, "-c", "import lightning_otel"),
            seconds(python, "-c", _USED),
            seconds(tool, "--help"),
        )
        if number >= 0:  # the first ones compile
            for held, value in zip((bare, imported, used, helped), times, strict=True):
                held.append(value * 1e3)
    figures = {
        "import over bare Python, ms": [
            after - before for before, after in zip(bare, imported, strict=True)
        ],
        "the same, and auto_trace taken out of it, ms": [
            after - before for before, after in zip(bare, used, strict=True)
        ],
        "lightning-otel --help, ms": helped,
        "packages": [packages],
        "size, MB": [size],
    }
    rows = [
        [
            name,
            peers.with_spread(values),
            f"≤ {BUDGETS[name]}" if name in BUDGETS else "-",
            peers.ratio(median(values), BUDGETS[name]) if name in BUDGETS else "-",
        ]
        for name, values in figures.items()
    ]
    peers.table("The core package", ["what", "median (spread)", "budget", "of the budget"], rows)
    loaded = output(python, _LOADED)
    print(f"\nOf {', '.join(KEPT_OUT)}, `import lightning_otel` loads: {loaded or 'none'}.")
    where = peers.facts(python, "lightning-otel", "opentelemetry-sdk", "duckdb")
    peers.finish(options.json, where, figures)


if __name__ == "__main__":
    main()
