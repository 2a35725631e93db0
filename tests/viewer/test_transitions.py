"""The page of transitions: which, why, what was dropped, and the same at a shell."""

import http.client
import json
import re
import shlex
import shutil
import time
from html import unescape
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import pytest
from tests.acting import act
from tests.command import invoke
from tests.viewer.browsing import KEY, Visits, violations
from tests.viewer.client import Asking, AskingOf
from tests.viewer.spans import call, said

from lightning_otel import Store, auto_trace, emit_action, emit_reward
from lightning_otel.errors import ConfigError
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def fail(number: int) -> Span:
    """A call that failed, in a trace of its own."""
    own = {c.ROLLOUT_ID: "failing", c.AGENT_NAME: "writer", c.ERROR_TYPE: "Oops"}
    words = said(("user", HOSTILE)), said(("assistant", "yes"))
    return call(number, None, *words, trace_id=f"{number:032x}", attributes=own, status="ERROR")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Three rewarded steps of one agent, one without of another, and two failed calls."""
    return fill(Store(tmp_path_factory.mktemp("filled") / "traces.duckdb"))


def fill(store: Store) -> Store:
    """The same, in a store that a test changes."""
    for number, reward in enumerate((0.0, 0.5, 1.0, None)):
        agent = "planner" if reward is None else "solver"
        words = {"seen": f"question {number} {HOSTILE}", "said": f"answer {number}"}
        act(store, f"r{number}", reward, agent=agent, mode="val", **words)
    store.add(map(fail, (1, 2)))
    store.writer().seal()
    return store


def ids(words: str) -> list[str]:
    """The rollouts that the rows of a page name, in its order."""
    return re.findall(r"(?:solver|planner|nobody|–) – (r\d+)\b", words)


def test_rows_tell_what_was_seen_done_and_earned_by_what(asked: Asking) -> None:
    """The newest rollout first; the rule that placed a reward beside it; what is said is text."""
    page = asked.get("/transitions")

    assert page.status == 200
    assert ids(page.words) == ["r3", "r2", "r1", "r0"]
    assert "4 transitions" in page.words
    assert f"#0 question 2 {HOSTILE} answer 2 1 previous done text – solver – r2" in page.words
    assert f"#0 question 3 {HOSTILE} answer 3 – – done" in page.words
    assert "<script>alert" not in page.text
    assert "<img src=x" not in page.text


SELECTIONS: Final[list[tuple[dict[str, Any], list[str]]]] = [
    ({"agents": "solv*"}, ["r2", "r1", "r0"]),
    ({"agents": "!solver"}, ["r3"]),
    ({"rewarded": False}, ["r3"]),
    ({"min_reward": 0.5, "max_reward": 0.5}, ["r1"]),
    ({"rollout_id": "r2", "credit": "discounted", "gamma": 0.5}, ["r2"]),
    ({"reward": "nothing", "rewarded": True}, []),
    ({"advantage": "grpo", "include_incomplete": True}, ["r3", "r2", "r1", "r0"]),
    (
        {
            "mode": "val",
            "capture": "exact",
            "since": "2000-01-01",
            "received": False,
            "truncated": False,
        },
        [],
    ),
]
"""Options, by the names that every door has for them, and the rollouts whose steps they mean."""
_WORDS: Final = {True: "yes", False: "no"}


@pytest.mark.parametrize(("options", "rollouts"), SELECTIONS)
def test_every_door_selects_the_same(
    filled: Store, asked: Asking, options: dict[str, Any], rollouts: list[str]
) -> None:
    """Python, a page, the command that it shows, and the API."""
    query = urlencode({name: _WORDS.get(value, value) for name, value in options.items()})
    page = asked.get(f"/transitions?{query}")
    rows = asked.get(f"/v1/transitions?{query}", Accept="application/x-ndjson")
    (command,) = re.findall(r'class="command">([^<]+)<', page.text)
    shell = shlex.split(unescape(command))
    told = invoke(*shell[1:3], "-", *shell[4:])
    steps = list(filled.transitions(**options))

    assert ids(page.words) == rollouts
    assert told.returncode == (0 if rollouts else 3), told.stderr
    for text in (told.stdout, rows.text):
        answers = [json.loads(line) for line in text.splitlines()]
        assert sorted((row["rollout_id"], row["reward"]) for row in answers) == sorted(
            (step.rollout_id, step.reward) for step in steps
        )
    assert sorted({step.rollout_id for step in steps}, reverse=True) == rollouts


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"agent": "x"}, "agents"), ({"rollout": "r1"}, "rollout_id"),
        ({"incomplete": "yes"}, "include_incomplete"), ({"credit": "magic"}, "previous"),
        ({"gamma": 7}, "between 0 and 1"), ({"adapter": "nobody"}, "no adapter 'nobody'"),
    ],
)  # fmt: skip
def test_every_door_refuses_the_same(
    filled: Store, asked: Asking, options: dict[str, Any], words: str
) -> None:
    """An unknown option is told the nearest one, and what cannot be meant is named."""
    with pytest.raises(ConfigError, match=words):
        filled.transitions(**options)
    for path in ("transitions", "transitions/export", "transitions/download", "v1/transitions"):
        answer = asked.get(f"/{path}?{urlencode(options)}", Accept="*/*")
        assert (answer.status, words in unescape(answer.text)) == (400, True), path


def test_credit_is_a_setting_of_the_address(store: Store, asking: AskingOf) -> None:
    """Another rule gives other rewards."""
    with auto_trace(store=store, rollout_id="long", agent="solver"):
        emit_action("first")
        emit_action("second")
        emit_reward(1.0)
    at, asked = "/transitions?rollout_id=long", asking(store)

    plain, discounted = asked.get(at).words, asked.get(f"{at}&credit=discounted&gamma=0.5").words

    assert "first – – text" in plain
    assert "second 1 previous done" in plain
    assert "first 0.5 " in discounted


def test_every_dropped_call_is_listed_with_its_reason(store: Store, asking: AskingOf) -> None:
    """A few of each reason, and all of the one that is asked for, a part at a time."""
    store.add(map(fail, range(1, 250)))
    asked = asking(store)

    def listed(text: str) -> list[str]:
        return re.findall(r"<li>\s*<a class=\"id\"[^>]*>(\w{16})</a>", text)

    page = asked.get("/transitions")
    (link,) = re.findall(r'href="([^"]*reason=[^"]*)#reason">Show more', page.text)
    whole = asked.get(unescape(link)).text
    second = asked.get(f"{unescape(link)}&dropped=2").text

    assert "249 calls dropped" in page.words
    assert "Oops" in page.words
    assert (len(listed(page.text)), len(listed(whole)), len(listed(second))) == (5, 200, 49)
    assert {*listed(whole), *listed(second)} == {f"{n:016x}" for n in range(1, 250)}


@pytest.mark.pain(13)
def test_pages_tell_the_whole_count(store: Store, asking: AskingOf) -> None:
    """No step is on two pages or on none."""
    with auto_trace(store=store, rollout_id="many"):
        for number in range(107):
            emit_action(f"did {number}.")
    asked = asking(store)

    pages = [asked.get(f"/transitions?page={number}").words for number in (1, 2, 3, 4)]
    told = [re.findall(r"did (\d+)\.", each) for each in pages]

    assert [len(each) for each in told] == [50, 50, 7, 0]
    assert "101–107 of 107 transitions" in pages[2]
    assert sorted(int(each) for one in told for each in one) == list(range(107))


def test_rollouts_beyond_what_is_read_are_counted(
    store: Store, asking: AskingOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is of the newest rollouts, says of how many, and the older ones are a link away."""
    monkeypatch.setattr("lightning_otel.serve.viewer.transitions.ROLLOUTS", 3)
    for number in range(8):
        act(store, f"r{number}")
    asked = asking(store)

    newest, last, every, one = (
        asked.get(f"/transitions{query}").words
        for query in ("", "?after=6", "?rollouts=all", "?rollout_id=r1")
    )

    assert "Rollouts 1 to 3 of 8 , the newest first. Older · Show all" in newest
    assert ids(newest) == ["r7", "r6", "r5"]
    assert "Rollouts 7 to 8 of 8" in last
    assert ids(last) == ["r1", "r0"]
    assert len(ids(every)) == 8
    assert "the newest first" not in every + one


