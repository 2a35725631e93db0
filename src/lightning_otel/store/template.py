"""The file ``X.duckdb``: a template that ships, with the place of the store written into it.

So the traced process makes it without an engine. ``.ci/template.py`` makes the template: views
that name their files by the macro ``store_folder()``, whose text alone differs between stores.
"""

import contextlib
import functools
import logging
import os
import re
import struct
import zlib
from pathlib import Path
from typing import Final

from lightning_otel.store.files import escape_glob, make_private, replace_file
from lightning_otel.store.layout import EMPTY_DATA, EMPTY_FACTS, EMPTY_LIVE, Layout

log = logging.getLogger(__name__)

STAMP: Final = "catalogue.stamp"
TEMPLATE: Final = Path(__file__).with_name("catalogue.template")
"""A line with a hash of the statements that made it, and the packed database."""
EMPTY_FILE: Final = Path(__file__).with_name("empty.parquet")
"""A data file without rows, which names every column: DuckDB reads no pattern without a match."""
NO_FACTS_FILE: Final = Path(__file__).with_name("facts.parquet")
"""A file of facts without rows, likewise."""
FOLDER_BYTES: Final = 4096
"""Room for the store's folder: no longer path can be opened."""
MARK: Final = b"\x7f"
"""Fills that room in the template."""
ROOM: Final = MARK + b"{2,}"
"""Matches the parts of the room, as DuckDB splits texts; nothing else in the template matches."""
BLOCK_BYTES: Final = 16384
_HEADER_BYTES: Final = 3 * 4096
_CHECKSUM: Final = struct.Struct("<Q")


def add_catalogue(layout: Layout) -> None:
    """Make ``X.duckdb`` where none stands, as the traced process does."""
    if not os.path.exists(layout.catalogue):
        ensure_catalogue(layout)


def ensure_catalogue(layout: Layout) -> None:
    """Make ``X.duckdb`` and the files without rows, unless up to date or read-only."""
    with contextlib.suppress(OSError):
        if not (layout.live / EMPTY_LIVE).exists():  # somebody emptied the folder, or removed it
            layout.make_folders()
    stamp = b""
    with contextlib.suppress(OSError):
        stamp = (layout.root / STAMP).read_bytes()
    try:
        if stamp != _current_stamp(layout):
            make_private(layout.facts)
            replace_file(layout.data / EMPTY_DATA, EMPTY_FILE.read_bytes(), layout.new)
            replace_file(layout.facts / EMPTY_FACTS, NO_FACTS_FILE.read_bytes(), layout.new)
            replace_file(layout.catalogue, _build_catalogue(layout.root), layout.new)
            replace_file(layout.root / STAMP, _current_stamp(layout), layout.new)
    except (OSError, ValueError):
        log.debug("%s has no catalogue, or an old one", layout.root, exc_info=True)


def _current_stamp(layout: Layout) -> bytes:
    version, _ = _read_template()
    paths = (layout.catalogue, layout.data / EMPTY_DATA, layout.facts / EMPTY_FACTS)
    states = " ".join(map(_file_state, paths))
    return b"%b %b %b" % (version, states.encode(), os.fsencode(layout.root))


def _file_state(path: Path) -> str:
    """Size and time of change, which tell whether somebody else wrote into it or damaged it."""
    try:
        status = path.stat()
    except OSError:
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns}"


@functools.cache
def _read_template() -> tuple[bytes, bytes]:
    version, _, database = TEMPLATE.read_bytes().partition(b"\n")
    return version, database


def _build_catalogue(folder: Path) -> bytes:
    """Return the template with a store's folder in it, and the checksums that DuckDB verifies."""
    room = escape_glob(folder).encode().ljust(FOLDER_BYTES)  # ``store_folder()`` trims it
    if len(room) > FOLDER_BYTES:
        raise ValueError(f"{folder} is longer than {FOLDER_BYTES:,} bytes")
    template = zlib.decompress(_read_template()[1])
    database, offset, blocks = bytearray(template), 0, set()
    for part in re.finditer(ROOM, template):
        start, end = part.span()
        database[start:end] = room[offset : offset + end - start]
        offset += end - start
        blocks.add((start - _HEADER_BYTES) // BLOCK_BYTES)
    for block in blocks:
        start = _HEADER_BYTES + block * BLOCK_BYTES
        content = database[start + _CHECKSUM.size : start + BLOCK_BYTES]
        _CHECKSUM.pack_into(database, start, _sum_words(content))
    return bytes(database)


def _sum_words(content: bytes | bytearray) -> int:
    """Return DuckDB's checksum of a block. Source: ``src/common/checksum.cpp`` of DuckDB."""
    total = 5381
    for (word,) in _CHECKSUM.iter_unpack(content):
        total ^= word * 0xBF58476D1CE4E5B9
    return total & 0xFFFFFFFFFFFFFFFF
