"""Files as documents: lines of JSON, one printed document, rows of CSV or Parquet, also packed."""

import contextlib
import csv
import gzip
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_otel.cli.output import format_size
from lightning_otel.errors import ReceiveError, TooLargeError
from lightning_otel.types.values import json_text

if TYPE_CHECKING:
    from io import BufferedReader

_GZIP: Final = b"\x1f\x8b"
_SHORTEST: Final = 1000
"""Bytes that a line or row counts at least: a span is about as long, and takes its time."""
_UTF_16: Final = (b"\xff\xfe", b"\xfe\xff")
_HEADER: Final = re.compile(rb'(\xef\xbb\xbf)?"?\w[\w .()-]*"?(,"?[\w .()-]+"?){2,}\s*')
"""The first line of CSV: names of columns."""
Refuse = Callable[[int, str], None]
"""Counts a line, by its number, or a span in it that could not be read."""


def read_documents(
    path: Path, refuse: Refuse, limit_bytes: int
) -> Iterator[tuple[bytes, int, int]]:
    """Yield the lines that say something, with their number and how far into the file they end.

    Of a file whose first line is no JSON by itself, that is all of it; of CSV, each row.
    """
    from lightning_otel.dataset.tables import is_parquet, read_parquet

    number = 0
    try:
        if is_parquet(path):
            rows = (row.encode() for row in read_parquet(path))
            for number, row in enumerate(_limit_lines(rows, limit_bytes), 1):
                yield row, number, 0
            return
        with open_lines(path) as (read, tell):
            lines = _limit_lines(read, limit_bytes)
            numbered = enumerate(lines, 1)
            number, first = next((item for item in numbered if not item[1].isspace()), (0, b""))
            if not first:
                return
            if first.startswith(_UTF_16):
                raise ReceiveError("the file is UTF-16; save it as UTF-8")
            # A damaged line ends anyhow; the first line of a printed document opens something.
            if first.rstrip().endswith((b"{", b"[", b",")):
                yield _join_lines(chain([first], lines)), number, path.stat().st_size
                return
            if _HEADER.fullmatch(first):
                for number, row in _read_rows(chain([first], lines)):
                    yield row, number, tell()
                return
            remaining = chain([(number, first)], numbered)
            for number, line in remaining:
                if len(line) > (most := _longest()):
                    refuse(number, f"line is longer than {most} bytes")
                    while line and not line.endswith(b"\n"):
                        line = next(lines, b"")
                elif not line.isspace():
                    yield line, number, tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
        refuse(number + 1, f"the gzip is damaged from here on: {exc}")
    except (ReceiveError, csv.Error) as exc:
        refuse(number + 1, str(exc))


@contextlib.contextmanager
def open_lines(path: Path) -> Iterator[tuple[Iterator[bytes], Callable[[], int]]]:
    """Give the lines of a file, inflated if need be, and what tells how far it was read."""
    from lightning_otel.dataset.tables import is_zstd, read_zstd

    if is_zstd(path):
        yield read_zstd(path, _longest()), int
        return
    with path.open("rb") as raw, _open_inflated(raw) as file:
        yield iter(lambda: file.readline(_longest() + 1), b""), raw.tell


def _longest() -> int:
    from lightning_otel.receivers.documents import FILE_LIMITS

    return FILE_LIMITS.body_bytes


def _join_lines(lines: Iterable[bytes]) -> bytes:
    """Return lines as one document, of no more than a byte too many."""
    buffer = bytearray()
    for line in lines:
        buffer += line
        if len(buffer) > _longest():
            break
    return bytes(buffer[: _longest() + 1])


def _read_rows(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    csv.field_size_limit(_longest())
    texts = (line.removeprefix(BOM_UTF8).decode("utf-8", "replace") for line in lines)
    rows = csv.DictReader(texts)
    for row in rows:
        values = {name: value or None for name, value in row.items() if isinstance(name, str)}
        yield rows.line_num, json_text(values).encode()


def _limit_lines(lines: Iterable[bytes], limit_bytes: int) -> Iterator[bytes]:
    """Yield lines until they are more than a limit; then raise TooLargeError."""
    size = 0
    for line in lines:
        size += max(len(line), _SHORTEST)
        if size > limit_bytes:
            raise TooLargeError(
                f"the file holds more than {format_size(limit_bytes)}, and a line counts "
                f"{_SHORTEST} bytes at least; split it, or raise --limit"
            )
        yield line


def _open_inflated(raw: "BufferedReader") -> "BufferedReader | gzip.GzipFile":
    is_gzip = raw.read(len(_GZIP)) == _GZIP
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if is_gzip else raw


def is_packed(path: Path) -> bool:
    """Return whether a file is compressed."""
    from lightning_otel.dataset.tables import is_zstd

    with path.open("rb") as file:
        return file.read(len(_GZIP)) == _GZIP or is_zstd(path)
