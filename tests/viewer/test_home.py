"""The first page and the SQL page: what they show, answer and refuse, and what they weigh."""

import csv
import http.client
import io
import json
import re
import time
from dataclasses import replace
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest
from tests.cli.conftest import FORMULAS
from tests.viewer.browsing import KEY, Visits, violations
from tests.viewer.client import Ask
from tests.viewer.spans import call, said, span

from lightning_otel import Store, auto_trace, emit_message, emit_reward
from lightning_otel.serve import streaming
from lightning_otel.serve.viewer import sql
from lightning_otel.serve.viewer.home import share_of
from lightning_otel.types import Span
from lightning_otel.types import conventions as c


def rollout(rank: int, reward: float, version: str = "v1") -> list[Span]:
    own = {c.ROLLOUT_ID: f"r{rank}", c.AGENT_NAME: "calc", c.RESOURCE_VERSION: version}
    first, place = rank * 8 + 1, {"trace_id": f"{rank + 1:032x}"}
    asked = said(("user", "What is 6*7?"))
    used = {c.REQUEST_MODEL: "m", c.INPUT_TOKENS: 5, c.OUTPUT_TOKENS: 2}
    earned = {c.REWARD_VALUE: reward, c.REWARD_NAME: c.PRIMARY_REWARD}
    return [
        span(first, name=c.SPAN_ROLLOUT, attributes={**own, c.TASK: '"What is 6*7?"'}, **place),
        call(first + 1, first, asked, said(("assistant", "42")), attributes=own | used, **place),
        span(first + 2, first, name=c.SPAN_ANNOTATION, attributes=own | earned, **place),
    ]


@pytest.fixture
def filled(store: Store) -> Store:
    for rank in range(30):
        store.add(rollout(rank, rank % 3 / 2, f"v{rank // 10}"))
    return store


def test_home_shows_curve_funnel_and_newest(visit: Visits, filled: Store) -> None:
    """Light enough, and what it says is what there is; the address holds the choice of a curve."""
    page = visit(filled, "/?by=version")
    page.wait_for_selector(".tiles")
    page.wait_for_selector("svg.curve")
    page.wait_for_selector(".funnel")
    sizes = page.evaluate(
        "performance.getEntriesByType('navigation').concat(performance.getEntriesByType('resource'))"
        ".map((each) => each.transferSize)"
    )

    assert sum(sizes) <= 300_000
    assert page.inner_text(".funnel tbody").split()[:2] == ["Spans", "90"]
    assert "90 ended = 90 stored" in page.inner_text("main")
    assert page.locator("#newest tbody tr").count() == 10
    assert "10 of 30" in page.inner_text("#newest")
    assert "30 values · mean of each version" in page.text_content("svg.curve")
    page.click("text=by time")
    page.wait_for_selector("svg.curve")
    assert "by=time" in page.url


def test_home_draws_versions_side_by_side(visit: Visits, store: Store) -> None:
    """What a canary earns is not hidden in the mean of all; its line has a name and dashes."""
    for rank in range(40):
        store.add(rollout(rank, float(rank % 4 == 0), "canary" if rank % 4 == 0 else "stable"))
    page = visit(store)
    page.wait_for_selector("svg.curve")

    told = page.text_content("svg.curve")
    dashes = [
        page.eval_on_selector(
            f"svg.curve .mean.{line}", "(each) => getComputedStyle(each).strokeDasharray"
        )
        for line in ("s0", "s1")
    ]

    assert "canary · 10 values" in told
    assert "stable · 30 values" in told
    assert dashes[0] == "none"
    assert dashes[1] != "none"


def test_code_of_the_empty_page_records(ask: Ask, store: Store) -> None:
    """As it stands there, but for the agent, into the store that is looked at."""
    store.add([])
    page = unescape(ask(store, "/").body.decode())
    (code,) = re.findall(r"<pre>(import lightning_otel.*?)</pre>", page, re.DOTALL)

    exec(code, {"your_agent": lambda: emit_reward(1.0)})

    (rollout,) = store.rollouts()
    assert rollout["reward"] == 1.0
    assert b"No traces yet" not in ask(store, "/").body


