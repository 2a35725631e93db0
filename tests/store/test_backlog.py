"""What waits is bounded and in order, and a slow disk is left alone for longer and longer."""

import pytest

from lightning_otel.store import backlog as backlog_module
from lightning_otel.store.backlog import Backlog


def test_backlog_gives_the_first_lines_in_one_piece() -> None:
    """In order, and no more of them than one write should have."""
    backlog = Backlog()
    for number in range(5):
        backlog.add(b"%d\n" % number * 200_000, number % 2)

    text, count = backlog.first()
    spans = backlog.spans_of(count)
    backlog.written(count)

    assert (count, spans) == (2, 1)
    assert text == b"0\n" * 200_000 + b"1\n" * 200_000
    assert backlog.first(alone=True) == (b"2\n" * 200_000, 1)
    assert (len(backlog.lines), backlog.spans) == (3, 1)


def test_backlog_has_room_for_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes count, not lines."""
    monkeypatch.setattr(backlog_module, "PENDING_BYTES", 10)
    backlog = Backlog()
    backlog.add(b"12345", 1)

    assert backlog.has_room(b"12345")
    assert not backlog.has_room(b"123456")


def test_backlog_rests_longer_each_time_the_disk_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as long, at most half a minute; one quick answer ends it."""
    now = 100.0

    class Clock:
        """A clock that is set by hand, as half a minute is too long for a test."""

        @staticmethod
        def monotonic() -> float:
            """The time that was set."""
            return now

    monkeypatch.setattr(backlog_module, "time", Clock)
    backlog = Backlog()
    rests = []
    for _ in range(6):
        backlog.note_slow(2.0)
        rests.append(backlog.rest_until - now)
    was_resting = backlog.is_resting()
    now = 131.0
    is_resting = backlog.is_resting()
    backlog.note_quick()
    backlog.note_slow(2.0)

    assert rests == [2, 4, 8, 16, 30, 30]
    assert (was_resting, is_resting) == (True, False)
    assert backlog.rest_until == 133.0


def test_backlog_asks_again_when_told_to() -> None:
    """What has no room asks the disk, however slow it was."""
    backlog = Backlog()
    backlog.note_slow(10.0)

    backlog.ask_again()

    assert not backlog.is_resting()
