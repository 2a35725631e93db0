"""The pages of resources: versions, who uses them, texts compared, their rewards, what is live."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.acting import act
from tests.viewer.browsing import Visits, violations
from tests.viewer.client import Answer, Asking, AskingOf

from lightning_otel import Resources, Store
from lightning_otel.serve.viewer.text_diff import Line, Piece, compare_lines, fold_lines
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
            reward = (version - 1) * (0.9 + task % 2 / 10) + task / 1000
            act(store, None, reward, task=f"task {task}", agent="solver", resources=stamped)
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


def test_versions_tell_who_uses_them(measured: Store, asking: AskingOf) -> None:
    """Rollouts, mean reward with its error, agents; aliases; the list names the canary's share."""
    asked = asking(measured)

    listed = asked.get("/resources").words
    versions = asked.get("/resources/prompt").words
    used = asked.get("/resources/prompt@uses").words

    assert "1 resource " in listed
    assert "prompt prompt @1 @2 for 10% @2 " in listed
    assert versions.index("@2 canary 10%") < versions.index("@1 live")
    assert re.search(r"@2 0.9545 ± 0.0\d+ \(n = 10\) 10 solver", used)
    assert "@1 0.0045 ± 0.0009574 (n = 10) 10 solver" in used


def test_withdrawn_version_says_why(store: Store, opened: Resources, asked: Asking) -> None:
    """It is the canary no more, and its reason stands beside it; nothing is said of no rollouts."""
    opened.withdraw("prompt", f"worse {HOSTILE}")

    page = asked.get("/resources/prompt").words

    assert f"@2 withdrawn worse {HOSTILE}" in page
    assert "@2 canary" not in page
    assert "no task was done with both" in asked.get("/resources/prompt@diff?a=1&b=3").words
    for path in ("prompt@diff?a=9&b=1", "prompt@diff?a=blue&b=1", "other@diff?a=1&b=1", "nothing"):
        assert asked.get(f"/resources/{path}").status == 404


def test_rollout_with_two_versions_counts_for_none(
    store: Store, opened: Resources, asked: Asking
) -> None:
    """Its reward says nothing of either."""
    for version in (1, 2):
        act(store, "both", 1.0, attempt_id="1", resources={"*": {"prompt": version}})

    used = asked.get("/resources/prompt@uses").words

    assert "@2 – 0" in used
    assert "@1 – 0" in used


def test_to_look_makes_no_state(store: Store, asked: Asking, tmp_path: Path) -> None:
    """Nothing was published: the lists are empty, a name is not there, and no file is made."""
    store.add([])

    found = {path: asked.get(path) for path in ("/resources", "/runs", "/rollouts?of=queue", "/")}
    missing = [asked.get(f"/{each}/x").status for each in ("resources", "runs", "rollouts")]

    assert {each.status for each in found.values()} == {200}
    assert "No resources yet" in found["/resources"].words
    assert "No training runs yet" in found["/runs"].words
    assert missing == [404, 404, 404]
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
    asked: Asking,
    fields: dict[str, str],
    after: dict[str, int],
) -> None:
    """Each form does what its button says; a rollback goes back over the last change of live."""
    if fields["act"] == "rollback":
        opened.set_alias("prompt", "live", 3)
    last_move = str(opened.last_move("prompt"))

    assert asked.post("/resources/prompt@change", last_move=last_move, **fields).status == 303
    assert opened.aliases("prompt") == after


@pytest.mark.parametrize("last", ["diff", "edit", "uses", "change"])
def test_no_name_hides_behind_a_page(
    store: Store, opened: Resources, asked: Asking, last: str
) -> None:
    """A resource named as a page is, and the resource it would be a page of, have all of theirs."""
    for number in range(2):
        opened.publish(f"prompt/{last}", f"I am {last}, and {number}.")

    own, page = asked.get(f"/resources/prompt/{last}"), asked.get(f"/resources/prompt@{last}")
    quoted = asked.get(f"/resources/prompt%2F{last}@diff?a=1&b=2")
    links = re.findall(r'(?:href|action|data-load)="(/resources/[^"?]*@[^"?]*)', own.text)

    assert (own.status, f"I am {last}" in own.words) == (200, True)
    assert f"I am {last}" not in page.words
    assert (quoted.status, f"prompt/{last}@1 and @2" in quoted.text) == (200, True)
    assert {"diff", "edit", "uses", "change"} == {each.rpartition("@")[2] for each in links}
    assert {each.rpartition("@")[0] for each in links} == {f"/resources/prompt%2F{last}"}


