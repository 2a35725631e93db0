"""The one producer of data files from data files, for compact, retention, redaction and repair.

Rows go slice by slice into small files, and these one after the other into the new one: DuckDB
sorts wide rows in memory only, and 500 MB of a long conversation did not fit into 1 GB. The new
file counts, and the old ones cease to, in one commit of the manifest.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import orjson

from lightning_otel.store.gist import with_gist
from lightning_otel.store.layout import DataFile, Layout
from lightning_otel.store.parquet import (
    ROW_GROUP,
    ROW_GROUP_BYTES,
    SPILL,
    STORED,
    Origin,
    RowGroup,
    row_groups,
    write_file,
)
from lightning_otel.store.schema import COLUMNS, record_of_span, span_of
from lightning_otel.store.settle import exchange
from lightning_otel.store.spans import rows_of
from lightning_otel.store.sql import listed, quoted
from lightning_otel.store.values import repaired
from lightning_otel.types import Span

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

SLICE_BYTES: Final = 32 << 20
"""What is sorted or changed at once, uncompressed."""
MOST_ROWS: Final = 122_880
"""Rows in a row group of a compact file, and in a slice."""
LEVEL: Final = 9
THRIFT: Final = (1, 4, 16)
"""By how much slices and row groups shrink where rows prove too wide for the memory allowed."""
_NUMBERED: Final = quoted(orjson.dumps({"number": "BIGINT", **COLUMNS}).decode())

Step = Callable[[int], None]
"""Told how many more rows are done."""
Transform = Callable[[Span], Span]
"""Gives the span to be stored instead, or the very same one."""


class TooWideError(Exception):
    """The rows of these files are too wide for the memory allowed; the files are as they were."""


class Producer(ABC):
    """One new data file in the place of old ones; subclasses gather its rows.

    Attributes:
        files: The old files.
        counts: Ended spans that were left out, by reason.
    """

    is_readable_anew: ClassVar[bool] = True
    """Whether the segments that the rows came from may be read again in place of the new file."""

    def __init__(
        self,
        con: "duckdb.DuckDBPyConnection",
        layout: Layout,
        files: Sequence[DataFile],
        step: Step = lambda rows: None,
    ) -> None:
        """Name the files; nothing is read yet.

        Args:
            con: A connection of :func:`parquet.packing_connection`.
            layout: The store's paths.
            files: Old files, at least one.
            step: Told of the progress: of every row twice, as it is read and written.
        """
        self._con = con
        self._layout = layout
        self.files = tuple(files)
        self.counts: Mapping[str, int] = {}
        self._step = step
        self._is_compact = all(file.is_compact for file in files)

    @abstractmethod
    def gather(self, slice_bytes: int) -> list[Path]:
        """Write the rows that stay into small files, in their order.

        Args:
            slice_bytes: How much may be held at once, uncompressed.
        """

    def rewrite(self) -> DataFile | None:
        """Make the new file and have it count in place of the old ones; None if nothing is left.

        Raises:
            TooWideError: The rows do not fit into the memory allowed.
            OSError: There is no room.
            duckdb.Error: A file cannot be read, or there is no room.
        """
        made = self._make_file()
        exchange(
            self._layout, self.files, made, self.counts, is_readable_anew=self.is_readable_anew
        )
        return made

    def _make_file(self) -> DataFile | None:
        import duckdb

        for thrift in THRIFT:
            try:
                return self.write_slices(self.gather(SLICE_BYTES // thrift), thrift)
            except duckdb.OutOfMemoryException as exc:
                log.debug("too wide at a thrift of %d: %s", thrift, exc)
        raise TooWideError

    def write_slices(self, slices: Sequence[Path], thrift: int) -> DataFile | None:
        """Write slices into one file under ``new/``; they are gone then.

        Args:
            slices: What :meth:`gather` gave.
            thrift: By how much row groups are smaller than they should be.
        """
        if not slices:
            return None
        made = write_file(
            self._con,
            self._layout,
            f"SELECT {STORED} FROM read_parquet({listed(slices)})",
            self._describe_origin(),
            # Named as the oldest: of two spans with one id the first still comes first.
            stamp=min(file.name for file in self.files).split("-")[1],
            level=LEVEL if self._is_compact else 3,
            group_rows=MOST_ROWS if self._is_compact else ROW_GROUP // thrift,
            group_bytes=ROW_GROUP_BYTES // thrift,
            is_compact=self._is_compact,
        )
        for path in slices:
            path.unlink()
        self._step(made.rows if made else 0)
        return made

    def _describe_origin(self) -> Origin:
        names = {file.name for file in self.files}
        manifest = self._layout.read_manifest()
        is_same = self.is_readable_anew and not self.counts
        return Origin(
            {each.name: each.rows * is_same for each in manifest.segments if each.file in names},
            tuple(sorted(names | {f.name for f in manifest.files if f.dropped_us is not None})),
        )

    def _slice_path(self, number: int) -> Path:
        return self._layout.new / SPILL / f"slice-{number}.parquet"

    def _write_slice(self, spans: str, order: str, path: Path) -> None:
        """Write spans and their gist into a slice."""
        columns = (*COLUMNS, order)
        self._con.execute(
            f"COPY (SELECT {STORED} FROM ({with_gist(spans, columns)}) ORDER BY {order}) "
            f"TO {quoted(str(path))} (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1)"
        )


class Copy(Producer):
    """One file in its order, without some rows or with some spans changed."""

    is_readable_anew = False

    def __init__(
        self,
        con: "duckdb.DuckDBPyConnection",
        layout: Layout,
        file: DataFile,
        step: Step = lambda rows: None,
        *,
        keep: str = "true",
        transform: Transform | None = None,
        scope: str = "true",
        folder: Path | None = None,
        corrupt: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Name the file; nothing is read yet.

        Args:
            con: As for every producer.
            layout: The store's paths.
            file: The old file.
            step: As for every producer.
            keep: A condition of SQL for the rows that stay.
            transform: Applied to spans.
            scope: A condition of SQL for the rows that it is applied to.
            folder: Where the file lies, if not where it belongs: it is damaged then, and row groups
                that cannot be read are left out.
            corrupt: First byte and one past the last of ranges that are not as written.
        """
        super().__init__(con, layout, (file,), step)
        self._folder = folder or layout.data
        self._corrupt = corrupt
        self._keep = keep
        self._transform = transform
        self._scope = scope

    @property
    def rows(self) -> str:
        """The rows, as a subquery."""
        return rows_of(self._layout, self.files, self._folder)

    def gather(self, slice_bytes: int) -> list[Path]:
        """Write the rows as they stand."""
        import duckdb

        gathered = []
        for number, part in enumerate(self.parts(slice_bytes)):
            path = self._slice_path(number)
            if any(first < part.end_byte and end > part.first_byte for first, end in self._corrupt):
                continue
            try:
                self._write_slice(self._select_spans(part), "file_row_number", path)
            except duckdb.OutOfMemoryException:
                raise
            except duckdb.Error:
                if self._folder == self._layout.data:
                    raise
            else:
                gathered.append(path)
            self._step(part.end_row - part.first_row)
        return gathered

    def parts(self, slice_bytes: int = SLICE_BYTES) -> Iterator[RowGroup]:
        """Yield row groups, cut where they hold more than may be held at once."""
        for group in row_groups(self._con, self._folder / self.files[0].name):
            first, end = group.first_row, group.end_row
            step = int((end - first) * slice_bytes / max(1, group.raw_bytes))
            step = max(1, min(step, MOST_ROWS))
            for at in range(first, end, step):
                yield group._replace(first_row=at, end_row=min(at + step, end))

    def changed(self, part: RowGroup) -> list[tuple[int, Span]]:
        """Return the spans of a part that the transform changes, by the number of their row."""
        if self._transform is None:
            return []
        rows = self._con.execute(
            f"SELECT file_row_number, {', '.join(COLUMNS)} FROM {self.rows} "
            f"WHERE {_limit_rows(part)} AND {self._scope}"
        ).fetchall()
        found = []
        for number, *values in rows:
            span = span_of(dict(zip(COLUMNS, values, strict=True)))
            changed = self._transform(span)
            if changed is not span:
                found.append((int(number), changed))
        return found

    def _select_spans(self, part: RowGroup) -> str:
        """Return a subquery for a part's rows, the changed ones among them in their places."""
        if self._transform is None:
            return f"(SELECT * FROM {self.rows} AS f WHERE {_limit_rows(part)} AND {self._keep})"
        self._con.execute(
            "CREATE OR REPLACE TABLE changed AS SELECT unnest(json_transform(line, "
            f"{_NUMBERED})) FROM (SELECT unnest(?::VARCHAR[]) AS line)",
            [[_format_span(number, span) for number, span in self.changed(part)]],
        )
        columns = ", ".join(
            f"CASE WHEN number IS NULL THEN f.{name} ELSE changed.{name} END AS {name}"
            for name in COLUMNS
        )
        return (
            f"(SELECT {columns}, file_row_number FROM {self.rows} AS f "
            "LEFT JOIN changed ON number = file_row_number "
            f"WHERE {_limit_rows(part)} AND {self._keep})"
        )


def _limit_rows(part: RowGroup) -> str:
    return f"file_row_number BETWEEN {part.first_row} AND {part.end_row - 1}"


def _format_span(number: int, span: Span) -> str:
    record = {"number": number, **record_of_span(span)}
    try:
        return orjson.dumps(record).decode()
    except (TypeError, ValueError):
        return orjson.dumps(repaired(record)).decode()
