"""The SQL page: what it answers, shows, sends as a file and refuses."""

import csv
import http.client
import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.cli.conftest import FORMULAS
from tests.viewer.browsing import Visits, violations

from lightning_otel import Store
from lightning_otel.serve import streaming
from lightning_otel.serve.viewer import sql
from lightning_otel.types import Span


@pytest.fixture
def filled(store: Store) -> Store:
    """A store of three hundred spans."""
    store.add(
        Span(f"{n + 1:032x}", f"{n + 1:016x}", None, f'n{n},"x"', 1000 + n, 2000)
        for n in range(300)
    )
    return store


def test_a_statement_is_answered(visit: Visits, filled: Store, shot: Callable[..., None]) -> None:
    """Written and run by keys; the address holds it, and the rows that are not shown are told."""
    page = visit(filled, "/sql")
    page.keyboard.press("/")
    page.keyboard.type("SELECT name, span_id, NULL AS nothing FROM spans ORDER BY start_ns")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".answer")
    told = page.inner_text("main")
    shot(page)

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
def test_what_does_more_than_read_is_refused(
    ask: Callable[..., Any], filled: Store, text: str
) -> None:
    """With a page that says why, or a file that is none, and the status that it is refused."""
    query = urlencode({"q": text})

    page, file = ask(filled, f"/sql?{query}"), ask(filled, f"/sql/answer.csv?{query}")

    assert (page.status, file.status) == (400, 400)
    assert b"<h1>" in page.body
    assert len(filled.spans().rows()) == 300


def test_a_csv_file_holds_no_formula(ask: Callable[..., Any], filled: Store) -> None:
    """Text that a spreadsheet would run has a quote before it; numbers have none."""
    answer = ask(filled, f"/sql/answer.csv?{urlencode({'q': FORMULAS})}")

    assert answer.body.decode().splitlines() == ["'=a,n,t,u,v", "'=1+1,-1.5,'-x,'@y,a=b"]


def test_a_file_that_would_be_cut_is_broken_off(
    ask: Callable[..., Any], filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nobody takes the first rows for all of them."""
    monkeypatch.setattr(sql, "FILE_LIMITS", replace(sql.FILE_LIMITS, rows=10))
    at_once = ask(filled, "/sql/answer.jsonl?q=FROM+spans")
    monkeypatch.setattr(streaming, "PART_BYTES", 100)

    assert at_once.status == 400
    with pytest.raises((http.client.IncompleteRead, http.client.RemoteDisconnected)):
        ask(filled, "/sql/answer.jsonl?q=FROM+spans")
