"""Prints, for each example program that can run here, what was captured of it.

    python -m tests.examples.table [NAME ...]

A cell of the form ``a of b`` says how many of the server's requests have a span.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from tests.examples.checker import Host, Recorded, problems, recorded_in, run_both
from tests.examples.programs import CLIENTS, PROGRAMS, Program
from tests.examples.test_clients import RUNS
from tests.examples.test_clients import run as run_client

from lightning_otel.types import conventions as c

HEAD = ("program", "calls", "tokens", "exact", "agents", "tools", "orphans", "doubles", "wrong")


def is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # one of its parents is missing
        return False


def row(program: Program) -> list[object]:
    with tempfile.TemporaryDirectory() as folder:
        plain, recorded = run_both(program, Path(folder))
    wrong = len(problems(program, plain, recorded))
    agents = sorted(set(recorded.agents_of(recorded.calls)) - {""})
    return [
        program.name,
        f"{len(recorded.calls)} of {len(recorded.requests)}",
        _tokens(recorded),
        recorded.report.exact,
        ", ".join(agents) or "-",
        len(recorded.tools),
        len(recorded.orphans),
        recorded.doubles,
        wrong,
    ]


def client_row(program: Program) -> list[object]:
    """Likewise of a program that asks models of another vendor, whose server has its own log."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "traces.duckdb"
        plain, requests = run_client(program)
        output, log = run_client(program, *RUNS["run"], LIGHTNING_OTEL_STORE=str(place))
        recorded = recorded_in(place, Host(0, output, "", ()))
    count, missing = recorded.in_views[0], len(log) - recorded.report.transitions
    is_other = plain != output or sorted(map(repr, requests)) != sorted(map(repr, log))
    tools, orphans = len(recorded.tools), len(recorded.orphans)
    cells = [program.name, f"{count} of {len(log)}", "-", recorded.report.exact, "-", tools]
    return [*cells, orphans, max(count - len(log), 0), is_other + abs(missing)]


def _tokens(recorded: Recorded) -> str:
    keys = (c.INPUT_TOKENS, c.OUTPUT_TOKENS)
    given, made = (sum(call.attributes.get(key, 0) for call in recorded.calls) for key in keys)
    return f"{given} + {made}"


def lines(rows: Iterable[Sequence[object]]) -> Iterator[str]:
    rules = ["---", *("---:" for _ in HEAD[1:])]
    for cells in chain((HEAD, rules), rows):
        yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    wanted = [p for p in (*PROGRAMS, *CLIENTS) if p.name in sys.argv[1:] or not sys.argv[1:]]
    here = [program for program in wanted if all(map(is_here, program.needs))]
    missing = [program.name for program in wanted if program not in here]
    if missing:
        print(f"without {', '.join(missing)}: not installed here", file=sys.stderr)  # noqa: T201
    for line in lines(client_row(p) if p in CLIENTS else row(p) for p in here):
        print(line, flush=True)  # noqa: T201
