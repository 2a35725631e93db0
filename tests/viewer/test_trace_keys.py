"""One trace in a real browser: rows folded and unfolded by keys, and back to what was shown."""

from typing import Any

import pytest
from tests.viewer.browsing import Visits, violations
from tests.viewer.spans import TRACE, call, said, span

from lightning_otel import Store
from lightning_otel.types import conventions as c

PART = 250
"""Rows that come at once."""


@pytest.fixture
def small(store: Store) -> Store:
    """A root with two parts, of two calls each."""
    store.add([span(1, end_ns=90_000), span(2, 1), span(5, 1)])
    for parent in (2, 5):
        for number in (parent + 1, parent + 2):
            given, answered = said(("user", f"asked {number}")), said(("assistant", "ho"))
            store.add([call(number, parent, given, answered)])
    return store


@pytest.fixture
def long(store: Store) -> Store:
    """A root with a part of a thousand rows, and one of two."""
    last = 2 + 4 * PART + 1
    store.add([span(1, end_ns=9_999_999), span(2, 1), span(last, 1)])
    store.add(span(number, 2) for number in range(3, last))
    store.add(span(number, last) for number in (last + 1, last + 2))
    return store


def selected(page: Any) -> str:
    """The name of the row that is selected, which is one at most."""
    assert page.locator(".selected").count() == page.locator("[aria-current=true]").count() == 1
    return named(page.inner_text(".selected a.name"))


def named(text: str) -> str:
    """A span's name, without the number of its step."""
    return text.partition("work")[1] + text.partition("work")[2]


def shown(page: Any, count: int) -> None:
    """Wait until so many rows are there."""
    page.wait_for_function(
        "(count) => document.querySelectorAll('#rows li').length === count", arg=count
    )


def chosen(page: Any, name: str) -> None:
    """Wait until this row is selected."""
    page.wait_for_selector(f".selected a.name:has-text('{name}')")


def beside(page: Any, name: str) -> None:
    """Wait until this span is shown beside the rows."""
    page.wait_for_selector(f"#span h2:has-text('{name}')")


def at(number: int) -> str:
    return f"/traces/{TRACE}?span={number:016x}"


def test_keys_fold_and_unfold_rows(visit: Visits, small: Store) -> None:
    """Left folds or goes to the parent, right unfolds or goes to the first child; so do h and l."""
    page = visit(small, at(3))
    shown(page, 7)

    page.keyboard.press("ArrowLeft")
    chosen(page, "work 2")
    page.keyboard.press("h")
    shown(page, 5)
    assert selected(page) == "work 2"
    assert "2 below" in page.inner_text(".selected")
    assert page.get_attribute(".selected a.fold", "aria-expanded") == "false"
    assert violations(page) == []
    page.keyboard.press("ArrowRight")
    shown(page, 7)
    page.keyboard.press("l")
    chosen(page, "work 3")
    page.keyboard.press("ArrowRight")
    chosen(page, "work 3")
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    shown(page, 5)
    page.keyboard.press("h")
    chosen(page, "work 1")
    page.keyboard.press("ArrowLeft")
    shown(page, 1)
    page.keyboard.press("ArrowLeft")
    chosen(page, "work 1")
    page.keyboard.press("?")
    assert "collapse or go up, expand or go down" in page.inner_text("dialog[open]")


def test_arrows_move_where_rows_have_the_focus(visit: Visits, small: Store) -> None:
    """Up and down too; the focus goes along, and Enter leads on to the span."""
    page = visit(small, f"/traces/{TRACE}")
    focused = "document.activeElement.textContent"

    page.click("a.name:has-text('work 2')")
    page.keyboard.press("ArrowDown")
    chosen(page, "work 3")
    assert (selected(page), named(page.evaluate(focused))) == ("work 3", "work 3")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    shown(page, 5)
    assert (selected(page), named(page.evaluate(focused))) == ("work 2", "work 2")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "span"


def test_rows_that_are_not_there_yet_are_led_to(visit: Visits, long: Store) -> None:
    """The parent above, the first row after, and what a folded row hides: each is loaded first."""
    page = visit(long, at(2 + 2 * PART + 100))
    missing = page.locator("#rows div.chunk[data-load]").count()
    assert missing >= 1

    page.keyboard.press("h")
    chosen(page, "work 2")
    page.keyboard.press("h")
    shown(page, 5)
    assert page.locator("#rows [data-load]").count() == 0
    page.keyboard.press("j")
    last = 2 + 4 * PART + 1
    assert selected(page) == f"work {last}"
    page.keyboard.press("k")
    page.keyboard.press("l")
    page.wait_for_selector("#rows [data-load]", state="attached")
    page.goto(at(last + 2))
    for _ in range(3):  # to the parent, which is folded, and on, faster than rows come
        page.keyboard.press("ArrowLeft")
    chosen(page, "work 1")
    page.wait_for_selector(f"#s-{last:016x} a.fold[aria-expanded=false]")


