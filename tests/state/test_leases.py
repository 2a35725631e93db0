"""The contract of a lease, by whatever door, and of claims: one holder at a time, by the clock."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from tests.state.conftest import Clock

from lightning_otel import Queue
from lightning_otel.errors import StateError
from lightning_otel.state import State
from lightning_otel.state.leases import Claimable, Claims
from lightning_otel.state.requests import Requests
from lightning_otel.state.runs import Runs, TrainingRun

LEASE_S = 60


class Door(NamedTuple):
    """The lease as one door has it: what is claimed is named, so that all can tell it apart."""

    put: Callable[[int], object]
    claim: Callable[[str], tuple[str, Any] | None]
    extend: Callable[[Any], object]
    finish: Callable[[Any], bool]


def of_queue(state: State) -> Door:
    """Return the door of workers, to rollouts."""
    queue = Queue(state)

    def claim(worker: str) -> tuple[str, Any] | None:
        lease = queue.lease(worker, lease_s=LEASE_S)
        return lease and (lease.rollout.rollout_id, lease)

    return Door(
        lambda count: queue.put(range(count), max_attempts=3), claim, queue.heartbeat, queue.succeed
    )


def of_requests(state: State) -> Door:
    """Return the door of training workers, to what is asked for."""
    requests = Requests(state, lease_s=LEASE_S)

    def claim(worker: str) -> tuple[str, Any] | None:
        request = requests.claim(worker)
        return request and (request.request_id, request)

    def put(count: int) -> None:
        for _ in range(count):
            requests.put()

    return Door(put, claim, requests.heartbeat, requests.finish)


def of_claims(state: State) -> Door:
    """Return the door of training runs, to groups of two rollouts."""
    runs, groups = Runs(state), dict[str, list[Claimable]]()
    run = runs.start("Test")

    def put(count: int) -> None:
        groups.update({f"g{n}": [Claimable(f"a{n}"), Claimable(f"b{n}")] for n in range(count)})

    def claim(holder: str) -> tuple[str, Any] | None:
        claims = runs.claims(run, holder=holder, lease_s=LEASE_S)
        found = (name for name in groups if claims.claim({name: groups[name]}))
        return next(((name, (claims, name)) for name in found), None)

    def finish(held: tuple[Claims, str]) -> bool:
        claims, name = held
        ids = [each.rollout_id for each in groups[name]]
        try:
            runs.keep_checkpoint(run.run_id, 1, f"/{name}", claims=claims, rollout_ids=ids)
        except StateError as exc:
            return "of 2 rollouts of step 1 are claimed by another process" not in str(exc)
        return True

    return Door(put, claim, lambda held: held[0].extend(), finish)


@pytest.fixture(params=[of_queue, of_requests, of_claims])
def door(request: pytest.FixtureRequest, state: State) -> Door:
    """Each door in turn, where nothing waits."""
    found: Door = request.param(state)
    return found


def test_a_lease_lasts_until_the_clock_ends_it(door: Door, clock: Clock) -> None:
    """Extended it lasts longer; then the next has it, and the late one changes nothing."""
    door.put(1)
    first = door.claim("first")
    assert first is not None
    clock.go_on(LEASE_S - 1)
    door.extend(first[1])
    clock.go_on(LEASE_S - 1)
    assert door.claim("second") is None
    clock.go_on(1)

    second = door.claim("second")

    assert second is not None
    assert second[0] == first[0]
    assert not door.finish(first[1])
    assert door.finish(second[1])
    clock.go_on(LEASE_S)
    assert door.claim("third") is None


def test_holders_at_once_share(door: Door) -> None:
    """Each thing is held and finished by one of many who claim at the same time."""
    door.put(20)

    def work(holder: str) -> list[str]:
        names = []
        while (held := door.claim(holder)) is not None:
            assert door.finish(held[1])
            names.append(held[0])
        return names

    with ThreadPoolExecutor(4) as pool:
        names = [name for found in pool.map(work, "abcd") for name in found]

    assert len(names) == len(set(names)) == 20


@pytest.fixture
def runs(state: State) -> Runs:
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
