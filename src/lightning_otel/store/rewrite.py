"""Rewrite data files: the one mechanism of compact, retention, redaction and repair.

Only the positions of the rows are sorted; rows are copied slice by slice into small files, and
these into the new one: DuckDB sorts wide rows in memory only (2.0.1: 1 GB of long conversations
fails with 400 MB). The new file replaces the old ones in one commit.
"""

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from lightning_otel.store import counts as n
from lightning_otel.store.damage import quarantine_damage
from lightning_otel.store.layout import Layout
from lightning_otel.store.manifest import DataFile
from lightning_otel.store.packing import CONTENT
from lightning_otel.store.parquet import (
    ROW_GROUP,
    ROW_GROUP_BYTES,
    SPILL,
    STORED,
    Origin,
    fetch_row,
    find_settled_ns,
    row_groups_sql,
    settled_rows_sql,
    write_file,
)
from lightning_otel.store.schema import COLUMNS, build_record, build_span
from lightning_otel.store.settle import replace_files
from lightning_otel.store.snapshot import rows_sql
from lightning_otel.store.sql import ROLLOUT, quote_paths, quote_text
from lightning_otel.types import Span
from lightning_otel.types.values import json_text

if TYPE_CHECKING:
    import duckdb

log = logging.getLogger(__name__)

SLICE_BYTES: Final = 32 << 20
"""What is sorted or changed at once, uncompressed."""
MOST_ROWS: Final = 122_880
"""Rows in a row group of a compact file."""
LEVEL: Final = 9
SHRINK: Final = (1, 4, 16)
"""By how much slices and row groups shrink where rows prove too wide for the memory allowed."""
MAX_READS: Final = 16
"""How often, at most, the files may be read over for all slices to be gathered."""
_NUMBERED: Final = quote_text(
    orjson.dumps({"number": "BIGINT", "settled_ns": "BIGINT", **COLUMNS}).decode()
)

Step = Callable[[int], None]
"""Called with the number of rows just done; each row counts twice, when read and when written."""
Transform = Callable[[Span], Span]
"""Returns the span to store instead; the same object if nothing changes."""


class TooWideError(Exception):
    """The rows of these files are too wide for the memory allowed; the files are as they were."""


class InterleavedError(Exception):
    """The rollouts of these files lie so mixed that fewer files should be rewritten at once."""