def test_forms_change_nothing_that_changed_meanwhile(
    store: Store, opened: Resources, asked: Asking
) -> None:
    """A page that is out of date, fields that are absurd, unknown names: a 4xx, and no change."""
    (seen,) = set(
        re.findall(r'name="last_move" value="([^"]*)"', asked.get("/resources/prompt").text)
    )
    opened.set_alias("prompt", "canary", 3, weight=0.2)
    held, now = opened.aliases("prompt"), str(opened.last_move("prompt"))
    path = "/resources/prompt@change"

    late = asked.post(path, act="promote", last_move=seen)
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
        assert asked.post(path, **fields).status in (400, 404, 409)
    assert asked.post("/resources/nothing@change", act="promote", last_move="0").status == 404
    assert opened.aliases("prompt") == held


def test_two_prompts_are_compared_and_one_promoted(visit: Visits, promotable: Store) -> None:
    """In a browser: list, diff with paired rewards, and a promotion."""
    page = visit(promotable, "/resources")
    assert violations(page) == []
    page.get_by_role("link", name="live and canary").click()
    page.wait_for_url("**@diff?**")
    assert violations(page) == []
    note = page.locator(".note").inner_text()
    marked = page.locator("del").all_inner_texts(), page.locator("ins").all_inner_texts()
    text = page.locator(".diff").inner_text()
    page.get_by_text("Task by task").click()
    rows = page.locator("details tbody tr").count()
    page.get_by_role("button", name="Promote @2").click()
    page.wait_for_url("**/resources/prompt")
    page.get_by_text("Mean reward: ").wait_for()
    assert violations(page) == []

    assert "@2 is better than @1" in note
    assert "+0.950" in note
    assert "n = 10 tasks" in note
    assert marked == (["brief"], ["kind"])
    assert HOSTILE in text
    assert rows == TASKS
    assert Resources(State.beside(promotable)).aliases("prompt") == {"live": 2}
    assert page.get_by_role("button", name="Roll back to @1").count() == 1


@pytest.fixture
def asked_for(store: Store) -> Resources:
    """A prompt with a placeholder, live, and a task whose keys are recorded."""
    found = Resources(State.beside(store))
    found.publish("help", "Help in {city}.\n\u202eEnd.")
    act(store, task={"city": "Rome", "day": "Monday"})
    return found


def test_prompt_is_edited_and_published_as_canary(
    visit: Visits, store: Store, asked_for: Resources
) -> None:
    """In a browser: text, difference, publication; then the comparison with its beginning."""
    page = visit(store, "/resources/help")
    page.get_by_role("link", name="Edit", exact=True).click()
    box = page.get_by_label("Text")
    box.fill(box.input_value().replace("Help", "Kindly help on {day}"))
    page.get_by_role("button", name="Show the difference").click()
    page.locator("ins").first.wait_for()
    found, changed = violations(page), page.locator("ins").all_inner_texts()
    typed = page.locator("form code").all_inner_texts()
    page.get_by_label("Canary share").fill("0.25")
    page.get_by_role("button", name="Publish as canary").click()
    page.wait_for_url("**/resources/help@diff?a=1&b=2")

    assert ("".join(changed), typed) == ("Kindly help on {day}", ["{day}", "{city}"])
    assert asked_for.get("help", 2).prompt.template == "Kindly help on {day} in {city}.\n\u202eEnd."
    assert (asked_for.get("help", 2).parent, asked_for.canary_weight("help")) == (1, 0.25)
    assert asked_for.aliases("help") == {"live": 1, "canary": 2}
    assert found == []


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"text": "Help {country} in {city}."}, 400, "nobody fills in {country}."),
        ({"text": "Help."}, 400, ": the placeholders {city} are gone."),
        ({"text": " \r\n "}, 400, "has no text."),
        ({"text": "Help in {city}.\r\n\u202eEnd."}, 400, "This is the text of @1."),
        ({"share": "1"}, 400, "Share is 1."),
        ({"share": "0"}, 400, "Share is 0."),
        ({"share": "some"}, 400, "Share is 'some', which is not a number."),
        ({"share": ""}, 400, "Share is '', which is not a number."),
        ({"last_change": "0"}, 409, "Somebody changed help meanwhile."),
        ({"last_change": "x"}, 409, "Somebody changed help meanwhile."),
    ],
)
def test_form_that_cannot_be_published_keeps_its_text(
    store: Store, asked_for: Resources, asked: Asking,
    fields: dict[str, str], status: int, reason: str,
) -> None:  # fmt: skip
    """The reason stands on the page, with the text and the share; nothing is published."""
    sent = {
        "act": "publish", "parent": "1", "text": "Be kind in {city}.\nEnd <b>", "share": "0.5",
        "last_change": str(asked_for.last_change("help")), **fields,
    }  # fmt: skip

    answer = asked.post("/resources/help@edit", **sent)
    kept = re.search(r"<textarea[^>]*>\n([^<]*)</textarea>", answer.text)

    assert (answer.status, reason in answer.words) == (status, True), answer.words
    assert kept is not None
    assert unescape(kept[1]) == sent["text"].replace("\r\n", "\n")
    assert f'name="share" value="{sent["share"]}"' in unescape(answer.text)
    assert len(asked_for.versions("help")) == 1


