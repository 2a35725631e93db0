"""The pages of resources: versions, who uses them, what differs, what rewards say, what is live."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.viewer.asking import Asking
from tests.viewer.visiting import KEY, Visits, violations

from lightning_otel import Store, auto_trace, emit_action, emit_reward
from lightning_otel.errors import NotFoundError, StoreMissingError
from lightning_otel.resources import Resources
from lightning_otel.serve.viewer import resources
from lightning_otel.state import State

HOSTILE = "<script>alert(1)</script>"
TASKS = 10


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two versions of a prompt, ten tasks done with both, and the second one better."""
    folder: Path = tmp_path_factory.mktemp("measured")
    store = Store(folder / "traces.duckdb")
    opened = Resources(State.beside(store))
    opened.publish("prompt", f"You are brief.\n{HOSTILE}\nEnd.")
    opened.publish("prompt", f"You are kind.\n{HOSTILE}\nEnd.", parent=1, alias="canary")
    for task in range(TASKS):
        for version in (1, 2):
            stamped = {"*": {"prompt": version}}
            with auto_trace(store=store, task=f"task {task}", agent="solver", resources=stamped):
                emit_action("done")
                emit_reward((version - 1) * (0.9 + task % 2 / 10) + task / 1000)
    store.writer().seal()
    return store


@pytest.fixture
def promotable(measured: Store) -> Iterator[Store]:
    """The same store, whose aliases are put back when the test is done."""
    yield measured
    found = Resources(State.beside(measured))
    found.set_alias("prompt", "live", 1)
    found.set_alias("prompt", "canary", 2, weight=0.1)


@pytest.fixture
def opened(store: Store) -> Iterator[Resources]:
    """Three versions of a prompt; the first is live, the second the canary of a fifth."""
    found = Resources(State.beside(store))
    for text in ("one", "two", "three"):
        found.publish("prompt", text)
    found.set_alias("prompt", "canary", 2, weight=0.2)
    yield found
    found.state.close()


def test_versions_tell_who_uses_them(measured: Store) -> None:
    """Rollouts, mean reward with its error, agents; aliases; the list names the canary's share."""
    found: Any = resources.read(measured, "prompt", 1)
    listed: Any = resources.names(measured, 1)
    used: Any = resources.used(measured, "prompt")

    uses = dict(used["rows"])
    assert [each.version for each in found["versions"]] == [2, 1]
    assert {version: use.rollouts for version, use in uses.items()} == {1: TASKS, 2: TASKS}
    assert uses[1].mean == pytest.approx(0.0045)
    assert uses[1].error == pytest.approx(0.00302765 / TASKS**0.5, rel=1e-4)
    assert uses[2].agents == {"solver"}
    assert found["by_version"] == {1: ["live"], 2: ["canary"]}
    (row,) = listed["rows"]
    assert (row.live, row.canary, row.share, listed["total"]) == (1, 2, 0.1, 1)


def test_withdrawn_version_says_why(store: Store, opened: Resources) -> None:
    """It is the canary no more, and its reason stands beside it."""
    opened.withdraw("prompt", f"worse {HOSTILE}")

    found: Any = resources.read(store, "prompt", 1)

    assert found["by_version"] == {1: ["live"]}
    assert found["withdrawn"] == {2: f"worse {HOSTILE}"}


def test_rollout_with_two_versions_counts_for_none(store: Store) -> None:
    """Its reward says nothing of either."""
    Resources(State.beside(store)).publish("prompt", "one")
    for version in (1, 2):
        stamped = {"*": {"prompt": version}}
        with auto_trace(store=store, rollout_id="both", attempt_id="1", resources=stamped):
            emit_action("done")
    found = resources.uses("prompt", store.transitions(bodies=False), {"both": 1.0})

    assert {version: use.rollouts for version, use in found.items()} == {1: 0, 2: 0}


def test_difference_has_lines_pairs_and_an_interval(measured: Store) -> None:
    """The numbers are those of ``Resources.compare``, and each pair can be looked at."""
    found: Any = resources.difference(measured, "prompt", "", "", is_whole=False, is_paired=True)
    expected = Resources(State.beside(measured)).compare("prompt", 1, 2, measured)

    assert [line.kind for line in found["lines"]] == ["changed", "same", "same"]
    assert found["comparison"] == expected
    assert found["comparison"].difference == pytest.approx(0.95)
    assert found["pairs_total"] == len(found["pairs"]) == TASKS
    pair, task = found["pairs"][0]
    assert task.startswith("task ")
    assert pair.difference == pytest.approx(0.9)
    scale = found["scale"]
    assert 20 <= scale.zero < scale.low < scale.mean < scale.high <= 700
    assert sum(number for _, number in scale.dots) == TASKS


def test_difference_says_why_nothing_can_be_said(store: Store, opened: Resources) -> None:
    """Where no rollouts tell, what to do is said; unknown versions are not found."""
    found: Any = resources.difference(store, "prompt", "1", "3", is_whole=True, is_paired=True)

    assert found["comparison"] is None
    assert "no task was done with both" in found["refusal"]
    for name, version in (("prompt", "9"), ("prompt", "blue"), ("other", "1")):
        with pytest.raises(NotFoundError):
            resources.difference(store, name, version, "1", is_whole=True, is_paired=True)


def test_to_look_makes_no_state(tmp_path: Path) -> None:
    """Nothing was published: the list is empty, a name is not there, and no file is made."""
    store = Store(tmp_path / "traces.duckdb")
    store.add([])

    assert resources.names(store, 1)["total"] == 0
    with pytest.raises(StoreMissingError):
        resources.read(store, "prompt", 1)
    assert not list(tmp_path.rglob("state.sqlite"))


