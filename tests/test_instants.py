"""Times as people write them: one reader, whoever asks, and its inverse."""

import contextlib
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_otel.errors import ConfigError
from lightning_otel.types.instants import age_s, instant_ns, utc_text

SECOND = 1_000_000_000
NOW_NS = 1_795_359_150_065_166_081
NOON_NS = 1_793_534_400 * SECOND
"""2026-11-01T12:00:00Z."""
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
BERLIN, KOLKATA = ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Kolkata")


@given(INT64)
def test_what_is_written_is_read_back(time_ns: int) -> None:
    """To the nanosecond, over all that a store can hold."""
    assert instant_ns(utc_text(time_ns)) == time_ns


@given(INT64, INT64)
def test_written_times_sort_as_they_are(a: int, b: int) -> None:
    """So that ``sort`` puts lines in order."""
    assert (utc_text(a) < utc_text(b)) == (a < b)


@given(INT64)
def test_a_number_is_itself(time_ns: int) -> None:
    """As a value always; as a text where it is no number of seconds."""
    assert instant_ns(time_ns) == time_ns
    if abs(time_ns) >= 10**15:
        assert instant_ns(str(time_ns)) == time_ns


@given(
    st.datetimes(datetime(1700, 1, 1), datetime(2200, 1, 1)),
    st.sampled_from([UTC, BERLIN, KOLKATA]),
    st.integers(-840, 840),
)
def test_text_value_and_offset_mean_one_instant(
    wall: datetime, zone: ZoneInfo, offset_min: int
) -> None:
    """The zone counts only where the text names none, and the way it is written never does."""
    there = wall.replace(tzinfo=zone)
    elsewhere = there.astimezone(timezone(timedelta(minutes=offset_min)))

    found = {
        instant_ns(there),
        instant_ns(wall, zone=zone),
        instant_ns(wall.isoformat(), zone=zone),
        instant_ns(wall.isoformat(" "), zone=zone),
        instant_ns(elsewhere.isoformat(), zone=KOLKATA),
        instant_ns(elsewhere.isoformat().replace("+", " ")),
    }

    assert len(found) == 1


@given(st.integers(0, 5000), st.sampled_from(["s", "m", "min", "h", "d", "w"]))
def test_ages_are_counted_back_from_now(number: int, unit: str) -> None:
    """Whatever the zone."""
    passed_s = age_s(f"{number}{unit}")

    assert passed_s is not None
    assert instant_ns(f" {number} {unit} ", zone=KOLKATA, now_ns=NOW_NS) == (
        NOW_NS - int(passed_s) * SECOND
    )


@given(st.text(max_size=40))
def test_any_text_is_a_time_or_refused(text: str) -> None:
    """And no other error comes of it."""
    with contextlib.suppress(ConfigError):
        assert -(1 << 63) <= instant_ns(text, zone=UTC) < 1 << 63


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", NOW_NS),
        ("1.5h", NOW_NS - 5400 * SECOND),
        ("2w", NOW_NS - 14 * 86_400 * SECOND),
        ("2h ago", NOW_NS - 7200 * SECOND),
        ("today", NOW_NS - NOW_NS % (86_400 * SECOND)),
        ("Yesterday", NOW_NS - NOW_NS % (86_400 * SECOND) - 86_400 * SECOND),
        ("2026-11-01T12:00:00Z", NOON_NS),
        ("2026-11-01T13:00+01:00", NOON_NS),
        ("2026-11-01T13:00:00 01:00", NOON_NS),
        ("2026-11-01T17:30:00.25+0530", NOON_NS + SECOND // 4),
        ("2026-11-01T12:00:00.123456789Z", NOON_NS + 123_456_789),
        ("2026-11-01T12:00", NOON_NS),
        ("2026-11-01 12:00:00", NOON_NS),
        ("2026-11-01", NOON_NS - 43_200 * SECOND),
        ("20261101", NOON_NS - 43_200 * SECOND),
        (date(2026, 11, 1), NOON_NS - 43_200 * SECOND),
        (datetime(2026, 11, 1, 12), NOON_NS),
        (str(NOON_NS), NOON_NS),
        ("0", 0),
    ],
)
def test_times_are_read_as_people_write_them(text: Any, expected: int) -> None:
    """Ages, dates, times with and without a zone, numbers."""
    assert instant_ns(text, zone=UTC, now_ns=NOW_NS) == expected


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("tomorrow", "since: 'tomorrow' is no time"),
        ("", "since: '' is no time"),
        ("12:00", "since: '12:00' is no time"),
        ("2026-13-01", "since: '2026-13-01' is no time"),
        ("10 fortnights", "since: '10 fortnights' is no time"),
        ("1793534400", "since: '1793534400' is too small a number for nanoseconds"),
        ("1793534400000", "since: '1793534400000' is too small a number for nanoseconds"),
        ("9999-01-01", "since: '9999-01-01' is too far away to be kept in nanoseconds"),
        ("999999999w", "since: '999999999w' is too far away to be kept in nanoseconds"),
        (10**19, f"since: {10**19} is too far away to be kept in nanoseconds"),
        (True, "since: True is no time"),
        (1.5, "since: 1.5 is no time"),
    ],
)
def test_what_is_no_time_is_refused(given: Any, what: str) -> None:
    """With what was given, and what to write."""
    with pytest.raises(ConfigError) as refused:
        instant_ns(given, "since")

    assert refused.value.what == what
    assert refused.value.remedy.startswith("write 10m, 2h or 3d")


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "UTC", "America/New_York"])
def test_a_time_without_a_zone_is_of_this_machine(
    zone: str, run_python: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default: in another process, since a zone is the whole process's."""
    program = (
        "from datetime import date, datetime\n"
        "from lightning_otel.types.instants import instant_ns\n"
        "print(*map(instant_ns, ('2026-11-01T12:00', datetime(2026, 11, 1, 12),\n"
        "                        '2026-11-01', date(2026, 11, 1))))"
    )

    monkeypatch.setenv("TZ", zone)
    printed = run_python(program)

    noon = datetime(2026, 11, 1, 12, tzinfo=ZoneInfo(zone))
    midnight = noon.replace(hour=0)
    expected = [int(each.timestamp()) * SECOND for each in (noon, noon, midnight, midnight)]
    assert list(map(int, printed.split())) == expected
