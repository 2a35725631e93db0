"""One request and its answer on their way: the heads that change, and the reading of a copy."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Final

import h11

from lightning_otel import capture
from lightning_otel.instrumentors.http import RECORDED
from lightning_otel.proxy.codings import readable_codings
from lightning_otel.proxy.recording import Record
from lightning_otel.proxy.routes import Destination, server_address

_HEAD_BYTES: Final = 1 << 20
_OWN: Final = frozenset(
    {
        b"upgrade", b"http2-settings", b"proxy-authorization", b"proxy-connection",
        RECORDED.encode(),
    }
)  # fmt: skip
"""Headers that end here."""
_FRAMING: Final = ("content-length", "transfer-encoding", "expect", "host")
_PARTS: Final = (h11.InformationalResponse, h11.Response, h11.Data, h11.EndOfMessage)


class Passage:
    """One request and its answer on their way.

    Attributes:
        request: The head of the request.
        headers: Its headers, by lower-case name.
        destination: Where it goes.
        record: Its record; None where nothing is recorded.
        is_sent: Whether the request is there to its end.
        is_answered: Whether the answer is.
        is_refused: Whether the answer refuses what we asked besides, and is not passed on.
        is_unreadable: Whether the answer is no HTTP, and passes unread until its end.
        reading: The reading of a long request in a thread.
        ends_record: Whether the record ends with that.
        has_begun: Whether the record has begun.
        failure: What kept the server from being reached.
    """

    def __init__(
        self,
        request: h11.Request,
        headers: Mapping[str, str],
        destination: Destination,
        record: Record | None,
    ) -> None:
        self.request, self.headers = request, headers
        self.destination, self.record = destination, record
        self.is_sent = self.is_answered = self.is_refused = self.is_unreadable = False
        self.has_begun = self.ends_record = False
        self.failure: BaseException | None = None
        self.reading: asyncio.Future[Any] | None = None
        self._framing = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)

    def head(self) -> bytes:
        """Return the head that is sent: with another target and host, without what ends here."""
        return self._write_head(self.request.headers.raw_items())

    def _write_head(self, items: Iterable[tuple[bytes, bytes]]) -> bytes:
        host = self.destination.host.encode()
        headers = []
        for name, value in items:
            lower = name.lower()
            if lower == b"accept-encoding" and self.record is not None:
                headers.append((name, readable_codings(value.decode("latin-1")).encode()))
            elif lower not in _OWN:
                headers.append((name, host if lower == b"host" else value))
        if "host" not in self.headers:  # of HTTP/1.0
            headers.insert(0, (b"Host", host))
        request = h11.Request(
            method=self.request.method, target=self.destination.target, headers=headers
        )
        head = self._framing.send(request) or b""
        version = self.request.http_version
        return head.replace(b" HTTP/1.1\r\n", b" HTTP/%s\r\n" % version, 1)

    def write(self, event: h11.Data | h11.EndOfMessage) -> bytes:
        """Return the bytes of a part of the body."""
        return self._framing.send(event) or b""

    def write_whole(self, url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Return the bytes of a request that is sent in place of the program's."""
        self._framing = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        self.destination = server_address(url)
        pairs = {name: text for name, text in headers.items() if name.lower() not in _FRAMING}
        pairs |= {"host": self.destination.host, "content-length": str(len(body))}
        encoded = [(name.encode("latin-1"), pairs[name].encode("latin-1")) for name in pairs]
        head = self._write_head(encoded)
        return head + self.write(h11.Data(data=body)) + self.write(h11.EndOfMessage())

    def read(self, data: bytes) -> bool:
        """Read a copy of the bytes of the answer; return whether it can be read.

        No bytes are its end, by the connection's.
        """
        if self.is_unreadable:
            return False
        try:
            self._framing.receive_data(data)
            pieces: list[bytes] = []
            while type(event := self._framing.next_event()) in _PARTS:
                if type(event) is h11.Data:
                    pieces.append(event.data)
                else:
                    self._keep(pieces)
                    self._take(event)
            self._keep(pieces)
            if self.is_answered and self._framing.trailing_data[0]:
                self.is_unreadable = True  # more than it said: nobody knows what comes next
        except h11.RemoteProtocolError:
            return False
        return not self.is_unreadable

    def _keep(self, pieces: list[bytes]) -> None:
        """Keep what has come of the body in one: to look at each chunk costs more than all else."""
        if pieces and self.record is not None and not self.is_refused:
            is_end = capture.guard_call(self.record.keep, b"".join(pieces))
            pieces.clear()
            if is_end:
                self.end_record()

    def _take(self, event: Any) -> None:
        record = self.record
        if isinstance(event, h11.Response) and record is not None:
            headers = headers_of(event)
            capture.guard_call(record.answer, event.status_code, headers)
            self.is_refused = record.refused
        elif isinstance(event, h11.EndOfMessage):
            self.is_answered = True
            if not self.is_refused:
                self.end_record()

    def end_record(self, *, is_whole: bool = True, exc: BaseException | None = None) -> None:
        """Write the record, or have it written once the request is read."""
        if self.record is None:
            return
        if self.reading is not None and not self.reading.done():
            self.ends_record = True
            self.reading.add_done_callback(lambda _: self._end(is_whole, exc))
            return
        self._end(is_whole, exc)

    def _end(self, is_whole: bool, exc: BaseException | None) -> None:  # noqa: FBT001
        self.ends_record = False
        record = self.record
        if record is not None:
            if not self.has_begun and is_whole:  # the answer came before the request's end
                self.has_begun = True
                capture.guard_call(record.begin)
            capture.guard_call(record.end, is_whole=is_whole, exc=exc)


def make_parser() -> h11.Connection:
    """Return what reads a request."""
    return h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)


def headers_of(event: Any) -> dict[str, str]:
    """Return the headers of a head, by lower-case name."""
    headers: dict[str, str] = {}
    for name, value in event.headers:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers
