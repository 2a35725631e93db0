"""The page of transitions: which, why, what was dropped, and the same at a shell."""

import http.client
import json
import re
import shlex
import time
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.viewer.asking import Asking
from tests.viewer.visiting import KEY, Visits, violations

from lightning_otel import Store, auto_trace, emit_action, emit_observation, emit_reward
from lightning_otel import conventions as c
from lightning_otel.cli.export import export
from lightning_otel.errors import ConfigError, NotFoundError
from lightning_otel.serve.viewer import transitions
from lightning_otel.serve.viewer.selecting import chosen
from lightning_otel.types import Span

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def call(number: int, rollout: str, **attributes: Any) -> Span:
    """A call of a model; one that failed if it has an error."""
    said = json.dumps([{"role": "user", "parts": [{"type": "text", "content": HOSTILE}]}])
    told = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "yes"}]}])
    given = {
        c.OPERATION: c.CHAT,
        c.ROLLOUT_ID: rollout,
        c.AGENT_NAME: "writer",
        c.INPUT_MESSAGES: said,
        c.OUTPUT_MESSAGES: told,
    }
    status = "ERROR" if attributes.pop("failed", False) else "OK"
    return Span(
        trace_id=f"{number:032x}", span_id=f"{number:016x}", parent_span_id=None, name="chat m",
        start_ns=number * 10**9, end_ns=number * 10**9 + 1000, status=status,
        attributes={**given, **attributes},
    )  # fmt: skip


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Three rewarded steps of one agent, one without of another, and two failed calls."""
    return fill(Store(tmp_path_factory.mktemp("filled") / "traces.duckdb"))


def fill(store: Store) -> Store:
    """The same, in a store that a test changes."""
    for number, reward in enumerate((0.0, 0.5, 1.0, None)):
        agent = "planner" if reward is None else "solver"
        with auto_trace(store=store, rollout_id=f"r{number}", agent=agent, mode="val"):
            emit_observation(f"question {number} {HOSTILE}")
            emit_action(f"answer {number}")
            if reward is not None:
                emit_reward(reward)
    store.add([call(n, "failing", failed=True, **{c.ERROR_TYPE: "Oops"}) for n in (1, 2)])
    store.writer().seal()
    return store


def read(store: Store, number: int = 1, reason: str = "", **query: str) -> Any:
    """What the page shows."""
    return transitions.read(store, chosen(query, store), number, reason)


def test_rows_tell_what_was_seen_done_and_earned_by_what(filled: Store) -> None:
    """The newest rollout first; the rule that placed a reward beside it."""
    found = read(filled)

    assert [row["rollout_id"] for row in found["rows"]] == ["r3", "r2", "r1", "r0"]
    assert [row["reward"] for row in found["rows"]] == [None, 1.0, 0.5, 0.0]
    assert found["rows"][1]["observation"] == f"question 2 {HOSTILE}"
    assert found["rows"][1]["action"] == "answer 2"
    assert [credit.by for credit in found["rows"][1]["credits"]] == ["previous"]
    assert found["rows"][0]["credits"] == ()
    assert found["total"] == 4


@pytest.mark.parametrize(
    ("query", "rollouts"),
    [
        ({"agents": "solv*"}, ["r2", "r1", "r0"]),
        ({"agents": "!solver"}, ["r3"]),
        ({"rewarded": "no"}, ["r3"]),
        ({"min_reward": "0.5", "max_reward": "0.5"}, ["r1"]),
        ({"rollout": "r2"}, ["r2"]),
        ({"mode": "val", "capture": "exact", "since": "2000-01-01"}, []),
    ],
)  # fmt: skip
def test_fields_select_as_the_store_does(
    filled: Store, query: dict[str, str], rollouts: list[str]
) -> None:
    """And the command that is shown writes the same rows at a shell."""
    found = read(filled, **query)
    words = shlex.split(chosen(query, filled).command(filled, "triplets", "-"))
    said = CliRunner().invoke(export, words[2:])

    assert [row["rollout_id"] for row in found["rows"]] == rollouts
    assert found["total"] == len(rollouts)
    exported = [json.loads(line) for line in said.stdout.splitlines()]
    assert said.exit_code == 0, said.output
    assert sorted(row["rollout_id"] for row in exported) == sorted(rollouts)


def test_credit_is_a_setting_of_the_address(store: Store) -> None:
    """Another rule gives other rewards."""
    with auto_trace(store=store, rollout_id="long", agent="solver"):
        emit_action("first")
        emit_action("second")
        emit_reward(1.0)

    plain = read(store, rollout="long")["rows"]
    discounted = read(store, rollout="long", credit="discounted", gamma="0.5")["rows"]

    assert [row["reward"] for row in plain] == [None, 1.0]
    assert [row["reward"] for row in discounted] == [0.5, 1.0]


def test_every_dropped_call_is_listed_with_its_reason(store: Store) -> None:
    """A few of each reason, and all of the one that is asked for, a part at a time."""
    store.add([call(n, "failing", failed=True, **{c.ERROR_TYPE: "Oops"}) for n in range(1, 250)])

    found = read(store)
    (failed,) = [each for each in found["reasons"] if each.noun == "call"]
    whole = read(store, reason=failed.reason)
    (listed,) = [each for each in whole["reasons"] if each.reason == failed.reason]
    second = transitions.reasons(whole["report"], failed.reason, 2)[0]

    assert "Oops" in failed.reason
    assert (failed.total, len(failed.entries), found["lost"]) == (249, 5, 249)
    assert (len(listed.entries), len(second.entries)) == (200, 49)
    spans = {entry.span_id for entry in (*listed.entries, *second.entries)}
    assert spans == {f"{n:016x}" for n in range(1, 250)}


@pytest.mark.pain(13)
def test_pages_tell_the_whole_count(store: Store) -> None:
    """No step is on two pages or on none."""
    with auto_trace(store=store, rollout_id="many"):
        for number in range(2 * transitions.ROWS + 7):
            emit_action(f"{number}")

    pages = [read(store, number) for number in (1, 2, 3, 4)]

    assert [len(each["rows"]) for each in pages] == [50, 50, 7, 0]
    assert {each["total"] for each in pages[:3]} == {107}
    said = [row["action"] for each in pages for row in each["rows"]]
    assert sorted(said, key=int) == [str(number) for number in range(107)]


def test_rollouts_beyond_what_is_read_are_counted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is of the newest rollouts, says of how many, and the older ones are a link away."""
    monkeypatch.setattr(transitions, "ROLLOUTS", 3)
    for number in range(8):
        with auto_trace(store=store, rollout_id=f"r{number}"):
            emit_action("done")
    asked = chosen({}, store)

    def ids(first: int, *, is_all: bool = False) -> list[str]:
        within = transitions.window(store, asked, first, is_all=is_all)
        found: Any = transitions.read(store, asked, 1, within=within)
        assert within.rollouts == (0 if is_all else 8)
        assert within.is_part is not is_all
        return [row["rollout_id"] for row in found["rows"]]

    assert [ids(first) for first in (0, 6)] == [["r7", "r6", "r5"], ["r1", "r0"]]
    assert len(ids(0, is_all=True)) == 8
    assert not transitions.window(store, chosen({"rollout": "r1"}, store), 0).is_part


