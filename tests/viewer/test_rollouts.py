"""The pages of rollouts: recorded ones, the queue, and one of either with all that is known."""

import re
from collections.abc import Callable
from typing import Any

from tests.viewer.browsing import Visits, violations
from tests.viewer.client import Asking

from lightning_otel import Store, auto_trace, emit_action, emit_observation, emit_reward
from lightning_otel.state import State
from lightning_otel.state.queue import Queue


def record(store: Store, rollout_id: str, agent: str = "solver", **stamps: Any) -> None:
    """A rollout of two steps, the second rewarded."""
    with auto_trace(store=store, rollout_id=rollout_id, agent=agent, task="a task", **stamps):
        for number in (1, 2):
            emit_observation(f"seen {number}")
            emit_action(f"done {number}")
        emit_reward(0.5)


def ids(words: str, pattern: str = r"\br\d+\b") -> list[str]:
    """The rollouts that a page names, in its order."""
    return list(dict.fromkeys(re.findall(pattern, words)))


def test_recorded_rollouts_are_listed_by_page(
    store: Store, asking: Callable[[Store], Asking]
) -> None:
    """The newest first, with the whole count; by agent, status, id and time."""
    for number in range(52):
        record(store, f"r{number}", "even" if number % 2 == 0 else "odd", mode="val")
    asked = asking(store)

    first, second, even, one, none = (
        asked.get(f"/rollouts{query}").words
        for query in (
            "", "?page=2", "?agent=even", "?status=succeeded&id=r13", "?status=failed&since=1m",
        )
    )  # fmt: skip

    assert [*ids(first), *ids(second)] == [f"r{n}" for n in range(51, -1, -1)]
    assert "1–50 of 52 rollouts" in first
    assert "26 rollouts" in even
    assert ids(one) == ["r13"]
    assert "0.5" in one
    assert "val" in one
    assert "no rollouts" in none


def test_a_rollout_tells_all_that_is_known(store: Store, asking: Callable[[Store], Asking]) -> None:
    """Steps with their rewards and what gave them, traces, resources, and what was left out."""
    record(store, "r1", resources={"*": {"prompt": 3}})

    told = asking(store).get("/rollouts/r1").words

    for each in (
        "#0 seen 1 done 1 – – text prompt@3",
        "#1 seen 2 done 2 0.5 previous done text prompt@3",
        "0.5 previous 1 step:",
        "Reward 1 succeeded –",
        "Task a task",
        "Resources used prompt@3",
    ):
        assert each in told, told


def test_queue_and_attempts_with_reasons(store: Store, asking: Callable[[Store], Asking]) -> None:
    """What waits and what failed is told as the queue has it, also where no span tells of it."""
    queue = Queue(State.beside(store))
    queue.put([{"n": n} for n in range(60)], agent="solver", max_attempts=1)
    lease = queue.lease("worker")
    assert lease is not None
    queue.fail(lease, "it broke")
    asked, own = asking(store), lease.rollout.rollout_id

    page, rest, failed, one = (
        asked.get(path).words
        for path in (
            "/rollouts?of=queue", "/rollouts?of=queue&page=2", "/rollouts?of=queue&status=failed",
            f"/rollouts/{own}",
        )
    )  # fmt: skip

    assert "1–50 of 60 rollouts" in page
    assert "51–60 of 60 rollouts" in rest
    assert "failed 1" in page
    assert "1 × failed it broke" in page
    assert "1 rollout " in failed
    assert own[:12] in failed
    assert "1 failed it broke worker" in one
    assert 'Task {"n": 0}' in one
    assert "Cancel this rollout" not in one


def test_forms_pause_resume_and_cancel(store: Store, asking: Callable[[Store], Asking]) -> None:
    """Each does what it says, once; what is absurd is refused and changes nothing."""
    queue = Queue(State.beside(store))
    (waiting,) = queue.put(["a"])
    asked = asking(store)

    assert asked.post("/rollouts", act="pause").status == 303
    assert queue.is_paused
    assert "paused" in asked.get("/rollouts?of=queue").words
    assert asked.post("/rollouts", act="explode").status == 400
    assert asked.post("/rollouts", act="resume").status == 303
    assert not queue.is_paused
    path = f"/rollouts/{waiting.rollout_id}"
    assert "Cancel this rollout" in asked.get(path).words
    answer = asked.post(f"{path}/cancel", reason="no <need>")
    assert (answer.status, answer.headers["location"]) == (303, path)
    assert (queue.get(waiting.rollout_id).status) == "cancelled"
    assert "no <need>" in asked.get(path).words
    assert asked.post(f"{path}/cancel").status == 409
    assert asked.post("/rollouts/nobody/cancel").status == 404
    assert asked.get("/rollouts?of=queue&status=gone").status == 400
    assert asked.get("/rollouts/nobody").status == 404


def test_ids_of_any_kind_have_pages(store: Store, asking: Callable[[Store], Asking]) -> None:
    """Slashes, spaces and markup in an id; its beginning leads to the whole address."""
    name = "team a/run <7>?x=1&y#z"
    record(store, name)
    asked = asking(store)

    listed = asked.get("/rollouts")
    (address,) = {
        part.partition('"')[0] for part in listed.text.split('href="') if "team" in part[:30]
    }
    page = asked.get(address)
    short = asked.get("/rollouts/team%20a")

    assert page.status == 200
    assert name in page.words
    assert short.headers["location"] == address


def test_pages_of_rollouts_in_a_browser(
    visit: Visits, store: Store, shot: Callable[..., None]
) -> None:
    """From the list to a rollout by keyboard; nothing is wrong with either for axe."""
    record(store, "first")
    record(store, "second")
    Queue(State.beside(store)).put(["a task"])
    page = visit(store, "/rollouts")
    found = {"list": violations(page)}
    shot(page, "list")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/rollouts/first")
    found["one"] = violations(page)
    shot(page, "one")
    page.goto("/rollouts?of=queue")
    found["queue"] = violations(page)

    assert {name: each for name, each in found.items() if each} == {}
