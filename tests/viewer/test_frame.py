"""The frame of the pages in a real browser: the key, keys, colours, small screens."""

import gzip
import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.viewer.browsing import KEY, Visits, violations

from lightning_otel import Store


def test_a_link_with_the_key_opens_the_pages(visit: Visits, store: Store) -> None:
    """The address keeps no key; the next page needs none; a script cannot read the cookie."""
    page = visit(store, "/?x=1")

    assert page.url.endswith("/?x=1")
    assert KEY not in page.content()
    assert page.evaluate("document.cookie") == ""
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    page.goto("/settings")
    assert page.title().startswith("Settings")


def test_files_are_compressed_and_pages_are_not(ask: Callable[..., Any], store: Store) -> None:
    """A file is kept for good by its address; the length of a page tells of no secret."""
    styles = re.search(r"/static/viewer\.css\?v=\w+", ask(store, "/").text)
    assert styles is not None

    plain, small = ask(store, styles[0]), ask(store, styles[0], Accept_Encoding="gzip")

    assert gzip.decompress(small.body) == plain.body
    assert (small.headers["vary"], small.headers["content-encoding"]) == ("Accept-Encoding", "gzip")
    assert "immutable" in small.headers["cache-control"]
    assert "content-encoding" not in ask(store, "/", Accept_Encoding="gzip").headers


def test_without_the_key_a_page_says_what_to_do(
    browser: Any, served: Callable[..., str], store: Store
) -> None:
    """And shows nothing of the store, not even where it lies."""
    page = browser.new_page(base_url=served(store, "", key=KEY))
    answer = page.goto("/")
    wrong = page.goto(f"/?key={KEY}x")

    assert (answer.status, wrong.status) == (401, 401)
    assert "lightning-otel serve" in page.inner_text("main")
    assert store.name not in page.content()
    assert page.context.cookies() == []
    page.close()


@pytest.mark.parametrize(
    ("scheme", "ground"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(16, 20, 24)")]
)
def test_colours_follow_the_system(visit: Visits, store: Store, scheme: Any, ground: str) -> None:
    """Pages are light or dark, as the browser prefers."""
    page = visit(store, color_scheme=scheme)

    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == ground


def test_keys_lead_everywhere(visit: Visits, store: Store) -> None:
    """``?`` tells them; ``g`` and a letter go to a page; j, k and Esc select rows."""
    page = visit(store)
    page.keyboard.press("?")
    sheet = page.inner_text("dialog[open]")
    page.keyboard.press("Escape")
    is_closed = page.locator("dialog[open]").count() == 0
    page.keyboard.press("g")
    page.keyboard.press("e")
    page.wait_for_url("**/settings")
    for key in "jjk":
        page.keyboard.press(key)
    first = page.locator("tr[data-row]").first.get_attribute("class")
    page.keyboard.press("Escape")

    assert is_closed
    assert "next, previous row" in sheet
    assert first == "selected"
    assert page.locator(".selected").count() == 0


def test_what_no_link_leads_to_is_accessible(
    visit: Visits, store: Store, shot: Callable[..., None]
) -> None:
    """The sheet of keys and the page that says there is nothing; others are found by links."""
    page = visit(store, "/nowhere", color_scheme="dark", tolerated=(404,))
    nowhere = violations(page)
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    shot(page)

    assert page.title().startswith("Not found")
    assert (nowhere, violations(page)) == ([], [])