def test_command_names_the_instant_the_page_means(filled: Store) -> None:
    """In an address a time without a zone is UTC, at a shell the machine's: the command says it."""
    found = chosen({"since": "2026-11-01", "until": "2026-11-01T13:00+01:00"}, filled)

    assert found.options == (
        "--since=2026-11-01T00:00:00.000000000Z", "--until=2026-11-01T12:00:00.000000000Z",
    )  # fmt: skip
    assert found.values["since"] == "2026-11-01"


@pytest.mark.parametrize(
    "query",
    [
        {"min_reward": "nan"},
        {"max_reward": "one"},
        {"since": "yesterday-ish"},
        {"credit": "magic"},
        {"capture": "perfect"},
        {"gamma": "7"},
        {"agents": "re:("},
        {"agents": "x" * 3000},
        {"mode": "a\0b"},
    ],
)
def test_absurd_fields_are_refused(filled: Store, query: dict[str, str]) -> None:
    """With an error that says what may stand there."""
    with pytest.raises(ConfigError):
        read(filled, **query)


def test_unknown_rollout_is_not_found(filled: Store) -> None:
    """Nothing is shown instead of it."""
    with pytest.raises(NotFoundError):
        read(filled, rollout="nobody")


@pytest.fixture
def asking(filled: Store, served: Callable[..., str]) -> Asking:
    """The store, served."""
    return Asking(served(filled, "", key=KEY))


