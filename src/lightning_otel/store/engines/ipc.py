"""Rows as one Arrow IPC stream, and an IPC stream as a table of DuckDB's; needs ``nanoarrow``.

A stream that breaks off between two batches looks whole to every Arrow reader, so what arrives
must end with the format's own mark of the end, and is refused without it.
"""

import io
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from lightning_otel.errors import NotInstalledError, StoreError

if TYPE_CHECKING:
    import duckdb

MEDIA_TYPE: Final = "application/vnd.apache.arrow.stream"
END: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""What a whole stream ends with.

Source: the Arrow columnar format, "IPC Streaming Format".
"""
_DRAIN_BYTES: Final = 1 << 16
_BUFFER_BYTES: Final = 1 << 20
_BATCH: Final = "arrived"


class ArrowStream(Protocol):
    """Whatever speaks the Arrow C stream interface."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The stream as a capsule."""


class Body(Protocol):
    """Bytes that arrive: a response, or a file."""

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, at most so many; none at the end."""

    def close(self) -> None:
        """Let go of the way they came."""


def parts(tables: Iterable[ArrowStream]) -> Iterator[bytes]:
    """One IPC stream of the tables' rows, in parts; memory holds one of them at a time.

    Args:
        tables: At least one; all with the same columns.

    Raises:
        ConfigError: nanoarrow is not installed.
    """
    sink = io.BytesIO()
    writer = _nanoarrow("ipc").StreamWriter.from_writable(sink)
    try:
        for table in tables:
            writer.write_stream(table)
            yield _taken(sink)
        writer.close()
        yield _taken(sink)
    finally:
        # Not closed if something failed: that would write the mark of a whole stream.
        writer.release()


def _taken(sink: io.BytesIO) -> bytes:
    data = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return data


class Arrival(io.RawIOBase):
    """An IPC stream that is read while it arrives."""

    def __init__(self, body: Body, sender: str) -> None:
        """Take a body that nothing was read of yet.

        Args:
            body: Where the bytes come from.
            sender: Whom they come from, for errors.
        """
        super().__init__()
        self._body = body
        self._sender = sender
        self._tail = b""
        self._fault: Exception | None = None

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, into: Any) -> int:
        """The next bytes."""
        view = memoryview(into).cast("B")
        try:
            data = self._body.read(len(view))
        except Exception as exc:
            self._fault = exc  # all that is left of it further up is a part of its text
            raise
        view[: len(data)] = data
        self._tail = (self._tail + data[-len(END) :])[-len(END) :]
        return len(data)

    def close(self) -> None:
        """Close the body."""
        self._body.close()
        super().close()

    def load(self, con: "duckdb.DuckDBPyConnection", insert: Callable[[str], str]) -> None:
        """Put the rows into a table.

        Args:
            con: The connection.
            insert: Gives the INSERT, told the name that the rows have.

        Raises:
            ConfigError: nanoarrow is not installed.
            StoreError: Not all of it came, or it is no such stream.
        """
        import duckdb

        read = _nanoarrow("").ArrayStream.from_readable
        arriving = io.BufferedReader(self, _BUFFER_BYTES)
        try:
            # A batch at a time: DuckDB 1.5 asks for a stream twice, and a body comes once.
            for batch in read(arriving):
                con.register(_BATCH, batch)
                try:
                    con.execute(insert(_BATCH))
                finally:
                    con.unregister(_BATCH)
            while self.readinto(bytearray(_DRAIN_BYTES)):
                pass
        except (duckdb.Error, OSError, ValueError, RuntimeError) as exc:
            raise self._broken(self._fault or exc) from exc
        finally:
            arriving.close()
        if self._tail != END:
            raise self._broken("the answer broke off")

    def _broken(self, why: object) -> StoreError:
        return StoreError(f"cannot read spans from {self._sender}: {why}; try again")


def _nanoarrow(module: str) -> Any:
    import importlib

    try:
        importlib.import_module("nanoarrow.ipc")
        return importlib.import_module(f"nanoarrow.{module}" if module else "nanoarrow")
    except ImportError as exc:
        raise NotInstalledError(
            "reading a store over a network needs nanoarrow; pip install 'lightning-otel[remote]'"
        ) from exc
