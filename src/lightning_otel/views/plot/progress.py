"""Progress of training: one line that is redrawn, or now and then a new one."""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from math import isfinite
from shutil import get_terminal_size
from typing import Final, TextIO

from lightning_otel.types.text import one_line
from lightning_otel.views.plot.characters import bar, sparkline
from lightning_otel.views.plot.curves import number, widened

_FIRST: Final = ("reward", "loss")
_MOST: Final = 3
_BAR: Final = 20
_VALUES: Final = 24
_REDRAWN_S: Final = 0.1
_LOGGED_S: Final = 10.0
_CLEAR: Final = "\x1b[K"


class Progress(AbstractContextManager["Progress"]):
    """A callback for training: ``progress(step, total, metrics)`` after each step.

    On a terminal it keeps one line up to date; in a file or pipe it writes one at the first step,
    at the last, and every ten seconds. As a context manager it ends the line where training stops.
    """

    def __init__(
        self,
        metric: str = "reward",
        stream: TextIO | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Draw the metric too, by default to stderr; ``now_s`` is a clock that never goes back."""
        self._metric = metric
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._now_s = now_s
        self._values: deque[float] = deque(maxlen=_VALUES)
        self._first: tuple[int, float] | None = None
        self._written_s: float | None = None
        self._pending = ""
        self._is_open = False

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, step: int, total: int | None, metrics: Mapping[str, float]) -> None:
        """Show the steps done, of all if known, and numbers measured in the last one."""
        now = self._now_s()
        value = metrics.get(self._metric)
        if value is not None and isfinite(value):
            self._values.append(float(value))
        self._pending = self._format_line(step, total, metrics, now)
        wait = _REDRAWN_S if self._is_terminal else _LOGGED_S
        if self._written_s is None or now - self._written_s >= wait or step == total:
            self._written_s = now
            self._flush_lines()

    def close(self) -> None:
        """Write what is pending and end the line."""
        self._flush_lines()
        if self._is_open:
            self._write_text("\n")
            self._is_open = False

    def _flush_lines(self) -> None:
        if self._pending and self._is_terminal:
            room = max(20, get_terminal_size().columns - 1)
            self._write_text(f"\r{one_line(self._pending, room)}{_CLEAR}")
            self._is_open = True
        elif self._pending:
            self._write_text(f"{self._pending}\n")
        self._pending = ""

    def _write_text(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()

    def _format_line(
        self, step: int, total: int | None, metrics: Mapping[str, float], now: float
    ) -> str:
        words = [f"step {step}" + (f"/{total}" if total else "")]
        if total:
            part = min(1.0, step / total)
            words.append(f"{bar(part, _BAR):<{_BAR}} {part:.0%}")
        chosen = [name for name in _FIRST if name in metrics]
        chosen += [name for name in metrics if name not in chosen and "/" not in name]
        words += [f"{one_line(name, 24)} {number(metrics[name])}" for name in chosen[:_MOST]]
        if len(self._values) > 1:
            words.append(sparkline(self._values, *widened(min(self._values), max(self._values))))
        self._first = first, since = self._first or (step, now)
        if step > first:
            pace = (now - since) / (step - first)
            words.append(f"{pace:.2g} s a step")
            if total and total > step:
                words.append(f"{(total - step) * pace:.0f} s left")
        return "  ".join(words)
