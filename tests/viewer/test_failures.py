"""Pages of failures and breakdowns: whole at once, each fault once, with its stack trace."""

import re
import time
from html import unescape
from typing import Any

import pytest
from tests.viewer.browsing import Visits, violations
from tests.viewer.client import Ask
from tests.viewer.failing import make_rollout
from tests.viewer.spans import span

from lightning_otel import Store

NOW_NS = time.time_ns()
DAY_NS = 86_400 * 10**9
FAULTS = ("", "search", "run_python", "search")


@pytest.fixture
def made(store: Store) -> Store:
    """Sixteen rollouts of the last hours and one of last week, whose facts are known."""
    for rank in range(16):
        start_ns = NOW_NS - (17 - rank) * 1000 * 10**9
        fault = FAULTS[rank % len(FAULTS)]
        store.add(make_rollout(rank, start_ns, fault, survives=rank == 15))
    store.add(make_rollout(16, NOW_NS - 5 * DAY_NS, "run_python"))
    store.rollouts()
    return store


def test_failures_are_grouped_and_lead_to_rollouts(ask: Ask, made: Store) -> None:
    """By error, tool, agent and model, with counts, a trend and examples; filters keep a part."""
    whole, fatal = (ask(made, f"/rollouts?of=failures{more}") for more in ("", "&fatal=no"))
    groups = whole.text.partition("<h2>Errors")[0]
    (path,) = re.findall(r'href="([^"]*error=httpx[^"]*)"', groups)
    part = ask(made, unescape(path)).words

    told = "httpx.ReadTimeout The read operation timed out search researcher gpt-4o-mini 8 7 of 8"
    assert told in whole.words
    assert "KeyError 'customer_id' run_python coder claude-sonnet-4-5 5 5 of 5" in whole.words
    assert "13 errors" in whole.words
    assert 'aria-label="1, 0, 0' in groups  # the last week's
    links = re.findall(r'href="/rollouts/rollout-00(\d\d)"', groups)
    assert links[:3] == ["15", "13", "11"]
    assert ("8 errors" in part, "KeyError" in part) == (True, False)
    assert ("1 error " in fatal.words, "survived" in fatal.words) == (True, True)


def test_every_page_tells_the_reason_with_its_type(ask: Ask, made: Store) -> None:
    """Of the span that failed first; its page has the stack trace."""
    trace = f"/traces/{3:032x}"
    for path, words in {
        "/rollouts?status=failed": "failed KeyError",
        "/rollouts/rollout-0002": "1 failed KeyError: 'customer_id'",
        "/traces?error=yes": "failed httpx.ReadTimeout",
        trace: "1 failed KeyError: 'customer_id'",
        f"{trace}?span={84:016x}": "Failed: KeyError: 'customer_id'",
        f"{trace}?tab=tree&span={84:016x}": 'File "tools.py", line 7',
        "/": "failed httpx.ReadTimeout",
    }.items():
        page = ask(made, path).words
        assert words in page, path
        assert "2 errors" not in page, path


def test_home_is_whole_at_once_and_renewed(ask: Ask, made: Store) -> None:
    """As the last facts tell it, with their age; what came since is there once it is renewed."""
    first = ask(made, "/?split=tool")
    made.add(make_rollout(17, NOW_NS - 10**9, "search"))
    stale = ask(made, "/?split=tool")
    (part,) = re.findall(r'data-load="(/home/breakdown[^"]*)"', stale.text)
    renewed = ask(made, unescape(part))
    ask(made, "/home/tiles?period=24h&split=tool")
    last = ask(made, "/?split=tool")

    for page in (first, stale):
        assert "Rollouts 16 before: 0 Mean reward 0.3 (n = 5)" in page.words
        assert "search 16 0.3 (n = 5) 16 50.0%" in page.words
        assert "Show the summary" not in page.text
    assert re.search(r"As of \d+ \w+ ago\. Renew", stale.words)
    assert "search 17 " in renewed.words
    for page, is_renewed in ((first, False), (stale, True), (last, False)):
        assert ('data-load="/home/breakdown' in page.text) is is_renewed
        assert ("As of" in page.words) is is_renewed
    assert "search 17 " in last.words
    assert len(last.body) <= 45_000
    assert ask(made, "/?split=colour").status == 400


def test_home_tells_how_many_rollouts_are_not_read_yet(ask: Ask, store: Store) -> None:
    """A first look at many waits for none but those of its list."""
    for rank in range(2_100):
        store.add([span(1, trace_id=f"{rank + 1:032x}", start_ns=NOW_NS, end_ns=NOW_NS + 1)])

    page = ask(store, "/")

    assert re.search(r"2,0\d\d attempts not read yet; the others up to \d+ \w+ ago", page.words)
    assert 'data-load="/home/tiles' in page.text
    assert "2,100" in page.words


@pytest.mark.parametrize("width", [390, 1280])
def test_pages_of_failures_are_accessible(visit: Visits, made: Store, width: int) -> None:
    """From Home by one link to the failures, by one more to the span; axe finds nothing."""
    page = visit(made, viewport={"width": width, "height": 900})
    assert check(page) == []
    page.get_by_role("link", name="All failures").click()
    page.wait_for_url("**of=failures**")
    assert check(page) == []
    page.keyboard.press("j")
    page.keyboard.press("x")
    assert page.locator("input[name='rollout']:checked").count() == 1
    page.keyboard.press("b")
    page.wait_for_url("**/label**")
    assert "Label 1 item" in page.inner_text("h1")
    page.go_back()
    page.locator("h2:has-text('Errors') ~ .table tbody a.id").first.click()
    page.wait_for_url("**/traces/**")
    assert check(page) == []

    assert "Traceback (most recent call last)" in page.inner_text("main")


def check(page: Any) -> list[str]:
    """What is wrong with a page, in both colours and in width."""
    page.evaluate("document.querySelectorAll('[data-load]').forEach((e) => e.scrollIntoView())")
    page.keyboard.press("End")
    page.wait_for_selector("[data-load]", state="detached")
    wrong = violations(page)
    page.emulate_media(color_scheme="dark")
    wrong += violations(page, "color-contrast")
    page.emulate_media(color_scheme="light")
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return wrong + ([f"{wide} too wide"] if wide > 0 else [])
