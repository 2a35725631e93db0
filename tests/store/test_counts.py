"""Counts add up by name, and the accounting says whether a span is missing."""

import pytest

from lightning_otel.store.counts import CONFLICT, DISK, ENDED, Accounting, account, added, unstored


def test_added_sums_name_by_name() -> None:
    """What is 0 is left out, so that a manifest does not fill with it."""
    assert added({ENDED: 2, DISK: 1}, {ENDED: 3}, {DISK: -1}) == {ENDED: 5}


def test_unstored_is_what_was_rejected_or_dropped() -> None:
    """Neither the sum nor what merely waited counts."""
    assert unstored({ENDED: 9, CONFLICT: 2, DISK: 1, "slow.held": 5}) == 3


def test_account_says_why() -> None:
    """Each reason in words, with its number; one of a newer version by its name."""
    found = account({ENDED: 9, CONFLICT: 2, DISK: 1, "dropped.novel": 1}, stored=4, pending=1)

    assert found.is_balanced
    assert found.rejected == {"conflict": 2}
    assert found.dropped == {"disk": 1, "novel": 1}
    assert found.reasons() == [
        ("their id was taken by a different span", 2),
        ("the disk refused them", 1),
        ("novel", 1),
    ]
    assert found.sentence() == "9 ended = 4 stored + 1 pending + 2 rejected + 2 dropped"


@pytest.mark.parametrize(("stored", "missing"), [(7, 3), (12, -2)])
def test_accounting_does_not_balance_what_does_not(stored: int, missing: int) -> None:
    """Both too few and too many are said."""
    found = Accounting(10, stored)

    assert (found.missing, found.is_balanced) == (missing, False)
    assert found.sentence() == f"10 ended = {stored} stored + {missing} missing"
