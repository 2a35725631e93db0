"""Exported files that are changed in one place each, and what ``verify`` says of them.

    python -m tests.store.mutations [CHANGES] [ROWS]

It makes CHANGES changes (10,000), counts those that are missed, and tells the CPU seconds that
ROWS certified rows (1,000,000) take. The tests make a few hundred changes.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import orjson
from tests.environments import say
from tests.trainer.made import spans_of

from lightning_otel import Store
from lightning_otel.dataset import formats
from lightning_otel.dataset.certificate import find_certificate, verify
from lightning_otel.dataset.formats import Format

TASKS = 100
HOMES = {"sft": "a.jsonl", "kto": "b.parquet", "grpo": "folder", "openai-sft": "d.jsonl"}


def fill_store(path: Path) -> Store:
    """Make a store of a hundred tasks, each tried twice, some steps without a reward."""
    store = Store(path)
    for task in range(TASKS):
        for number, reward in enumerate((task / TASKS, None if task % 10 else 1.0)):
            store.add(spans_of(f"r{task}-{number}", f"{task}+2?", reward, tokens=True))
    return store


def certify(store: Store, root: Path) -> list[Path]:
    """Export lines, Parquet, a folder of two sides, and lines of two sides, each certified."""
    paths = [root / name.partition(".")[0] / name for name in HOMES.values()]
    for path, name in zip(paths, HOMES, strict=True):
        path.parent.mkdir()
        split = 0.3 if name in ("grpo", "openai-sft") else None
        store.export(name, path, certificate=True, split=split)
        assert all(verdict.is_right for verdict in verify(path, store))
        assert find_certificate(path).stat().st_size <= 10_000
    return paths


def swap_lines(text: bytes, chance: random.Random) -> bytes:
    """Two rows change places."""
    lines = text.splitlines(keepends=True)
    one, other = chance.sample(range(len(lines)), 2)
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def repeat_line(text: bytes, chance: random.Random) -> bytes:
    """A row comes twice."""
    lines = text.splitlines(keepends=True)
    lines.insert(chance.randrange(len(lines)), chance.choice(lines))
    return b"".join(lines)


def edit_number(text: bytes, chance: random.Random) -> bytes:
    """A number of the certificate is another one, and its text is canonical but for its digest."""
    whole = orjson.loads(text)
    part = chance.choice([whole["predicate"][name] for name in ("law", "funnel", "rewards")])
    name = chance.choice([name for name, value in part.items() if isinstance(value, int)])
    part[name] += chance.choice((-1, 1))
    return orjson.dumps(whole, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2) + b"\n"


BYTES: dict[str, Callable[[bytes, int, random.Random], bytes]] = {
    "flip": lambda text, at, r: text[:at] + bytes([text[at] ^ 1 << at % 8]) + text[at + 1 :],
    "insert": lambda text, at, r: text[:at] + bytes([r.randrange(256)]) + text[at:],
    "remove": lambda text, at, r: text[:at] + text[at + 1 :],
    "cut": lambda text, at, r: text[:at],
}  # fmt: skip


def mutate(path: Path, chance: random.Random) -> Iterator[tuple[Path, str, bytes]]:
    """Yield changes of one file each: its bytes, its rows, the numbers of the certificate."""
    for file in sorted(file for file in path.parent.rglob("*") if file.is_file()):
        text = file.read_bytes()
        for name, change in BYTES.items():
            for _ in range(6):
                yield file, name, change(text, chance.randrange(len(text)), chance)
        for rows in (swap_lines, repeat_line) if file.suffix == ".jsonl" else ():
            yield file, rows.__name__, rows(text, chance)
        for _ in range(10 if file.name.endswith("certificate.json") else 0):
            yield file, "number", edit_number(text, chance)


def list_missed(path: Path, chance: random.Random) -> Iterator[tuple[str, str] | None]:
    """Yield for each change None, or the file and the change that nobody finds."""
    for file, name, text in mutate(path, chance):
        before = file.read_bytes()
        if text == before:
            continue
        file.write_bytes(text)
        is_missed = all(verdict.is_right for verdict in verify(path))
        file.write_bytes(before)
        yield (file.name, name) if is_missed else None


def time_rows(store: Store, path: Path, number: int) -> float:
    """Return the CPU seconds of a certified export of rows."""
    rows = list(store.rows("sft"))

    def repeat_rows(trajectories: Iterable[Any]) -> Iterator[dict[str, Any]]:
        assert sum(1 for _ in trajectories)
        yield from rows
        for place, row in zip(range(len(rows), number), cycle(rows)):  # endless
            yield {**row, "reward": float(place), "span_ids": []}

    layout = Format(repeat_rows, steps_of=lambda row: row["span_ids"])
    start_s = time.process_time()
    with patch.object(formats, "get", lambda name: layout):  # it installs no distribution
        store.export("own", path, certificate=True)
    return time.process_time() - start_s


def main(changes: int = 10_000, rows: int = 1_000_000) -> None:
    """Print the changes, those that were missed, and the CPU seconds."""
    chance = random.Random(7)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        store = fill_store(root / "traces.duckdb")
        homes = certify(store, root)
        outcomes = (
            missed for _ in count() for path in homes for missed in list_missed(path, chance)
        )
        found = list(islice(outcomes, changes))
        say(f"{len(found)} changes, missed: {[missed for missed in found if missed]}")
        for name in ("rows.jsonl", "rows.parquet"):
            seconds = time_rows(store, root / name, rows)
            say(f"{name}: {rows} rows written and certified in {seconds:.1f} CPU s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
