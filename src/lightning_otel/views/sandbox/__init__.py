"""One SQL statement of somebody's, run in a process of its own that can be killed at any moment.

The process (``child``) checks the statement (``statement``), opens the views, gives up its rights,
runs it and sends rows as JSON lines. The caller imports no DuckDB, and gets rows or a
``QueryError``.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import lightning_otel
from lightning_otel import config, errors
from lightning_otel.errors import LightningOtelError, QueryError
from lightning_otel.store.damage import warn_of_missing_spans
from lightning_otel.store.layout import Layout

_CHUNK: Final = 1 << 16
_LOOK_MS: Final = 200
"""How often a statement that runs is asked for."""
_START: Final = (
    "import json, sys\n"
    "job = json.loads(sys.stdin.buffer.readline())\n"
    "sys.path[:] = job.pop('path')\n"
    "from lightning_otel.views.sandbox.child import main\n"
    "main(job)\n"
)
"""What the process runs: isolated from the environment and from ``site``, whose hooks would trace
it, but with its parent's modules."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a statement.

    Attributes:
        wall_s: Time from the call to the last row; one second later the process is gone.
        memory_bytes: Memory beyond what DuckDB needs to stand there.
        rows: Rows given back; the rest is left out, and said to be.
        size_bytes: Bytes of rows given back, as JSON; likewise.
        threads: Processors it may keep busy.
    """

    wall_s: float = 30.0
    memory_bytes: int = 1 << 30
    rows: int = 10_000
    size_bytes: int = 64 << 20
    threads: int = 2


class Result(contextlib.AbstractContextManager["Result"]):
    """The rows of a statement as they come, each a tuple; to be closed, or used in ``with``.

    ``cut`` is the limit that left rows out (``rows`` or ``bytes``), once all have come; else empty.
    """

    def __init__(self, process: "_ChildProcess", columns: list[str]) -> None:
        self._process = process
        self.columns = columns
        self.cut = ""

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        while "rows" in (message := self._process.message()):
            for row in message["rows"]:
                yield tuple(map(_restore_value, row))
        self.cut = message["end"]
        self.close()

    def close(self) -> None:
        """End the process, if it has not ended."""
        self._process.kill()

    def __exit__(self, *_: object) -> None:
        self.close()


def run_statement(
    layout: Layout,
    text: str,
    limits: Limits | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Result:
    """Return the answer of a store to one read-only statement over its views.

    ``is_wanted`` is asked while the statement runs: whether somebody still waits.

    Raises:
        QueryError: It is no SELECT, DESCRIBE, SUMMARIZE, SHOW TABLES or EXPLAIN of these over the
            views; DuckDB refuses it; it came to a limit before its first row; or nobody waits.
        StoreMissingError: There is no store.
        StoreVersionError: A newer version wrote it.
        StoreError: It cannot be read.
    """
    layout.require()
    process = _ChildProcess(layout, text, limits or Limits(), is_wanted)
    try:
        message = process.message()
        warn_of_missing_spans(layout, also=message["avoided"])
        return Result(process, message["columns"])
    except BaseException:
        process.kill()
        raise


class _ChildProcess:
    """The child, and what it has sent that nobody has read."""

    def __init__(
        self, layout: Layout, text: str, limits: Limits, is_wanted: Callable[[], bool]
    ) -> None:
        self._limits = limits
        self._is_wanted = is_wanted
        self._deadline = time.monotonic() + limits.wall_s
        self._received = bytearray()
        # Rows, their envelopes, and a first and a last line.
        self._left = 2 * limits.size_bytes + (1 << 20)
        # No key goes along that the environment holds. No terminal's signals reach it.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **config.read_environment("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ"),
                config.PRICES.name: config.PRICES.read() and os.path.abspath(config.PRICES.read()),
            },
            start_new_session=True,
        )
        package = str(Path(lightning_otel.__file__).parents[1])
        job = {
            # An editable install may be found by a hook, which the child has not.
            "path": [*map(os.path.abspath, sys.path), package],
            "store": str(layout.catalogue),
            "text": text.encode("utf-8", "replace").decode(),
            "limits": asdict(limits),
        }
        assert self._child.stdin is not None
        # If the child is dead already, reading says of what.
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(job).encode() + b"\n")
            # It stays open: its end tells the child that nobody waits any more.
            self._child.stdin.flush()

    def message(self) -> dict[str, Any]:
        line = self._read_line()
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            self.kill()
            raise _make_error(message)
        return message

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _read_line(self) -> bytes:
        start = 0
        while (end := self._received.find(b"\n", start)) < 0:
            start = len(self._received)
            chunk = self._read_bytes()
            if not chunk:
                raise QueryError(self._cause_of_death())
            self._left -= len(chunk)
            if self._left < 0:
                self.kill()
                raise QueryError("the statement's rows are larger than was allowed")
            self._received += chunk
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def _read_bytes(self) -> bytes:
        assert self._child.stdout is not None
        if self._child.stdout.closed:
            return b""
        descriptor = self._child.stdout.fileno()
        waiter = select.poll()  # not select(): a server may have more than 1024 files open
        waiter.register(descriptor, select.POLLIN)
        while not waiter.poll(min(self._left_ms(), _LOOK_MS)):
            if not self._left_ms() or not self._is_wanted():
                self.kill()
                raise QueryError(self._too_slow())
        return os.read(descriptor, _CHUNK)

    def _left_ms(self) -> float:
        return max(0.0, self._deadline - time.monotonic()) * 1000

    def _cause_of_death(self) -> str:
        self._child.wait()
        code = self._child.returncode
        self.kill()
        if -code in (signal.SIGALRM, signal.SIGXCPU):
            return self._too_slow()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        memory = self._limits.memory_bytes >> 20
        return (
            f"the statement's process died ({how}), most likely of its memory limit of {memory} "
            "MiB; ask for fewer rows or columns"
        )

    def _too_slow(self) -> str:
        return (
            f"the statement was stopped after {self._limits.wall_s:g} s; narrow it with WHERE or "
            "LIMIT, or use Store.connect() for a database without limits"
        )


def _make_error(message: Mapping[str, str]) -> LightningOtelError:
    kind = getattr(errors, message["error"], None)
    if isinstance(kind, type) and issubclass(kind, LightningOtelError):
        return kind(message["text"])
    return QueryError(message["text"])


_KINDS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "map": lambda pairs: {_restore_value(key): _restore_value(value) for key, value in pairs},
    "bytes": b64decode,
    "decimal": Decimal,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time_of_day.fromisoformat,
    "timedelta": lambda parts: timedelta(*parts),
    "uuid": UUID,
}


def _restore_value(sent: Any) -> Any:
    if type(sent) is list:
        return [_restore_value(item) for item in sent]
    if type(sent) is dict:
        ((kind, content),) = sent.items()
        return _KINDS[kind](content)
    return sent
