"""Prints what became of the spans in each row of the fault suite, with its full numbers.

    python -m tests.faults.table [--json] [ROW ...]

Rows whose trials end in no count of spans say how many tests of theirs passed. Exits with 1 if a
test failed or a span was lost or doubled.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

COUNTED: Final = ("tests/faults", "tests/processes/test_loss.py")
"""Tests that note their counts."""
ELSEWHERE: Final[Mapping[str, tuple[str, ...]]] = {
    "L3": ("tests/processes/test_kill.py",),
    "L13": ("tests/processes/test_loss.py::test_eight_writers_and_a_reader_agree",),
    "L15": ("tests/store/test_settle.py",),
    "I1": ("tests/instrumentors/openai/test_surfaces.py",),
    "I2": ("tests/instrumentors/contract", "tests/instrumentors/openai/test_body.py"),
    "I3": ("tests/instrumentors/openai/test_failures.py",),
    "I4": ("tests/instrumentors/contract", "tests/instrumentors/openai/test_init.py"),
    "I6": ("tests/faults/test_inside.py", "tests/instrumentors/openai/test_faults.py"),
    "I7": ("tests/instrumentors/contract", "tests/tracing/test_blocks.py"),
    "I8": ("tests/instrumentors/contract",),
    "I9": ("tests/test_config.py",),
}
"""Tests that show a row, or one more side of it, without a count of spans."""
_PASSED: Final = re.compile(r"(\d+) passed")
_KEYS: Final = ("ended", "stored", "counted", "lost", "doubled")
"""``counted`` are spans that are not stored, with a reason; ``lost`` are those without one."""
Row = dict[str, Any]


def counted() -> tuple[list[Row], bool]:
    """The rows that note their counts, added up; and whether every test passed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table"
        path.touch()
        _, is_green = _run(COUNTED, path)
        notes = [json.loads(line) for line in path.read_text().splitlines()]
    rows: dict[str, Row] = {}
    for note in notes:
        row = rows.setdefault(note["row"], dict.fromkeys(("trials", *_KEYS), 0))
        for key in row:
            row[key] += note[key]
    return [{"row": name, **row} for name, row in sorted(rows.items())], is_green


def passed(wanted: set[str]) -> Iterator[tuple[Row, bool]]:
    """How many tests of each row elsewhere passed; and whether all did."""
    for name, nodes in ELSEWHERE.items():
        if wanted and name not in wanted:
            continue
        count, is_green = _run(nodes)
        yield {"row": name, "trials": count, "tests": " ".join(nodes)}, is_green


def _run(nodes: tuple[str, ...], table: Path | None = None) -> tuple[int, bool]:
    environment = {**os.environ, "LIGHTNING_TEST_FAULTS": "1", "LIGHTNING_TEST_KILLS": "50"}
    if table is not None:
        environment["LIGHTNING_FAULTS_TABLE"] = str(table)
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=900", *nodes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-4000:], file=sys.stderr)  # noqa: T201
    found = _PASSED.search(done.stdout)
    return int(found[1]) if found else 0, done.returncode == 0


def main(words: list[str]) -> int:
    """Print the table; gives the exit code."""
    is_json = "--json" in words
    wanted = {word for word in words if not word.startswith("--")}
    rows, is_green = counted()
    for row, is_row_green in passed(wanted):
        rows.append(row)
        is_green = is_green and is_row_green
    rows = [row for row in rows if not wanted or row["row"] in wanted]
    rows.sort(key=lambda row: (row["row"][0], int(row["row"][1:])))
    if is_json:
        print(json.dumps(rows, indent=2))  # noqa: T201
    else:
        for line in lines(rows):
            print(line)  # noqa: T201
    return 0 if is_green and not any(row.get("doubled") or row.get("lost") for row in rows) else 1


def lines(rows: list[Row]) -> Iterator[str]:
    yield f"| fault | trials | {' | '.join(_KEYS)} |"
    yield f"| --- |{' ---: |' * (1 + len(_KEYS))}"
    for row in rows:
        cells = [row["row"], row["trials"], *(row.get(key, "-") for key in _KEYS)]
        yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