def test_no_row_is_passed_over(visit: Visits, long: Store) -> None:
    """However fast one goes, from the last row that is there to the one that comes after it."""
    page = visit(long, at(2 + PART - 3))
    beside(page, f"work {2 + PART - 3}")

    names = [selected(page)]
    for _ in range(5):
        page.keyboard.press("j")
        page.wait_for_function(
            "(held) => !held.includes(document.querySelector('.selected a.name').textContent)",
            arg=names,
        )
        names.append(selected(page))

    assert names == [f"work {2 + PART - 3 + step}" for step in range(6)]


def test_back_goes_to_what_was_shown(visit: Visits, small: Store) -> None:
    """Spans and tabs are entries of the history, also after a reload; folding is none."""
    page = visit(small, f"/traces/{TRACE}")
    page.click("a.name:has-text('work 3')")
    beside(page, "work 3")
    page.click("a.name:has-text('work 6')")
    beside(page, "work 6")
    page.click("li:has-text('work 2') a.fold")
    shown(page, 5)
    page.click(".tabs a:text-is('chat')")
    page.wait_for_url("**tab=chat**")

    page.go_back()
    beside(page, "work 6")
    shown(page, 5)
    page.reload()
    beside(page, "work 6")
    assert page.locator("#rows li").count() == 5
    page.go_back()
    beside(page, "work 3")
    shown(page, 5)
    assert page.url.endswith(f"?span={3:016x}&closed={2:016x}")
    page.go_back()
    beside(page, "work 1")
    assert selected(page) == "work 1"
    page.go_forward()
    beside(page, "work 3")
    page.go_forward()
    beside(page, "work 6")
    assert selected(page) == "work 6"
    page.go_forward()
    page.wait_for_url("**tab=chat**")


def test_who_runs_through_rows_makes_one_entry(visit: Visits, small: Store) -> None:
    """Where one rests counts; what was not read is not gone back to."""
    page = visit(small, f"/traces/{TRACE}")
    before = page.evaluate("history.length")

    for _ in range(4):
        page.keyboard.press("j")
    beside(page, "work 5")

    assert page.evaluate("history.length") == before + 1
    page.go_back()
    beside(page, "work 1")


def test_what_failed_and_what_runs_right_to_left(visit: Visits, store: Store) -> None:
    """The count of failures leads to the first, a row says its error once, Arabic begins right."""
    given, answered = said(("user", "ما هي عاصمة فرنسا؟")), said(("assistant", "باريس."))
    wrong = {"attributes": {c.ERROR_TYPE: "ValueError"}, "status_message": "ValueError: too many"}
    store.add([span(1, end_ns=90_000), call(2, 1, given, answered)])
    store.add([span(3, 1, status="ERROR", **wrong), span(4, 1, status="ERROR")])
    page = visit(store, f"/traces/{TRACE}?tab=chat")
    body = page.locator(".chat .body p").first

    left = page.evaluate(
        """(body) => { const range = document.createRange(); range.selectNodeContents(body);
           return range.getBoundingClientRect().left - body.getBoundingClientRect().left }""",
        body.element_handle(),
    )
    assert left > 100
    assert violations(page) == []
    page.click("#facts a:has-text('2 failed')")
    beside(page, "work 3")
    assert page.inner_text(".selected .bad") == "failed ValueError: too many"
    page.set_viewport_size({"width": 390, "height": 600})
    page.click("a.name:has-text('work 2')")
    beside(page, "work 2")
    assert page.evaluate("document.querySelector('#span').getBoundingClientRect().top") < 500
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_no_reward_goes_to_the_span_before(visit: Visits, small: Store) -> None:
    """Who selects a row and rewards at once, before it is shown, rewards nothing."""
    page = visit(small, at(3))
    before = page.url

    page.keyboard.press("j")
    page.keyboard.press("+")
    beside(page, "work 4")

    assert page.url != before
    assert list(small.sql("SELECT 1 FROM rewards")) == []
    page.keyboard.press("+")
    page.wait_for_url("**given=1**")
    assert len(list(small.sql("SELECT 1 FROM rewards"))) == 1
    page.goto(f"/traces/{TRACE}?tab=waterfall")
    page.wait_for_selector(".arrows path")


def test_a_message_turns_into_json_and_back(visit: Visits, small: Store) -> None:
    """In place, by its link; the page is as accessible then."""
    page = visit(small, f"/traces/{TRACE}?tab=chat")
    message = page.locator(".message.user").first

    message.locator("button.json").click()
    assert '"content": "asked 3"' in message.locator("pre").inner_text()
    assert not message.locator(".prose").is_visible()
    assert violations(page) == []
    message.locator("button.json").click()
    assert message.inner_text().split() == ["user", "JSON", "asked", "3"]


def test_a_search_is_typed_and_marked_where_it_stands(visit: Visits, small: Store) -> None:
    """By its key; what it finds is selected, and marked beside the rows, too."""
    page = visit(small, f"/traces/{TRACE}")

    page.keyboard.press("/")
    page.keyboard.type("ASKED 7")
    page.keyboard.press("Enter")

    page.wait_for_selector(".selected mark")
    shown(page, 3)
    assert selected(page) == "work 7"
    assert page.evaluate("CSS.highlights.get('found').size") >= 1
    assert violations(page) == []
    page.emulate_media(color_scheme="dark")
    assert violations(page, "color-contrast") == []
