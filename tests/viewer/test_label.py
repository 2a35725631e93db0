"""Labels: a sitting in a real browser, and the same by forms, HTTP and Python."""

import json
from typing import Any

import pytest
from tests.acting import act
from tests.command import invoke
from tests.viewer.browsing import KEY, Visits, violations
from tests.viewer.client import Answer, AskingOf

from lightning_otel import ConfigError, Store, auto_trace, emit_feedback


@pytest.fixture
def judged(store: Store) -> Store:
    """Four rollouts; the program calls each of them resolved."""
    for number in range(4):
        words = {"seen": f"seen {number}", "said": f"done {number}", "task": f"task {number}"}
        act(store, f"r{number}", {"resolved": 0.25}, agent="solver", **words)
    return store


def labels(store: Store, rollout_id: str = "r3") -> list[tuple[Any, ...]]:
    """What people said of a rollout: name, value, author."""
    query = "SELECT name, value, author FROM rewards WHERE author IS NOT NULL AND rollout_id = ?"
    return sorted(tuple(row.values()) for row in store.sql(query, [rollout_id]).rows())


def press(page: Any, key: str, item: str, name: str = "good") -> None:
    """Press a key, and wait for the item and name that it leads to."""
    page.keyboard.press(key)
    page.wait_for_function(
        """([item, name]) => !document.querySelector('#label').hasAttribute('aria-busy')
          && document.querySelector('#judge [name=item]').value === item
          && (!item || document.querySelector('#judge').elements.name.value === name)""",
        arg=[item, name],
    )


def test_a_sitting_takes_a_key_an_item_and_one_load(visit: Visits, judged: Store) -> None:
    """From the list by keys: score, skip, undo, and the end; the program's reward stays."""
    page = visit(judged, "/rollouts?agent=solver")
    page.keyboard.press("b")
    page.wait_for_selector("#sitting")
    assert violations(page) == []
    for name, value in (("names", "good"), ("author", "ana")):
        page.fill(f"#sitting [name={name}]", value)
    page.keyboard.press("Enter")
    page.wait_for_selector("#label")
    loads: list[str] = []
    page.on("load", lambda _: loads.append(page.url))
    assert "task 3" in page.inner_text("#item")
    assert "done 3" in page.inner_text("#item")
    assert violations(page) == []
    press(page, "4", "r2")
    press(page, "-", "r1")
    press(page, "s", "r0")
    press(page, "5", "")
    assert page.is_visible("#end")
    assert loads == []
    assert "3 labelled" in page.inner_text(".desk")
    page.evaluate("sending")
    page.go_back()
    page.go_forward()
    page.wait_for_selector("#label")
    assert page.input_value("#judge [name=item]") == "r1"

    assert (labels(judged), labels(judged, "r2"), labels(judged, "r0")) == (
        [("good", 0.6, "ana")], [("good", -1.0, "ana")], [("good", 1.0, "ana")],
    )  # fmt: skip
    assert {step.reward for step in judged.transitions()} == {0.25}


def test_undo_gives_back_what_was_said_before(visit: Visits, judged: Store) -> None:
    """Of two names in turn; a score is sent while the next item is shown already."""
    emit_feedback(rating=1, name="good", author="ana", rollout_id="r3", store=judged)
    page = visit(judged, "/label?rollout=r3&rollout=r1&names=good,kind&author=ana")
    assert page.input_value("#judge [name=item]") == "r3"
    press(page, "[", "r3")
    press(page, "+", "r3", "kind")
    press(page, "1", "r1")
    press(page, "u", "r3", "kind")
    assert "taken back" in page.inner_text(".desk")
    assert labels(judged) == [("good", 1.0, "ana")]
    press(page, "u", "r3")

    assert labels(judged) == [("good", -0.6, "ana")]
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 844})
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_people_never_overwrite_each_other(asking: AskingOf, judged: Store) -> None:
    """By forms, as without scripts: one's own later label counts, and another's stays."""
    asked, path = asking(judged), "/label?of=traces&names=good&author=ana"

    def give(author: str, reward: str) -> Answer:
        fields = {"item": "r3", "following": "r2", "name": "good"}
        return asked.post(path, author=author, reward=reward, **fields)

    answers = [give("ana", "1"), give("bo", "-0.2"), give("ana", "0.2")]

    assert {answer.headers["location"] for answer in answers} == {f"{path}&item=r2"}
    assert labels(judged) == [("good", -0.2, "bo"), ("good", 0.2, "ana")]
    (step,) = judged.transitions(rollout_id="r3", reward="good")
    assert step.reward == -0.2  # the first that stands; the other under its author's name
    assert step.rewards == {"good": -0.2, "good (ana)": 0.2, "resolved": 0.25}
    assert "good -0.2 by bo" in asked.get(f"{path}&item=r3").words
    assert "good by ana" in asked.get("/rollouts/r3").words
    assert give("ana", "").headers["location"] == f"{path}&item=r3"
    assert labels(judged) == [("good", -0.2, "bo")]


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"reward": "2"}, 400, "from -1 to 1"),
        ({"reward": "x"}, 400, "not a number"),
        ({"name": "primary"}, 400, "the program's own reward"),
        ({"author": ""}, 400, "Author is empty"),
        ({"item": "r9"}, 404, "no rollout 'r9'"),
    ],
)
def test_what_is_no_label_is_refused(
    asking: AskingOf, judged: Store, fields: dict[str, str], status: int, words: str
) -> None:
    """With the reason, and nothing is kept."""
    whole = {"item": "r3", "name": "good", "author": "ana", "reward": "1", **fields}

    answer = asking(judged).post("/label", **whole)

    assert (answer.status, words in answer.words) == (status, True), answer.words
    assert labels(judged) == []


