"""Files of facts: what the adapter made of attempts, kept so that it is computed once.

A file is named by the version of the facts, its time and its checksum, and is renamed to its place
when it is whole. Of a rollout the rows of the newest file count. Now and then a file of all facts
takes the place of those before it. Facts by another credit than the usual one have files of their
own. Any of them may be deleted at any time.
"""

import contextlib
import hashlib
import os
import re
import stat
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_otel import config
from lightning_otel.store.files import (
    file_lock,
    is_own_file,
    list_names,
    make_private,
    put_file,
)
from lightning_otel.store.layout import FACTS_MARK, FACTS_VERSION, now_us, read_facts_mark
from lightning_otel.store.sql import quote_paths, quote_text
from lightning_otel.types.transitions import STEP_COLUMNS, Credit

if TYPE_CHECKING:
    import duckdb

FACT_COLUMNS: Final = {
    "kind": "VARCHAR",
    "fingerprint": "UBIGINT",
    **STEP_COLUMNS,
    "has_next": "BOOLEAN",
    # Of attempts.
    "is_attempt": "BOOLEAN",
    "spans": "BIGINT",
    "traces": "BIGINT",
    "calls": "BIGINT",
    "reported_spans": "BIGINT",
    "reported_calls": "BIGINT",
    "steps": "BIGINT",
    "exact": "BIGINT",
    "rewarded": "BIGINT",
    "reward_spans": "BIGINT",
    "retracted": "BIGINT",
    "rewards_placed": "BIGINT",
    "cached_tokens": "BIGINT",
    "agents": "VARCHAR",
    "models": "VARCHAR",
    "task": "VARCHAR",
    "task_id": "VARCHAR",
    "reasons": "JSON",
    "notes": "JSON",
    # Of attempts and faults.
    "error_type": "VARCHAR",
    "error_message": "VARCHAR",
    "is_fatal": "BOOLEAN",
    # Of calls, rewards, tools, faults, what was left out, and repairs.
    "name": "VARCHAR",
    "request_model": "VARCHAR",
    "response_model": "VARCHAR",
    "written_tokens": "BIGINT",
    "reason": "VARCHAR",
    "is_repeated": "BOOLEAN",
    "is_waiting": "BOOLEAN",
    "is_retracted": "BOOLEAN",
    "recorded_in": "VARCHAR",
    "placed_by": "VARCHAR",
    "call_ids": "JSON",
    # Of dependencies.
    "dependency": "VARCHAR",
}
"""Every column of the ``facts`` view and its type; each kind of row has some of them."""
NO_FACTS: Final = ", ".join(f"NULL::{kind} AS {name}" for name, kind in FACT_COLUMNS.items())
PATTERN: Final = f"facts-{FACTS_VERSION}-*.parquet"
_NAME: Final = re.compile(
    r"(facts|credit-[a-z]+[-.\w]*?)-(\d+)-(\d{16})-([0-9a-f]{8})(-base)?\.parquet", re.ASCII
)
_DRAFT: Final = "draft-"
_MOST_FILES: Final = 8
_MOST_CREDITS: Final = 4
"""Credits whose facts are kept; the views need those of the usual one."""
_LOCK_S: Final = 2.0
"""How long to wait for a lock that others hold for the time of a rename."""
_GRACE_S: Final = 60.0
"""How long replaced files stay, for readers that opened them."""
_CACHE: Final = "XDG_CACHE_HOME"
_CACHE_S: Final = 86_400.0
"""How long facts of a store elsewhere are kept: nothing tells of text that is masked there."""
_sound: Final[set[tuple[str, int, int]]] = set()
"""Name, size and time of change of the files whose checksums were right."""


class CreditOptions(NamedTuple):
    """How rewards reach calls in some facts: the first options of the adapter."""

    credit: Credit = "previous"
    gamma: float = 0.99

    @property
    def prefix(self) -> str:
        """The beginning of the names of their files."""
        if self == USUAL:
            return "facts"
        # Under the other credits nothing is discounted.
        gamma = f"-{float(self.gamma)}" if self.credit == "discounted" else ""
        return f"credit-{self.credit}{gamma}"


USUAL: Final = CreditOptions()


def list_facts(folder: Path, prefix: str = "facts") -> list[Path]:
    """Return the files of a prefix that count, oldest first: sound ones of this version."""
    names = _list_names(folder, prefix)
    bases = [name for name in names if name.endswith("-base.parquet")]
    first = max(bases, default="")
    return [path for name in names if name >= first and _is_sound(path := folder / name)]


def count_unsound(folder: Path) -> int:
    """Count files of facts that are damaged or of another version, and so are not read."""
    with contextlib.suppress(OSError):
        names = filter(_NAME.fullmatch, list_names(folder))
        return sum(not (_has_version(name) and _is_sound(folder / name)) for name in names)
    return 0


def make_cache(name: str) -> Path | None:
    """Make a folder for the facts of a store elsewhere, in the user's cache.

    Returns:
        The folder; None if it cannot be made, or others may read it.

    Source: XDG Base Directory Specification 0.8.
    """
    try:
        place = Path(config.read_environment(_CACHE).get(_CACHE, ""))
        caches = place if place.is_absolute() else Path.home() / ".cache"
        # A name may hold the name of a host or of a user.
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
        folder = caches / "lightning-otel" / "facts" / digest
        make_private(folder)
        status, mark = folder.lstat(), folder / FACTS_MARK
        if not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
            return None
        if status.st_uid != os.geteuid():
            return None
        if not mark.exists() or time.time() - mark.stat().st_mtime > _CACHE_S:
            delete_facts(folder)
    except (OSError, RuntimeError):  # there may be no home
        return None
    return folder


def facts_sql(source: str, *, is_one: bool) -> str:
    """Return a query for the facts of files, of each rollout those of its newest file.

    Args:
        source: The rows with their ``filename``, in SQL.
        is_one: Whether they are of one file.
    """
    columns = ", ".join(FACT_COLUMNS)
    if is_one:
        return f"SELECT {columns} FROM {source}"
    newest = (
        f"SELECT rollout_id, max(filename) AS filename FROM {source} "
        "WHERE kind = 'attempt' GROUP BY 1"
    )
    return f"SELECT {columns} FROM {source} SEMI JOIN ({newest}) USING (rollout_id, filename)"


def files_sql(paths: Sequence[Path]) -> str:
    """Return a query for the facts of some files."""
    if not paths:
        return f"SELECT {NO_FACTS} LIMIT 0"
    base, updates = (
        f"read_parquet({quote_paths(group)}, filename=true)" for group in (paths[:1], paths[1:])
    )
    query = facts_sql(base, is_one=True)
    if len(paths) == 1:
        return query
    # Newer files are small: what of the first one counts is told by them alone.
    renewed = f"SELECT rollout_id FROM {updates} WHERE kind = 'attempt'"
    rows = facts_sql(updates, is_one=len(paths) == 2)
    return f"FROM ({query}) ANTI JOIN ({renewed}) USING (rollout_id) UNION ALL {rows}"


def keep_facts(
    con: "duckdb.DuckDBPyConnection", folder: Path, mark: bytes, prefix: str,
    paths: Sequence[Path] = (),
) -> Path | None:  # fmt: skip
    """Write the facts in ``reading.fresh`` to a file, or all of other files that count.

    Args:
        con: A connection with the tables of the schema ``reading``.
        folder: The folder of the files.
        mark: The last deletion of facts before the spans were read.
        prefix: The beginning of the file's name.
        paths: The files that this one replaces.

    Returns:
        The file; None where none can be written, as on a full disk or one that is only read, and
        where facts were deleted since.
    """
    import duckdb

    draft = folder / f"{_DRAFT}{os.getpid()}-{os.urandom(4).hex()}"
    try:
        make_private(folder)
        _write_rows(con, draft, paths)
        checksum = zlib.crc32(draft.read_bytes())
        suffix = "-base" if paths else ""
        version = f"{prefix}-{FACTS_VERSION}"
        final = folder / f"{version}-{now_us():016d}-{checksum:08x}{suffix}.parquet"
        with file_lock(folder / FACTS_MARK, wait_s=_LOCK_S) as lock:
            # These facts may hold what was masked or removed meanwhile.
            if lock is None or read_facts_mark(folder) != mark:
                return None
            put_file(draft, final)
    except (OSError, duckdb.Error):
        return None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    return final


