"""Several data files as one, packed as tightly as they can be.

Only where each row belongs is sorted; the rows themselves follow a slice at a time.
"""

from pathlib import Path
from typing import Final

from lightning_otel.store import counts as n
from lightning_otel.store.packing import CONTENT
from lightning_otel.store.parquet import row_of, row_weights
from lightning_otel.store.rewrite import Producer
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.spans import rows_of
from lightning_otel.store.sql import ROLLOUT

TANGLE: Final = 16
"""How often, at most, the files may be read over for all slices to be gathered."""


class TangledError(Exception):
    """The rollouts of these files lie so mixed that fewer files should be merged at once."""


class Merge(Producer):
    """Several files as one, packed as tightly as they can be: each span once, rollout by rollout.

    What stands in the table ``expired`` (rollout, reason) is left out. The files may be of older
    schemas.
    """

    def gather(self, slice_bytes: int) -> list[Path]:
        """Write the rows in order of their rollouts' begin.

        Raises:
            TangledError: It would take too long; half of the files each will do.
        """
        self._is_compact = True
        try:
            self._index_rows()
            self.counts = self._drop_rows()
            self._place_rows(slice_bytes)
            if len(self.files) > 1 and self._count_readings() > TANGLE:
                raise TangledError
            return self._sort_rows()
        finally:
            for table in ("files", "weights", "spot", "twice", "placed"):
                self._con.execute(f"DROP TABLE IF EXISTS {table}")

    def _index_rows(self) -> None:
        """Make ``spot``: where each row stands, what it is ordered by, and about how large it is.

        Where a row group holds one long conversation its rows are a thousand times as wide as
        others.
        """
        con = self._con
        con.execute("CREATE TABLE files (file INTEGER, path VARCHAR)")
        paths = [self._layout.data / name for name in sorted(file.name for file in self.files)]
        con.executemany("INSERT INTO files VALUES (?, ?)", list(enumerate(map(str, paths))))
        weights = row_weights(paths, "total_uncompressed_size")
        con.execute(f"CREATE TABLE weights AS FROM ({weights}) JOIN files USING (path)")
        con.execute(
            f"""
            CREATE TABLE spot AS
            SELECT files.file, number, rollout, agent, start_ns, sequence, trace_id, span_id,
              is_ended, weight FROM (
              SELECT filename AS path, file_row_number AS number, {ROLLOUT} AS rollout, agent,
                start_ns, sequence, trace_id, span_id, end_ns IS NOT NULL AS is_ended
              FROM {rows_of(self._layout, self.files)}
            ) JOIN files USING (path) ASOF JOIN weights
              ON files.file = weights.file AND number >= begins
            """
        )

    def _drop_rows(self) -> dict[str, int]:
        """Take expired rollouts and second spans of one id out of ``spot``; count the ended."""
        con = self._con
        counts = dict(
            con.execute(
                "SELECT reason, count(*) FROM spot JOIN expired USING (rollout) "
                "WHERE is_ended GROUP BY 1"
            ).fetchall()
        )
        con.execute("DELETE FROM spot USING expired WHERE spot.rollout = expired.rollout")
        con.execute(
            """
            CREATE TABLE twice AS
            SELECT file, number, trace_id, span_id, is_ended, row_number() OVER
              (PARTITION BY trace_id, span_id ORDER BY NOT is_ended, file, number) AS rank
            FROM spot SEMI JOIN
              (SELECT trace_id, span_id FROM spot GROUP BY ALL HAVING count(*) > 1)
              USING (trace_id, span_id)
            """
        )
        if row_of(con, "SELECT count(*) FROM twice") == (0,):
            return counts
        conflicts, seconds = row_of(
            con,
            f"""
            WITH read AS (
              SELECT twice.*, {CONTENT} AS content
              FROM {rows_of(self._layout, self.files)} AS data JOIN files ON path = filename
                JOIN twice ON files.file = twice.file AND file_row_number = number
            )
            SELECT count(*) FILTER (content <> first_content), count(*) FROM (
              SELECT *, first_value(content) OVER
                (PARTITION BY trace_id, span_id ORDER BY rank) AS first_content
              FROM read) WHERE rank > 1 AND is_ended
            """,
        )
        con.execute(
            "DELETE FROM spot USING twice "
            "WHERE spot.file = twice.file AND spot.number = twice.number AND rank > 1"
        )
        return n.added(counts, {n.CONFLICT: int(conflicts), n.DUPLICATE: int(seconds - conflicts)})

    def _place_rows(self, slice_bytes: int) -> None:
        """Make ``placed``: each row's position in the new file, and the slice it comes with."""
        self._con.execute(
            f"""
            CREATE TABLE placed AS
            SELECT file, number, start_ns, position,
              (sum(weight) OVER (ORDER BY position) / {slice_bytes})::INTEGER AS slice
            FROM (
              SELECT file, number, start_ns, weight, row_number() OVER
                (ORDER BY began, rollout, agent, start_ns, sequence) AS position
              FROM (SELECT *, min(start_ns) OVER (PARTITION BY rollout) AS began FROM spot))
            """
        )
        self._con.execute("DROP TABLE spot")

    def _count_readings(self) -> float:
        """Return how often the files are read over if each slice reads those it stands in."""
        (times,) = row_of(
            self._con,
            """
            WITH raw AS (SELECT file, sum(weight * rows) AS size FROM weights GROUP BY 1)
            SELECT coalesce((SELECT sum(size) FROM (SELECT DISTINCT slice, file FROM placed)
              JOIN raw USING (file)) / (SELECT sum(size) FROM raw), 0)
            """,
        )
        return float(times)

    def _sort_rows(self) -> list[Path]:
        slices = self._con.execute(
            "SELECT slice, list(DISTINCT path), min(start_ns), max(start_ns), count(*) "
            "FROM placed JOIN files USING (file) GROUP BY 1 ORDER BY 1"
        ).fetchall()
        gathered = []
        for number, paths, low, high, rows in slices:
            held = [file for file in self.files if str(self._layout.data / file.name) in paths]
            spans = f"""(
              SELECT {", ".join(f"data.{name}" for name in COLUMNS)}, position
              FROM {rows_of(self._layout, sorted(held, key=lambda file: file.name))} AS data
              JOIN files ON path = filename JOIN placed
                ON files.file = placed.file AND file_row_number = number AND slice = {number}
              WHERE data.start_ns BETWEEN {low} AND {high})"""
            gathered.append(self._slice_path(number))
            self._write_slice(spans, "position", gathered[-1])
            self._step(rows)
        return gathered
