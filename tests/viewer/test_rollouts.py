"""The pages of rollouts: recorded ones, the queue, and one of either with all that is known."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.viewer.asking import Asking
from tests.viewer.visiting import KEY, Visits, violations

from lightning_otel import Store, auto_trace, emit_action, emit_observation, emit_reward
from lightning_otel.errors import NotFoundError
from lightning_otel.serve.viewer import rollouts
from lightning_otel.serve.viewer.rollouts import Wanted
from lightning_otel.state import State
from lightning_otel.state.queue import Queue


def record(store: Store, rollout_id: str, agent: str = "solver", **stamps: Any) -> None:
    """A rollout of two steps, the second rewarded."""
    with auto_trace(store=store, rollout_id=rollout_id, agent=agent, task="a task", **stamps):
        for number in (1, 2):
            emit_observation(f"seen {number}")
            emit_action(f"done {number}")
        emit_reward(0.5)


def test_recorded_rollouts_are_listed_by_page(store: Store) -> None:
    """The newest first, with the whole count; by agent, status, id and time."""
    for number in range(rollouts.ROWS + 2):
        record(store, f"r{number}", "even" if number % 2 == 0 else "odd", mode="val")

    first = rollouts.recorded(store, Wanted(), 1)
    second = rollouts.recorded(store, Wanted(), 2)
    even: Any = rollouts.recorded(store, Wanted(agent="even"), 1)
    one: Any = rollouts.recorded(store, Wanted("succeeded", "", "r13"), 1)

    listed: Any = [*first["rows"], *second["rows"]]  # type: ignore[misc]  # lists of rows
    assert [row["rollout_id"] for row in listed] == [f"r{n}" for n in range(51, -1, -1)]
    assert (first["total"], second["total"], even["total"]) == (52, 52, 26)
    assert [row["rollout_id"] for row in one["rows"]] == ["r13"]
    assert (one["rows"][0]["mode"], one["rows"][0]["reward"]) == ("val", 0.5)
    assert rollouts.recorded(store, Wanted("failed", since_ns=2**62), 1)["total"] == 0


def test_a_rollout_tells_all_that_is_known(store: Store) -> None:
    """Steps with their rewards and what gave them, traces, resources, and what was left out."""
    record(store, "r1", resources={"*": {"prompt": 3}})

    found: Any = rollouts.read(store, "r1")

    assert [each.step.reward for each in found["steps"]] == [None, 0.5]
    assert [each.told["observation"] for each in found["steps"]] == ["seen 1", "seen 2"]
    (reward,) = found["rewards"]
    assert found["by"][reward["span_id"]].by == "previous"
    assert found["versions"] == [("prompt", "3")]
    assert [each.status for each in found["tries"]] == ["succeeded"]
    assert found["task"].text == "a task"
    assert len(found["traces"]) == 1
    with pytest.raises(NotFoundError):
        rollouts.read(store, "r")


def test_queue_and_attempts_with_reasons(store: Store) -> None:
    """What waits and what failed is told as the queue has it, also where no span tells of it."""
    queue = Queue(State.beside(store))
    queue.put([{"n": n} for n in range(60)], agent="solver", max_attempts=1)
    lease = queue.lease("worker")
    assert lease is not None
    queue.fail(lease, "it broke")

    page: Any = rollouts.queued(store, Wanted(), 1)
    rest: Any = rollouts.queued(store, Wanted(), 2)
    failed: Any = rollouts.queued(store, Wanted(status="failed"), 1)
    one: Any = rollouts.read(store, lease.rollout.rollout_id)

    assert (page["total"], len(page["rows"]), len(rest["rows"])) == (60, 50, 10)
    assert page["queue"]["counts"]["failed"] == 1
    assert page["queue"]["reasons"] == [(("failed", "it broke"), 1)]
    assert [each.rollout_id for each in failed["rows"]] == [lease.rollout.rollout_id]
    assert [(each.status, each.reason) for each in one["tries"]] == [("failed", "it broke")]
    assert one["queued"]["is_over"]
    assert one["task"].text == '{"n": 0}'


def test_forms_pause_resume_and_cancel(store: Store, served: Callable[..., str]) -> None:
    """Each does what it says, once; what is absurd is refused and changes nothing."""
    queue = Queue(State.beside(store))
    (waiting,) = queue.put(["a"])
    asking = Asking(served(store, "", key=KEY))

    assert asking.post("/rollouts", act="pause").status == 303
    assert queue.is_paused
    assert "paused" in asking.get("/rollouts?of=queue").words
    assert asking.post("/rollouts", act="explode").status == 400
    assert asking.post("/rollouts", act="resume").status == 303
    assert not queue.is_paused
    path = f"/rollouts/{waiting.rollout_id}"
    assert "Cancel this rollout" in asking.get(path).words
    answer = asking.post(f"{path}/cancel", reason="no <need>")
    assert (answer.status, answer.headers["location"]) == (303, path)
    assert (queue.get(waiting.rollout_id).status) == "cancelled"
    assert "no <need>" in asking.get(path).words
    assert asking.post(f"{path}/cancel").status == 409
    assert asking.post("/rollouts/nobody/cancel").status == 404
    assert asking.get("/rollouts?of=queue&status=gone").status == 400
    assert asking.get("/rollouts/nobody").status == 404


def test_ids_of_any_kind_have_pages(store: Store, served: Callable[..., str]) -> None:
    """Slashes, spaces and markup in an id; its beginning leads to the whole address."""
    name = "team a/run <7>?x=1&y#z"
    record(store, name)
    asking = Asking(served(store, "", key=KEY))

    listed = asking.get("/rollouts")
    (address,) = {
        part.partition('"')[0] for part in listed.text.split('href="') if "team" in part[:30]
    }
    page = asking.get(address)
    short = asking.get("/rollouts/team%20a")

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
