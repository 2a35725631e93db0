"""The session files of which coding agents are read, and how one is told from the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from lightning_otel.errors import ReceiveError
from lightning_otel.messages import object_of
from lightning_otel.receivers import Rejected, otlp
from lightning_otel.receivers.claude_code import ClaudeCode
from lightning_otel.receivers.codex import Codex
from lightning_otel.receivers.documents import FILE_LIMITS
from lightning_otel.receivers.otlp import InvalidSpanError, Object
from lightning_otel.receivers.sessions import SessionReader
from lightning_otel.types import Span

_RECORD: Final = frozenset({"uuid", "parentUuid", "sessionId"})
"""What a record of a conversation of Claude Code's has; others may stand before the first."""


def open_session(lines: Iterable[bytes], about: Object) -> SessionReader | None:
    """Return a reader of the session that a file's first lines are of; None if they are of none.

    Args:
        lines: The first lines.
        about: What stands beside the file, of a subagent of Claude Code's.
    """
    for line in lines:
        try:
            record = object_of(otlp.load_json(line, FILE_LIMITS))
        except ReceiveError:
            continue
        payload = object_of(record.get("payload"))
        if record.keys() >= _RECORD and isinstance(record["sessionId"], str):
            return ClaudeCode(record["sessionId"], about)
        if record.get("type") == "session_meta" and isinstance(payload.get("id"), str):
            return Codex(payload["id"], payload)
    return None


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
