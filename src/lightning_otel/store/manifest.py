"""The manifest: the files and segments that count, and its form on the disk.

Nothing in here imports DuckDB: the traced process uses it.
"""

import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

import orjson

from lightning_otel.store.counts import count_unstored, sum_counts

SCHEMA_VERSION: Final = 1
FURTHEST_AHEAD_US: Final = 10_000_000
"""A commit is written a moment before it counts; a later one is of a clock that went back since."""
DATA_NAME: Final = re.compile(r"spans-\d{1,20}-\w{1,64}\.parquet", re.ASCII)
"""When its oldest predecessor was made, and a token. No name that a store reads is a path."""
SEGMENT_NAME: Final = re.compile(r"\w{1,64}-\d{1,20}-\d{1,20}-\d{1,20}\.ndjson", re.ASCII)
"""Boot, start of the process in nanoseconds, process id, number."""
Integer = Annotated[int, range(-1 << 63, 1 << 63)]
Natural = Annotated[int, range(1 << 63)]
Counts = Mapping[str, Natural]
DataName = Annotated[str, DATA_NAME]
SegmentName = Annotated[str, SEGMENT_NAME]
Checksum = Annotated[
    str, re.compile(r"(?:[1-9a-f][0-9a-f]{3,11}\.[0-9a-f]{1,12}\.[0-9a-f]{1,12}\.([0-9a-f]{8})+)?")
]


@dataclass(frozen=True, slots=True)
class DataFile:
    """One settled Parquet file.

    Attributes:
        added_us: When it began to count, Unix microseconds.
        dropped_us: When it ceased to count; None while it does.
        successor: The file that holds all that this one held, once it ceased to count; empty if
            some was taken out or masked on purpose, so that this one must not be read again.
        is_compact: Whether ``compact`` packed it as tightly as it can.
        publication: What it goes into lakes as, with all files of the same one; empty if that is
            not settled yet. Files of different publications are never packed into one.
        checksum: As ``quarantine.checksum_of`` gives it; empty if it was never taken.
        settled_ns: When the last of its spans was settled; 0 if an older version wrote it.
    """

    name: DataName
    added_us: Natural
    rows: Natural
    size_bytes: Natural
    min_start_ns: Integer
    max_start_ns: Integer
    dropped_us: Natural | None = None
    is_compact: bool = False
    publication: str = ""
    checksum: Checksum = ""
    successor: DataName | Literal[""] = ""
    settled_ns: Natural = 0


