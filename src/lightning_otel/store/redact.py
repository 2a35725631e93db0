"""Mask content in stored spans: rewrite the files that hold it, and unlink the old ones.

A file is rewritten in its row order and replaced in one commit; the next redaction continues one
that was killed. Processes that record are asked to close their segments; what they hold open is
only counted. The record does not name what was masked: a pattern may be the secret itself.
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
from lightning_otel.store import removal
from lightning_otel.store.compact import Progress
from lightning_otel.store.damage import translate_errors
from lightning_otel.store.facts import delete_facts
from lightning_otel.store.files import give_to_owner
from lightning_otel.store.layout import Layout, hold_settler_lock
from lightning_otel.store.lines import read_records
from lightning_otel.store.lookup import ID_COLUMNS
from lightning_otel.store.parquet import SPILL, bounded_connection, list_live_files
from lightning_otel.store.rewrite import Rewrite, TooWideError
from lightning_otel.store.schema import COLUMNS, build_span
from lightning_otel.store.settle import settle_elected, wait_until_visible
from lightning_otel.store.snapshot import IS_SPAN, SEGMENT_COLUMNS, Snapshot, ndjson_sql
from lightning_otel.store.source import prepare
from lightning_otel.store.sql import new_connection, quote_paths, quote_text
from lightning_otel.types import Span

RECORDS: Final = "redactions.ndjson"
_BATCH: Final = 256

Scope = Sequence[tuple[str, str]]
"""What each id is (``rollout``, ``trace``, ``span`` or ``response``), and the whole id."""


@dataclass(slots=True)
class RedactResult:
    """Work that a redaction did, or would do.

    Attributes:
        redaction_id: Stands on every span that was changed, and in the record of redactions.
        looked_at: Spans read.
        spans: Spans changed, of ``rollouts``.
        values: How many values went, by reason.
        files: Files written anew.
        open_spans: Spans with such content that a living process holds open: unchanged.
        in_ids: Ids that hold what was to be masked; they stay.
        published: Spans changed that may stand in a lake, as they were.
        left: Files that are as they were: their rows are too wide for the memory allowed.
        aside: Damaged parts in quarantine, which cannot be looked into.
        is_gone: Whether every file is unlinked that was replaced.
        bytes_waiting: Size of what was replaced, on the disk for readers ``waiting_s`` longer.
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
    bytes_waiting: int = 0
    waiting_s: float = 0.0


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
    """Mask what the rules name in every settled span; see :meth:`SpanStore.redact`."""
    if layout is None:
        raise ConfigError("redact needs a store on this disk; name one with --store")
    if rules.is_whole and not scope:
        raise ConfigError(
            "nothing to redact is named; name it with --pattern, --key, --secrets or --id"
        )
    prepare(layout)
    work = _Redaction(layout, rules, scope, progress)
    with translate_errors(layout, "redact"):
        if not is_dry_run:
            work.close_segments(wait_s, waiting)
        with hold_settler_lock(layout):
            if is_dry_run:
                work.count()
            else:
                work.carry_out(reason)
        if not is_dry_run:
            work.done.is_gone = removal.wait_for_unlink(layout, wait_s, waiting)
            work.done.bytes_waiting, work.done.waiting_s = removal.measure_leftover(
                layout, layout.read_manifest()
            )
    return work.done


def read_redactions(layout: Layout) -> list[dict[str, Any]]:
    """Return every redaction, the oldest first; one without an ``ended_ns`` was cut off."""
    records: dict[str, dict[str, Any]] = {}
    path = layout.root / RECORDS
    for record in read_records(path) if path.exists() else ():
        if isinstance(record.get("redaction_id"), str):
            records.setdefault(record["redaction_id"], {}).update(record)
    return list(records.values())


class _Redaction:
    """One redaction under way."""

    def __init__(
        self, layout: Layout, rules: Rules, scope: Scope, progress: Progress | None
    ) -> None:
        self._layout, self._rules, self._scope, self._progress = layout, rules, scope, progress
        same = [f"{ID_COLUMNS[noun]} = {quote_text(value)}" for noun, value in scope]
        self._where = " OR ".join(same) or "true"
        self.done = RedactResult(redaction_id=f"redaction-{secrets.token_hex(4)}")
        self._redactor = Redactor(rules, self.done.redaction_id)
        self._found: dict[tuple[str, str], tuple[str, Mapping[str, int]]] = {}
        self._rollouts: set[str] = set()
        self._rows = self._total = 0

    def close_segments(self, wait_s: float, callback: removal.Callback | None) -> None:
        layout = self._layout
        removal.close_own_segment(layout, lambda path: self._count_open([path]))
        paths = [path for path in removal.list_open_segments(layout) if self._count_open([path])]
        removal.close_segments(layout, paths, wait_s, callback)

    def carry_out(self, reason: str) -> None:
        layout = self._layout
        # Never what is looked for itself: a pattern may be the very thing to be forgotten.
        only: dict[str, list[str]] = {}
        for noun, value in self._scope:
            only.setdefault(f"{noun}s", []).append(value)
        start = {
            "redaction_id": self.done.redaction_id,
            "began_ns": time.time_ns(),
            "patterns": len(self._rules.patterns),
            "keys": list(self._rules.keys),
            "secrets": self._rules.secrets,
            "only": only,
        }
        _write_record(layout, {**start, "reason": reason, "user": _find_user()})
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
        delete_facts(layout.facts)
        result = asdict(self.done)
        for name in ("is_gone", "bytes_waiting", "waiting_s"):  # they are not known yet
            del result[name]
        _write_record(layout, {**result, "ended_ns": time.time_ns()})

    def count(self) -> None:
        still_open = removal.list_open_segments(self._layout)
        snapshot = Snapshot.take(self._layout).without(path.name for path in still_open)
        self._total = self.done.looked_at = sum(file.rows for file in snapshot.files)
        self._mask_spans(snapshot.spans_sql())
        self._add_found(is_published=False)
        self._end(still_open)

    def _end(self, still_open: Sequence[Path]) -> None:
        self.done.open_spans = self._count_open(still_open)
        self.done.aside = removal.count_unknown_parts(self._layout)

    def _mask_spans(self, query: str) -> None:
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
        if paths:
            lines = ndjson_sql(quote_paths(paths), SEGMENT_COLUMNS)
            self._mask_spans(f"FROM {lines} WHERE {IS_SPAN} AND record <> 'drop'")
        count = sum(bool(rollout) for rollout, _ in self._found.values())
        self._found.clear()
        return count

    def _add_found(self, *, is_published: bool) -> None:
        result, values = self.done, Counter(self.done.values)
        for rollout, counts in self._found.values():
            result.in_ids += counts.get(IN_ID, 0)
            if rollout:
                result.spans += 1
                result.published += is_published
                self._rollouts.add(rollout)
                values.update({reason: n for reason, n in counts.items() if reason != IN_ID})
        result.values, result.rollouts = dict(+values), len(self._rollouts)
        self._found.clear()

    def _step(self, rows: int) -> None:
        self._rows += rows
        if self._progress is not None:
            self._progress(min(self._rows, self._total), self._total)


def _write_record(layout: Layout, record: Mapping[str, Any]) -> None:
    with open(layout.root / RECORDS, "ab", opener=partial(os.open, mode=0o600)) as file:
        give_to_owner(file.fileno(), layout.root / RECORDS)
        # A line that a kill has torn does not swallow this one.
        file.write(b"\n" + orjson.dumps(record) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _find_user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in a container
        return str(os.getuid())