def test_page_is_text_and_refuses_what_is_absurd(asking: Asking) -> None:
    """What a model said stands there as text; wrong fields get a page with a 4xx."""
    found = asking.get("/transitions")

    assert found.status == 200
    assert HOSTILE in found.words
    assert "<script>alert" not in found.text
    assert "<img src=x" not in found.text
    assert asking.get("/transitions?min_reward=x").status == 400
    assert asking.get("/transitions?page=0").status == 400
    assert asking.get("/transitions?page=9").status == 200
    assert asking.get("/transitions?rollout=nobody").status == 404


def test_downloads_are_what_export_writes(filled: Store, asking: Asking, tmp_path: Path) -> None:
    """In every format, as JSON lines and as Parquet; the page before says how many, and why."""
    for name in ("triplets", "sft", "tokens"):
        place = tmp_path / f"{name}.jsonl"
        done = filled.export(name, place, agents=["solver"])
        said = asking.get(f"/transitions/export?format={name}&agents=solver")
        rows = asking.get(f"/transitions/download?format={name}&agents=solver")

        assert (said.status, rows.status) == (200, 200)
        assert rows.body == place.read_bytes()
        assert rows.headers["content-disposition"] == f'attachment; filename="{name}.jsonl"'
        assert f"{done.rows} row{'' if done.rows == 1 else 's'} would be written" in said.words
        for reason in done.left_out:
            assert reason in said.words

    packed = asking.get("/transitions/download?format=kto&agents=solver&as=parquet")
    (tmp_path / "rows.parquet").write_bytes(packed.body)
    con = filled.connect()
    assert con.read_parquet(str(tmp_path / "rows.parquet")).aggregate("count(*)").fetchall() == [
        (3,)
    ]


def test_downloads_come_in_parts_and_end_with_their_reader(
    store: Store, served: Callable[..., str], tmp_path: Path
) -> None:
    """Rows are sent as they are made; readers that go away make room for others."""
    for number in range(30):
        with auto_trace(store=store, rollout_id=f"r{number}"):
            for _ in range(20):
                emit_action("x" * 2000)
    store.export("triplets", tmp_path / "rows.jsonl")
    asking = Asking(served(store, "", key=KEY))
    path = "/transitions/download?format=triplets"

    whole = asking.get(path)
    for _ in range(5):
        connection = http.client.HTTPConnection(asking.host, timeout=30)
        connection.request("GET", path, headers={"Authorization": f"Bearer {KEY}"})
        assert connection.getresponse().read(1000)
        connection.close()
    statuses = set()
    for _ in range(20):  # a reader's end is noticed at the next part
        statuses.add(asking.get(path).status)
        if 200 in statuses:
            break
        time.sleep(0.2)

    assert whole.body == (tmp_path / "rows.jsonl").read_bytes()
    assert len(whole.body) > 1_000_000
    assert 200 in statuses


def test_export_takes_a_formats_own_options(asking: Asking) -> None:
    """And refuses those it has not, and values that are none."""
    page = asking.get("/transitions/export?format=kto&option.threshold=0.9")
    rows = asking.get("/transitions/download?format=kto&option.threshold=0.9")
    (command,) = re.findall(r'class="command">([^<]+)<', page.text)

    labels = [json.loads(line)["label"] for line in rows.body.splitlines()]
    assert sorted(labels) == [False, False, True]
    assert "--threshold=0.9" in unescape(command)
    for query in ("format=kto&option.nothing=1", "format=kto&option.threshold=x", "format=none",
                  "format=kto&as=exe"):  # fmt: skip
        assert asking.get(f"/transitions/download?{query}").status == 400
        assert "as=exe" in query or asking.get(f"/transitions/export?{query}").status == 400


def test_dropped_call_leads_to_its_trace(
    visit: Visits, filled: Store, shot: Callable[..., None]
) -> None:
    """In a browser: from the count to the reason, the call, and the trace it lies in."""
    page = visit(filled, "/transitions")
    shot(page)
    wrong = violations(page)
    page.get_by_role("link", name="2 calls dropped").click()
    page.get_by_text("2 calls: ").click()
    link = page.locator("details[open] .ids a").first
    address = link.get_attribute("href")
    link.click()

    assert wrong == []
    assert re.fullmatch(r"/v-[\w-]{22}/traces/0{31}[12]\?span=0{15}[12]", address)
    page.wait_for_url(f"**{address}")
