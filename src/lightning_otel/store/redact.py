"""Content taken out of what is stored: files rewritten span by span, the old ones gone for good.

A file with something to mask is written anew, its rows in their order, and the manifest alone has
the new one count; whatever is cut off leaves each span once, and the next redaction finds what is
left. Processes that write on close their segments for it; what others hold open is but counted.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from lightning_otel import conventions as c
from lightning_otel.errors import ConfigError, StoreError
from lightning_otel.store.closing import close_segments, open_segments
from lightning_otel.store.compact import there
from lightning_otel.store.damage import look, reading, remove
from lightning_otel.store.gist import with_gist
from lightning_otel.store.layout import DataFile, Layout
from lightning_otel.store.lines import parsed
from lightning_otel.store.masking import IN_ID, Masked, Masker, Rules
from lightning_otel.store.merge import (
    ROW_GROUP,
    ROW_GROUP_BYTES,
    SLICE_BYTES,
    STORED,
    write_slices,
)
from lightning_otel.store.parquet import ROW_GROUP as SETTLED_GROUP
from lightning_otel.store.parquet import SPILL, described, packing_connection, row_of
from lightning_otel.store.quarantine import notes
from lightning_otel.store.redactions import Redacted, Scope, await_effect, finish, note, user
from lightning_otel.store.schema import COLUMNS, record_of_span, span_of
from lightning_otel.store.settle import exchange, settle_as_elected, settler_elected
from lightning_otel.store.source import prepare
from lightning_otel.store.spans import rows_of
from lightning_otel.store.sql import quoted
from lightning_otel.store.values import repaired
from lightning_otel.types import Span

if TYPE_CHECKING:
    import duckdb

_SETTLED_LEVEL: Final = 3
_ELECTION_S: Final = 10.0
_SHAPE: Final = quoted(orjson.dumps({"row": "BIGINT", **COLUMNS}).decode())

Progress = Callable[[int, int], None]
"""Told how many of how many rows were looked at."""


def redact_and_wait(
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
    """:func:`redact`, and :func:`finish`.

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
    try:
        with reading(layout, "redact"):
            done = redact(
                layout, rules, scope, reason=reason, is_dry_run=is_dry_run,
                wait_s=_ELECTION_S, progress=progress,
            )  # fmt: skip
            if not is_dry_run:
                done.is_gone = finish(layout, wait_s=wait_s, told=waiting)
    except OSError as exc:
        raise StoreError(f"cannot redact {layout.catalogue}: {exc}; is there room?") from exc
    return done


