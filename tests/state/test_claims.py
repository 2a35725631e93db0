"""Claims: whole groups, by one holder at a time, for each consumer apart, and once."""

from collections.abc import Callable

import pytest
from tests.state.conftest import Clock

from lightning_otel.errors import StateError
from lightning_otel.state import State
from lightning_otel.state.runs import Claimable, Claims, Runs, TrainingRun


@pytest.fixture
def runs(state: State) -> Runs:
    """Runs of an empty state."""
    return Runs(state)


@pytest.fixture
def claims_of(runs: Runs) -> Callable[..., Claims]:
    """A function that gives the claims of a new process of a consumer."""

    def make(consumer: str = "us", run: TrainingRun | None = None) -> Claims:
        return runs.claims(run or runs.start("Test", consumer=consumer), lease_s=60)

    return make


def group(*ids: str) -> list[Claimable]:
    """Rollouts of a group, each with a reward."""
    return [Claimable(each, 1.0) for each in ids]


def kept(runs: Runs, claims: Claims, step: int, *ids: str) -> None:
    """Keep a checkpoint that holds rollouts."""
    runs.keep_checkpoint(
        claims.run_id, step, f"/checkpoints/{step}", claims=claims, rollout_ids=ids
    )


def test_group_is_claimed_whole_by_one(claims_of: Callable[..., Claims]) -> None:
    """A group of which somebody holds a member is neither claimed nor left; consumers are apart."""
    ours, theirs = claims_of(), claims_of()
    first = ours.claim({"a": group("a1", "a2")})
    second = theirs.claim({"a": group("a2", "a3"), "b": group("b1")})
    theirs.exclude("a", group("a1"), "no reward")

    assert (first, second) == (["a"], ["b"])
    assert set(theirs.read_taken()) == {"a1", "a2", "b1"}
    assert theirs.counts() == {"claimed": 3}
    assert claims_of("sft").claim({"a": group("a1")}) == ["a"]


def test_claim_that_is_not_extended_runs_out(
    claims_of: Callable[..., Claims], clock: Clock, runs: Runs
) -> None:
    """Its rollouts are there again, and who held them can neither extend nor acknowledge them."""
    slow, quick = claims_of(), claims_of()
    slow.claim({"a": group("a1"), "b": group("b1")})
    clock.go_on(59)
    slow.extend()
    clock.go_on(59)
    assert quick.claim({"a": group("a1")}) == []
    clock.go_on(2)

    assert quick.claim({"a": group("a1")}) == ["a"]
    with pytest.raises(StateError, match=r"1 of 2 rollouts of step 1 .* resume from the"):
        kept(runs, slow, 1, "a1", "b1")
    assert runs.checkpoints(slow.run_id) == []
    assert quick.counts() == {"claimed": 2}


def test_what_is_kept_is_trained_on_once(claims_of: Callable[..., Claims], runs: Runs) -> None:
    """Checkpoint and acknowledgement are one; released and rewound rollouts come again."""
    run = runs.start("Test")
    ours = claims_of(run=run)
    ours.claim({"a": group("a1", "a2"), "b": group("b1"), "c": group("c1")})
    kept(runs, ours, 1, "a1", "a2")
    kept(runs, ours, 2, "b1")
    again = claims_of(run=run)

    assert again.claim({"a": group("a1", "a2")}) == []
    assert again.rewind(1) == 2
    assert again.read_trained() == {"a1": 1.0, "a2": 1.0}
    assert again.claim({"b": group("b1"), "c": group("c1")}) == ["b", "c"]
    assert again.release(["b1", "c1"]) == 2
    assert again.counts() == {"trained": 2}


def test_left_rollouts_are_counted_by_reason(claims_of: Callable[..., Claims]) -> None:
    """They are not offered again, unless they are opened again by hand."""
    ours = claims_of()
    ours.claim({"a": group("a1", "a2")})
    ours.exclude("a", group("a2"), "no reward")
    ours.exclude("b", group("b1", "b2"), "failed")

    assert ours.counts() == {"failed": 2, "claimed": 1, "no reward": 1}
    assert ours.claim({"b": group("b1", "b2")}) == []
    assert ours.reopen(["a1", "b1", "b2"]) == 2
    assert ours.claim({"b": group("b1", "b2")}) == ["b"]


def test_many_rollouts_are_claimed_at_once(claims_of: Callable[..., Claims], runs: Runs) -> None:
    """More than a statement takes values."""
    ours = claims_of()
    ids = [f"r{number}" for number in range(2_500)]

    assert ours.claim({"a": group(*ids)}) == ["a"]
    kept(runs, ours, 1, *ids)
    assert ours.counts() == {"trained": 2_500}
