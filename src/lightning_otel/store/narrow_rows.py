"""Spans as narrow rows with their gist: from files that have it, and made of all others.

``told`` is a view over the files, as many of them as a span of time needs; ``loose`` a table of
what the others and the segments hold, made once, for these are few.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel import conventions as c
from lightning_otel.store.gist import GIST, ODD, with_gist
from lightning_otel.store.layout import SCHEMA_VERSION, DataFile, Layout
from lightning_otel.store.reader import Reader
from lightning_otel.store.snapshot import Snapshot
from lightning_otel.store.spans import is_one_span
from lightning_otel.store.sql import ROLLOUT, listed, quoted

if TYPE_CHECKING:
    pass

COLUMNS: Final = (
    "trace_id", "span_id", "parent_span_id", "name", "start_ns", "end_ns", "status", "operation",
    "agent", "model", "response_id", "input_tokens", "output_tokens", "rollout_id", "attempt_id",
    "reward", "process", "sequence", "end_sequence", "scope",
)  # fmt: skip
"""What is read beside the gist."""
_ALL: Final = ", ".join((*COLUMNS, *GIST))

_CHOSEN: Final = f"""
SELECT number, trace_id, span_id, parent_span_id, start_ns, end_ns, nullif(agent, '') AS agent,
  response_id, input_tokens, output_tokens, coalesce(nullif(attempt_id, ''), '1') AS attempt,
  process, sequence, end_sequence, operation = {quoted(c.EXECUTE_TOOL)} AS is_tool,
  {", ".join(GIST)}
FROM {{source}} JOIN part ON rollout = {ROLLOUT} WHERE start_ns BETWEEN ? AND ?"""


class NarrowRows:
    """The rows of a store on one connection."""

    def __init__(self, con: Reader, layout: Layout) -> None:
        """Read what no file tells.

        Args:
            con: A connection of the store.
            layout: The store's paths.
        """
        self._con = con
        self._layout = layout
        self._has_gist: dict[str, bool] = {}
        self._is_loose = False
        con.answered(self._load)

    def _load(self) -> None:
        made = with_gist(f"({self.loose_query()})", COLUMNS)
        self._con.execute(f"CREATE OR REPLACE TABLE loose AS {made}")
        self._is_loose = bool(self._con.execute("FROM loose LIMIT 1").fetchall())

    def loose_query(self) -> str:
        """The query for whole spans that no file with their gist holds."""
        now = Snapshot.take(self._layout)
        told = {file.name for file in self._told(now)}
        others = tuple(file for file in now.files if file.name not in told)
        return replace(now, files=others).spans_sql()

    def paths(self, low: int | None = None, high: int | None = None) -> list[Path]:
        """Files with the gist of their spans; those of a span of time, Unix nanoseconds."""
        return [
            self._layout.data / file.name
            for file in self._told(Snapshot.take(self._layout))
            if (high is None or file.min_start_ns <= high)
            and (low is None or file.max_start_ns >= low)
        ]

    def define(self, low: int | None = None, high: int | None = None) -> None:
        """Have the views ``told``, and ``every`` of that and what no file tells, as of now.

        Args:
            low: Only files with spans from this time on, Unix nanoseconds.
            high: Only files with spans up to this time.
        """
        paths = self.paths(low, high)
        told = f"read_parquet({listed(paths)})" if paths else "loose LIMIT 0"
        # A gist that is empty, for whatever reason, tells nothing.
        gist = f"SELECT * REPLACE (coalesce(gist_kind, {ODD})::TINYINT AS gist_kind)"
        self._con.execute(f"CREATE OR REPLACE VIEW told AS {gist} FROM (SELECT {_ALL} FROM {told})")
        every = "FROM told UNION ALL FROM loose" if self._is_loose else "FROM told"
        self._con.execute(f"CREATE OR REPLACE VIEW every AS {every}")

    def choose(self, batch: int, low: int, high: int) -> None:
        """Make the tables ``part``, a batch of ``plan``, and ``chosen``, its rows, each span once.

        Args:
            batch: Which.
            low: When its earliest span starts.
            high: When its latest one does.
        """

        def act() -> None:
            self.define(low, high)
            given = [low, high]
            self._con.execute(
                "CREATE OR REPLACE TABLE part AS SELECT number, rollout, spans, low, high "
                "FROM plan WHERE batch = ?",
                [batch],
            )
            chosen = _CHOSEN.format(source="told")
            self._con.execute(f"CREATE OR REPLACE TABLE chosen AS {chosen}", given)
            if self._is_loose:
                # What was settled meanwhile is in both.
                loose = _CHOSEN.format(source="loose")
                self._con.execute(
                    f"INSERT INTO chosen SELECT * FROM ({loose}) AS late ANTI JOIN chosen "
                    f"ON {is_one_span('chosen', 'late')}",
                    given,
                )

        self._con.answered(act)

    def _told(self, now: Snapshot) -> list[DataFile]:
        """Of the files that count those that have the gist of their spans."""
        layout = self._layout
        files = [file for file in now.files if file.schema >= SCHEMA_VERSION]
        new = [layout.data / file.name for file in files if file.name not in self._has_gist]
        if new:
            having = self._con.execute(
                f"SELECT parse_filename(file_name) FROM parquet_schema({listed(new)}) "
                "WHERE name = 'gist_facts'"
            ).fetchall()
            names = {name for (name,) in having}
            self._has_gist |= {path.name: path.name in names for path in new}
        return [file for file in files if self._has_gist[file.name]]
