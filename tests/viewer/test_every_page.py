"""Every page there is, found by its links, over a store whose every field is an attack."""

import re
from collections.abc import Callable
from html import unescape
from typing import Any

import pytest
from tests.viewer.browsing import Visits, prefix, violations
from tests.viewer.corpus import FOUND, fill

from lightning_otel import Store, auto_trace, emit_action, emit_reward
from lightning_otel.resources import Resources
from lightning_otel.state import State

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
    assert {"/settings", "/sql", "/traces/*", "/transitions", "/conversations/*"} <= kinds


@pytest.mark.parametrize("path", ["/resources/prompt", "/?by=time", "/?by=step", "/?by=version"])
def test_pages_of_a_store_of_one(ask: Callable[..., Any], store: Store, path: str) -> None:
    """One rollout and one live version are enough for every page."""
    Resources(State.beside(store)).publish("prompt", "Be brief.", alias="live")
    with auto_trace(store=store, resources={"*": {"prompt": 1}}):
        emit_action("done")
        emit_reward(1.0)

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
