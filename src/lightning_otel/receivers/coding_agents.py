"""The session files of which coding agents are read, and how one is told from the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from lightning_otel.errors import ReceiveError
from lightning_otel.messages import object_of
from lightning_otel.receivers import Rejected, otlp
from lightning_otel.receivers.claude_code import ClaudeCode
from lightning_otel.receivers.codex import Codex, find_copied, find_origin
from lightning_otel.receivers.documents import FILE_LIMITS
from lightning_otel.receivers.otlp import InvalidSpanError, Object
from lightning_otel.receivers.sessions import SessionLinks
from lightning_otel.types import Span

SessionReader: TypeAlias = ClaudeCode | Codex
_MOST_UNKNOWN: Final = 50
"""Lines before the first that tells what a file is."""
_RECORD: Final = frozenset({"uuid", "parentUuid", "sessionId"})
"""What a record of a conversation of Claude Code's has."""
_BESIDE: Final = frozenset({"leafUuid", "messageId", "sessionId"})
"""Of which other records of Claude Code's have one, and a type."""
_ANOTHERS: Final = frozenset({"id", "traceId", "trace_id", "message"})
"""What no such record has."""
_COPYING: Final = b"session_meta"
"""The first record of sessions of which some copy others."""
_HEAD_BYTES: Final = 200
_OLD_HEAD: Final = frozenset({"id", "timestamp"})
_OLD_HEADS: Final = _OLD_HEAD | {"instructions", "git", "cwd", "originator", "cli_version"}
"""What the first line of Codex's sessions had before its records had a type."""


def open_session(
    lines: Iterable[bytes], about: Object, links: SessionLinks
) -> SessionReader | None:
    """Return a reader of the session in a file's first lines; None if they are of none."""
    unknown, is_session = 0, False
    for line in lines:
        try:
            record = object_of(otlp.load_json(line, FILE_LIMITS))
        except ReceiveError:
            record = {}
        payload, keys = object_of(record.get("payload")), record.keys()
        if keys >= _RECORD and isinstance(record["sessionId"], str):
            return ClaudeCode(record["sessionId"], about, links)
        if record.get("type") == "session_meta" and isinstance(payload.get("id"), str):
            return Codex(payload, links)
        if _OLD_HEAD <= keys <= _OLD_HEADS and isinstance(record["id"], str):
            return Codex(record, links)
        kind = record.get("type")
        is_beside = isinstance(kind, str) and keys & _BESIDE and not keys & _ANOTHERS
        is_session, unknown = is_session or bool(is_beside), unknown + (not is_beside)
        if unknown >= _MOST_UNKNOWN:
            break
    return ClaudeCode("", about, links) if is_session else None


def read_origin(lines: Iterable[bytes]) -> tuple[str, str]:
    """Return the session whose file begins with lines, and the one that it may be copied from."""
    heads: list[Object] = []
    for line in lines:
        try:
            record = otlp.load_json(line, FILE_LIMITS) if _COPYING in line[:_HEAD_BYTES] else None
        except ReceiveError:
            record = None
        heads.append(object_of(object_of(record).get("payload")))
    own_id = str(heads[0].get("id") or "")
    return own_id, find_origin(heads[0]) or (find_copied(own_id, heads[1]) or "")


def read_line(reader: SessionReader, line: bytes) -> Iterator[Span | Rejected]:
    """Yield the spans that a line of a session completes, or why it is none.

    Raises:
        ReceiveError: It is no JSON.
    """
    record = otlp.load_json(line, FILE_LIMITS)
    if not isinstance(record, dict):
        yield Rejected("no object, as each record of a session is")
        return
    try:
        yield from reader.feed(record)
    except (InvalidSpanError, RecursionError) as exc:
        yield Rejected(str(exc))
    except (AttributeError, TypeError, ValueError) as exc:
        yield Rejected(f"a value is of another kind than in any session: {exc}")
    if reader.session.problem:
        yield Rejected(reader.session.problem)
        reader.session.problem = ""