@dataclass(frozen=True, slots=True)
class SettledSegment:
    """A segment whose spans stand in a data file.

    Attributes:
        damaged: Lines that did not parse.
        counts: Its ended spans, by what became of them.
        file: The data file; empty if it is not known or there is none.
        rows: Its spans that stand in that file.
    """

    name: SegmentName
    settled_us: Natural
    damaged: Natural = 0
    counts: Counts = field(default_factory=dict)
    file: DataName | Literal[""] = ""
    rows: Natural = 0

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
    than the start of its transaction: it sees either the one or the other. The time lies a little
    ahead of the replacement; it becomes 0, valid for all, before the segments are unlinked.

    Attributes:
        segments: Settled segments, until they are gone.
        counts: Spans of segments that are gone, and spans taken out of the store since.
        spent: Names of files that are gone and must not be read again, wherever they come from.
    """

    files: tuple[DataFile, ...] = ()
    segments: tuple[SettledSegment, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    spent: tuple[str, ...] = ()

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
            segment.name for segment in self.segments if is_in_effect(segment.settled_us, time_us)
        )

    def replace_files(
        self,
        old: Collection[str],
        file: DataFile | None,
        counts: Counts,
        settled: Iterable[SettledSegment],
        *,
        is_whole: bool,
        commit_us: int,
    ) -> "Manifest":
        """Return the manifest in which a new file, if any, counts in place of others.

        With ``is_whole`` the new file holds all that the old ones held: these and their segments
        stand in for it should it be damaged.
        """
        successor = file.name if file is not None and is_whole else ""
        files = []
        for entry in self.files:
            if entry.name in old:
                entry = replace(entry, dropped_us=commit_us, successor=successor)
            elif entry.successor in old:
                entry = replace(entry, successor=successor)
            files.append(entry)
        if file is not None:
            replaced = [(i, entry) for i, entry in enumerate(files) if entry.name in old]
            place, publication = len(files), ""
            if replaced:
                place, publication = replaced[0][0], replaced[0][1].publication
            files.insert(place, replace(file, added_us=commit_us, publication=publication))
        segments = (
            replace(entry, file=successor, rows=entry.rows if successor else 0)
            if entry.file in old
            else entry
            for entry in self.segments
        )
        new = (replace(entry, settled_us=commit_us) for entry in settled)
        return replace(
            self,
            files=tuple(files),
            segments=(*segments, *new),
            counts=sum_counts(self.counts, counts),
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
    if manifest.spent:
        rows.append({"kind": "spent", "names": manifest.spent})
    text = b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
    return text + orjson.dumps(_end_of(text), option=orjson.OPT_APPEND_NEWLINE)


def _end_of(text: bytes) -> dict[str, Any]:
    return {"kind": "end", "crc32": zlib.crc32(text)}


def parse_manifest(text: bytes) -> tuple[int, Manifest]:
    """Return a manifest's schema and content, none of an unknown schema; ValueError if not ours."""
    lines = text.splitlines(keepends=True)
    rows = [orjson.loads(line) for line in lines]
    if not rows or rows[0]["kind"] != "store":
        raise ValueError("its beginning is gone")
    if rows[-1]["kind"] != "end":
        raise ValueError("its end is gone")
    if rows[-1] != _end_of(text[: -len(lines[-1])]):
        raise ValueError("its checksum does not match")
    schema = _parse_value("schema", rows[0]["schema"], Natural)
    if schema > SCHEMA_VERSION:
        return schema, Manifest()
    counts: Any = next((row["counts"] for row in rows if row["kind"] == "counts"), {})
    spent: Any = tuple(next((row["names"] for row in rows if row["kind"] == "spent"), ()))
    manifest = Manifest(
        tuple(parse_entry(DataFile, row) for row in rows if row["kind"] == "file"),
        tuple(parse_entry(SettledSegment, row) for row in rows if row["kind"] == "segment"),
        _parse_value("counts", counts, Counts),
        _parse_value("names", spent, tuple[DataName, ...]),
    )
    names = [file.name for file in manifest.files]
    names += [segment.name for segment in manifest.segments]
    if len(names) > len(set(names)):
        raise ValueError(f"it names {Counter(names).most_common(1)[0][0]} twice")
    return schema, manifest


def parse_entry(kind: type[E], row: Mapping[str, Any]) -> E:
    """Return a row's entry, without fields that we do not know; ValueError for an unfit field."""
    values: dict[str, Any] = {}
    for name, is_valid, is_needed in _list_rules(kind):  # type: ignore[arg-type]  # a class
        if name in row:
            values[name] = row[name]
            if not is_valid(values[name]):
                raise ValueError(f"the {name} of a {kind.__name__} is {row[name]!r:.80}")
        elif is_needed:
            raise ValueError(f"a {kind.__name__} has no {name}")
    return kind(**values)


def _parse_value(name: str, value: Any, kind: Any) -> Any:
    if not _make_rule(kind)(value):
        raise ValueError(f"its {name} is {value!r:.80}")
    return value


Rule = Callable[[Any], bool]
"""Returns whether a value from a file is of some type."""


@cache
def _list_rules(kind: type) -> list[tuple[str, Rule, bool]]:
    """Return each field of a dataclass, the rule for it, and whether it is needed."""

    def is_needed(entry: "Field[Any]") -> bool:
        return entry.default is entry.default_factory is MISSING

    return [(entry.name, _make_rule(entry.type), is_needed(entry)) for entry in fields(kind)]


def _make_rule(kind: Any) -> Rule:
    arguments = get_args(kind)
    if get_origin(kind) is Annotated:
        base, bound = arguments
        if base is int:
            return lambda value: type(value) is int and value in bound
        return lambda value: type(value) is str and bound.fullmatch(value) is not None
    if get_origin(kind) is Literal:
        return lambda value: value in arguments
    rules = [*map(_make_rule, arguments)]
    if get_origin(kind) is Mapping:
        is_key, is_value = rules
        return lambda value: (
            type(value) is dict and all(map(is_key, value)) and all(map(is_value, value.values()))
        )
    if get_origin(kind) is tuple:  # of any length
        return lambda value: type(value) is tuple and all(map(rules[0], value))
    if arguments:  # a union
        return lambda value: any(rule(value) for rule in rules)
    return lambda value: type(value) is kind