def test_home_lives_on(visit: Visits, store: Store) -> None:
    """An empty store says how to begin; what comes is shown without a touch, the newest first."""
    store.add([])
    page = visit(store)
    begins = page.inner_text("main")
    page.wait_for_selector("[data-live-state]:has-text('live')")
    store.add(rollout(0, 1.0))
    page.wait_for_selector("#newest tbody tr")
    page.wait_for_selector("svg.curve")
    store.add(rollout(1, 0.0))
    page.wait_for_selector("#newest tbody tr:nth-child(2)")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/traces/*")

    assert "lightning-otel demo" in begins
    assert "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:" in begins
    assert page.url.endswith(f"/traces/{2:032x}")


def test_pages_fit_a_small_screen(visit: Visits, filled: Store) -> None:
    """Nothing is wider than a telephone but tables, which scroll by themselves."""
    page = visit(filled, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    wide = {}
    for path in ("/", "/transitions", "/rollouts", "/sql?q=FROM+calls", "/settings"):
        page.goto(path)
        page.wait_for_load_state()
        wide[path] = page.evaluate("document.documentElement.scrollWidth - innerWidth")

    assert {path: width for path, width in wide.items() if width > 0} == {}


def test_pages_work_without_the_script(visit: Visits, filled: Store) -> None:
    """Parts are links then, and everything else is there."""
    page = visit(filled, java_script_enabled=False)
    page.click("text=See the funnel")
    funnel = page.inner_text("main")

    assert "Transitions" in funnel
    page.click("text=30 text only")
    assert page.url.endswith("/transitions?capture=text")
    assert KEY not in page.url


@pytest.mark.parametrize(
    ("number", "whole", "share"),
    [(999_999, 1_000_000, "99.9%"), (3, 3, "100%"), (0, 3, "0.0%"), (0, 0, "")],
)
def test_a_share_is_never_rounded_up_to_all(number: int, whole: int, share: str) -> None:
    """One of a million that is missing is missing."""
    assert share_of(number, whole) == share


def test_home_is_there_soon(ask: Ask, filled: Store) -> None:
    """Once warm, within the time that is allowed to the first page."""
    ask(filled, "/")

    began = time.perf_counter()
    ask(filled, "/")
    first_s = time.perf_counter() - began
    began = time.perf_counter()
    ask(filled, "/")

    assert min(first_s, time.perf_counter() - began) <= 1.5


def rollouts_at(place: int, start_ns: int, *, model: str, status: str = "OK") -> list[Span]:
    times = {"start_ns": start_ns, "end_ns": start_ns + 1_000_000_000}
    error = {"status": status, "status_message": "disk full" if status == "ERROR" else ""}
    made = rollout(place, 0.5)
    made[0] = replace(made[0], **times, **error)
    used = {**made[1].attributes, c.REQUEST_MODEL: model, c.INPUT_TOKENS: 1_000_000}
    made[1] = replace(made[1], **times, attributes=used)
    made[2] = replace(made[2], **dict.fromkeys(times, times["end_ns"]))
    return made


def test_tiles_show_the_last_day_and_the_day_before(
    ask: Ask, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page, trace and API have one view; a model without a price costs nothing known."""
    now_ns, day_ns = time.time_ns(), 86_400 * 1_000_000_000
    for rank in range(9):
        model, status = ("gpt-4o", "OK") if rank else ("own", "ERROR")
        store.add(rollouts_at(rank, now_ns - 10**10 * (rank + 1), model=model, status=status))
    store.add(before := rollouts_at(9, now_ns - day_ns - 10**10, model="own"))
    trace = f"/traces/{before[0].trace_id}"

    words = ask(store, "/home/tiles").words
    unknown = ask(store, trace).words
    found = json.loads(ask(store, "/v1/summary", Accept="application/json").body)
    prices = tmp_path / "prices.csv"
    prices.write_text("model,input,output\nown,1,0\ngpt*,2,0\n")
    monkeypatch.setenv("LIGHTNING_OTEL_PRICES", str(prices))
    own, known = ask(store, "/home/tiles").words, ask(store, trace).words
    prices.write_text("model,input,output\nown,free,0\n")
    broken, shown = ask(store, "/home/tiles"), ask(store, trace)

    assert "Rollouts 9 before: 1" in words
    assert "Mean reward 0.5 ± 0 (n = 9) before: 0.5" in words
    assert "Error rate 11.1% before: 0.0%" in words
    assert "Latency p95 1.0 s" in words
    assert "Cost $20.00 1 call without price before: –" in words
    assert "No price: own" in words
    assert "Failures All failures" in words
    assert "error disk full – calc own 1 1 of 1" in words
    assert found["now"]["cost"] == pytest.approx(20.00016)
    assert (found["now"]["unpriced_models"], found["before"]["cost"]) == (["own"], None)
    assert "Cost $17.00 before: $1.00" in own
    assert (broken.status, "not a table of prices" in broken.words) == (400, True)
    assert ["$1.00" in text for text in (unknown, known, shown.words)] == [False, True, False]
    assert (shown.status, "$" in unknown) == (200, False)
    assert ask(store, "/v1/summary?period=1y", Accept="application/json").status == 400


@pytest.fixture
def spread(store: Store) -> Store:
    store.add(
        Span(f"{n + 1:032x}", f"{n + 1:016x}", None, f'n{n},"x"', 1000 + n, 2000)
        for n in range(300)
    )
    return store


def test_a_statement_is_answered(visit: Visits, spread: Store) -> None:
    """Written and run by keys; the address holds it, and the rows that are not shown are told."""
    page = visit(spread, "/sql")
    page.keyboard.press("/")
    page.keyboard.type("SELECT name, span_id, NULL AS nothing FROM spans ORDER BY start_ns")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".answer")
    told = page.inner_text("main")

    assert "q=SELECT+name" in page.url
    assert page.locator(".answer tbody tr").count() == sql.LIMITS.rows
    assert "cut off" in told
    assert 'n0,"x"' in told
    assert violations(page) == []
    with page.expect_download() as csv_info:
        page.click("text=CSV")
    with page.expect_download() as json_info:
        page.click("text=JSON lines")
    rows = list(csv.reader(io.StringIO(csv_info.value.path().read_text(), newline="")))
    lines = json_info.value.path().read_text().splitlines()
    assert rows[0] == ["name", "span_id", "nothing"]
    assert (len(rows), rows[1]) == (301, ['n0,"x"', f"{1:016x}", ""])
    assert [json.loads(line)["name"] for line in lines] == [f'n{n},"x"' for n in range(300)]


@pytest.mark.parametrize(
    "text", ["DROP VIEW spans", "SELECT * FROM read_csv('/etc/passwd')", "\0", "x" * 20_001]
)
def test_what_does_more_than_read_is_refused(ask: Ask, spread: Store, text: str) -> None:
    """With a page that says why, or a file that is none, and the status that it is refused."""
    query = urlencode({"q": text})

    page, file = ask(spread, f"/sql?{query}"), ask(spread, f"/sql/answer.csv?{query}")

    assert (page.status, file.status) == (400, 400)
    assert b"<h1>" in page.body
    assert len(spread.spans().rows()) == 300


def test_a_csv_file_holds_no_formula(ask: Ask, spread: Store) -> None:
    """Text that a spreadsheet would run has a quote before it; numbers have none."""
    answer = ask(spread, f"/sql/answer.csv?{urlencode({'q': FORMULAS})}")

    assert answer.body.decode().splitlines() == ["'=a,n,t,u,v", "'=1+1,-1.5,'-x,'@y,a=b"]


def test_a_file_that_would_be_cut_is_broken_off(
    ask: Ask, spread: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nobody takes the first rows for all of them."""
    monkeypatch.setattr(sql, "FILE_LIMITS", replace(sql.FILE_LIMITS, rows=10))
    at_once = ask(spread, "/sql/answer.jsonl?q=FROM+spans")
    monkeypatch.setattr(streaming, "PART_BYTES", 100)

    assert at_once.status == 400
    with pytest.raises((http.client.IncompleteRead, http.client.RemoteDisconnected)):
        ask(spread, "/sql/answer.jsonl?q=FROM+spans")


def test_home_warns_of_spans_without_a_call(ask: Ask, store: Store) -> None:
    """Beside the counts, with what to do."""
    with auto_trace(store=store):
        emit_message("hello")

    words = ask(store, "/home/funnel").words

    assert "2 spans, but no request to a model" in words
    assert "lightning-otel run --debug" in words
