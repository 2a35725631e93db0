"""Progress of training: one line on a terminal, a few in a file, nothing that acts."""

import io
import re

import pytest
from tests.test_picture import ATTACKS

from lightning_otel.plot import Progress


class _Terminal(io.StringIO):
    """A stream that says it is a terminal; a real one is not needed to see what is written."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class _Clock:
    def __init__(self, step_s: float) -> None:
        self.now = 0.0
        self._step_s = step_s

    def __call__(self) -> float:
        self.now += self._step_s
        return self.now


def test_a_terminal_keeps_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn anew after each step, ended once."""
    monkeypatch.setenv("COLUMNS", "100")
    stream = _Terminal()

    with Progress(stream=stream, now_s=_Clock(2.0)) as progress:
        for step, reward in enumerate((0.0, 0.5, 1.0), 1):
            progress(step, 4, {"kept": 3.0, "loss": 0.25, "reward": reward, "left_out/x": 1.0})

    lines = stream.getvalue().split("\r")
    assert lines[1].startswith("step 1/4  █████                25%  reward 0  loss 0.25  kept 3")
    assert lines[3].endswith("reward 1  loss 0.25  kept 3  ▁▅█  2 s a step  2 s left\x1b[K\n")
    assert len(lines) == 4


def test_a_file_gets_a_line_now_and_then() -> None:
    """The first, the last, and one every ten seconds; without colours or moves."""
    stream = io.StringIO()

    with Progress(stream=stream, now_s=_Clock(1.0)) as progress:
        for step in range(1, 26):
            progress(step, None, {"reward": 1.0})

    text = stream.getvalue()
    assert [line.split("  ")[0] for line in text.splitlines()] == [
        "step 1", "step 11", "step 21", "step 25",
    ]  # fmt: skip
    assert "\x1b" not in text


def test_strange_numbers_are_told() -> None:
    """A loss that is none, huge rewards, and steps beyond the last."""
    stream = io.StringIO()
    progress = Progress(stream=stream)

    progress(1, 1, {"reward": 1.7e308, "loss": float("nan")})
    progress(2, 1, {"reward": -1.7e308, "loss": float("inf")})
    progress.close()
    progress.close()

    assert "loss nan" in stream.getvalue()
    assert "100%  reward -1.7e+308  loss inf  █▁" in stream.getvalue()


@pytest.mark.parametrize("attack", ATTACKS, ids=range(len(ATTACKS)))
def test_no_name_of_a_metric_acts(attack: str) -> None:
    """It is text on that line."""
    stream = _Terminal()

    with Progress(stream=stream) as progress:
        progress(1, 2, {attack: 1.0})

    line = stream.getvalue().removeprefix("\r").removesuffix("\x1b[K\n")
    assert not re.search("[\x00-\x1f\x7f-\x9f\u202e\u2066\u061c\u2028]", line)
