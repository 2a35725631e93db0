"""The pages of training runs: where they stand, curves, what they published and kept."""

import re
from collections.abc import Callable, Iterator

import pytest
from tests.viewer.browsing import Visits, violations
from tests.viewer.client import Asking

from lightning_otel import Store
from lightning_otel.resources import Resources
from lightning_otel.state import State
from lightning_otel.state.runs import Runs, TrainingRun

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def state(store: Store) -> Iterator[State]:
    """The state beside an empty store."""
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
    store: Store, trained: TrainingRun, asking: Callable[[Store], Asking]
) -> None:
    """Curves with the usual metrics first; the version it published, and what that is now."""
    asked = asking(store)

    at = f"/runs/{trained.run_id}"
    found, alone = asked.get(at[:-2]), asked.get(f"{at}?metric=loss")

    assert [each.text.count("</svg>") for each in (found, alone)] == [3, 1]
    assert HOSTILE not in found.text
    told = found.words
    places = [told.index(each) for each in ("reward", "loss", HOSTILE)]
    assert places == sorted(places)
    for each in ("reward 0 0.9667", "prompt@2", "/checkpoints/30", "@1 @2 for 10%"):
        assert each in told, told
    for wrong in ("/runs/run-x", f"{at}?metric=nothing"):
        assert asked.get(wrong).status == 404


def test_runs_are_listed_and_silent_ones_marked(
    store: Store, state: State, asking: Callable[[Store], Asking]
) -> None:
    """The newest first, with the whole count; one whose process died says so."""
    opened = Runs(state)
    made = [opened.start("grpo") for _ in range(51)]
    opened.set_status(made[0].run_id, "failed", "it broke")
    Runs(State(store.name, now_ns=lambda: 1)).start("kto")
    asked = asking(store)

    first, second = (asked.get(f"/runs?page={number}").words for number in (1, 2))

    assert re.search("1–50 of 52 .*runs", first)
    assert (first.count(" grpo "), second.count(" grpo "), second.count(" kto ")) == (50, 1, 1)
    assert "silent" not in first
    assert "it broke" in second
    assert len(re.findall("silent|not heard", second)) == 1


def test_pages_of_runs(
    visit: Visits, store: Store, trained: TrainingRun, shot: Callable[..., None]
) -> None:
    """In a browser: from the list to a run with its curves; axe finds nothing."""
    page = visit(store, "/runs", color_scheme="dark")
    found = {"list": violations(page)}
    page.get_by_role("link", name=trained.run_id).click()
    page.wait_for_url("**/runs/*")
    found["run"] = violations(page)
    shot(page)

    assert page.locator("svg.curve").count() == 3
    assert page.locator("svg.curve .mean").first.evaluate("e => getComputedStyle(e).fill") == "none"
    assert page.get_by_text("2 versions at once").count() == 1
    assert {name: each for name, each in found.items() if each} == {}
