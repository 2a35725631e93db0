"""Redactions as they are told of: what is looked at, what was done, the record of it, its end.

A redaction has ended when no file of the store holds any more what was masked. Nothing in here says
what was masked: a pattern may be the very thing that is to be forgotten.
"""

import getpass
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson

from lightning_otel.store import settle
from lightning_otel.store.layout import Layout, now_us
from lightning_otel.store.lines import parsed
from lightning_otel.store.quarantine import notes
from lightning_otel.store.settle import settler_elected, sweep
from lightning_otel.store.sql import ROLLOUT, quoted

RECORDS: Final = "redactions.ndjson"
_LOOK_S: Final = 0.5


class Scope(NamedTuple):
    """Spans that are looked at; all, if nothing is named."""

    rollouts: tuple[str, ...] = ()
    traces: tuple[str, ...] = ()
    spans: tuple[str, ...] = ()
    responses: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """Return the same as a condition of SQL."""
        named = zip((ROLLOUT, "trace_id", "span_id", "response_id"), self, strict=True)
        parts = [f"{column} IN ({', '.join(map(quoted, ids))})" for column, ids in named if ids]
        return f"({' OR '.join(parts)})" if parts else "true"

    def holds(self, record: Mapping[str, Any]) -> bool:
        """Say whether a line of a segment is of such a span."""
        rollout = record.get("rollout_id") or record["trace_id"]
        values = (rollout, record["trace_id"], record["span_id"], record.get("response_id"))
        return not any(self) or any(value in ids for value, ids in zip(values, self, strict=True))


@dataclass(slots=True)
class Redacted:
    """Work that a redaction did, or would do.

    Attributes:
        redaction_id: Stands on every span that was changed, and in the record of redactions.
        looked_at: Spans read.
        spans: Spans changed.
        rollouts: Rollouts they are of.
        values: How many values went, by reason.
        files: Files written anew.
        open_spans: Spans that hold such content in what a living process holds open: they are as
            they were.
        in_ids: Ids that hold what was to be masked; they stay.
        published: Spans changed that may stand in a lake, as they were.
        left: Files that are as they were: their rows are too wide for the memory allowed.
        aside: Damaged parts in quarantine, which cannot be looked into.
        is_gone: Whether no file of the store holds any more what was masked.
    """

    redaction_id: str = ""
    looked_at: int = 0
    spans: int = 0
    rollouts: int = 0
    values: dict[str, int] = field(default_factory=dict)
    files: int = 0
    open_spans: int = 0
    in_ids: int = 0
    published: int = 0
    left: int = 0
    aside: int = 0
    is_gone: bool = False


def scope_of(found: Iterable[tuple[str, str]]) -> Scope:
    """Return the scope that ids amount to.

    Args:
        found: What each is (``rollout``, ``trace``, ``span`` or ``response``), and its whole id.
    """
    ids: dict[str, list[str]] = {"rollout": [], "trace": [], "span": [], "response": []}
    for noun, whole in found:
        ids[noun].append(whole)
    return Scope(*map(tuple, ids.values()))


def finish(layout: Layout, *, wait_s: float, told: Callable[[float], None] | None = None) -> bool:
    """Have the files that hold what was masked unlinked, once no reader can want them any more.

    Args:
        layout: The store's paths.
        wait_s: How long to wait for that, and for other settlers.
        told: Told how many seconds are left.

    Returns:
        Whether they are gone.
    """
    until_us = now_us()
    deadline = time.monotonic() + wait_s
    while True:
        newest_us = max(_leftover_times(layout, until_us), default=0)
        left_us = newest_us + settle.GRACE_US - now_us()
        if left_us <= 0:
            with settler_elected(layout) as is_elected:
                if is_elected:
                    sweep(layout, is_asked=True)
            if not any(True for _ in _leftover_times(layout, until_us)):
                return True
        if time.monotonic() >= deadline:
            return False
        if told is not None:
            told(max(0.0, left_us / 1e6))
        time.sleep(min(_LOOK_S, max(0.01, left_us / 1e6)))


def redactions(layout: Layout) -> list[dict[str, Any]]:
    """Return every redaction of a store, the oldest first: by which rules, and when.

    One without an ``ended_ns`` was cut off.
    """
    found: dict[str, dict[str, Any]] = {}
    try:
        lines = (layout.root / RECORDS).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        record = parsed(line)
        if "redaction_id" in record:
            found.setdefault(record["redaction_id"], {}).update(record)
    return list(found.values())


def write_record(layout: Layout, record: Mapping[str, Any]) -> None:
    """Append to the record of redactions, on the disk before anything goes on."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(layout.root / RECORDS, flags, 0o600)
    try:
        # A line that a kill has torn does not swallow this one.
        os.write(descriptor, b"\n" + orjson.dumps(record) + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def user_name() -> str:
    """Return who runs this, as far as the system knows them."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in a container
        return str(os.getuid())


def _leftover_times(layout: Layout, until_us: int) -> Iterator[int]:
    """Yield since when each file counts no more that still lies there, Unix microseconds."""
    manifest = layout.read_manifest()
    # A commit counts a little after it was written.
    late_us = until_us + 10 * settle.COMMIT_AHEAD_US
    for file in manifest.files:
        if file.dropped_us is not None and file.dropped_us <= late_us:
            yield file.dropped_us
    for segment in manifest.segments:
        if (layout.live / segment.name).exists() and segment.settled_us <= late_us:
            yield segment.settled_us
    listed = {file.name for file in manifest.files} | {note.name for note in notes(layout)}
    for path in layout.data.glob("spans-*.parquet"):
        try:
            changed_us = path.stat().st_mtime_ns // 1000
        except FileNotFoundError:
            continue
        if path.name not in listed and changed_us <= until_us:
            yield changed_us