def test_command_names_the_instant_the_page_means(asked: Asking) -> None:
    """In an address a time without a zone is UTC, at a shell the machine's: the command says it."""
    page = asked.get("/transitions?since=2026-11-01&until=2026-11-01T13:00%2B01:00")

    assert "--since=2026-11-01T00:00:00.000000000Z" in page.words
    assert "--until=2026-11-01T12:00:00.000000000Z" in page.words
    assert 'name="since" value="2026-11-01"' in page.text


@pytest.fixture
def asked(filled: Store, asking: AskingOf) -> Asking:
    return asking(filled)


def test_downloads_are_what_export_writes(filled: Store, asked: Asking, tmp_path: Path) -> None:
    """In every format, as JSON lines and as Parquet; the page before says how many, and why."""
    for name in ("triplets", "sft", "tokens"):
        place = tmp_path / f"{name}.jsonl"
        done = filled.export(name, place, agents=["solver"])
        page = asked.get(f"/transitions/export?format={name}&agents=solver")
        rows = asked.get(f"/transitions/download?format={name}&agents=solver")

        assert (page.status, rows.status) == (200, 200)
        assert rows.body == place.read_bytes()
        assert rows.headers["content-disposition"] == f'attachment; filename="{name}.jsonl"'
        assert f"{done.rows} row{'' if done.rows == 1 else 's'} will be written" in page.words
        for reason in done.left_out:
            assert reason in page.words

    packed = asked.get("/transitions/download?format=kto&agents=solver&as=parquet")
    (tmp_path / "rows.parquet").write_bytes(packed.body)
    con = filled.connect()
    assert con.read_parquet(str(tmp_path / "rows.parquet")).aggregate("count(*)").fetchall() == [
        (3,)
    ]


