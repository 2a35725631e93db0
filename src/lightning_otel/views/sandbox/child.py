"""The process that runs a statement: opens the views, gives up its rights, sends rows.

What bounds it depends neither on its parent nor on DuckDB alone: the kernel ends it at the limit of
time, refuses it memory beyond its share, and lets it write no byte into any file.
"""

import base64
import contextlib
import os
import resource
import signal
import threading
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from json import JSONEncoder
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from lightning_otel.errors import LightningOtelError
from lightning_otel.store.damage import list_excluded
from lightning_otel.store.layout import Layout
from lightning_otel.store.reader import Moment, Reader
from lightning_otel.store.snapshot import Snapshot
from lightning_otel.store.source import LocalSource, define_views, prepare
from lightning_otel.store.sql import new_connection
from lightning_otel.store.table import Query
from lightning_otel.store.views import FACT_VIEWS, list_views
from lightning_otel.views.sandbox import Limits, landlock
from lightning_otel.views.sandbox.statement import check

if TYPE_CHECKING:
    import duckdb

_GRACE_S: Final = 0.5
"""How much later than its parent's the child's own clock ends it."""
_BATCH: Final = 256
_LOCKS: Final = {
    "temp_directory": "''",
    "max_temp_directory_size": "'0B'",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "allow_persistent_secrets": "false",
    "python_enable_replacements": "false",
    "python_scan_all_frames": "false",
    "allowed_directories": "['live', 'data', 'facts']",
    "allowed_paths": "['manifest.ndjson', 'manifest.copy.ndjson']",
    "enable_external_access": "false",
    "lock_configuration": "true",
}
"""Settings in the order that they are made in; after the last one none can be changed."""

# NaN and infinities go through: both ends are Python's.
_encode: Final = JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def main(job: Mapping[str, Any]) -> None:
    """Answer one question on stdout and end the process."""
    limits = Limits(**job["limits"])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_s + _GRACE_S)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    out = os.dup(1)
    # DuckDB's own words on stdout would be taken for rows.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        _send_answer(out, Path(job["store"]), job["text"], limits)
    except LightningOtelError as exc:
        # The rest would be the traceback of a module that DuckDB missed, with paths in it.
        text = str(exc).partition("\nTraceback")[0]
        _send_message(out, {"error": type(exc).__name__, "text": text})
    except MemoryError:
        text = f"the statement needs more than its {limits.memory_bytes >> 20} MiB of memory"
        _send_message(
            out, {"error": "QueryError", "text": f"{text}; ask for fewer rows or columns"}
        )
    # At once: threads of DuckDB may be at work still, and nothing here is worth a clean end.
    os._exit(0)


def _send_answer(out: int, store: Path, text: str, limits: Limits) -> None:
    layout = Layout(store)
    if any(name in text.lower() for name in FACT_VIEWS):
        # Here they can be kept, and limits are the statement's: the adapter is ours.
        LocalSource(layout).connect(("facts",)).con.close()
    else:
        prepare(layout)
    os.chdir(layout.root)
    # Before DuckDB starts its threads: each is bound by what bound the one that started it.
    landlock.give_up()
    inside = _layout_inside(layout)
    con = _open_connection(inside, text, limits)
    query = Query(con, text)
    columns, batches = query.batches(_BATCH)
    _send_message(out, {"columns": columns, "avoided": sorted(list_excluded(inside))})
    rows, size, cut = 0, 0, ""
    for batch in batches:
        kept = []
        for row in batch:
            line = _encode([sendable(value) for value in row])
            size += len(line)
            cut = "rows" if rows == limits.rows else "bytes" if size > limits.size_bytes else ""
            if cut:
                break
            rows += 1
            kept.append(line)
        _write_text(out, f'{{"rows":[{",".join(kept)}]}}\n')
        if cut:
            break
    _send_message(out, {"end": cut})


def _layout_inside(layout: Layout) -> Layout:
    """Return the store's paths as seen from its folder: no plan or error tells where it is."""
    inside = Layout(layout.catalogue)
    inside.live = Path("live")
    inside.data = Path("data")
    inside.facts = Path("facts")
    inside.manifest_path = Path("manifest.ndjson")
    inside.manifest_copy = Path("manifest.copy.ndjson")
    return inside


def _open_connection(inside: Layout, text: str, limits: Limits) -> Reader:
    """Open a database with the views the statement reads, in which no setting can be changed."""
    con = new_connection()
    # Three quarters: DuckDB does not count all that it takes.
    con.execute(f"SET memory_limit = '{limits.memory_bytes * 3 // 4} B'")
    con.execute(f"SET threads = {limits.threads}")
    # Before the text is parsed, which may take memory too.
    _confine_process(limits)
    check(con, text)
    names = list_views(con, text)

    def define(con: "duckdb.DuckDBPyConnection", snapshot: Snapshot) -> None:
        define_views(con, snapshot, names)

    reader = Reader(con, Moment(inside), define)
    for name, value in _LOCKS.items():
        con.execute(f"SET {name} = {value}")
    return reader


def _confine_process(limits: Limits) -> None:
    cpu_s = ceil((limits.wall_s + _GRACE_S) * limits.threads)
    limits_by = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CPU: cpu_s,
    }
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        # Each thread reserves 64 MiB of addresses for its allocator, whether it needs them or not.
        reserved = (limits.threads + 2) << 26
        size = pages * resource.getpagesize() + reserved + limits.memory_bytes
        limits_by[resource.RLIMIT_AS] = size
    for kind, value in limits_by.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS knows no limit of addresses
            resource.setrlimit(kind, (value, value))


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)


def sendable(value: Any) -> Any:
    """A value as JSON that says what it was: an object has one key, the kind of value."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, (list, tuple)):
        return [sendable(item) for item in value]
    if isinstance(value, dict):
        pairs = [[sendable(key), sendable(item)] for key, item in value.items()]
        return {"map": pairs}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, timedelta):
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, (datetime, date, time_of_day)):
        return {type(value).__name__: value.isoformat()}
    if isinstance(value, (Decimal, UUID)):
        return {type(value).__name__.lower(): str(value)}
    return str(value)


def _send_message(out: int, message: Mapping[str, Any]) -> None:
    _write_text(out, _encode(message) + "\n")


def _write_text(out: int, text: str) -> None:
    view = memoryview(text.encode("utf-8", "replace"))
    while view:
        view = view[os.write(out, view) :]