def test_the_page_says_what_is_wrong_with_its_address(asking: AskingOf, judged: Store) -> None:
    """A filter of no list, a name that is the program's, a list without rows."""
    asked = asking(judged)

    assert "agnt: unknown; did you mean 'agent'" in asked.get("/label?agnt=x").words
    assert "Primary is the program's own" in asked.get("/label?names=primary&author=a").words
    assert "Nothing matches" in asked.get("/label?agent=nobody").words
    picked = asked.get("/label?rollout=r1&rollout=r2&names=good&author=ana").text
    saving = "/selections?of=traces&amp;rollout=r1&amp;rollout=r2&amp;reward=good"
    assert saving in picked


def test_labels_by_http_need_the_key(asking: AskingOf, judged: Store) -> None:
    """Whoever sends feedback in somebody's name replaces what they said."""
    asked = asking(judged)
    body = {"rollout_id": "r3", "reward": 0.5, "name": "good", "author": "ana"}
    sent = {"Content_Type": "application/json", "Accept": "application/json"}

    def post(**changes: str) -> Answer:
        return asked.ask("POST", "/v1/feedback", json.dumps(body), **{**sent, **changes})

    assert (post(Authorization="").status, labels(judged)) == (401, [])
    assert (post(Authorization=f"Bearer {KEY}").status, post().status) == (200, 200)
    assert labels(judged) == [("good", 0.5, "ana")]


def test_labels_that_waited_take_the_place_of_earlier_ones(asking: AskingOf, judged: Store) -> None:
    """Whatever their order is on the disk: the last one counts."""
    asked, name = asking(judged), "good"
    for reward, feedback_id in ((1, "b"), (0.2, "c"), (-0.5, "a")):
        body = {"rollout_id": "r9", "reward": reward, "name": name, "author": "ana"}
        asked.ask(
            "POST", "/v1/feedback", json.dumps({**body, "feedback_id": feedback_id}),
            Content_Type="application/json", Accept="application/json",
        )  # fmt: skip
    act(judged, "r9")

    settled = invoke("export", "triplets", "--store", judged.name)

    assert "3 × feedback given" in settled.stderr
    assert labels(judged, "r9") == [(name, -0.5, "ana")]


def test_labels_by_python_take_the_place_of_earlier_ones(judged: Store) -> None:
    """Of the same author, name and target alone."""
    for rating in (1, 5):
        emit_feedback(rating=rating, name="good", author="ana", rollout_id="r3", store=judged)
    emit_feedback(rating=5, name="kind", author="ana", rollout_id="r3", store=judged)

    assert labels(judged) == [("good", 1.0, "ana"), ("kind", 1.0, "ana")]
    with pytest.raises(ConfigError, match="give the score another name"):
        emit_feedback(rating=5, name="primary", rollout_id="r3", store=judged)
    with pytest.raises(ConfigError, match="without a comma"):
        emit_feedback(rating=5, author="a, b", rollout_id="r3", store=judged)
    wrong: Any = 3
    with pytest.raises(ConfigError, match="author is 3; it must be"):
        emit_feedback(rating=5, author=wrong, rollout_id="r3", store=judged)
    with auto_trace(store=judged, rollout_id="r4"):
        emit_feedback(rating=5, name=" good ", author="ana")
    assert labels(judged, "r4") == [("good", 1.0, "ana")]


def test_a_score_that_is_not_kept_leads_back(visit: Visits, judged: Store) -> None:
    """With the reason; nothing is counted as labelled that the server did not take."""
    page = visit(judged, "/label?of=rollouts&names=good&author=ana", tolerated=(503,))

    def refuse(route: Any) -> None:
        if route.request.method != "POST":
            return route.continue_()
        return route.fulfill(status=503, json={"detail": "the disk is full"})

    page.route("**/label?*", refuse)
    page.keyboard.press("5")
    page.wait_for_selector("#told:has-text('Not kept: the disk is full')")
    press(page, "[", "r3")

    assert "0 labelled" in page.inner_text(".desk")
    assert labels(judged) == []
