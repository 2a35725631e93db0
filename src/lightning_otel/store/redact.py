"""Mask content in stored spans: rewrite the files that hold it, and unlink the old ones.

A file with something to mask is rewritten in its row order and replaced in one commit. A redaction
that is killed leaves each span once; the next one continues. Processes that still record are asked
to close their segments; what they hold open is only counted. A redaction has ended when no file of
the store holds what was masked. Its record does not name that: a pattern may be the secret itself.
"""

import getpass
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson

from lightning_otel.errors import ConfigError
from lightning_otel.redact import IN_ID, Redactor, Rules
from lightning_otel.store import settle
from lightning_otel.store.compact import Progress
from lightning_otel.store.damage import translate_errors
from lightning_otel.store.files import give_to_owner
from lightning_otel.store.layout import Layout, elect_settler, hold_settler_lock, now_us
from lightning_otel.store.lines import read_records
from lightning_otel.store.lookup import ID_COLUMNS
from lightning_otel.store.parquet import SPILL, bounded_connection, list_live_files
from lightning_otel.store.quarantine import read_notes
from lightning_otel.store.rewrite import Rewrite, TooWideError
from lightning_otel.store.schema import COLUMNS, build_span
from lightning_otel.store.segment import request_rotation
from lightning_otel.store.settle import list_sealed, settle_elected, wait_until_visible
from lightning_otel.store.snapshot import IS_SPAN, SEGMENT_COLUMNS, Snapshot, ndjson_sql
from lightning_otel.store.source import prepare
from lightning_otel.store.sql import new_connection, quote_paths, quote_text
from lightning_otel.store.writer import writers_by_catalogue
from lightning_otel.types import Span

RECORDS: Final = "redactions.ndjson"
_CLOSING_S: Final = 1.0
"""How long processes that write are waited for until their segments are closed."""
_CLOSING_STEP_S: Final = 0.02
_FINISH_STEP_S: Final = 0.5
_LEAST_STEP_S: Final = 0.1
_BATCH: Final = 256

Scope = Sequence[tuple[str, str]]
"""What each id is (``rollout``, ``trace``, ``span`` or ``response``), and the whole id."""


@dataclass(slots=True)
class RedactResult:
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


def redact(
    layout: Layout | None,
    rules: Rules,
    scope: Scope,
    *,
    reason: str = "",
    is_dry_run: bool = False,
    wait_s: float = 0.0,
    progress: Progress | None = None,
    waiting: Callable[[float], None] | None = None,
) -> RedactResult:
    """Mask what the rules name in every settled span, note down that it was done, and finish it.

    See :meth:`SpanStore.redact`.
    """
    if layout is None:
        raise ConfigError("redact needs a store on this disk; name one with --store")
    if rules.is_whole and not scope:
        raise ConfigError(
            "nothing to redact is named; name it with --pattern, --key, --secrets or --id"
        )
    prepare(layout)
    work = _Work(layout, rules, scope, progress)
    with translate_errors(layout, "redact"):
        with hold_settler_lock(layout):
            if is_dry_run:
                work.count()
            else:
                work.carry_out(reason)
        if not is_dry_run:
            work.done.is_gone = _wait_for_unlink(layout, wait_s, waiting)
    return work.done


def read_redactions(layout: Layout) -> list[dict[str, Any]]:
    """Return every redaction of a store, the oldest first: by which rules, and when.

    One without an ``ended_ns`` was cut off.
    """
    found: dict[str, dict[str, Any]] = {}
    path = layout.root / RECORDS
    for record in read_records(path) if path.exists() else ():
        if isinstance(record.get("redaction_id"), str):
            found.setdefault(record["redaction_id"], {}).update(record)
    return list(found.values())


