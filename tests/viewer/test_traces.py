"""Traces in a real browser: searched, read, rewarded by keys, and seen while they are written."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from tests.viewer.visiting import Visits, violations

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.types import Span

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\u202eevil\x1b[31m"
START_NS = 1_760_000_000_000_000_000
MESSAGE = '[{{"role":"{}","parts":[{{"type":"text","content":{}}}]}}]'


def message(role: str, text: str) -> str:
    """One message as spans hold it."""
    return MESSAGE.format(role, orjson.dumps(text).decode())


def spans_of(trace_id: str, asked: str, answered: str, *, start_ns: int = START_NS) -> list[Span]:
    """An agent that calls a model and a tool, with a request of another instrumentor below."""

    def span(number: int, parent: int | None, name: str, **attributes: Any) -> Span:
        return Span(
            trace_id=trace_id,
            span_id=f"{trace_id[0]}{number:015x}",
            parent_span_id=None if parent is None else f"{trace_id[0]}{parent:015x}",
            name=name,
            start_ns=start_ns + number * 1_000_000,
            end_ns=start_ns + number * 1_000_000 + (90_000_000 if parent is None else 800_000),
            attributes=attributes,
            scope=c.SCOPE,
            process="p",
            sequence=number * 2 if parent is not None else 0,
            end_sequence=number * 2 + 1 if parent is not None else 99,
        )

    call = {
        c.OPERATION: c.CHAT,
        c.REQUEST_MODEL: "demo-1",
        c.RESPONSE_ID: f"resp-{trace_id[:6]}",
        c.INPUT_TOKENS: 12,
        c.OUTPUT_TOKENS: 3,
        c.INPUT_MESSAGES: message("user", asked),
        c.OUTPUT_MESSAGES: message("assistant", answered),
    }
    tool = {
        c.OPERATION: c.EXECUTE_TOOL,
        c.TOOL_NAME: "search",
        c.TOOL_ARGUMENTS: '{"q":"x"}',
        c.TOOL_RESULT: HOSTILE,
    }
    return [
        span(1, None, "plan", **{c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: "planner"}),
        span(2, 1, "chat demo-1", **call),
        span(3, 2, "GET", **{"http.request.method": "GET"}),
        span(4, 1, HOSTILE, **tool),
    ]


@pytest.fixture
def filled(store: Store) -> Store:
    """Two traces, one of them hostile."""
    store.add(spans_of("a" * 32, "What is the capital of France?", "Paris"))
    store.add(spans_of("b" * 32, HOSTILE, HOSTILE, start_ns=START_NS + 10**9))
    return store


def test_traces_are_searched_and_filtered(
    visit: Visits, filled: Store, shot: Callable[..., None]
) -> None:
    """Text, filters and ids stand in the address; the whole count is told; axe finds no fault."""
    page = visit(filled, "/traces")
    shot(page)

    assert page.locator("tbody tr").count() == 2
    assert "2 traces" in page.inner_text("#traces")
    assert violations(page) == []

    page.keyboard.press("/")
    page.keyboard.type("capital of france")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=capital**")
    assert page.locator("tbody tr").count() == 1
    assert "What is the capital of France?" in page.inner_text("tbody")

    page.goto("/traces?agent=nobody")
    assert "No trace matches" in page.inner_text("#traces")
    page.goto("/traces?q=resp-aaaaaa")
    assert page.url.endswith(f"/traces/{'a' * 32}?span=a{2:015x}")


def test_a_trace_is_read_by_keys_and_tabs(
    visit: Visits, filled: Store, shot: Callable[..., None]
) -> None:
    """Rows, what was said, each tab; HTTP is folded away and counted; untrusted text is text."""
    page = visit(filled, f"/traces/{'b' * 32}")

    assert page.locator("li[data-row]").count() == 3
    assert "1 HTTP and DB span folded away" in page.inner_text("main")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.wait_for_selector("#span .message")
    assert page.url.endswith(f"?span=b{2:015x}")
    said = page.inner_text("#span")
    assert "<script>alert(2)</script>" in said
    assert "‹U+202E›" in said
    assert "‹U+001B›[31m" in said
    shot(page, "tree")
    assert violations(page) == []

    for tab, told in {
        "waterfall": "the bar's width",
        "chat": "2 messages",
        "tools": "search",
        "tokens": "no token ids: none were recorded",
        "rewards": "none, which is not 0",
        "attributes": "gen_ai.response.id",
        "raw": '"trace_id"',
    }.items():
        page.keyboard.press("]")
        page.wait_for_url(f"**tab={tab}**")
        assert told in page.inner_text("main"), tab
        assert page.locator("main img, main script").count() == 0
        shot(page, tab)
    assert violations(page) == []


def test_a_span_is_rewarded_by_a_key(
    visit: Visits, filled: Store, shot: Callable[..., None]
) -> None:
    """The reward is there at once, linked to the span; what becomes of a second one is told."""
    page = visit(filled, f"/traces/{'a' * 32}?span=a{2:015x}")

    page.keyboard.press("+")
    page.wait_for_selector("[role=status]")
    shot(page)

    assert "Kept: a reward of 1" in page.inner_text("[role=status]")
    assert "given later" in page.inner_text(".spans")
    (step,) = filled.transitions(rollout_id="a" * 32)
    assert step.rewards == {"feedback": 1.0}
    page.keyboard.press("-")
    page.wait_for_url("**given=-1**")
    assert "its call already has a reward of that name" in page.inner_text(".spans")
    assert len(list(filled.sql("SELECT 1 FROM rewards"))) == 2


def test_a_trace_appears_while_an_agent_writes_it(visit: Visits, store: Store) -> None:
    """A real process records; its row and then its spans come without a reload."""
    store.writer()
    page = visit(store, "/traces")
    assert "No traces yet" in page.inner_text("#traces")
    command = [sys.executable, "-c", textwrap.dedent(AGENT), store.name]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as agent:
        try:
            page.wait_for_selector("tbody .status:has-text('running')", timeout=20_000)
            assert "calc" in page.inner_text("tbody")
            assert agent.stdin is not None
            agent.stdin.close()
            page.wait_for_selector("tbody .status:has-text('ended')", timeout=20_000)
            assert "sum it" in page.inner_text("tbody")
        finally:
            agent.kill()


AGENT = """
    import sys
    import lightning_otel as lo

    with lo.auto_trace(store=sys.argv[1], task="sum it", agent="calc"):
        lo.emit_action("answer", "42")
        sys.stdin.read()