@pytest.mark.parametrize(
    ("fields", "after"),
    [
        ({"act": "promote"}, {"live": 2}),
        ({"act": "rollback"}, {"live": 1, "canary": 2}),
        ({"act": "alias", "alias": "live", "version": "3"}, {"live": 3, "canary": 2}),
        (
            {"act": "alias", "alias": "canary", "version": "3", "weight": "0.5"},
            {"live": 1, "canary": 3},
        ),
        ({"act": "alias", "alias": "canary", "version": "none"}, {"live": 1}),
        ({"act": "alias", "alias": "live", "version": "none"}, {"canary": 2}),
        (
            {"act": "alias", "alias": "mine", "version": "2"},
            {"live": 1, "canary": 2, "mine": 2},
        ),
    ],
)
def test_forms_move_aliases(
    store: Store,
    opened: Resources,
    served: Callable[..., str],
    fields: dict[str, str],
    after: dict[str, int],
) -> None:
    """Each form does what its button says; a rollback goes back over the last change of live."""
    if fields["act"] == "rollback":
        opened.set_alias("prompt", "live", 3)
    asking = Asking(served(store, "", key=KEY))
    last_move = str(opened.last_move("prompt"))

    assert asking.post("/resources/prompt@change", last_move=last_move, **fields).status == 303
    assert opened.aliases("prompt") == after


@pytest.mark.parametrize("last", ["diff", "uses", "change"])
def test_no_name_hides_behind_a_page(
    store: Store, opened: Resources, served: Callable[..., str], last: str
) -> None:
    """A resource named as a page is, and the resource it would be a page of, have all of theirs."""
    for number in range(2):
        opened.publish(f"prompt/{last}", f"I am {last}, and {number}.")
    asking = Asking(served(store, "", key=KEY))

    own, page = asking.get(f"/resources/prompt/{last}"), asking.get(f"/resources/prompt@{last}")
    quoted = asking.get(f"/resources/prompt%2F{last}@diff?a=1&b=2")
    links = re.findall(r'(?:href|action|data-load)="(/resources/[^"?]*@[^"?]*)', own.text)

    assert (own.status, f"I am {last}" in own.words) == (200, True)
    assert f"I am {last}" not in page.words
    assert (quoted.status, f"prompt/{last}: 1 and 2" in quoted.text) == (200, True)
    assert {"diff", "uses", "change"} == {each.rpartition("@")[2] for each in links}
    assert {each.rpartition("@")[0] for each in links} == {f"/resources/prompt%2F{last}"}


def test_forms_change_nothing_that_changed_meanwhile(
    store: Store, opened: Resources, served: Callable[..., str]
) -> None:
    """A page that is out of date, fields that are absurd, unknown names: a 4xx, and no change."""
    asking = Asking(served(store, "", key=KEY))
    (seen,) = set(
        re.findall(r'name="last_move" value="([^"]*)"', asking.get("/resources/prompt").text)
    )
    opened.set_alias("prompt", "canary", 3, weight=0.2)
    held, now = opened.aliases("prompt"), str(opened.last_move("prompt"))
    path = "/resources/prompt@change"

    late = asking.post(path, act="promote", last_move=seen)
    assert (late.status, "meanwhile" in late.words) == (409, True)
    for fields in (
        {"act": "delete"},
        {"act": "alias", "alias": "live", "version": "99", "last_move": now},
        {"act": "alias", "alias": "", "version": "1", "last_move": now},
        {"act": "alias", "alias": "live", "version": "2"},
        {"act": "alias", "alias": "live", "version": "2", "last_move": "x"},
        {"act": "alias", "alias": "live", "version": "x", "last_move": now},
        {"act": "alias", "alias": "canary", "version": "1", "weight": "7", "last_move": now},
        {},
    ):
        assert asking.post(path, **fields).status in (400, 404, 409)
    assert asking.post("/resources/nothing@change", act="promote", last_move="0").status == 404
    assert asking.get("/resources/nothing").status == 404
    assert asking.get("/resources/prompt@diff?a=1&b=99").status == 404
    assert opened.aliases("prompt") == held


def test_two_prompts_are_compared_and_one_promoted(
    visit: Visits, promotable: Store, shot: Callable[..., None]
) -> None:
    """In a browser: list, diff with paired rewards, and a promotion."""
    page = visit(promotable, "/resources")
    found = {"list": violations(page)}
    page.get_by_role("link", name="live and canary").click()
    page.wait_for_url("**@diff?**")
    found["diff"] = violations(page)
    shot(page, "diff")
    note = page.locator(".note").inner_text()
    marked = page.locator("del").all_inner_texts(), page.locator("ins").all_inner_texts()
    text = page.locator(".diff").inner_text()
    page.get_by_text("Task by task").click()
    rows = page.locator("details tbody tr").count()
    page.get_by_role("button", name="Promote @2").click()
    page.wait_for_url("**/resources/prompt")
    page.get_by_text("Mean reward: ").wait_for()
    found["resource"] = violations(page)
    shot(page, "resource")

    assert "@2 is better than @1" in note
    assert "+0.950" in note
    assert "n = 10 tasks" in note
    assert marked == (["brief"], ["kind"])
    assert HOSTILE in text
    assert rows == TASKS
    assert Resources(State.beside(promotable)).aliases("prompt") == {"live": 2}
    assert page.get_by_role("button", name="Roll back to @1").count() == 1
    assert {name: each for name, each in found.items() if each} == {}
