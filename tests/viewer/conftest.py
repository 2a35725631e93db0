"""A real browser without a window, and pages that fail their test when something is wrong in them.

One browser for all tests of a process; each visit has cookies and a cache of its own.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.viewer.browsing import CHROMIUM, FLAGS, KEY, Visit, Visits, prefix
from tests.viewer.client import Ask, Asking, AskingOf

from lightning_otel import Store

pytest.importorskip("hypercorn", reason="needs the extra serve")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")


@pytest.fixture(scope="session")
def _chromium() -> Iterator[Any]:
    if not CHROMIUM.exists():
        pytest.skip(f"needs {CHROMIUM}: apt-get install chromium")
    running = playwright.sync_playwright().start()
    found = running.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
    yield found
    asyncio._set_running_loop(found._loop)
    found.close()
    running.stop()


@pytest.fixture
def browser(_chromium: Any) -> Iterator[Any]:
    """The browser; its event loop counts as running in a test that uses it, and in no other."""
    asyncio._set_running_loop(_chromium._loop)
    yield _chromium
    asyncio._set_running_loop(None)


@pytest.fixture
def visit(browser: Any, served: Callable[..., str]) -> Iterator[Visits]:
    """``visit(store, "/path")``: a page of a served store, opened by the link with its key.

    When the test ends, every page must have been free of errors, and have asked no other host.
    """
    visits: list[Visit] = []
    urls: dict[str, str] = {}

    def go(
        store: Store, path: str = "/", *, tolerated: tuple[int, ...] = (), **options: Any
    ) -> Any:
        url = urls.get(store.name) or urls.setdefault(store.name, served(store, "", key=KEY))
        context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 800}, "base_url": url, **options}
        )
        context.set_default_timeout(60_000)
        visits.append(Visit(context, url, tolerated))
        page = context.new_page()
        page.goto(f"{path}{'&' if '?' in path else '?'}key={KEY}")
        # Pages lie below a path of the server's; a test names them without it.
        below, plainly = prefix(page.url), page.goto
        page.goto = lambda to, **more: plainly(f"{below}{to}" if to[0] == "/" else to, **more)
        return page

    yield go
    for each in visits:
        each.context.close()
    problems = [problem for each in visits for problem in each.problems]
    assert not problems, "\n".join(problems)


@pytest.fixture
def asked(store: Store, asking: AskingOf) -> Asking:
    """The test's own store, served from the beginning."""
    return asking(store)


@pytest.fixture
def ask(asking: AskingOf) -> Ask:
    """``ask(store, "/path")``: an answer without a browser, with the key and as people ask."""
    return lambda store, path, **headers: asking(store).get(path, **headers)