def test_a_download_that_cannot_begin_is_refused_as_its_page_is(
    store: Store, asking: AskingOf
) -> None:
    """A store that cannot be read is said to be so before any row, and may be asked again."""
    asked, layout = asking(fill(store)), store.layout
    assert layout is not None
    shutil.rmtree(layout.data)

    for kind in ("jsonl", "parquet"):
        refused = asked.get(f"/transitions/download?format=triplets&as={kind}")
        assert refused.status == asked.get("/transitions/export?format=triplets").status == 503


def test_downloads_come_in_parts_and_end_with_their_reader(
    store: Store, asking: AskingOf, tmp_path: Path
) -> None:
    """Rows are sent as they are made; readers that go away make room for others."""
    for number in range(30):
        with auto_trace(store=store, rollout_id=f"r{number}"):
            for _ in range(20):
                emit_action("x" * 2000)
    store.export("triplets", tmp_path / "rows.jsonl")
    asked = asking(store)
    path = "/transitions/download?format=triplets"

    whole = asked.get(path)
    for _ in range(5):
        connection = http.client.HTTPConnection(asked.host, timeout=30)
        connection.request("GET", path, headers={"Authorization": f"Bearer {KEY}"})
        assert connection.getresponse().read(1000)
        connection.close()
    statuses = set()
    for _ in range(20):  # a reader's end is noticed at the next part
        statuses.add(asked.get(path).status)
        if 200 in statuses:
            break
        time.sleep(0.2)

    assert whole.body == (tmp_path / "rows.jsonl").read_bytes()
    assert len(whole.body) > 1_000_000
    assert 200 in statuses


def test_export_takes_a_formats_own_options(asked: Asking) -> None:
    """And refuses those it has not, and values that are none."""
    page = asked.get("/transitions/export?format=kto&threshold=0.9")
    rows = asked.get("/transitions/download?format=kto&threshold=0.9")
    (command,) = re.findall(r'class="command">([^<]+)<', page.text)

    labels = [json.loads(line)["label"] for line in rows.body.splitlines()]
    assert sorted(labels) == [False, False, True]
    assert "--threshold=0.9" in unescape(command)
    for query in ("format=kto&gap=1", "format=kto&threshold=x", "format=none",
                  "format=kto&as=exe"):  # fmt: skip
        assert asked.get(f"/transitions/download?{query}").status == 400
        assert "as=exe" in query or asked.get(f"/transitions/export?{query}").status == 400


def test_the_export_page_counts_what_came_since(store: Store, asking: AskingOf) -> None:
    """Its numbers are those of the store as it is, at every visit."""
    asked = asking(fill(store))
    for number in (4, 4, 5, 6):
        if number > 4:
            act(store, f"later{number}")
        page = asked.get("/transitions/export?format=triplets")
        assert f"{number} rows will be written" in page.words


def test_dropped_call_leads_to_its_trace(visit: Visits, filled: Store) -> None:
    """In a browser: from the count to the reason, the call, and the trace it lies in."""
    page = visit(filled, "/transitions")
    wrong = violations(page)
    page.get_by_role("link", name="2 calls dropped").click()
    page.get_by_text("2 calls: ").click()
    link = page.locator("details[open] .ids a").first
    address = link.get_attribute("href")
    link.click()

    assert wrong == []
    assert re.fullmatch(r"/v-[\w-]{22}/traces/0{31}[12]\?span=0{15}[12]", address)
    page.wait_for_url(f"**{address}")
