"""Content taken out of what is stored: files rewritten span by span, the old ones gone for good.

A file with something to mask is written anew, its rows in their order, and the manifest alone has
the new one count; whatever is cut off leaves each span once, and the next redaction finds what is
left. Processes that write on close their segments for it; what others hold open is but counted.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from lightning_otel.errors import ConfigError, StoreError
from lightning_otel.redact import IN_ID, Redactor, Rules
from lightning_otel.store.compact import elected_alone, live_files
from lightning_otel.store.damage import reading
from lightning_otel.store.layout import DataFile, Layout
from lightning_otel.store.lines import parsed
from lightning_otel.store.parquet import SPILL, packing_connection
from lightning_otel.store.quarantine import notes
from lightning_otel.store.redactions import Redacted, Scope, finish, user_name, write_record
from lightning_otel.store.rewrite import Rewrite, TooWideError
from lightning_otel.store.schema import span_of
from lightning_otel.store.segment import ask_to_close
from lightning_otel.store.settle import await_effect, sealed, settle_as_elected
from lightning_otel.store.source import prepare
from lightning_otel.store.writer import writer_if_any
from lightning_otel.types import Span

_ELECTION_S: Final = 10.0
_CLOSING_S: Final = 1.0
"""How long processes that write are waited for until their segments are closed."""
_LOOK_S: Final = 0.02

Progress = Callable[[int, int], None]
"""Told how many of how many rows were looked at."""


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
) -> Redacted:
    """Mask what the rules name in every settled span, note down that it was done, and finish it.

    Args:
        layout: The store's paths; None if it has no files.
        rules: What is masked.
        scope: Which spans are looked at.
        reason: Why, which is kept with the record.
        is_dry_run: Only count.
        wait_s: How long to wait for the old files to be gone.
        progress: Told how far it is.
        waiting: Told how many seconds are left of that.

    Raises:
        ConfigError: There are neither rules nor a scope, or the store has no files.
        StoreMissingError: There is no store.
        StoreError: Another process is at it, there is no room, or a file is damaged.
    """
    if layout is None:
        raise ConfigError("redact needs a store on this disk; name one with --store")
    if rules.is_whole and not any(scope):
        raise ConfigError(
            "nothing to redact is named; name it with --pattern, --key, --secrets or --id"
        )
    prepare(layout)
    work = _Work(layout, rules, scope, progress)
    try:
        with reading(layout, "redact"):
            with elected_alone(layout, _ELECTION_S):
                if is_dry_run:
                    work.count()
                else:
                    work.carry_out(reason)
            if not is_dry_run:
                work.done.is_gone = finish(layout, wait_s=wait_s, told=waiting)
    except OSError as exc:
        raise StoreError(f"cannot redact {layout.catalogue}: {exc}; is there room?") from exc
    return work.done


class _Work:
    """One redaction under way."""

    def __init__(
        self, layout: Layout, rules: Rules, scope: Scope, progress: Progress | None
    ) -> None:
        self._layout = layout
        self._rules = rules
        self._scope = scope
        self._progress = progress
        self.done = Redacted(redaction_id=f"redaction-{secrets.token_hex(4)}")
        self._redactor = Redactor(rules, self.done.redaction_id)
        self._found: dict[tuple[str, str], tuple[str, Mapping[str, int]]] = {}
        self._rollouts: set[str] = set()
        self._rows = 0
        self._total = 0

    def carry_out(self, reason: str) -> None:
        """Write anew every file that holds what the rules name."""
        # Never what is looked for itself: a pattern may be the very thing to be forgotten.
        begun = {
            "redaction_id": self.done.redaction_id,
            "began_ns": time.time_ns(),
            "patterns": len(self._rules.patterns),
            "keys": list(self._rules.keys),
            "secrets": self._rules.secrets,
            "only": {name: list(ids) for name, ids in self._scope._asdict().items() if ids},
        }
        write_record(self._layout, {**begun, "reason": reason, "user": user_name()})
        _close_segments(self._layout, lambda path: any(True for _ in self._in_segment(path)))
        settle_as_elected(self._layout)
        with packing_connection(self._layout.new / SPILL) as con:
            for file in self._list_files(passes=2):
                rewrite = self._begin_rewrite(con, file)
                if any(rewrite.changes()):
                    self._run_rewrite(rewrite)
                else:
                    self._step(file.rows)
                self._add_found(file)
        for path in self._layout.unsettled(self._layout.read_manifest()):
            self.done.open_spans += sum(1 for _ in self._in_segment(path))
        self._sum_up()
        await_effect(self._layout)
        found = asdict(self.done)
        del found["is_gone"]
        write_record(self._layout, {**found, "ended_ns": time.time_ns()})

    def count(self) -> None:
        """Count what would be changed; nothing is."""
        with packing_connection(self._layout.new / SPILL) as con:
            for file in self._list_files(passes=1):
                for _ in self._begin_rewrite(con, file).changes():
                    pass
                self._add_found(file)
        still_open = set(_open_segments(self._layout))
        for path in self._layout.unsettled(self._layout.read_manifest()):
            for span in self._in_segment(path):
                self.done.open_spans += path in still_open
                if path not in still_open:
                    self._mask_span(span)
            self._add_found(None)
        self._sum_up()

    def _list_files(self, passes: int) -> list[DataFile]:
        files = live_files(self._layout)
        self.done.looked_at = sum(file.rows for file in files)
        self._total = passes * self.done.looked_at
        return list(files)

    def _begin_rewrite(self, con: Any, file: DataFile) -> Rewrite:
        return Rewrite(
            con, self._layout, [file], self._step,
            transform=self._mask_span, scope=self._scope.where,
        )  # fmt: skip

    def _run_rewrite(self, rewrite: Rewrite) -> None:
        try:
            rewrite.run()
        except TooWideError:
            self._found.clear()
            self.done.left += 1
        else:
            self.done.files += 1

    def _mask_span(self, span: Span) -> Span:
        masked = self._redactor.mask(span)
        if any(masked.counts.values()):
            # By its id: a part that proves too wide is read once more.
            rollout = (span.rollout_id or span.trace_id) if masked.is_changed else ""
            self._found[span.trace_id, span.span_id] = rollout, masked.counts
        return masked.span

    def _add_found(self, file: DataFile | None) -> None:
        """Add what was found in a file."""
        for rollout, counts in self._found.values():
            self.done.in_ids += counts.get(IN_ID, 0)
            if rollout:
                self.done.spans += 1
                self.done.published += bool(file is not None and file.publication)
                self._rollouts.add(rollout)
                for reason, count in counts.items():
                    if reason != IN_ID and count:
                        self.done.values[reason] = self.done.values.get(reason, 0) + count
        self._found.clear()

    def _in_segment(self, path: Path) -> Iterator[Span]:
        """Yield the spans of a segment that hold what is to be masked, each once."""
        seen: set[tuple[str, str]] = set()
        try:
            with path.open("rb") as file:
                for record in map(parsed, file):
                    if not _is_span(record) or not self._scope.holds(record):
                        continue
                    span = span_of(record)
                    key = span.trace_id, span.span_id
                    if key not in seen and self._redactor.mask(span).is_changed:
                        seen.add(key)
                        yield span
        except FileNotFoundError:
            return

    def _sum_up(self) -> None:
        self.done.rollouts = len(self._rollouts)
        self.done.aside = sum(
            (self._layout.quarantine / note.name).exists() for note in notes(self._layout)
        )

    def _step(self, rows: int) -> None:
        self._rows += rows
        if self._progress is not None:
            self._progress(min(self._rows, self._total), self._total)


def _is_span(record: Mapping[str, Any]) -> bool:
    ids = all(isinstance(record.get(name), str) for name in ("trace_id", "span_id"))
    return record.get("record") in ("span", "start") and ids and "start_ns" in record


def _open_segments(layout: Layout) -> list[Path]:
    """Return segments that other processes still write to; this one's can be closed at any time."""
    done = {*sealed(layout), *_own_segments(layout)}
    return [path for path in layout.unsettled(layout.read_manifest()) if path not in done]


def _close_segments(layout: Layout, holds: Callable[[Path], bool]) -> None:
    """Have segments closed that processes still write to, as far as they do within a second.

    Nobody but its process may seal a segment. It is asked by a bit of the file's mode, which a
    writer sees with its next line at no cost, and then goes on in a new segment. What is asked
    stays asked: it is closed with the next line, whenever that comes.

    Args:
        layout: The store's paths.
        holds: Says whether a segment needs to be; the others are left alone.
    """
    writer = writer_if_any(layout)
    if writer is not None and any(map(holds, _own_segments(layout))):
        writer.rotate()
    waiting = [path for path in _open_segments(layout) if holds(path)]
    for path in waiting:
        ask_to_close(path)
    until = time.monotonic() + _CLOSING_S
    while waiting and time.monotonic() < until:
        time.sleep(_LOOK_S)
        still = set(_open_segments(layout))
        waiting = [path for path in waiting if path in still]


def _own_segments(layout: Layout) -> list[Path]:
    writer = writer_if_any(layout)
    segment = writer.segment if writer is not None else None
    return [segment.path] if segment is not None else []
