"""One request to a model, of whichever client: a span from the first attempt to the last byte."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from opentelemetry.context import Context

from lightning_otel import capture, config, debugging
from lightning_otel.capture import attach_context, join_session, operations
from lightning_otel.dialects import Dialect, find_dialect
from lightning_otel.dialects.dialect import Attributes, Json, dump
from lightning_otel.instrumentors.wrappers import WrappedRun
from lightning_otel.types import conventions as c

_UNKNOWN: Final = "the client gave no body that could be read"
"""What stands for the messages of such a request: no list of messages, so it makes no step."""
_SESSIONS: Final = ("X-Session-ID", "X-Claude-Code-Session-Id", "session-id")
"""Headers that name a session: of a relay, which serves many from one place of the program (and of
opencode), of Claude Code, of Codex."""
_FAILED: Final = 400


def endpoint_of(method: str, url: str) -> Dialect | None:
    """Return the dialect of a request to a model; None for everything else."""
    dialect = find_dialect(method, url)
    if dialect is None and debugging.is_on:
        debugging.log(f"missed  {method} {url}: not a model endpoint")
    return dialect


def open_request(context: Context) -> "ModelRequest | None":
    """Return the request to a model that is under way in a context."""
    operation = operations.operation_of(context)
    if operation is None or operation.is_over:
        return None
    return operation.request if isinstance(operation.request, ModelRequest) else None


def session_of(headers: object) -> str | None:
    """Return the session that the headers of a request name."""
    if not isinstance(headers, Mapping):
        return None
    for name in _SESSIONS:
        session_id = headers.get(name) or headers.get(name.lower())
        if isinstance(session_id, str):
            return session_id
    return None


def within_session(headers: object) -> AbstractContextManager[None]:
    """Return what puts a request into the open block of the session that its headers name."""
    session_id = session_of(headers)
    return attach_context(join_session(session_id)) if session_id else nullcontext()


def server_attributes(url: str) -> Attributes:
    """Return host and port of the server that a request for a whole URL ends at."""
    parts = urlsplit(config.upstream_of(url))
    facts = ((c.SERVER_ADDRESS, parts.hostname), (c.SERVER_PORT, parts.port))
    return {key: value for key, value in facts if value is not None}


class _RequestAttempt(NamedTuple):
    started_s: float | None
    answered_s: float
    outcome: int | str


class ModelRequest(WrappedRun):
    """One request to a model; ``started_s`` is on the clock of ``time.perf_counter``."""

    def __init__(
        self,
        endpoint: Dialect,
        body: Json | None,
        url: str,
        context: Context,
        attributes: Attributes,
        *,
        is_stream: bool,
        start_ns: int | None = None,
    ) -> None:
        """Start the span; a ``body`` of None is unknown until :meth:`read_sent`."""
        self._endpoint = endpoint
        self.is_stream = is_stream
        self._attempts: list[_RequestAttempt] = []
        attributes = {c.OPERATION: endpoint.operation, **attributes}
        # Read before sending: the program may change its own lists while it waits.
        content: dict[str, str] = {}
        name = self._describe(body, url, attributes, content)
        self.operation = operations.start_call(name, attributes, content, context, start_ns)
        self.operation.request = self
        if operations.operation_of(context) is not self.operation:  # as a framework's call may be
            self.context = self.operation.context
        self.started_s = time.perf_counter()
        if start_ns is not None:
            self.started_s -= (time.time_ns() - start_ns) / 1e9

    def read_sent(self, body: Json, url: str) -> None:
        """Say what was sent, where that could not be read beforehand."""
        if not self.operation.is_over:
            self.is_stream = self._endpoint.is_stream(body, url)
            operation = self.operation
            operation.rename(self._describe(body, url, operation.attributes, operation.body))

    def _describe(
        self, body: Json | None, url: str, attributes: Attributes, content: dict[str, str]
    ) -> str:
        if body is None:
            content[c.INPUT_MESSAGES] = _UNKNOWN
        model = self._endpoint.model_of(body or {}, url)
        if model is not None:
            attributes[c.REQUEST_MODEL] = model
        if self.is_stream:
            attributes[c.REQUEST_STREAM] = True
        if body is not None:
            capture.guard_call(_read_request, self._endpoint, body, attributes, content)
        return f"{self._endpoint.operation} {model or ''}".rstrip()

    def note_attempt(self, started_s: float | None, outcome: int | str) -> None:
        """Note the status or error of an attempt, and its start if known."""
        if not self.operation.is_over:
            self._attempts.append(_RequestAttempt(started_s, time.perf_counter(), outcome))

    def end(
        self,
        body: bytes | None,
        *,
        is_whole: bool,
        first_chunk_s: float | None = None,
        exc: BaseException | None = None,
        status: int = 0,
    ) -> None:
        """End the span with the answer's body, as far as it was read.

        Args:
            body: A JSON document, or server-sent events; None if none came.
            is_whole: Whether it was read to its end.
            first_chunk_s: Seconds from the span's start to the first byte of a stream.
            exc: What ended the call instead of an answer.
            status: The answer's HTTP status.
        """
        operation = self.operation
        if operation.is_over:
            return
        read = capture.guard_call(self._read_answer, body, first_chunk_s)
        answer, is_complete = read or ({}, False)
        if len(self._attempts) > 1:
            capture.guard_call(self._tell_attempts)
        self.release()
        error = self._endpoint.error_of(answer)
        if exc is not None:
            operation.fail(exc)
        elif error is not None:
            operation.fail_with(*error)
        elif status >= _FAILED:
            operation.fail_with(str(status), f"the server answered {status}")
        else:
            if not is_whole and not is_complete:
                operation.attributes[c.ABANDONED] = True
            operation.stop()

    def release(self) -> None:
        """Let go of all that it holds: apart, it and the answer's body are freed at once."""
        self.operation.request = self.context = self.arguments = None

    def _tell_attempts(self) -> None:
        self.operation.attributes[c.RESENDS] = len(self._attempts) - 1
        failed: list[dict[str, Any]] = []
        for attempt, successor in pairwise(self._attempts):
            failed.append({"outcome": attempt.outcome})
            if successor.started_s is not None and attempt.started_s is not None:
                failed[-1]["wait_s"] = round(successor.started_s - attempt.answered_s, 3)
        self.operation.attributes[c.FAILED_ATTEMPTS] = dump(failed)

    def _read_answer(self, body: bytes | None, first_chunk_s: float | None) -> tuple[Json, bool]:
        """Put an answer on the span; return it, and whether a stream said that it is over."""
        if not body:
            return {}, False
        answer = self._endpoint.read_body(body)
        if answer.is_stream and first_chunk_s is not None:
            self.operation.attributes[c.TIME_TO_FIRST_CHUNK] = first_chunk_s
        if answer.body:
            capture.guard_call(self._take_answer, answer.body)
        elif capture.process.content.is_kept and body.strip():
            self.operation.body[c.UNREAD_ANSWER] = body.decode(errors="replace")
        return answer.body, answer.is_complete

    def _take_answer(self, answer: Json) -> None:
        self.operation.attributes.update(self._endpoint.response_attributes(answer))
        if capture.process.content.is_kept:
            self.operation.body.update(self._endpoint.response_content(answer))


def _read_request(
    endpoint: Dialect, body: Mapping[str, Any], attributes: Attributes, content: dict[str, str]
) -> None:
    attributes.update(endpoint.request_attributes(body))
    if capture.process.content.is_kept:
        content.update(endpoint.request_content(body))