def _write_rows(con: "duckdb.DuckDBPyConnection", path: Path, paths: Sequence[Path]) -> None:
    """Write facts kind by kind and not sorted, by one thread, in small row groups.

    A sort takes a kilobyte of memory a row, and each thread a row group.
    """
    files = f"read_parquet({quote_paths(paths)}, filename=true)"
    source = f"SELECT * FROM {files if paths else 'reading.fresh'}"
    kinds = con.execute(f"SELECT DISTINCT kind FROM ({source}) ORDER BY 1").fetchall()
    parts = (f"{source} WHERE kind = {quote_text(kind)}" for (kind,) in kinds)
    rows = " UNION ALL ".join(parts) or source
    if paths:
        rows = facts_sql(f"({rows})", is_one=False)
        rows += " SEMI JOIN reading.attempts USING (rollout_id)"
    ((threads,),) = con.execute("SELECT current_setting('threads')").fetchall()
    con.execute("SET threads = 1")
    try:
        con.execute(
            f"COPY ({rows}) TO {quote_text(str(path))} "
            "(FORMAT parquet, COMPRESSION zstd, USE_TMP_FILE false, ROW_GROUP_SIZE 20480)"
        )
    finally:
        con.execute(f"SET threads = {threads}")


def is_merge_due(paths: Sequence[Path]) -> bool:
    """Return whether files are many, or together larger than the one that holds all before them."""
    with contextlib.suppress(OSError):
        first, *others = (path.stat().st_size for path in paths)
        return len(paths) > _MOST_FILES or sum(others) > first
    return False


def remove_replaced(folder: Path, prefix: str) -> None:
    """Unlink damaged files, and replaced ones and drafts once no process needs them any more.

    Those of other prefixes stay, but of the credits whose facts were made longest ago.
    """
    files = list_facts(folder, prefix)
    with contextlib.suppress(OSError):
        base_s = files[0].stat().st_mtime if files else 0.0
        newest: dict[str, str] = {}
        for name in filter(_is_made_here, list_names(folder) - {path.name for path in files}):
            path, match = folder / name, _NAME.fullmatch(name)
            if match is not None and match[1] != prefix:
                newest[match[1]] = max(newest.get(match[1], ""), match[3])
                continue
            is_damaged = _has_version(name) and not _is_sound(path)
            if is_damaged or time.time() - max(base_s, path.stat().st_mtime) > _GRACE_S:
                path.unlink(missing_ok=True)
        newest.pop("facts", None)
        others = _MOST_CREDITS - len({"facts", prefix})
        for other in sorted(newest, key=newest.__getitem__)[:-others]:
            _unlink_all(folder, f"{other}-")


def delete_facts(folder: Path) -> None:
    """Unlink all facts, and have those refused that a reader made of what it read before."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        with file_lock(folder / FACTS_MARK, wait_s=_LOCK_S):
            (folder / FACTS_MARK).write_bytes(os.urandom(8))
        _unlink_all(folder)


def _unlink_all(folder: Path, prefix: str = "") -> None:
    for name in filter(_is_made_here, list_names(folder)):
        if name.startswith(prefix):
            (folder / name).unlink(missing_ok=True)


def _is_made_here(name: str) -> bool:
    return name.startswith(_DRAFT) or _NAME.fullmatch(name) is not None


def _list_names(folder: Path, prefix: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(name for name in list_names(folder) if _has_version(name, prefix))
    return []


def _has_version(name: str, prefix: str | None = None) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and int(match[2]) == FACTS_VERSION and match[1] == (prefix or match[1])


def _is_sound(path: Path) -> bool:
    """Return whether a file holds what its name says."""
    match = _NAME.fullmatch(path.name)
    try:
        status = path.stat()
        state = path.name, status.st_size, status.st_mtime_ns
        if state not in _sound and match is not None and is_own_file(path):
            checksum = f"{zlib.crc32(path.read_bytes()):08x}"
            _sound.update([state] if checksum == match[4] else [])
    except OSError:
        return False
    return state in _sound
