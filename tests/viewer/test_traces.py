"""Traces in a real browser: searched, read, rewarded by keys, and seen while they are written."""

import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from tests.acting import act
from tests.viewer.browsing import Visits, violations
from tests.viewer.client import Ask
from tests.viewer.spans import call, said, span

from lightning_otel import Store
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\u202eevil\x1b[31m"


def plan(letter: str, first: int, asked: str, answered: str) -> list[Span]:
    """An agent that calls a model and a tool, with a request of another instrumentor below."""
    trace: dict[str, Any] = {"trace_id": letter * 32}
    agent = {c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: "planner"}
    model = {
        c.REQUEST_MODEL: "demo-1",
        c.RESPONSE_ID: f"resp-{letter * 6}",
        c.INPUT_TOKENS: 12,
        c.OUTPUT_TOKENS: 3,
    }
    tool = {
        c.OPERATION: c.EXECUTE_TOOL,
        c.TOOL_NAME: "search",
        c.TOOL_ARGUMENTS: '{"q":"x"}',
        c.TOOL_RESULT: HOSTILE,
    }
    given, told = said(("user", asked)), said(("assistant", answered))
    http = {"http.request.method": "GET"}
    return [
        span(first, name="plan", attributes=agent, end_ns=1_000 * first + 9_000, **trace),
        call(first + 1, first, given, told, name="chat demo-1", attributes=model, **trace),
        span(first + 2, first + 1, name="GET", attributes=http, **trace),
        span(first + 3, first, name=HOSTILE, attributes=tool, **trace),
    ]


@pytest.fixture
def filled(store: Store) -> Store:
    """Two traces, one of them hostile."""
    store.add(plan("a", 1, "What is the capital of France?", "Paris"))
    store.add(plan("b", 11, HOSTILE, HOSTILE))
    return store


def test_traces_are_searched_and_filtered(visit: Visits, filled: Store) -> None:
    """Text, filters and ids stand in the address; the whole count is told; axe finds no fault."""
    page = visit(filled, "/traces")

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
    assert "No traces match" in page.inner_text("#traces")
    page.goto("/traces?q=resp-aaaaaa")
    assert page.url.endswith(f"/traces/{'a' * 32}?span={2:016x}")


def test_a_trace_is_read_by_keys_and_tabs(visit: Visits, filled: Store) -> None:
    """Rows, what was said, each tab; HTTP is folded away and counted; untrusted text is text."""
    page = visit(filled, f"/traces/{'b' * 32}")

    assert page.locator("li[data-row]").count() == 3
    assert "1 HTTP and DB span hidden" in page.inner_text("main")
    page.keyboard.press("j")
    page.wait_for_selector("#span h2 .tag:has-text('call')")
    assert page.url.endswith(f"?span={12:016x}")
    said = page.inner_text("#span")
    assert "<script>alert(2)</script>" in said
    assert "‹U+202E›" in said
    assert "‹U+001B›[31m" in said
    assert violations(page) == []

    for tab, told in {
        "waterfall": "0 ms",
        "chat": "2 messages",
        "tools": "search",
        "rewards": "no reward",
        "attributes": "gen_ai.response.id",
        "raw": '"trace_id"',
    }.items():
        page.keyboard.press("]")
        page.wait_for_url(f"**tab={tab}**")
        assert told in page.inner_text("main"), tab
        assert page.locator("main img, main script").count() == 0
    assert violations(page) == []


def test_a_span_is_rewarded_by_a_key(visit: Visits, filled: Store) -> None:
    """The reward is there at once, linked to the span; what becomes of a second one is told."""
    page = visit(filled, f"/traces/{'a' * 32}?span={2:016x}")

    page.keyboard.press("+")
    page.wait_for_selector("[role=status]")

    assert "Kept: a reward of 1" in page.inner_text("[role=status]")
    assert "given later" in page.inner_text(".spans")
    (step,) = filled.transitions(rollout_id="a" * 32)
    assert step.rewards == {"feedback": 1.0}
    page.keyboard.press("-")
    page.wait_for_url("**given=-1**")
    assert "its call already has a reward of that name" in page.inner_text(".spans")
    assert len(list(filled.sql("SELECT 1 FROM rewards"))) == 2
    page.keyboard.press("u")
    page.wait_for_selector(".note.good", state="detached")
    assert "it was retracted" in page.inner_text(".spans")
    assert "feedback -1" not in page.inner_text("#facts")
    assert violations(page) == []
    page.click(".credit button:has-text('Retract')")
    page.wait_for_selector(".credit", state="detached")
    assert list(filled.sql("SELECT 1 FROM rewards")) == []


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


def test_a_trace_on_a_small_screen_fits(visit: Visits, filled: Store) -> None:
    """Nothing is wider than the screen, in the dark too."""
    small = {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}
    page = visit(filled, f"/traces/{'b' * 32}?span={12:016x}", **small)

    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert violations(page) == []


@pytest.mark.pain(12)
def test_a_large_trace_is_read_in_parts(visit: Visits, store: Store) -> None:
    """Of thousands of rows those that are seen are there; what is far down comes by scrolling."""
    store.add([span(5_000, start_ns=0)])
    store.add(span(number, 5_000) for number in range(1, 2_000))
    page = visit(store, f"/traces/{'a' * 32}")

    assert "2,000 rows" in page.inner_text("main")
    assert page.locator("li[data-row]").count() < 600
    page.locator(".spans .chunk").last.scroll_into_view_if_needed()
    page.get_by_text("work 1999", exact=True).wait_for()
    page.goto(f"/traces/{'a' * 32}?span={1234:016x}")
    assert page.locator("li.selected a.name").inner_text().startswith("work 1234")


@pytest.mark.parametrize(
    ("path", "field", "fault"),
    [
        ("/traces?min_reward=high&agent=solo", "min_reward", "Not a number; use one such as 0.5."),
        ("/rollouts?since=soonish&agent=solo", "since", "Not a time; write 10m"),
        ("/transitions?gamma=much&agents=solo", "gamma", "Not a number; use one such as 0.5."),
        (
            "/transitions/export?format=sft&gamma=much&agents=solo",
            "gamma",
            "Not a number; use one such as 0.5.",
        ),
    ],
)
def test_a_fault_stands_beside_its_field(
    ask: Ask, store: Store, path: str, field: str, fault: str
) -> None:
    """The form keeps all that was written, so that one field is mended and not the address."""
    store.add([])
    answer = ask(store, path)
    (found,) = re.findall(
        rf'name="{field}" value="\w+" aria-invalid="true"[^>]*>(.*?)</label>', answer.text
    )

    assert answer.status == 400
    assert fault in found
    assert 'value="solo"' in answer.text


def test_addresses_hold_no_empty_fields(ask: Ask, store: Store) -> None:
    """A form sends every field; the page's address has those that say something."""
    store.add([])
    answer = ask(store, "/traces?q=Norway&agent=&model=&status=")

    assert answer.status == 303
    assert answer.headers["location"].endswith("/traces?q=Norway")


def test_a_conversation_is_the_rollouts_that_name_it(ask: Ask, store: Store) -> None:
    """As one row, with what was asked first; its address leads to its traces, its box to export."""
    for at, (letter, name) in enumerate((("a", 'ada "1"'), ("b", "bob"), ("c", 'ada "1"')), 1):
        named = {c.ROLLOUT_ID: f"rollout-{letter}", c.CONVERSATION_ID: name}
        given, told = said(("user", f"asked {letter}")), said(("assistant", f"told {letter}"))
        store.add([call(at, None, given, told, trace_id=letter * 32, attributes=named)])
    own = "/conversations/ada%20%221%22"

    moved, whole = ask(store, own), ask(store, "/conversations?q=ASKED+C")
    traces, rollout = ask(store, moved.headers["location"]), ask(store, "/traces?q=rollout-b")
    chosen = ask(store, "/export?of=conversations&rollout=ada+%221%22")
    label = ask(store, "/label?of=conversations&q=ASKED+C")

    assert (moved.status, moved.headers["location"]) == (308, "/traces?conversation=ada+%221%22")
    assert "1 conversation" in whole.words
    assert 'asked a ada "1" told c succeeded – 2 2 ' in whole.words
    assert f'href="{own}"' in whole.text
    assert set(re.findall(r'href="/traces/(\w)', traces.text)) == {"a", "c"}
    assert set(re.findall(r'href="/traces/(\w)', rollout.text)) == {"b"}
    assert chosen.headers["location"].endswith("?rollout_id=rollout-a%2Crollout-c")
    assert "Label 2 items" in label.words


def test_rows_are_chosen_compared_and_exported(visit: Visits, filled: Store) -> None:
    """By keys and boxes; from one the next is a key away; columns are a choice in the address."""
    page = visit(filled, "/traces?q=a&show=title&show=models&show=reward")
    assert page.locator("thead th").all_inner_texts()[1:] == ["Input", "Models", "Reward"]
    for key in "jxjx":
        page.keyboard.press(key)
    assert violations(page) == []
    page.keyboard.press("c")
    page.wait_for_url(f"**/traces/{'b' * 32}/diff?with={'a' * 32}")
    page.go_back()
    page.uncheck("tbody tr:first-child input")
    page.click("text=Export")
    page.wait_for_url(f"**/transitions/export?rollout_id={'a' * 32}")
    page.go_back()
    page.click("tbody tr:first-child td:last-child")
    page.wait_for_url(f"**/traces/{'b' * 32}")
    assert page.is_hidden("[data-step='-1']")
    page.keyboard.press("n")
    page.wait_for_url(f"**/traces/{'a' * 32}")
    assert page.is_hidden("[data-step='1']")
    page.keyboard.press("p")
    page.wait_for_url(f"**/traces/{'b' * 32}")
    assert violations(page) == []


def test_all_that_match_are_exported(ask: Ask, filled: Store) -> None:
    """Times as they stand, any other filter by the rollouts that it finds; else it is refused."""
    led, refused = (
        [ask(filled, f"/{path}") for path in paths]
        for paths in (
            ("export?of=traces&since=2h", "export?of=rollouts&q=france", "export?of=traces"),
            ("export?of=rollouts&agent=nobody", "export?of=rollouts&colour=red",
             "compare?rollout=a", "traces?show=colour"),
        )
    )  # fmt: skip

    places = [each.headers["location"].partition("/export?")[2] for each in led]
    assert places == ["since=2h", f"rollout_id={'a' * 32}", ""]
    assert [each.status for each in refused] == [400] * 4


def test_a_match_is_marked_and_the_answer_is_shown(ask: Ask, store: Store) -> None:
    """As text, whatever was searched for."""
    store.add(plan("a", 1, "Where is <b>Oslo</b>?", "In Norway, by oslo fjord."))

    found = ask(store, "/traces?q=oslo").text
    odd = ask(store, "/traces?q=%3Cb%3E").text

    assert "Where is &lt;b&gt;<mark>Oslo</mark>&lt;/b&gt;?" in found
    assert "In Norway, by <mark>oslo</mark> fjord." in found
    assert "<mark>&lt;b&gt;</mark>Oslo" in odd


def test_lists_are_sorted_by_their_heads(visit: Visits, store: Store) -> None:
    """By links, and so without a script; rollouts without a reward come last either way."""
    for rank, value in enumerate((0.25, 1.0, None, -0.5)):
        act(store, f"r{rank}", value)
    page = visit(store, "/rollouts", java_script_enabled=False)
    orders = []
    for _ in range(2):
        page.click("th a:has-text('Reward')")
        orders.append(page.locator("tbody .id").all_inner_texts())

    assert orders == [["r1", "r0", "r3", "r2"], ["r3", "r0", "r1", "r2"]]
    assert page.get_attribute("th:has-text('Reward')", "aria-sort") == "ascending"