def redact(
    layout: Layout,
    rules: Rules,
    scope: Scope,
    *,
    reason: str = "",
    is_dry_run: bool = False,
    wait_s: float = 0.0,
    progress: Progress | None = None,
) -> Redacted:
    """Mask what the rules name in every settled span, and note down that it was done.

    Args:
        layout: The store's paths; its catalogue must stand there.
        rules: What is masked.
        scope: Which spans are looked at.
        reason: Why, which is kept with the record.
        is_dry_run: Only count.
        wait_s: How long to wait for another settler to finish.
        progress: Told how far it is.

    Raises:
        StoreError: Another settler is at it.
        OSError: There is no room.
        duckdb.Error: A file cannot be read, or there is no room.
    """
    with settler_elected(layout, wait_s=wait_s) as is_elected:
        if not is_elected:
            raise StoreError(
                f"another process settles or compacts {layout.catalogue}; try again later"
            )
        work = _Work(layout, rules, scope, progress)
        if is_dry_run:
            work.count()
            return work.done
        note(layout, {**work.begun(), "reason": reason, "user": user()})
        close_segments(layout, work.holds)
        settle_as_elected(layout)
        # A file that was damaged shall not be written anew, with a checksum that says it is whole.
        remove(layout, look(layout, layout.read_manifest(), is_thorough=True))
        work.rewrite()
        await_effect(layout)
        note(layout, work.ended())
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
        self._masker = Masker(rules, self.done.redaction_id)
        self._rollouts: set[str] = set()
        self._rows = 0
        self._total = 0

    def begun(self) -> dict[str, Any]:
        """What is noted before anything is changed: never what is looked for itself."""
        return {
            "redaction_id": self.done.redaction_id,
            "began_ns": time.time_ns(),
            "patterns": len(self._rules.patterns),
            "keys": list(self._rules.keys),
            "secrets": self._rules.secrets,
            "only": {name: list(ids) for name, ids in self._scope._asdict().items() if ids},
        }

    def ended(self) -> dict[str, Any]:
        """What is noted when all is changed."""
        found = asdict(self.done)
        del found["is_gone"]
        return {**found, "ended_ns": time.time_ns()}

    def count(self) -> None:
        """What would be changed; nothing is."""
        files = there(self._layout)
        self.done.looked_at = self._total = sum(file.rows for file in files)
        with packing_connection(self._layout.new / SPILL) as con:
            for file in files:
                for first, end in _slices(con, self._layout, file, 1):
                    for _, masked in self._changed(con, file, first, end):
                        self._take(masked, file)
                    self._step(end - first)
        still_open = set(open_segments(self._layout))
        for path in self._layout.unsettled(self._layout.read_manifest()):
            for masked in self._in_segment(path):
                self.done.open_spans += path in still_open
                if path not in still_open:
                    self._take(masked, None)
        self._sum_up()

    def holds(self, segment: Path) -> bool:
        """Whether a segment holds what the rules name."""
        return any(True for _ in self._in_segment(segment))

    def rewrite(self) -> None:
        """Write anew every file that holds what the rules name."""
        files = there(self._layout)
        self.done.looked_at = sum(file.rows for file in files)
        self._total = 2 * self.done.looked_at
        with packing_connection(self._layout.new / SPILL) as con:
            for file in files:
                if self._holds_any(con, file):
                    self._rewrite(con, file)
                else:
                    self._step(file.rows)  # not to be written
        for path in self._layout.unsettled(self._layout.read_manifest()):
            self.done.open_spans += sum(1 for _ in self._in_segment(path))
        self._sum_up()

    def _sum_up(self) -> None:
        self.done.rollouts = len(self._rollouts)
        self.done.aside = sum(
            (self._layout.quarantine / note.name).exists() for note in notes(self._layout)
        )

    def _holds_any(self, con: "duckdb.DuckDBPyConnection", file: DataFile) -> bool:
        for first, end in _slices(con, self._layout, file, 1):
            found = self._changed(con, file, first, end)
            in_ids = [masked.counts.get(IN_ID, 0) for _, masked in found]
            if any(masked.is_changed for _, masked in found):
                self._step(file.rows - first)
                return True
            self.done.in_ids += sum(in_ids)
            self._step(end - first)
        return False

    def _rewrite(self, con: "duckdb.DuckDBPyConnection", file: DataFile) -> None:
        """Have a masked file count in the place of this one; or leave it if it is too wide."""
        import duckdb

        rows = self._rows
        for thrift in (1, 4, 16):
            self._rows = rows
            found: list[Masked] = []
            try:
                made = self._made(con, file, thrift, found)
            except duckdb.OutOfMemoryException:
                continue
            for masked in found:
                self._take(masked, file)
            self.done.files += 1
            exchange(self._layout, (file,), made, {}, is_readable_anew=False)
            return
        self.done.left += 1

    def _made(
        self,
        con: "duckdb.DuckDBPyConnection",
        file: DataFile,
        thrift: int,
        found: list[Masked],
    ) -> DataFile:
        """The masked file, under ``new/``; ``found`` is given what was changed, without content."""
        layout = self._layout
        slices = []
        for number, (first, end) in enumerate(_slices(con, layout, file, thrift)):
            changed = self._changed(con, file, first, end)
            slices.append(layout.new / SPILL / f"slice-{number}.parquet")
            lines = [_line(row, masked.span) for row, masked in changed if masked.is_changed]
            _write_slice(con, layout, file, (first, end), lines, slices[-1])
            found += [Masked(_nameless(masked.span), masked.counts) for _, masked in changed]
            self._step(end - first)
        # Named as the old one: of two spans with one id the first still comes first.
        made = layout.new / f"spans-{file.name.split('-')[1]}-{secrets.token_hex(4)}.parquet"
        if file.is_compact:
            write_slices(con, made, slices, group_bytes=ROW_GROUP_BYTES // thrift)
        else:
            write_slices(
                con, made, slices, level=_SETTLED_LEVEL, group_rows=SETTLED_GROUP // thrift,
            )  # fmt: skip
        rows, low, high = row_of(
            con,
            f"SELECT count(*), min(start_ns), max(start_ns) FROM read_parquet({quoted(str(made))})",
        )
        if rows != file.rows:
            made.unlink()
            raise StoreError(
                f"{file.name} has {rows} spans where the manifest says {file.rows}, so it was not "
                "redacted; see: lightning-otel doctor"
            )
        return described(made, rows, low, high, is_compact=file.is_compact)

    def _changed(
        self, con: "duckdb.DuckDBPyConnection", file: DataFile, first: int, end: int
    ) -> list[tuple[int, Masked]]:
        """Spans of some rows that the rules concern, by the number of their row."""
        rows = con.execute(
            f"SELECT file_row_number, {', '.join(COLUMNS)} FROM {rows_of(self._layout, [file])} "
            f"WHERE file_row_number BETWEEN {first} AND {end - 1} AND {self._scope.where}"
        ).fetchall()
        found = []
        for number, *values in rows:
            record = dict(zip(COLUMNS, values, strict=True))
            masked = self._masker.mask(span_of(record))
            if masked.counts:
                found.append((int(number), masked))
        return found

    def _in_segment(self, path: Path) -> Iterator[Masked]:
        """Spans of a segment that hold what is to be masked, each once."""
        seen: set[tuple[str, str]] = set()
        try:
            with path.open("rb") as file:
                for line in file:
                    record = parsed(line)
                    if not _is_span(record) or not self._scope.holds(record):
                        continue
                    key = record["trace_id"], record["span_id"]
                    masked = self._masker.mask(span_of(record))
                    if masked.is_changed and key not in seen:
                        seen.add(key)
                        yield masked
        except FileNotFoundError:
            return

    def _take(self, masked: Masked, file: DataFile | None) -> None:
        self.done.in_ids += masked.counts.get(IN_ID, 0)
        if not masked.is_changed:
            return
        self.done.spans += 1
        self.done.published += bool(file is not None and file.publication)
        self._rollouts.add(masked.span.rollout_id or masked.span.trace_id)
        for reason, count in masked.counts.items():
            if reason != IN_ID and count:
                self.done.values[reason] = self.done.values.get(reason, 0) + count

    def _step(self, rows: int) -> None:
        self._rows += rows
        if self._progress is not None:
            self._progress(min(self._rows, self._total), self._total)


def _nameless(span: Span) -> Span:
    """What is counted of a span: whose it is."""
    kept = {key: span.attributes[key] for key in (c.ROLLOUT_ID,) if key in span.attributes}
    return replace(span, attributes=kept, events=(), links=(), otel_resource={})


def _is_span(record: Mapping[str, Any]) -> bool:
    ids = all(isinstance(record.get(name), str) for name in ("trace_id", "span_id"))
    return record.get("record") in ("span", "start") and ids and "start_ns" in record


def _slices(
    con: "duckdb.DuckDBPyConnection", layout: Layout, file: DataFile, thrift: int
) -> list[tuple[int, int]]:
    """Rows of a file that are read at once: the first, and one past the last."""
    groups = con.execute(
        "SELECT any_value(row_group_num_rows), sum(total_uncompressed_size) "
        f"FROM parquet_metadata({quoted(str(layout.data / file.name))}) "
        "GROUP BY row_group_id ORDER BY row_group_id"
    ).fetchall()
    found, row = [], 0
    for rows, size in groups:
        step = max(1, int(rows * (SLICE_BYTES // thrift) / max(1, size)))
        step = min(step, ROW_GROUP)
        found += [(row + at, row + min(at + step, rows)) for at in range(0, rows, step)]
        row += rows
    return found


def _line(row: int, span: Span) -> str:
    """A masked span as JSON, with the number of its row."""
    record = {"row": row, **record_of_span(span)}
    try:
        return orjson.dumps(record).decode()
    except (TypeError, ValueError):
        return orjson.dumps(repaired(record)).decode()


def _write_slice(
    con: "duckdb.DuckDBPyConnection",
    layout: Layout,
    file: DataFile,
    rows: tuple[int, int],
    lines: Sequence[str],
    made: Path,
) -> None:
    """Some rows of a file, the changed ones among them in their places."""
    con.execute(
        "CREATE OR REPLACE TABLE changed AS SELECT unnest(json_transform(line, "
        f"{_SHAPE})) FROM (SELECT unnest(?::VARCHAR[]) AS line)",
        [list(lines)],
    )
    columns = ", ".join(
        f"CASE WHEN changed.row IS NULL THEN data.{name} ELSE changed.{name} END AS {name}"
        for name in COLUMNS
    )
    spans = (
        f"(SELECT {columns}, file_row_number FROM {rows_of(layout, [file])} AS data "
        "LEFT JOIN changed ON changed.row = file_row_number "
        f"WHERE file_row_number BETWEEN {rows[0]} AND {rows[1] - 1})"
    )
    con.execute(
        f"COPY (SELECT {STORED} FROM ({with_gist(spans, (*COLUMNS, 'file_row_number'))}) "
        f"ORDER BY file_row_number) TO {quoted(str(made))} "
        "(FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1)"
    )
    con.execute("DROP TABLE changed")
