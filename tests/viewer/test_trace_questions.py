"""Traces by plain HTTP: absurd questions, foreign forms, and eight agents that write meanwhile."""

import http.client
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from tests.viewer.test_tree import TRACE, call, said, span
from tests.viewer.visiting import KEY

from lightning_otel import Store

FORM = "application/x-www-form-urlencoded"


class Answer(NamedTuple):
    """What came back."""

    status: int
    text: str
    location: str


Ask = Callable[..., Answer]


@pytest.fixture
def ask(store: Store, served: Callable[..., str]) -> Ask:
    """A function that asks a served store, with its key, for a page."""
    store.add([span(1), call(2, 1, said(("user", "hi")), said(("assistant", "ho")))])
    place = urlsplit(served(store, "", key=KEY)).netloc

    def get(path: str, body: str | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection(place, timeout=30)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        kind = {} if body is None else {"Content-Type": FORM, "Sec-Fetch-Site": "same-origin"}
        given = {"Cookie": "", "Authorization": f"Bearer {KEY}", "Accept": "text/html"}
        method = "GET" if body is None else "POST"
        connection.request(method, path, body, {**given, **kind, **named})
        answer = connection.getresponse()
        found = Answer(
            answer.status, answer.read().decode(), answer.getheader("location", "") or ""
        )
        connection.close()
        return found

    return get


ABSURD = {
    "/traces?status=x": 400,
    "/traces?rewarded=maybe": 400,
    "/traces?min_reward=NaN": 400,
    "/traces?min_reward=1e999": 400,
    "/traces?max_reward=--1": 400,
    "/traces?since=yesterday": 400,
    "/traces?after=x": 400,
    "/traces?after=99999999999999999999-a": 400,
    "/traces?q=%00": 400,
    "/traces?q=" + "a" * 3_000: 400,
    "/traces?origin=mars": 400,
    "/traces?q='%20OR%201=1%20--%20%25": 200,
    "/traces?agent=[&model=]&version=%25@%22": 200,
    "/traces/none": 404,
    "/traces/%27%22%3Cx%3E": 404,
    f"/traces/{TRACE}?tab=none": 400,
    f"/traces/{TRACE}?first=-1": 400,
    f"/traces/{TRACE}?first=999999999": 200,
    f"/traces/{TRACE}?tab=chat&first=999999999": 200,
    f"/traces/{TRACE}?span=%3Cscript%3E": 200,
    f"/traces/{TRACE}?closed={','.join(['a'] * 500)}": 200,
    f"/traces/{TRACE}/rows?first=999999": 200,
    f"/traces/{TRACE}/rows?first=x": 400,
    f"/traces/{TRACE}/spans/none": 404,
    f"/traces/{TRACE}/spans/none/tokens": 404,
    f"/traces/{TRACE}/spans/{1:016x}/text?side=output&message=-99&part=0": 404,
    f"/traces/{TRACE}/spans/{1:016x}/tokens": 200,
    f"/traces/{TRACE}/raw": 200,
}


def test_absurd_questions_are_refused_or_answered(ask: Ask) -> None:
    """A clear refusal or a safe page, never a fault."""
    found = {path: ask(path).status for path in ABSURD}

    assert found == ABSURD


def test_a_form_gives_a_reward_once(ask: Ask, store: Store) -> None:
    """However often it is sent; what cannot be said, and forms of other sites, give none."""
    at = f"/traces/{TRACE}/spans/{2:016x}/reward"
    own = [ask(at, "reward=1&feedback_id=f&tab=waterfall") for _ in range(2)]
    told = ask(at, "rating=4&satisfied=yes&text=well+done&feedback_id=g")
    refused = [
        ask(at, "reward=5").status,
        ask(at, "").status,
        ask(at, "rating=9").status,
        ask(at, "rating=x").status,
        ask(at, "satisfied=maybe").status,
        ask(at, "reward=1&feedback_id=f", Sec_Fetch_Site="cross-site").status,
        ask(at, "reward=1", Origin="http://evil.example").status,
        ask(f"/traces/{TRACE}/spans/none/reward", "reward=1").status,
        ask(at).status,
    ]

    assert [(each.status, each.location) for each in own] == 2 * [
        (303, f"/traces/{TRACE}?span={2:016x}&given=1&tab=waterfall")
    ]
    assert told.status == 303
    assert refused == [400, 400, 400, 400, 400, 403, 403, 404, 405]
    values = [row["value"] for row in store.sql("SELECT value FROM rewards ORDER BY value")]
    assert values == [pytest.approx(0.8), 1.0]


WRITER = """
    import sys
    import lightning_otel as lo

    for number in range(40):
        with lo.auto_trace(store=sys.argv[1], agent="writer", task=f"task {number}"):
            lo.emit_action("answer", str(number))
            lo.emit_reward(number / 40)
"""


def test_the_list_is_right_while_eight_agents_write(ask: Ask, store: Store) -> None:
    """Every answer is a page, counts only grow, and in the end every trace is counted."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), store.name]
    writers = [subprocess.Popen(command) for _ in range(8)]
    counts, seen = [], []
    try:
        while any(writer.poll() is None for writer in writers):
            page = ask("/traces")
            seen.append(page.status)
            counts.append(total(page.text))
            seen.append(ask(f"/traces/{TRACE}").status)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait(10)

    assert set(seen) <= {200}
    assert counts == sorted(counts)
    assert [writer.returncode for writer in writers] == [0] * 8
    assert total(ask("/traces").text) == 8 * 40 + 1


def total(page: str) -> int:
    """The whole count that a list tells."""
    found = page.partition('id="traces"')[2].partition("<strong>")[2].partition(" trace")[0]
    return int(found.replace(",", ""))
