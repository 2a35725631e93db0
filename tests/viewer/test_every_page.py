"""Every page and its frame: the key, keys, small screens, and a store whose fields are attacks."""

import gzip
import json
import re
from collections.abc import Callable
from html import unescape
from typing import Any
from urllib.parse import quote

import pytest
from tests.acting import act
from tests.viewer.browsing import KEY, Visits, prefix, violations
from tests.viewer.client import Ask
from tests.viewer.corpus import FOUND, fill

from lightning_otel import Resources, Span, Store
from lightning_otel.state import State
from lightning_otel.types import Event
from lightning_otel.types import conventions as c

HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069"
    "\ud800-\udfff\ufeff\U000e0000-\U000e007f]"
)
"""Characters that move a cursor, turn the writing or are not seen."""

_PATH = re.compile(r"(/[a-z_]*)(/[^?#]*)?.*", re.DOTALL)


@pytest.mark.pain(20)
@pytest.mark.timeout(180)  # some fifteen pages
def test_data_is_text_on_every_page(visit: Visits, store: Store) -> None:
    """Nothing of it runs, makes an element or leads away; axe finds nothing, in both colours."""
    fill(store)
    page = visit(store)
    waiting, kinds, wrong = ["/"], {"/"}, {}
    while waiting:
        path = waiting.pop(0)
        page.goto(path)
        page.evaluate(
            "document.querySelectorAll('details').forEach((each) => { each.open = true })"
        )
        page.wait_for_selector("[data-load]", state="detached")
        found = page.evaluate(FOUND)
        assert found["ran"] is None, path
        assert (found["elements"], found["handlers"], found["places"]) == (0, 0, []), path
        assert all(each.startswith("/static/") for each in found["scripts"]), path
        wrong[path] = violations(page)
        page.emulate_media(color_scheme="dark")
        wrong[path] += violations(page, "color-contrast")
        page.emulate_media(color_scheme="light")
        for link in links(page):
            if _kind(link) not in kinds:
                kinds.add(_kind(link))
                waiting.append(link)

    assert {path: each for path, each in wrong.items() if each} == {}
    assert {"/settings", "/sql", "/traces/*", "/transitions"} <= kinds


def test_no_page_holds_what_is_not_seen(ask: Ask, store: Store) -> None:
    """Control characters and marks of direction are named, whichever field of whatever page."""
    evil = "\x1b[31m\x07\x9b2J \u202egnp\u2066 \u200f\u200b end"
    own = {c.ROLLOUT_ID: f"r{evil}", c.AGENT_NAME: evil, c.MODE: evil, evil: evil}
    said = json.dumps([{"role": evil, "parts": [{"type": "text", "content": evil}]}])
    call = {c.OPERATION: "chat", c.REQUEST_MODEL: evil, c.INPUT_MESSAGES: said, c.TOOL_NAME: evil}
    reward = {c.REWARD_VALUE: 1.0, c.REWARD_NAME: evil}
    for number, (name, more) in enumerate([(c.SPAN_ROLLOUT, {}), (evil, call), (evil, reward)], 1):
        parent = f"{1:016x}" if number > 1 else None
        store.add([Span("a" * 32, f"{number:016x}", parent, name, number, number + 1,
                        status="ERROR", status_message=evil, attributes={**own, **more},
                        events=(Event(evil, number, {evil: evil}),))])  # fmt: skip
    waiting, shapes, raw = ["/", "/sql?q=FROM+spans", f"/traces?q={quote(evil)}"], set(), {}
    while waiting:
        answer = ask(store, path := waiting.pop(0))
        if answer.headers["content-type"].startswith("text/html"):
            raw[path] = HIDDEN.findall(answer.text)
        for link in re.findall(r' (?:href|data-load|data-href)="(/(?!static)[^"]*)"', answer.text):
            if _kind(link) not in shapes and not link.startswith("/sql/answer"):
                shapes.add(_kind(link))
                waiting.append(unescape(link))

    assert {path: characters for path, characters in raw.items() if characters} == {}
    assert {"/rollouts/*", "/traces/*", "/transitions"} <= shapes
    assert "‹U+202E›" in ask(store, f"/rollouts/{quote(own[c.ROLLOUT_ID], '')}").text
    assert 'value="&#27;[31m&#7;' in ask(store, f"/traces?q={quote(evil)}").text


@pytest.mark.parametrize(
    "path", ["/resources/prompt", "/?by=time", "/?by=step", "/?by=version", "/?lines=agent"]
)
def test_pages_of_a_store_of_one(ask: Ask, store: Store, path: str) -> None:
    """One rollout and one live version are enough for every page."""
    Resources(State.beside(store)).publish("prompt", "Be brief.", alias="live")
    act(store, None, 1.0, resources={"*": {"prompt": 1}})

    answer = ask(store, path)

    assert answer.status == 200
    for part in re.findall(r'data-load="([^"]+)"', answer.body.decode()):
        assert ask(store, unescape(part)).status == 200


def links(page: Any) -> list[str]:
    """Addresses of pages that a page leads to; not of files."""
    every = page.eval_on_selector_all(
        "a[href^='/']:not([download]), [data-href]",
        "(found) => found.map((each) => each.dataset.href ?? each.getAttribute('href'))",
    )
    below = prefix(page.url)
    return [found for each in every if (found := each.removeprefix(below)) != each]


def _kind(link: str) -> str:
    """The page that an address leads to, whatever it is about."""
    match = _PATH.fullmatch(link)
    assert match is not None, link
    return match[1] + "/*" * (match[2] or "").count("/")


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


def test_files_are_compressed_and_pages_are_not(ask: Ask, store: Store) -> None:
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
    assert "label the item with so many stars" in sheet
    assert first == "selected"
    assert page.locator(".selected").count() == 0


def test_what_no_link_leads_to_is_accessible(visit: Visits, store: Store) -> None:
    """The sheet of keys and the page that says there is nothing; others are found by links."""
    page = visit(store, "/nowhere", color_scheme="dark", tolerated=(404,))
    nowhere = violations(page)
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")

    assert page.title().startswith("Not found")
    assert (nowhere, violations(page)) == ([], [])
