"""Codings of bodies: chunks, gzip and deflate always; br and zstd where a library is installed."""

import re
import zlib
from collections.abc import Callable
from functools import cache, reduce
from importlib import import_module
from typing import Any, Final, TypeAlias

Decode: TypeAlias = Callable[[bytes], bytes]
"""Decodes the next bytes of a body."""

_CHUNK: Final = re.compile(rb"(?:\r\n)?([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
"""The line before a chunk, with the end of the chunk before it."""
_TRAILERS: Final = re.compile(rb"(?:[^\r\n]+\r\n)*\r\n")
_LONGEST_LINE: Final = 64 << 10
_ANY_HEADER: Final = 47
"""Has zlib tell gzip and zlib apart."""


class Chunks:
    """Reads a body in chunks: with h11 those of a stream cost as much as its whole record.

    Source: RFC 9112, section 7.1.

    Attributes:
        is_over: Whether the last chunk came, and the trailers after it.
        rest: Bytes that are not read yet; once it is over, those after the end.
    """

    is_over = _is_last = False
    rest = b""
    _missing = 0

    def read(self, data: bytes) -> bytes:
        """Return what the next bytes stand for.

        Raises:
            ValueError: They are no chunks.
        """
        data, at, pieces = self.rest + data, 0, []
        while not self.is_over:
            piece = data[at : at + self._missing]
            pieces.append(piece)
            at += len(piece)
            self._missing -= len(piece)
            pattern = _TRAILERS if self._is_last else _CHUNK
            if self._missing or (line := pattern.match(data, at)) is None:
                break
            at = line.end()
            self.is_over = self._is_last
            self._missing = 0 if self._is_last else int(line[1], 16)
            self._is_last = not self._missing
        self.rest = data[at:]
        is_whole_line = not self._is_last and b"\n" in self.rest[2:]
        if not self.is_over and (is_whole_line or len(self.rest) > _LONGEST_LINE):
            raise ValueError("no line before a chunk, or one without an end")
        return b"".join(pieces)


class _Zlib:
    """A decoder of gzip, in several members too, and of deflate with its header or without."""

    def __init__(self) -> None:
        self._inner: Any = None

    def decompress(self, data: bytes) -> bytes:
        """Return what the next bytes stand for."""
        text = b""
        while data:
            if self._inner is None:
                has_header = data[:1] == b"\x1f" or (data[0] & 15 == 8 and data[0] >> 4 < 8)
                self._inner = zlib.decompressobj(_ANY_HEADER if has_header else -zlib.MAX_WBITS)
            text += self._inner.decompress(data)
            if not self._inner.eof:
                break
            data, self._inner = self._inner.unused_data, None
        return text


def _make_decoder(coding: str) -> Decode | None:
    decoder: Any = _Zlib()
    try:
        if coding == "br":
            decoder = import_module("brotli").Decompressor()
        elif coding == "zstd":
            decoder = import_module("zstandard").ZstdDecompressor().decompressobj()
        elif coding not in ("gzip", "x-gzip", "deflate"):
            return None
    except ImportError:
        return None
    return decoder.process if coding == "br" else decoder.decompress  # type: ignore[no-any-return]  # of a library


def find_decoder(codings: str) -> Decode | None:
    """Return what decodes a body whose ``Content-Encoding`` is given; None where nothing can."""
    names = [name for part in codings.lower().split(",") if (name := part.strip())]
    decoders = [_make_decoder(name) for name in reversed(names) if name != "identity"]
    if not decoders:
        return bytes
    if None in decoders:
        return None
    return lambda data: reduce(lambda text, decode: decode(text), filter(None, decoders), data)


@cache
def readable_codings(accepted: str) -> str:
    """Return an ``Accept-Encoding`` without the codings that cannot be decoded here."""
    parts = [part.strip() for part in accepted.split(",")]
    readable = [part for part in parts if part[:1] != "*" and find_decoder(part.partition(";")[0])]
    return accepted if readable == parts else ", ".join(readable) or "identity"
