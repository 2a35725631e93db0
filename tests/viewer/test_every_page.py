"""Every page there is, found by its links, over a store whose every field is an attack."""

import re
from typing import Any

import pytest
from tests.viewer.corpus import FOUND, fill
from tests.viewer.visiting import Visits, violations

from lightning_otel import Store

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


def links(page: Any) -> list[str]:
    """Addresses of pages that a page leads to; not of files."""
    every = page.eval_on_selector_all(
        "a[href^='/']:not([download]), [data-href]",
        "(found) => found.map((each) => each.dataset.href ?? each.getAttribute('href'))",
    )
    return [each for each in every if not each.startswith(("/static/", "/v1/"))]


def _kind(link: str) -> str:
    """The page that an address leads to, whatever it is about."""
    match = _PATH.fullmatch(link)
    assert match is not None, link
    return match[1] + "/*" * (match[2] or "").count("/")