class Rewrite:
    """One new data file in the place of old ones of any schema, each span once.

    What stands in a table ``expired`` (rollout, reason) is left out. ``keep`` and ``scope`` are SQL
    conditions on ``f``: for the rows that stay, and for those that are transformed.

    Attributes:
        files: The old files.
        counts: Ended spans that were left out, by reason.
    """

    def __init__(
        self,
        con: "duckdb.DuckDBPyConnection",
        layout: Layout,
        files: Sequence[DataFile],
        step: Step = lambda rows: None,
        *,
        is_packed: bool = False,
        keep: str = "true",
        transform: Transform | None = None,
        scope: str = "true",
        corrupt: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Verify the files, on a connection of :func:`parquet.bounded_connection`.

        Packed rows are ordered by rollout; else one file's rows stay in their order. A transform
        that changes no span leaves the files. With ranges of corrupt bytes the one file lies in
        quarantine, and only row groups without any are read.
        """
        damaged = quarantine_damage(layout, files) if corrupt is None else {}
        self.files = tuple(file for file in files if file.name not in damaged)
        self.counts: dict[str, int] = {}
        self._con, self._layout, self._step = con, layout, step
        self._folder = layout.data if corrupt is None else layout.quarantine
        self._corrupt = corrupt or ()
        self._rows = rows_sql(layout, self.files, self._folder)
        self._is_packed = is_packed
        self._is_compact = is_packed or all(file.is_compact for file in files)
        self._keep, self._transform, self._scope = keep, transform, scope
        self._is_changed = transform is None
        con.execute("CREATE TABLE IF NOT EXISTS expired (rollout VARCHAR, reason VARCHAR)")

    def run(self) -> DataFile | None:
        """Make the new file and have it count in place of the old ones; None if there is none."""
        import duckdb

        if not self.files:
            return None
        for divisor in SHRINK:
            try:
                file = self._write_slices(
                    list(self._gather_slices(SLICE_BYTES // divisor)), divisor
                )
            except duckdb.OutOfMemoryException as exc:
                log.debug("too wide at a divisor of %d: %s", divisor, exc)
                continue
            if self._is_changed:
                replace_files(
                    self._layout, self.files, file, self.counts, keeps_segments=self._is_packed
                )
            return file
        raise TooWideError

    def _gather_slices(self, slice_bytes: int) -> Iterator[Path]:
        self._index_rows()
        self._drop_rows()
        self._place_rows(slice_bytes)
        # DuckDB 1.5 takes what it holds of a file for another of that name, made soon after.
        token = secrets.token_hex(4)
        slices = self._con.execute(
            "SELECT slice, list(DISTINCT path), min(start_ns), max(start_ns), "
            "min(number), max(number), count(*) "
            "FROM placed JOIN files USING (file) GROUP BY 1 ORDER BY 1"
        ).fetchall()
        queue: list[tuple[int, str]] = []
        for number, paths, low, high, first, last, rows in slices:
            files = [file for file in self.files if str(self._folder / file.name) in paths]
            where = f"f.start_ns BETWEEN {low} AND {high}"
            if len(files) == 1:  # other row groups are not read
                where += f" AND file_row_number BETWEEN {first} AND {last}"
            names = ", ".join(f"f.{name}" for name in COLUMNS)
            source = settled_rows_sql(self._folder / file.name for file in files)
            spans = self._change_spans(
                f"(SELECT {names}, coalesce(f.settled_ns, files.settled_ns) AS settled_ns, "
                f"position FROM {source} AS f JOIN files ON path = filename "
                "JOIN placed ON files.file = placed.file AND file_row_number = number "
                f"AND slice = {number} WHERE {where})"
            )
            self._step(rows)
            # Of a file that the transform leaves as it is nothing is written.
            queue.append((number, spans))
            while self._is_changed and queue:
                number, spans = queue.pop(0)
                path = self._layout.new / SPILL / f"slice-{token}-{number}.parquet"
                self._con.execute(
                    f"COPY (SELECT {STORED} FROM {spans} ORDER BY position) "
                    f"TO {quote_text(str(path))} "
                    "(FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1)"
                )
                yield path

    def _index_rows(self) -> None:
        """Make ``spot``: where each row stands, what it is ordered by, and about how large it is.

        Where a row group holds one long conversation its rows are a thousand times as wide as
        others.
        """
        con = self._con
        files = sorted(self.files, key=lambda file: file.name)
        paths = [self._folder / file.name for file in files]
        con.execute("CREATE OR REPLACE TABLE files (file INTEGER, path VARCHAR, settled_ns BIGINT)")
        con.executemany(
            "INSERT INTO files VALUES (?, ?, ?)",
            [
                (number, str(path), find_settled_ns(self._folder, file))
                for number, (file, path) in enumerate(zip(files, paths, strict=True))
            ],
        )
        con.execute(
            "CREATE OR REPLACE TABLE row_group AS "
            f"FROM ({row_groups_sql(paths)}) JOIN files USING (path)"
        )
        parts = ["true"]
        if self._folder != self._layout.data:
            groups = con.execute("SELECT begins, ends, first_byte, end_byte FROM row_group")
            parts = [
                f"file_row_number BETWEEN {begins} AND {ends - 1}"
                for begins, ends, first, end in groups.fetchall()
                if not any(low < end and high > first for low, high in self._corrupt)
            ]
        begin = "CREATE OR REPLACE TABLE spot AS"
        for where in parts or ["false"]:
            con.execute(
                f"""
                {begin} SELECT files.file, number, begins, rollout, agent, start_ns, sequence,
                  trace_id, span_id, is_ended, weight FROM (
                  SELECT filename AS path, file_row_number AS number, {ROLLOUT} AS rollout, agent,
                    start_ns, sequence, trace_id, span_id, end_ns IS NOT NULL AS is_ended
                  FROM {self._rows} AS f
                  WHERE {where} AND {self._keep}
                ) JOIN files USING (path) ASOF JOIN row_group
                  ON files.file = row_group.file AND number >= begins
                """
            )
            begin = "INSERT INTO spot"

    def _drop_rows(self) -> None:
        """Take expired rollouts and second spans of one id out of ``spot``; count the ended."""
        con = self._con
        expired = con.execute(
            "SELECT reason, count(*) FROM spot JOIN expired USING (rollout) "
            "WHERE is_ended GROUP BY 1"
        ).fetchall()
        con.execute("DELETE FROM spot USING expired WHERE spot.rollout = expired.rollout")
        con.execute(
            """
            CREATE OR REPLACE TABLE twice AS
            SELECT file, number, trace_id, span_id, is_ended, row_number() OVER
              (PARTITION BY trace_id, span_id ORDER BY NOT is_ended, file, number) AS rank
            FROM spot SEMI JOIN
              (SELECT trace_id, span_id FROM spot GROUP BY ALL HAVING count(*) > 1)
              USING (trace_id, span_id)
            """
        )
        conflicts = seconds = 0
        if fetch_row(con, "SELECT count(*) FROM twice") != (0,):
            conflicts, seconds = fetch_row(
                con,
                f"""
                SELECT count(*) FILTER (content <> first_content), count(*) FROM (
                  SELECT rank, is_ended, content, first_value(content) OVER
                    (PARTITION BY trace_id, span_id ORDER BY rank) AS first_content FROM (
                    SELECT twice.*, {CONTENT} AS content FROM {self._rows} AS data
                    JOIN files ON path = filename
                    JOIN twice ON files.file = twice.file AND file_row_number = number
                  )) WHERE rank > 1 AND is_ended
                """,
            )
            con.execute(
                "DELETE FROM spot USING twice "
                "WHERE spot.file = twice.file AND spot.number = twice.number AND rank > 1"
            )
        self.counts = n.sum_counts(
            dict(expired), {n.CONFLICT: int(conflicts), n.DUPLICATE: int(seconds - conflicts)}
        )

    def _place_rows(self, slice_bytes: int) -> None:
        """Make ``placed``: each row's position and slice; InterleavedError if read too often."""
        order = "began, rollout, agent, start_ns, sequence" if self._is_packed else "number"
        group = "0" if self._is_packed else "begins"
        self._con.execute(
            f"""
            CREATE OR REPLACE TABLE placed AS
            SELECT file, number, start_ns, position, dense_rank() OVER (ORDER BY part, piece)
              AS slice FROM (
              SELECT file, number, start_ns, position, part, (sum(weight) OVER
                (PARTITION BY part ORDER BY position) / {slice_bytes})::INTEGER AS piece
              FROM (
                SELECT file, number, start_ns, weight, {group} AS part,
                  row_number() OVER (ORDER BY {order}) AS position
                FROM (SELECT *, min(start_ns) OVER (PARTITION BY rollout) AS began FROM spot)))
            """
        )
        self._con.execute("DROP TABLE spot")
        (readings,) = fetch_row(
            self._con,
            """
            WITH raw AS (SELECT file, sum(raw_size) AS size FROM row_group GROUP BY 1)
            SELECT coalesce((SELECT sum(size) FROM (SELECT DISTINCT slice, file FROM placed)
              JOIN raw USING (file)) / (SELECT sum(size) FROM raw), 0)
            """,
        )
        if len(self.files) > 1 and readings > MAX_READS:
            raise InterleavedError

    def _change_spans(self, spans: str) -> str:
        if self._transform is None:
            return spans
        rows = self._con.execute(
            f"SELECT position, settled_ns, {', '.join(COLUMNS)} FROM {spans} WHERE {self._scope}"
        ).fetchall()
        lines = []
        for position, settled_ns, *values in rows:
            span = build_span(dict(zip(COLUMNS, values, strict=True)))
            changed = self._transform(span)
            if changed is not span:
                places = {"number": int(position), "settled_ns": settled_ns}
                lines.append(json_text({**places, **build_record(changed)}))
        if not lines:
            return spans
        self._is_changed = True
        self._con.execute(
            "CREATE OR REPLACE TABLE changed AS SELECT unnest(json_transform(line, "
            f"{_NUMBERED})) FROM (SELECT unnest(?::VARCHAR[]) AS line)",
            [lines],
        )
        return (
            f"(SELECT {', '.join(COLUMNS)}, settled_ns, number AS position FROM changed "
            "UNION ALL BY NAME "
            f"SELECT * FROM {spans} ANTI JOIN changed ON number = position)"
        )

    def _write_slices(self, slices: Sequence[Path], divisor: int) -> DataFile | None:
        output = None
        if slices:
            names = {file.name for file in self.files}
            manifest = self._layout.read_manifest()
            is_same = self._is_packed and not self.counts
            output = write_file(
                self._con,
                self._layout,
                f"SELECT {STORED} FROM read_parquet({quote_paths(slices)})",
                Origin(
                    {e.name: e.rows * is_same for e in manifest.segments if e.file in names},
                    (*names, *(f.name for f in manifest.files if f.dropped_us), *manifest.spent),
                    old=tuple(names),
                    is_whole=is_same,
                    counts=self.counts,
                ),
                # Named as the oldest: of two spans with one id the first still comes first.
                stamp=min(names).split("-")[1],
                level=LEVEL if self._is_compact else 3,
                group_rows=MOST_ROWS if self._is_compact else ROW_GROUP // divisor,
                group_bytes=ROW_GROUP_BYTES // divisor,
                is_compact=self._is_compact,
            )
        for path in slices:
            path.unlink()
        self._step(sum(file.rows for file in self.files))
        return output