class _Work:
    """One redaction under way."""

    def __init__(
        self, layout: Layout, rules: Rules, scope: Scope, progress: Progress | None
    ) -> None:
        self._layout, self._rules, self._scope, self._progress = layout, rules, scope, progress
        same = [f"{ID_COLUMNS[noun]} = {quote_text(each)}" for noun, each in scope]
        self._where = " OR ".join(same) or "true"
        self.done = RedactResult(redaction_id=f"redaction-{secrets.token_hex(4)}")
        self._redactor = Redactor(rules, self.done.redaction_id)
        self._found: dict[tuple[str, str], tuple[str, Mapping[str, int]]] = {}
        self._rollouts: set[str] = set()
        self._rows = self._total = 0

    def carry_out(self, reason: str) -> None:
        """Write anew every file that holds what the rules name."""
        layout = self._layout
        # Never what is looked for itself: a pattern may be the very thing to be forgotten.
        only: dict[str, list[str]] = {}
        for noun, each in self._scope:
            only.setdefault(f"{noun}s", []).append(each)
        begun = {
            "redaction_id": self.done.redaction_id,
            "began_ns": time.time_ns(),
            "patterns": len(self._rules.patterns),
            "keys": list(self._rules.keys),
            "secrets": self._rules.secrets,
            "only": only,
        }
        _write_record(layout, {**begun, "reason": reason, "user": _find_user()})
        self._close_segments()
        settle_elected(layout)
        files = list_live_files(layout, layout.read_manifest())
        self.done.looked_at = sum(file.rows for file in files)
        self._total = 2 * self.done.looked_at
        with bounded_connection(layout.new / SPILL) as con:
            for file in files:
                rewrite = Rewrite(
                    con, layout, [file], self._step, transform=self._mask_span, scope=self._where
                )
                try:
                    self.done.files += rewrite.run() is not None
                except TooWideError:
                    self._found.clear()
                    self.done.left += 1
                self._add_found(is_published=bool(file.publication))
        self._end(layout.list_unsettled(layout.read_manifest()))
        wait_until_visible(layout)
        found = asdict(self.done)
        del found["is_gone"]
        _write_record(layout, {**found, "ended_ns": time.time_ns()})

    def count(self) -> None:
        """Count what would be changed; nothing is."""
        still_open = _open_segments(self._layout)
        snapshot = Snapshot.take(self._layout).without(path.name for path in still_open)
        self._total = self.done.looked_at = sum(file.rows for file in snapshot.files)
        self._mask_spans(snapshot.spans_sql())
        self._add_found(is_published=False)
        self._end(still_open)

    def _end(self, still_open: Sequence[Path]) -> None:
        self.done.open_spans = self._count_open(still_open)
        aside = (self._layout.quarantine / note.name for note in read_notes(self._layout))
        self.done.aside = sum(path.exists() for path in aside)

    def _mask_spans(self, query: str) -> None:
        """Mask the spans of a query, to count what is found."""
        with new_connection() as con:
            con.execute(f"SELECT {', '.join(COLUMNS)} FROM ({query}) WHERE {self._where}")
            while rows := con.fetchmany(_BATCH):
                for row in rows:
                    self._mask_span(build_span(dict(zip(COLUMNS, row, strict=True))))
                self._step(len(rows))

    def _mask_span(self, span: Span) -> Span:
        masked, counts = self._redactor.mask(span)
        if any(counts.values()):
            # By its id: a part that proves too wide is read once more.
            rollout = (span.rollout_id or span.trace_id) if masked is not span else ""
            self._found[span.trace_id, span.span_id] = rollout, counts
        return masked

    def _count_open(self, paths: Sequence[Path]) -> int:
        """Return how many spans of segments hold what is to be masked, in any of their lines."""
        if paths:
            lines = ndjson_sql(quote_paths(paths), SEGMENT_COLUMNS)
            self._mask_spans(f"FROM {lines} WHERE {IS_SPAN} AND record <> 'drop'")
        found = sum(bool(rollout) for rollout, _ in self._found.values())
        self._found.clear()
        return found

    def _add_found(self, *, is_published: bool) -> None:
        """Add what was found in a file."""
        done, values = self.done, Counter(self.done.values)
        for rollout, counts in self._found.values():
            done.in_ids += counts.get(IN_ID, 0)
            if rollout:
                done.spans += 1
                done.published += is_published
                self._rollouts.add(rollout)
                values.update({reason: n for reason, n in counts.items() if reason != IN_ID})
        done.values, done.rollouts = dict(+values), len(self._rollouts)
        self._found.clear()

    def _step(self, rows: int) -> None:
        self._rows += rows
        if self._progress is not None:
            self._progress(min(self._rows, self._total), self._total)

    def _close_segments(self) -> None:
        """Have segments closed that processes write to and that hold what is to be masked.

        Nobody but its process may seal a segment. It is asked by a bit of the file's mode, which a
        writer sees with its next line at no cost, and then goes on in a new segment. What is asked
        stays asked: it is closed with the next line, whenever that comes.
        """
        writer = writers_by_catalogue.get(self._layout.catalogue)
        if writer is not None and self._count_open(_own_segments(self._layout)):
            writer.rotate()
        waiting = {path for path in _open_segments(self._layout) if self._count_open([path])}
        for path in waiting:
            request_rotation(path)
        until = time.monotonic() + _CLOSING_S
        while waiting.intersection(_open_segments(self._layout)) and time.monotonic() < until:
            time.sleep(_CLOSING_STEP_S)


def _open_segments(layout: Layout) -> list[Path]:
    """Return segments that other processes still write to; this one's can be closed at any time."""
    done = {*list_sealed(layout), *_own_segments(layout)}
    return [path for path in layout.list_unsettled(layout.read_manifest()) if path not in done]


def _own_segments(layout: Layout) -> list[Path]:
    writer = writers_by_catalogue.get(layout.catalogue)
    segment = writer.segment if writer is not None else None
    return [segment.path] if segment is not None else []


def _wait_for_unlink(layout: Layout, wait_s: float, told: Callable[[float], None] | None) -> bool:
    """Unlink the files that hold what was masked, after the readers' grace period."""
    old, deadline = _list_old_parts(layout), time.monotonic() + wait_s
    while True:
        with elect_settler(layout) as is_elected:
            if is_elected:
                settle.sweep(layout, is_asked=True)
        if not old.intersection(_list_old_parts(layout)):
            return True
        if time.monotonic() >= deadline:
            return False
        manifest = layout.read_manifest()
        times = [each.settled_us for each in manifest.segments]
        times += [file.dropped_us or 0 for file in manifest.files]
        left_s = (max(times, default=0) + settle.GRACE_US - now_us()) / 1e6
        if told is not None and left_s > 0:
            told(left_s)
        time.sleep(min(_FINISH_STEP_S, max(_LEAST_STEP_S, left_s)))


def _list_old_parts(layout: Layout) -> set[Path]:
    """Return replaced files and segments that are not unlinked yet."""
    manifest = layout.read_manifest()
    kept = {file.name for file in manifest.live_files}
    kept.update(note.name for note in read_notes(layout))
    segments = (layout.live / each.name for each in manifest.segments)
    return {
        *(path for path in layout.data_files() if path.name not in kept),
        *(path for path in segments if path.exists()),
    }


def _write_record(layout: Layout, record: Mapping[str, Any]) -> None:
    """Append to the record of redactions, on the disk before anything goes on."""
    with open(layout.root / RECORDS, "ab", opener=partial(os.open, mode=0o600)) as file:
        give_to_owner(file.fileno(), layout.root / RECORDS)
        # A line that a kill has torn does not swallow this one.
        file.write(b"\n" + orjson.dumps(record) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _find_user() -> str:
    """Return who runs this, as far as the system knows them."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in a container
        return str(os.getuid())
