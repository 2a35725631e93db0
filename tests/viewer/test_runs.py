"""The pages of training runs: where they stand, curves, what they published and kept."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.viewer.asking import Asking
from tests.viewer.visiting import KEY, Visits, violations

from lightning_otel import Store
from lightning_otel.errors import NotFoundError
from lightning_otel.resources import Resources
from lightning_otel.serve.viewer import runs
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
    opened.keep(run.run_id, 30, "/checkpoints/30", versions={"prompt": 2})
    opened.set_status(run.run_id, "succeeded")
    return run


def test_a_run_tells_what_it_measured_made_and_kept(store: Store, trained: TrainingRun) -> None:
    """Curves with the usual metrics first; the version it published, and what that is now."""
    found: Any = runs.read(store, trained.run_id[:8])
    alone: Any = runs.read(store, trained.run_id, "loss")

    assert found["names"] == ["reward", "loss", HOSTILE]
    assert (len(found["pictures"]), len(alone["pictures"])) == (3, 1)
    assert HOSTILE not in "".join(found["pictures"])
    assert ("reward", 0.0, pytest.approx(29 / 30)) in found["last"]
    assert [str(each) for each in found["made"]] == ["prompt@2"]
    assert [(each.step, each.place) for each in found["checkpoints"]] == [(30, "/checkpoints/30")]
    (living,) = found["living"]
    assert (living.live.version, living.canary.version, living.share) == (1, 2, 0.1)
    for wrong in ({"run_id": "run-x"}, {"run_id": trained.run_id, "metric": "nothing"}):
        with pytest.raises(NotFoundError):
            runs.read(store, **wrong)


def test_runs_are_listed_and_silent_ones_marked(store: Store, state: State) -> None:
    """The newest first, with the whole count; one whose process died says so."""
    opened = Runs(state)
    made = [opened.start("grpo") for _ in range(runs.ROWS + 1)]
    opened.set_status(made[0].run_id, "failed", "it broke")
    long_ago = Runs(State(store.name, now_ns=lambda: 1)).start("kto")

    first: Any = runs.listed(store, 1)
    second: Any = runs.listed(store, 2)
    rows = [*first["rows"], *second["rows"]]

    assert (first["total"], len(first["rows"]), len(second["rows"])) == (52, 50, 2)
    assert [run.run_id for run, is_silent in rows if is_silent] == [long_ago.run_id]
    assert {run.reason for run, _ in rows} == {"", "it broke"}


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


def test_nothing_trained_yet(store: Store, served: Callable[..., str]) -> None:
    """A list that says how to begin; no run by any id."""
    store.add([])
    asking = Asking(served(store, "", key=KEY))

    assert "Nothing was trained yet" in asking.get("/runs").words
    assert asking.get("/runs/run-1").status == 404
    assert asking.get("/runs/@last").status == 404