"""


def test_a_trace_on_a_small_screen_fits(
    visit: Visits, filled: Store, shot: Callable[..., None]
) -> None:
    """Nothing is wider than the screen, in the dark too."""
    small = {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}
    page = visit(filled, f"/traces/{'b' * 32}?span=b{2:015x}", **small)
    shot(page)

    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert violations(page) == []


@pytest.mark.pain(12)
def test_a_large_trace_is_read_in_parts(visit: Visits, store: Store) -> None:
    """Of thousands of rows those that are seen are there; what is far down comes by scrolling."""
    first = spans_of("a" * 32, "hi", "ho")[0]
    store.add([first])
    store.add(
        Span("a" * 32, f"{n:016x}", first.span_id, f"work {n}", START_NS + n, START_NS + n + 9)
        for n in range(1, 2000)
    )
    page = visit(store, f"/traces/{'a' * 32}")

    assert "2,000 rows" in page.inner_text("main")
    assert page.locator("li[data-row]").count() < 600
    page.locator(".spans .chunk").last.scroll_into_view_if_needed()
    page.get_by_text("work 1999", exact=True).wait_for()
    page.goto(f"/traces/{'a' * 32}?span={1234:016x}")
    assert page.locator("li.selected a.name").inner_text().startswith("work 1234")
