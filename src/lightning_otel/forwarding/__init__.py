"""Spans of a store on their way to an OTLP endpoint, read from disk and retried from there.

Nothing in here is part of the traced process: it follows the store as any consumer does, so what a
collector did not take waits on disk for as long as it must.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from opentelemetry.instrumentation.utils import suppress_instrumentation

from lightning_otel.forwarding.sending import Answer, GrpcSender, HttpSender, Verdict
from lightning_otel.store.engines.otlp import UnsendableError, request_of
from lightning_otel.store.follow import POLL_S, Follower
from lightning_otel.types import Span

__all__ = ["Answer", "Forwarder", "Verdict"]

BATCH_SPANS: Final = 512
BATCH_BYTES: Final = 2 << 20
"""Below what a gRPC server takes by default, which is 4 MiB."""
_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 60.0
_LONGEST_ASKED_S: Final = 900.0
"""A server's Retry-After is honoured up to this."""


class Forwarder:
    """Sends what a follower is given, until it is delivered or the endpoint rejects it for good.

    Delivered is what a well-formed OTLP answer says was taken. A batch that is too large is halved;
    one that is called bad is halved down to the span that is at fault, which is counted as rejected
    and passed over. Anything else is tried again, ever more rarely.

    Attributes:
        delivered: Spans that the endpoint took.
        rejected: Spans it will never take, by the reason it gave.
        complaint: Why it does not take spans now; empty while it does.
        is_answering: Whether it answered the last request, whatever it said.
    """

    def __init__(
        self,
        follower: Follower,
        sender: HttpSender | GrpcSender,
        *,
        with_content: bool,
        wait: Callable[[float], bool] | None = None,
        on_complaint: Callable[[str], None] = lambda text: None,
        is_once: bool = False,
    ) -> None:
        """Begin to forward; nothing is sent yet.

        Args:
            follower: Gives the spans and keeps the position.
            sender: Speaks to the endpoint.
            with_content: Whether messages and other content may leave.
            wait: Waits so many seconds, or less if it is told to hurry; whether it was.
            on_complaint: Told when the endpoint begins to refuse, and with "" when it takes again.
            is_once: Whether to offer what there is once, and end.
        """
        self._follower = follower
        self._sender = sender
        self._with_content = with_content
        self._hurried = threading.Event()
        self._wait = wait or self._hurried.wait
        self._on_complaint = on_complaint
        if is_once:
            self._hurried.set()
        # The last is the next; a follower counts as delivered what stands in none of them.
        self._parts: list[list[Span]] = []
        self._tries = 0
        self._asked_ns = 0
        self.delivered = 0
        self.rejected: Counter[str] = Counter()
        self.complaint = ""
        self.is_answering = False

    def run(self) -> bool:
        """Send what there is and what comes, until told to hurry; whether all of it was taken."""
        with suppress_instrumentation():
            while True:
                is_last = self._hurried.is_set()
                is_taken = self.send_waiting()
                if is_last or not is_taken:
                    return is_taken
                self._wait(POLL_S)

    def send_waiting(self) -> bool:
        """Send all there is now; False if told to hurry while the endpoint takes nothing."""
        while True:
            if not self._parts:
                spans = self._follower.batch(BATCH_SPANS, limit_bytes=BATCH_BYTES)
                if not spans:
                    return True
                self._parts = [spans]
            if not self._deliver_spans():
                return False

    def probe(self) -> None:
        """Ask the endpoint with an empty request, to know early whether it answers."""
        with suppress_instrumentation():
            self._note_answer(self._send_body(b""))

    def hurry(self) -> None:
        """From now on try once and do not wait to try again; from any thread."""
        self._hurried.set()

    @property
    def silent_s(self) -> float:
        """Return for how long a request has been without an answer; 0 if none is under way."""
        asked_ns = self._asked_ns
        return (time.monotonic_ns() - asked_ns) / 1e9 if asked_ns else 0.0

    def _deliver_spans(self) -> bool:
        """Return whether the endpoint gave its last word on each span in hand."""
        while self._parts:
            part = self._parts[-1]
            answer = self._answer_to(part)
            if answer is None:
                return False
            self._parts.pop()
            if answer.verdict is not Verdict.DELIVERED and len(part) > 1:
                half = len(part) // 2
                self._parts += [part[half:], part[:half]]
            else:
                self._settle_part(part, answer)
        return True

    def _settle_part(self, part: list[Span], answer: Answer) -> None:
        """Count what became of some spans, and note that they are dealt with."""
        rejected = len(part)
        if answer.verdict is Verdict.DELIVERED:
            rejected = min(answer.rejected, len(part))
        self.delivered += len(part) - rejected
        if rejected:
            self.rejected[answer.reason] += rejected
        self._follower.commit(part)

    def _answer_to(self, part: list[Span]) -> Answer | None:
        """Return what the endpoint says of some spans at last; None if told not to wait."""
        try:
            body = request_of(part, with_content=self._with_content)
        except UnsendableError as exc:
            return Answer(Verdict.BAD, str(exc))
        is_last_try = self._hurried.is_set()
        while True:
            answer = self._send_body(body)
            if (
                answer.verdict is Verdict.BAD
                and self._send_body(b"").verdict is not Verdict.DELIVERED
            ):
                # Not even nothing at all is good: it is not the spans' fault.
                answer = Answer(Verdict.LATER, answer.reason)
            self._note_answer(answer)
            if answer.verdict is not Verdict.LATER:
                return answer
            if is_last_try:
                return None
            is_last_try = self._wait(self._wait_s(answer)) or self._hurried.is_set()

    def _send_body(self, body: bytes) -> Answer:
        self._asked_ns = time.monotonic_ns()
        try:
            return self._sender.send(body)
        finally:
            self._asked_ns = 0

    def _note_answer(self, answer: Answer) -> None:
        complaint = answer.reason if answer.verdict is Verdict.LATER else ""
        self.is_answering = not answer.is_silent
        self._tries = self._tries + 1 if complaint else 0
        if complaint != self.complaint:
            self.complaint = complaint
            self._on_complaint(complaint)

    def _wait_s(self, answer: Answer) -> float:
        """Return an exponential wait with jitter, not less than the server asked for."""
        longest = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(self._tries - 1, 10))
        wait_s = random.uniform(longest / 2, longest)
        return max(wait_s, min(answer.wait_s, _LONGEST_ASKED_S))
