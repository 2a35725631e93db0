"""The pages of rollouts, recorded and queued, and of training runs: all that is known of each."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.acting import act
from tests.viewer.browsing import Visits, violations
from tests.viewer.client import Asking, AskingOf

from lightning_otel import (
    Queue,
    Resources,
    Store,
    auto_trace,
    emit_action,
    emit_observation,
    emit_reward,
    operation,
)
from lightning_otel.serve.viewer import page as pages
from lightning_otel.state import State
from lightning_otel.state.runs import Runs, TrainingRun


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


def test_huge_rollouts_are_told_of_without_their_messages(
    store: Store, asked: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded: what is too large for a page is linked to, on every page alike."""
    monkeypatch.setattr(pages, "MOST_BYTES", 4000)
    for rollout_id, text in (("huge", "x" * 5000), ("small", "small")):
        act(store, rollout_id, 1.0, seen=text)

    one, listed = (asked.get(path).words for path in ("/rollouts/huge", "/transitions"))

    assert f"#0 {pages.TOO_LARGE} 1 – done" in one
    assert re.search(rf"#0 small .* #0 {pages.TOO_LARGE} 1 ", listed)
    assert "xxxxx" not in one + listed


def test_recorded_rollouts_are_listed_by_page(store: Store, asked: Asking) -> None:
    """The newest first, with the whole count; by agent, status, id and time."""
    for number in range(52):
        record(store, f"r{number}", "even" if number % 2 == 0 else "odd", mode="val")

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


def test_a_rollout_tells_all_that_is_known(store: Store, asked: Asking) -> None:
    """Steps with their rewards and what gave them, traces, resources, and what was left out."""
    record(store, "r1", resources={"*": {"prompt": 3}})

    told = asked.get("/rollouts/r1").words

    for each in (
        "#0 seen 1 done 1 – – text prompt@3",
        "#1 seen 2 done 2 0.5 previous done text prompt@3",
        "0.5 previous 1 step:",
        "Reward 1 succeeded –",
        "Task a task",
        "Resources used prompt@3",
    ):
        assert each in told, told
    assert "r1" in asked.get("/transitions?rollout_id=r1").words
    assert 'href="/transitions?rollout_id=r1"' in asked.get("/rollouts/r1").text


def test_a_failed_rollout_says_why(store: Store, asked: Asking) -> None:
    """The type and the bounded message of its own error, not of what failed inside and went on."""

    @operation
    def act() -> None:
        raise ValueError("retried")

    with contextlib.suppress(KeyError), auto_trace(store=store, rollout_id="r1"):
        with contextlib.suppress(ValueError):
            act()
        raise KeyError("customer_id" + "x" * 9_000)
    record(store, "r2")

    failed, fine = store.rollouts()
    listed = json.loads(asked.get("/v1/rollouts?status=failed").body)["rollouts"]

    assert (fine["error_type"], fine["error_message"]) == (None, None)
    assert (failed["error_type"], len(failed["error_message"])) == ("KeyError", 300)
    assert [(row["error_type"], row["error_message"][:12]) for row in listed] == [
        ("KeyError", "'customer_id")
    ]
    assert "1 failed KeyError: 'customer_idxxx" in asked.get("/rollouts/r1").words
    assert "failed KeyError" in asked.get("/rollouts").words


def test_queue_and_attempts_with_reasons(store: Store, asking: AskingOf) -> None:
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


def test_forms_pause_resume_and_cancel(store: Store, asked: Asking) -> None:
    """Each does what it says, once; what is absurd is refused and changes nothing."""
    queue = Queue(State.beside(store))
    (waiting,) = queue.put(["a"])

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


def test_ids_of_any_kind_have_pages(store: Store, asked: Asking) -> None:
    """Slashes, spaces and markup in an id; its beginning leads to the whole address."""
    name = "team a/run <7>?x=1&y#z"
    record(store, name)

    listed = asked.get("/rollouts")
    (address,) = {
        part.partition('"')[0] for part in listed.text.split('href="') if "team" in part[:30]
    }
    page = asked.get(address)
    short = asked.get("/rollouts/team%20a")

    assert page.status == 200
    assert name in page.words
    assert short.headers["location"] == address


def test_pages_of_rollouts_in_a_browser(visit: Visits, store: Store) -> None:
    """From the list to a rollout by keyboard; nothing is wrong with either for axe."""
    record(store, "first")
    record(store, "second")
    Queue(State.beside(store)).put(["a task"])
    page = visit(store, "/rollouts")
    assert violations(page) == []
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/rollouts/first")
    assert violations(page) == []
    page.goto("/rollouts?of=queue")
    assert violations(page) == []


HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def state(store: Store) -> Iterator[State]:
    store.add([])
    found = State.beside(store)
    yield found
    found.close()


@pytest.fixture
def trained(state: State) -> TrainingRun:
    """A run that learnt, published a canary and kept a checkpoint."""
    opened, resources = Runs(state), Resources(state)
    run = opened.start("apo", {"model": HOSTILE, "beam": 3})
    for step in range(30):
        opened.log(run.run_id, step, {"reward": step / 30, "loss": 1 / (step + 1), HOSTILE: 1.0})
    resources.publish("prompt", "one")
    resources.publish("prompt", "two", parent=1, run_id=run.run_id, metrics={"val": 0.7},
                      alias="canary")  # fmt: skip
    opened.keep_checkpoint(run.run_id, 30, "/checkpoints/30", versions={"prompt": 2})
    opened.set_status(run.run_id, "succeeded")
    return run


def test_a_run_tells_what_it_measured_made_and_kept(
    store: Store, trained: TrainingRun, asked: Asking
) -> None:
    """Curves with the usual metrics first; the version it published, and what that is now."""
    at = f"/runs/{trained.run_id}"
    found, alone = asked.get(at[:-2]), asked.get(f"{at}?metric=loss")

    assert [each.text.count("</svg>") for each in (found, alone)] == [3, 1]
    assert HOSTILE not in found.text
    told = found.words
    places = [told.index(each) for each in ("reward", "loss", HOSTILE)]
    assert places == sorted(places)
    for each in ("reward 0 0.9667", "prompt@2", "/checkpoints/30", "@1 @2 for 10%"):
        assert each in told, told
    for wrong in ("/runs/run-x", f"{at}?metric=nothing", f"/runs/compare?run=x&run={at[-9:]}"):
        assert asked.get(wrong).status == 404
    assert asked.get(f"/runs/compare?run={trained.run_id}").status == 400


def test_two_runs_are_compared(
    visit: Visits, store: Store, state: State, trained: TrainingRun
) -> None:
    """From the list by two boxes: the settings that differ, metrics side by side and overlaid."""
    opened = Runs(state)
    other = opened.start("apo", {"model": HOSTILE, "beam": 4, "rate": 1e-4})
    for step in range(30):
        opened.log(other.run_id, step, {"reward": step / 60, "rate": 1e-4})
    page = visit(store, "/runs")
    for box in page.locator("[name=run]").all():
        box.check()
    found = violations(page)
    page.get_by_role("button", name="Compare").click()
    page.wait_for_url("**/runs/compare?run=*")
    told = page.locator("table").all_inner_texts()
    charts = page.locator("svg.curve")

    assert "beam\t3\t4" in told[0]
    assert "rate\t–\t0.0001" in told[0]
    assert "model" not in told[0]
    assert "2 of 4 settings differ" in page.inner_text("main")
    assert re.search(r"reward\t0 → 0.9333\t0 → 0.4667\t-0.4667", told[1])
    assert [charts.nth(at).locator("path.mean").count() for at in (0, 2)] == [4, 1]
    assert (found, violations(page)) == ([], [])


def test_runs_are_listed_and_silent_ones_marked(store: Store, state: State, asked: Asking) -> None:
    """The newest first, with the whole count; one whose process died says so."""
    opened = Runs(state)
    made = [opened.start("grpo") for _ in range(51)]
    opened.set_status(made[0].run_id, "failed", "it broke")
    Runs(State(store.name, now_ns=lambda: 1)).start("kto")

    first, second = (asked.get(f"/runs?page={number}").words for number in (1, 2))

    assert re.search("1–50 of 52 .*runs", first)
    assert (first.count(" grpo "), second.count(" grpo "), second.count(" kto ")) == (50, 1, 1)
    assert "silent" not in first
    assert "it broke" in second
    assert len(re.findall("silent|not heard", second)) == 1


def test_pages_of_runs(visit: Visits, store: Store, trained: TrainingRun) -> None:
    """In a browser: from the list to a run with its curves; axe finds nothing."""
    page = visit(store, "/runs", color_scheme="dark")
    assert violations(page) == []
    page.get_by_role("link", name=trained.run_id).click()
    page.wait_for_url("**/runs/*")
    assert violations(page) == []

    assert page.locator("svg.curve").count() == 3
    assert page.locator("svg.curve .mean").first.evaluate("e => getComputedStyle(e).fill") == "none"
    assert page.get_by_text("2 versions at once").count() == 1
