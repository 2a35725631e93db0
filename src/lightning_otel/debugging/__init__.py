"""Debug mode: what is kept and what is not, and why, reported on stderr while it happens.

Off, it costs a look at ``is_on``. Reports have names, ids and reasons, and no content.
"""

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from lightning_otel import config
from lightning_otel.debugging.turns import BoundedLock
from lightning_otel.types import conventions as c

if TYPE_CHECKING:
    from lightning_otel.types import Report

MOST_LINES: Final = 40
"""Lines in a second; what is beyond is counted."""
_INSTRUMENTORS: Final = "lightning_otel.instrumentors."

is_on: bool = False
"""Whether anything is to be told; looked at before a text is made."""


# Guards the next three: lines of this second, when it began, and how many were left out in it.
_turns: Final = BoundedLock()
_told: Final[set[str]] = set()
_since_s = 0.0
_left_out = 0
# Guards the next two: what was asked for, and how many recordings that asked for it are open.
_lock: Final = threading.Lock()
_is_asked = False
_wanting = 0


def set_debug_mode(enabled: bool = True) -> None:  # noqa: FBT001  # as others spell it
    """Report on stderr what this process keeps and what it does not, and why; or stop that.

    ``LIGHTNING_OTEL_DEBUG=1``, ``auto_trace(debug=True)`` and ``lightning-otel run --debug`` do the
    same for a process, a recording, and a program.
    """
    _switch(is_asked=enabled)


def take_setting() -> None:
    """Switch on where ``LIGHTNING_OTEL_DEBUG`` says so."""
    if not is_on and config.DEBUG.read():
        _switch(is_asked=True)


def begin(is_wanted: object) -> None:
    """Switch on for one recording more, if it wants that."""
    if is_wanted:
        _switch(more=1)


def end(is_wanted: object) -> None:
    """Take that back."""
    if is_wanted:
        flush()
        _switch(more=-1)


def _switch(*, is_asked: bool | None = None, more: int = 0) -> None:
    global is_on, _is_asked, _wanting
    with _lock:
        _is_asked = _is_asked if is_asked is None else is_asked
        _wanting += more
        is_on = _is_asked or _wanting > 0


def log(text: str) -> None:
    """Write a line, so many a second and each of them once, and say how many are left out."""
    global _left_out
    from lightning_otel.types.text import one_line

    line = one_line(text, 300)
    with _turns.alone():
        if time.monotonic() - _since_s >= 1:
            _begin_second()
        if line in _told or len(_told) >= MOST_LINES:
            _left_out += 1
        else:
            _told.add(line)
            _write(line)


def flush() -> None:
    """Say how many lines were left out so far."""
    with _turns.alone():
        _begin_second()


def _begin_second() -> None:
    global _since_s, _left_out
    if _left_out:
        _write(f"… {_left_out:,} more lines within a second, the same or too many")
    _since_s, _left_out = time.monotonic(), 0
    _told.clear()


def log_kept(span: Any) -> None:
    """Report an ended SDK span that was handed to the store."""
    attributes = span.attributes or {}
    lasted = (span.end_time - span.start_time) / 1e6 if span.end_time else 0.0
    agent = attributes.get(c.AGENT_NAME)
    words = [f"kept    {span.name}", f"{lasted:,.1f} ms"]
    words += [f"agent {agent}"] if agent else []
    if not span.status.is_ok and span.status.description is not None:
        words.append(f"ERROR {attributes.get(c.ERROR_TYPE) or ''}".strip())
    words.append(f"span {span.context.span_id:016x}")
    words.append(f"rollout {attributes.get(c.ROLLOUT_ID)}")
    log(" · ".join(words))


def log_missed(why: str) -> None:
    """Report a call that became no span; the calling module tells its library."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith(_INSTRUMENTORS) and not name.endswith(".base"):
            library = name.removeprefix(_INSTRUMENTORS).partition(".")[0]
            log(f"missed  what goes on in {library}: {why}")
            return
        frame = frame.f_back


def log_report(rollout_id: str, report: "Report") -> None:
    """Report a rollout's calls and rewards that are in no transition, and why."""
    log(
        f"done    {rollout_id}: {report.spans:,} spans, {report.calls:,} calls, "
        f"{report.transitions:,} transitions, {report.rewards_placed:,} of {report.rewards:,} "
        "rewards placed"
    )
    for dropped in report.dropped:
        log(f"dropped {dropped.noun} {dropped.span_id}: {dropped.reason}")
    for repair in report.repairs:
        log(f"moved   span {repair.span_id}: {repair.rule}")
    for why, count in report.inexact.items():
        log(f"inexact {count:,} × {why}")
    flush()


def _write(line: str) -> None:
    with contextlib.suppress(Exception):  # a closed stderr is no fault of the program's
        sys.stderr.write(f"lightning-otel: {line}\n")
        sys.stderr.flush()
