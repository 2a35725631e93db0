"""Forward a store's spans to an OTLP endpoint, as a follower that retries from disk."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry.instrumentation.utils import suppress_instrumentation

from lightning_otel.adapter.interop import to_conventions
from lightning_otel.errors import LightningOtelError
from lightning_otel.exporters.forwarding.senders import Disposition, GrpcSender, HttpSender, Receipt
from lightning_otel.store.engines.otlp import UnsendableError, encode_request
from lightning_otel.store.follow import POLL_S, Follower
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

__all__ = ["Disposition", "Forwarder", "Receipt"]

BATCH_SPANS: Final = 512
BATCH_BYTES: Final = 2 << 20
"""Below what a gRPC server takes by default, which is 4 MiB."""
_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 60.0
_LONGEST_ASKED_S: Final = 900.0
"""A server's Retry-After is honoured up to this."""
_GRACE_S: Final = 0.08
"""How long the end waits for an answer of an endpoint that has not given one lately."""
_SILENT_S: Final = 1.0
"""How long it waits for one of an endpoint that has."""
_LAST_CHANCE_S: Final = 5.0


class Forwarder:
    """Sends a follower's spans until each is delivered or rejected.

    A span is delivered when a valid OTLP response accepts it. A batch that is too large is halved;
    a bad one down to the span at fault, which is rejected. After any other answer the batch is sent
    again, with growing waits.

    Attributes:
        delivered: Spans that the endpoint took.
        withheld: Spans where the program suppressed instrumentation, which are not sent.
        rejected: Spans it will never take, by the reason it gave.
        last_error: Why it does not take spans now; empty while it does.
        error: Why the thread ended before its time.
    """

    def __init__(
        self,
        follower: Follower,
        sender: HttpSender | GrpcSender,
        *,
        with_content: bool,
        wait: Callable[[float], bool] | None = None,
        on_error: Callable[[str], None] = lambda text: None,
        encode: Callable[[Sequence[Span]], bytes] | None = None,
    ) -> None:
        """Args:
        follower: The source of spans, which keeps the position.
        sender: The connection to the endpoint.
        with_content: Whether messages and other content may leave.
        wait: Waits for seconds; returns whether it was told to hurry.
        on_error: Called when the endpoint begins to refuse, and with "" when it takes again.
        encode: Makes a request's body of spans; by default OTLP's.
        """
        self._follower = follower
        self._sender = sender
        self._with_content = with_content
        self._encode = encode or self._encode_otlp
        self._hurried = threading.Event()
        self._wait = wait or self._hurried.wait
        self._on_error = on_error
        # The last is the next; a follower counts as delivered what stands in none of them.
        self._parts: list[list[Span]] = []
        self._tries = 0
        self._asked_s: float | None = None
        self._is_answering = False
        self._is_done = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.delivered = self.withheld = 0
        self.rejected: Counter[str] = Counter()
        self.last_error = ""
        self.error: LightningOtelError | None = None

    def start(self, *, is_once: bool = False) -> None:
        """Send from a thread of its own what there is and, unless it is once, what comes."""
        if is_once:
            self._hurried.set()
        self._thread.start()

    def finish(self, *, is_whole: bool = False) -> bool:
        """Send the rest; return whether all went. ``is_whole`` removes the position."""
        end_s = time.monotonic() + _LAST_CHANCE_S
        self._hurried.set()
        while self._thread.is_alive() and (now_s := time.monotonic()) < end_s:
            patience_s = _SILENT_S if self._is_answering else _GRACE_S
            asked_s = self._asked_s  # once: the thread sets it to None
            if asked_s is not None and now_s - asked_s > patience_s:
                break
            self._thread.join(0.005)
        if not self._thread.is_alive():
            self._follower.close(is_done=self._is_done and is_whole)
        return self._is_done

    @property
    def is_running(self) -> bool:
        """Return whether its thread has not come to an end."""
        return self._thread.is_alive()

    @property
    def why(self) -> str:
        """Return why something was not delivered."""
        silent = "the endpoint does not answer in time"
        return str(self.error or "") or self.last_error or silent

    def _run(self) -> None:
        try:
            with suppress_instrumentation():
                self._note_answer(self._send_body(b""))  # to know early whether it answers
                is_last = False
                while not is_last:
                    is_last = self._hurried.is_set()
                    if not self.send_waiting():
                        return
                    if not is_last:
                        self._wait(POLL_S)
            self._is_done = True
        except LightningOtelError as exc:
            self.error = exc

    def send_waiting(self) -> bool:
        """Send all there is now; False if told to hurry while the endpoint takes nothing."""
        while True:
            if not self._parts:
                spans = self._follower.batch(BATCH_SPANS, limit_bytes=BATCH_BYTES)
                if not spans:
                    return True
                self._parts = [spans]
            part = self._parts[-1]
            sent = [span for span in part if c.SUPPRESSED not in span.attributes]
            answer = self._answer_to(sent) if sent else Receipt(Disposition.DELIVERED)
            if answer is None:
                return False
            self._parts.pop()
            is_delivered = answer.verdict is Disposition.DELIVERED
            if not is_delivered and len(part) > 1:
                half = len(part) // 2
                self._parts += [part[half:], part[:half]]
                continue
            rejected = min(answer.rejected, len(sent)) if is_delivered else len(sent)
            self.delivered += len(sent) - rejected
            self.withheld += len(part) - len(sent)
            if rejected:
                self.rejected[answer.reason] += rejected
            self._follower.commit(part)

    def _answer_to(self, part: list[Span]) -> Receipt | None:
        """Return what the endpoint says of some spans at last; None if told not to wait."""
        try:
            body = self._encode(part)
        except UnsendableError as exc:
            return Receipt(Disposition.BAD, str(exc))
        is_last_try = self._hurried.is_set()
        while True:
            answer = self._send_body(body)
            if (
                answer.verdict is Disposition.BAD
                and self._send_body(b"").verdict is not Disposition.DELIVERED
            ):
                # Not even nothing at all is good: it is not the spans' fault.
                answer = Receipt(Disposition.LATER, answer.reason)
            self._note_answer(answer)
            if answer.verdict is not Disposition.LATER:
                return answer
            if is_last_try:
                return None
            is_last_try = self._wait(self._wait_s(answer)) or self._hurried.is_set()

    def _encode_otlp(self, part: Sequence[Span]) -> bytes:
        sent = [to_conventions(span, with_content=self._with_content) for span in part]
        return encode_request(sent, with_content=self._with_content)

    def _send_body(self, body: bytes) -> Receipt:
        self._asked_s = time.monotonic()
        try:
            return self._sender.send(body)
        finally:
            self._asked_s = None

    def _note_answer(self, answer: Receipt) -> None:
        last_error = answer.reason if answer.verdict is Disposition.LATER else ""
        self._is_answering = not answer.is_silent
        self._tries = self._tries + 1 if last_error else 0
        if last_error != self.last_error:
            self.last_error = last_error
            self._on_error(last_error)

    def _wait_s(self, answer: Receipt) -> float:
        longest = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(self._tries - 1, 10))
        wait_s = random.uniform(longest / 2, longest)
        return max(wait_s, min(answer.wait_s, _LONGEST_ASKED_S))