def test_version_of_somebody_else_is_not_overwritten(
    store: Store, asked_for: Resources, asked: Asking
) -> None:
    """The page names it; the same form sent again, now that it was seen, goes after it."""
    page = asked.get("/resources/help@edit").text
    asked_for.publish("help", "Another in {city}.")

    def send(page: str) -> Answer:
        (seen,) = re.findall(r'name="last_change" value="(\d+)"', page)
        fields = {"text": "Mine in {city}.", "share": "0.5", "last_change": seen, "parent": "1"}
        return asked.post("/resources/help@edit", act="publish", **fields)

    late = send(page)
    again = send(late.text)

    assert (late.status, "The newest version is @2" in late.words) == (409, True)
    assert (again.status, asked_for.aliases("help")) == (303, {"live": 1, "canary": 3})
    assert asked_for.get("help", 2).prompt.template == "Another in {city}."


def test_only_prompts_are_edited(store: Store, asked_for: Resources, asked: Asking) -> None:
    """An endpoint says by which command; a version that is not there is not."""
    asked_for.publish("model", {"model": "small"})

    assert "only prompts are edited here" in asked.get("/resources/model@edit").words
    assert "@edit" not in asked.get("/resources/model").text
    assert asked.get("/resources/help@edit?version=7").status == 404


TEXTS = st.lists(st.text("ab \n.", max_size=12).map(lambda text: text.replace("\n", "")))


def said(pieces: tuple[Piece, ...]) -> str:
    return "".join(piece.text for piece in pieces)


@given(TEXTS, TEXTS)
def test_compared_keeps_both_texts_whole(a: list[str], b: list[str]) -> None:
    """Each side in its order is that text; lines are numbered; what is the same is the same."""
    found = compare_lines(a, b)
    of_a = [line for line in found if line.number_a]
    of_b = [line for line in found if line.number_b]

    assert [said(line.a) for line in of_a] == a
    assert [said(line.b) for line in of_b] == b
    assert [line.number_a for line in of_a] == list(range(1, len(a) + 1))
    assert [line.number_b for line in of_b] == list(range(1, len(b) + 1))
    for line in found:
        plain = [
            "".join(piece.text for piece in side if not piece.is_changed)
            for side in (line.a, line.b)
        ]
        if line.kind in ("same", "changed"):
            assert plain[0] == plain[1]
        if line.kind == "same":
            assert said(line.a) == said(line.b)


@given(TEXTS, TEXTS, st.integers(0, 4))
def test_folded_leaves_out_lines_that_are_the_same_alone(
    a: list[str], b: list[str], around: int
) -> None:
    """Gaps stand for as many lines as are missing, and every difference stays."""
    found = compare_lines(a, b)
    short = fold_lines(found, around)

    hidden = sum(line.number_a for line in short if line.kind == "gap")
    assert len([line for line in short if line.kind != "gap"]) + hidden == len(found)
    assert [line for line in short if line.kind not in ("same", "gap")] == [
        line for line in found if line.kind != "same"
    ]


def test_words_that_differ_are_marked() -> None:
    """A word in place of another; a line that has nothing of the other is no change of it."""
    found = compare_lines(
        ["You are brief.", "Answer the question.", "End."], ["You are kind.", "Zzz", "End."]
    )

    assert found[0].kind == "changed"
    assert [piece.text for piece in found[0].a if piece.is_changed] == ["brief"]
    assert [piece.text for piece in found[0].b if piece.is_changed] == ["kind"]
    assert [line.kind for line in found[1:]] == ["removed", "added", "same"]
    assert fold_lines(found, 0)[-1] == Line("gap", 1, 1)


def test_long_lines_are_compared_as_a_whole() -> None:
    """A comparison of words takes their product: beyond some, lines alone are compared."""
    a, b = "one word " * 2000, "two words " * 2000

    (line,) = compare_lines([a], [b])

    assert line == Line("changed", 1, 1, (Piece(a, is_changed=True),), (Piece(b, is_changed=True),))
