"""The lines of many closed segments in one file, for a settler to read."""

import errno
import os
from collections.abc import Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Final

from lightning_otel.store.lines import format_control_line, is_sound
from lightning_otel.store.quarantine import LONGEST_LINE
from lightning_otel.store.snapshot import SEGMENT_COLUMNS, lines_sql, ndjson_sql
from lightning_otel.store.sql import quote_paths, quote_text

_MOST_SIFTED: Final = 256 << 20
_CHUNK: Final = 1 << 18
_START: Final = b'{"record":"start","trace_id":"'
_END: Final = b'{"record":"span","trace_id":"'
_IDS: Final = len('","span_id":"') + 48
"""Length of a trace id and what follows it, to the end of the span id."""


def sift_segments(paths: Sequence[Path], copy: Path) -> list[str]:
    """Copy closed segments into one file, without the starts of spans that end in them.

    Half the size, and DuckDB takes a millisecond to open each of thousands. A line with the file's
    name, which nobody else can know, stands before each segment's. Return the names of those whose
    every line is as written.
    """
    names: list[str] = []
    with FileIO(copy, "w", opener=partial(os.open, mode=0o600)) as output:
        for path in paths:
            end = output.tell()
            try:
                is_whole = path.stat().st_size <= _MOST_SIFTED and _sift(path, output)
            except OSError:  # such as no room: the segment itself will do
                is_whole = False
            if is_whole:
                names.append(path.name)
            else:
                output.truncate(end)
                output.seek(end)
    return names


def sifted_sql(copy: Path, names: Sequence[str], remainder: Sequence[Path]) -> str:
    """Return a query for the lines of such a file and of other segments, each with its segment."""
    parts = [segment_lines_sql(lines_sql(remainder))] if remainder else []
    if names:
        mark = f"count(CASE WHEN record = {quote_text(copy.name)} THEN 1 END)"
        parts.append(
            f"SELECT * EXCLUDE (filename, place), [{', '.join(map(quote_text, names))}][place] "
            f"AS segment FROM (SELECT *, {mark} OVER (ROWS BETWEEN UNBOUNDED PRECEDING AND "
            f"CURRENT ROW) AS place FROM {ndjson_sql(quote_paths([copy]), SEGMENT_COLUMNS)}) "
            f"WHERE record IS DISTINCT FROM {quote_text(copy.name)}"
        )
    return " UNION ALL ".join(parts)


def segment_lines_sql(lines: str) -> str:
    """Return a query for lines of segments, each with its segment's name."""
    return f"SELECT * EXCLUDE (filename), parse_filename(filename) AS segment FROM {lines}"


def _sift(path: Path, output: FileIO) -> bool:
    starts: dict[bytes, bytes] = {}
    batch = [format_control_line(Path(os.fsdecode(output.name)).name)]
    with path.open("rb") as file:
        while lines := file.readlines(_CHUNK):
            for line in lines:
                if not is_sound(line) or len(line) > LONGEST_LINE:
                    return False
                if line.startswith(_START):
                    starts[line[len(_START) : len(_START) + _IDS]] = line
                else:
                    starts.pop(line[len(_END) : len(_END) + _IDS], None)
                    batch.append(line)
            _write(output, batch)
            batch = []
    _write(output, [*batch, *starts.values()])
    return True


def _write(output: FileIO, lines: Sequence[bytes]) -> None:
    text = b"".join(lines)
    if output.write(text) != len(text):
        raise OSError(errno.ENOSPC, "short write, no space left")
