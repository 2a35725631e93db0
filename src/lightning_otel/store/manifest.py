"""The manifest: the files and segments that count, and its form on the disk.

Nothing in here imports DuckDB: the traced process uses it.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar

import orjson

from lightning_otel.store.counts import count_unstored

SCHEMA_VERSION: Final = 1
FURTHEST_AHEAD_US: Final = 10_000_000
"""A commit is written a moment before it counts; a later one is of a clock that went back since."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One settled Parquet file.

    Attributes:
        added_us: When it began to count, Unix microseconds.
        dropped_us: When it ceased to count; None while it does.
        is_compact: Whether ``compact`` made it, and packed it as tightly as it can.
        publication: What it goes into lakes as, with all files of the same one; empty if that is
            not settled yet. Files of different publications are never packed into one.
        checksum: As ``quarantine.checksum_of`` gives it.
    """

    name: str
    added_us: int
    rows: int
    size_bytes: int
    min_start_ns: int
    max_start_ns: int
    dropped_us: int | None = None
    is_compact: bool = False
    publication: str = ""
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class SettledSegment:
    """A segment whose spans stand in a data file.

    Attributes:
        damaged: Lines that did not parse.
        counts: What became of the spans that ended in it, by reason; see :mod:`counts`.
        file: The data file its spans stand in; empty if it is not known or there is none.
        rows: Its spans that stand in that file.
    """

    name: str
    settled_us: int
    damaged: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    file: str = ""
    rows: int = 0

    @property
    def process(self) -> str:
        """Id of the process that wrote it."""
        return self.name.rpartition("-")[0]

    @property
    def has_damage(self) -> bool:
        """Return whether something was damaged, rejected or lost."""
        return bool(self.damaged or count_unstored(self.counts))


E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files and segments that count: the only commit mark of the store.

    A reader takes a file for live, and a segment for settled, if the time written here is not later
    than the start of its own transaction, so it sees either the one or the other. The time lies a
    little ahead of the replacement: whoever starts after it reads the new manifest, however often.
    It becomes 0, valid for all, before the segments are unlinked.

    Attributes:
        files: Data files.
        segments: Settled segments, until they are gone.
        counts: Spans of segments that are gone, and spans taken out of the store since, by what
            became of them; see :mod:`counts`.
    """

    files: tuple[DataFile, ...] = ()
    segments: tuple[SettledSegment, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def live_files(self) -> tuple[DataFile, ...]:
        """Files that count now."""
        return tuple(file for file in self.files if file.dropped_us is None)

    @property
    def settled(self) -> frozenset[str]:
        """Names of the segments that were settled."""
        return frozenset(segment.name for segment in self.segments)

    def settled_by(self, time_us: int) -> frozenset[str]:
        """Names of the segments that are settled for whoever begins at this time or later."""
        return frozenset(
            each.name for each in self.segments if is_in_effect(each.settled_us, time_us)
        )


def is_in_effect(commit_us: int, time_us: int) -> bool:
    """Return whether a commit counts at a time; one far ahead counts, as the clock went back."""
    return not time_us < commit_us <= time_us + FURTHEST_AHEAD_US


def format_manifest(manifest: Manifest) -> bytes:
    """Return a manifest's text: an object a line, the last one with the checksum of the others."""
    rows: list[dict[str, Any]] = [{"kind": "store", "schema": SCHEMA_VERSION, "ends": True}]
    for kind, entries in (("file", manifest.files), ("segment", manifest.segments)):
        rows += [{"kind": kind, **{n: getattr(e, n) for n in e.__slots__}} for e in entries]
    if manifest.counts:
        rows.append({"kind": "counts", "counts": manifest.counts})
    text = b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
    return text + orjson.dumps(_end_of(text), option=orjson.OPT_APPEND_NEWLINE)


def _end_of(text: bytes) -> dict[str, Any]:
    return {"kind": "end", "crc32": zlib.crc32(text)}


def parse_manifest(text: bytes) -> tuple[int, Manifest]:
    """Return a manifest's schema, and what it says; nothing if we do not know that schema.

    Raises:
        ValueError: It is not as it was written.
    """
    lines = text.splitlines(keepends=True)
    rows = [orjson.loads(line) for line in lines]
    if not rows or rows[0]["kind"] != "store":
        raise ValueError("its beginning is gone")
    schema = rows[0]["schema"]
    if schema > SCHEMA_VERSION:
        return schema, Manifest()
    if rows[-1]["kind"] != "end":
        raise ValueError("its end is gone")
    if rows[-1] != _end_of(text[: -len(lines[-1])]):
        raise ValueError("its checksum does not match")
    return schema, Manifest(
        tuple(parse_entry(DataFile, row) for row in rows if row["kind"] == "file"),
        tuple(parse_entry(SettledSegment, row) for row in rows if row["kind"] == "segment"),
        next((row["counts"] for row in rows if row["kind"] == "counts"), {}),
    )


def parse_entry(kind: type[E], row: Mapping[str, Any]) -> E:
    """Return a row's entry, without fields that we do not know."""
    names = (each.name for each in fields(kind))  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: row[name] for name in names if name in row})
