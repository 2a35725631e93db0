"""Debug mode: what is kept and what is not, and why, told on stderr while it happens.

Off, it costs a look at ``is_on`` wherever something could be told; no text is made. What is told
has names, ids and reasons in it, and nothing that was said to a model or by it.
"""

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from lightning_otel import config
from lightning_otel import conventions as c
from lightning_otel.turns import Turns

if TYPE_CHECKING:
    from lightning_otel.types import Report

MOST_LINES: Final = 40
"""Lines in a second; what is beyond is counted."""
_INSTRUMENTORS: Final = "lightning_otel.instrumentors."

is_on: bool = False
"""Whether anything is to be told; looked at before a text is made."""


class _Teller:
    """Writes lines, so many a second and each of them once, and says how many it left out."""

    def __init__(self) -> None:
        # Guards: a line is written or counted, and counts are told once.
        self._turns = Turns()
        self._since_s = 0.0
        self._said: set[str] = set()
        self._left_out = 0

    def tell(self, text: str) -> None:
        from lightning_otel.markup import one_line

        line, now_s = one_line(text, 300), time.monotonic()
        with self._turns.alone():
            if now_s - self._since_s >= 1:
                self._begin(now_s)
            if line in self._said or len(self._said) >= MOST_LINES:
                self._left_out += 1
                return
            self._said.add(line)
            _write(line)

    def flush(self) -> None:
        with self._turns.alone():
            self._begin(0.0)

    def _begin(self, now_s: float) -> None:
        if self._left_out:
            _write(f"… {self._left_out:,} more lines within a second, the same or too many")
        self._since_s, self._left_out = now_s, 0
        self._said.clear()


_teller: Final = _Teller()
# Guards the next two: what was asked for, and how many recordings that asked for it are open.
_lock: Final = threading.Lock()
_is_asked = False
_wanting = 0


def set_debug_mode(enabled: bool = True) -> None:  # noqa: FBT001  # as others spell it
    """Tell on stderr what this process keeps and what it does not, and why; or stop that.

    ``LIGHTNING_OTEL_DEBUG=1``, ``auto_trace(debug=True)`` and ``lightning-otel run --debug`` do the
    same for a process, a recording, and a program.

    Args:
        enabled: Whether to tell.
    """
    global _is_asked
    with _lock:
        _is_asked = enabled
        _switch()


def take_setting() -> None:
    """Switch on where ``LIGHTNING_OTEL_DEBUG`` says so."""
    if not is_on and config.is_debug_enabled():
        set_debug_mode()


def begin(is_wanted: object) -> None:
    """Switch on for one recording more, if it wants that."""
    global _wanting
    if is_wanted:
        with _lock:
            _wanting += 1
            _switch()


def end(is_wanted: object) -> None:
    """Take that back."""
    global _wanting
    if is_wanted:
        _teller.flush()
        with _lock:
            _wanting -= 1
            _switch()


def _switch() -> None:
    global is_on
    is_on = _is_asked or _wanting > 0


def tell(text: str) -> None:
    """Tell a line."""
    _teller.tell(text)


def tell_kept(span: Any) -> None:
    """Tell of a span that was handed to the store.

    Args:
        span: An ended span of OpenTelemetry's SDK.
    """
    attributes = span.attributes or {}
    lasted = (span.end_time - span.start_time) / 1e6 if span.end_time else 0.0
    agent = attributes.get(c.AGENT_NAME)
    words = [f"kept    {span.name}", f"{lasted:,.1f} ms"]
    words += [f"agent {agent}"] if agent else []
    if not span.status.is_ok and span.status.description is not None:
        words.append(f"ERROR {attributes.get(c.ERROR_TYPE) or ''}".strip())
    words.append(f"span {span.context.span_id:016x}")
    words.append(f"rollout {attributes.get(c.ROLLOUT_ID)}")
    tell(" · ".join(words))


def tell_missed(why: str) -> None:
    """Tell of a call that became no span.

    Args:
        why: Why; which library's it was is seen from where this is called.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith(_INSTRUMENTORS) and not name.endswith(".library"):
            library = name.removeprefix(_INSTRUMENTORS).partition(".")[0]
            tell(f"missed  what goes on in {library}: {why}")
            return
        frame = frame.f_back


def tell_report(rollout_id: str, report: "Report") -> None:
    """Tell what a rollout came to: each call and reward that is in no transition, and why.

    Args:
        rollout_id: The rollout.
        report: Its funnel.
    """
    tell(
        f"done    {rollout_id}: {report.spans:,} spans, {report.calls:,} calls, "
        f"{report.transitions:,} transitions, {report.rewards_placed:,} of {report.rewards:,} "
        "rewards placed"
    )
    for dropped in report.dropped:
        tell(f"dropped {dropped.noun} {dropped.span_id}: {dropped.reason}")
    for repair in report.repairs:
        tell(f"moved   span {repair.span_id}: {repair.rule}")
    for why, count in report.inexact.items():
        tell(f"inexact {count:,} × {why}")
    _teller.flush()


def _write(line: str) -> None:
    with contextlib.suppress(Exception):  # a closed stderr is no fault of the program's
        sys.stderr.write(f"lightning-otel: {line}\n")
        sys.stderr.flush()
