"""From a store to transitions and conversations: memory, late rewards, and both ways to sum."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import HealthCheck, example, given, settings
from tests.adapter.forest import (
    Forest,
    draw,
    said,
)
from tests.adapter.programs import drawing_of, programs, spans_drawn
from tests.adapter.test_credit import CASES, PLACES

from lightning_otel import (
    Store,
    TripletAdapter,
)
from lightning_otel.adapter.advantages import last_rewards
from lightning_otel.adapter.rewards import with_evaluations
from lightning_otel.dataset.tables import MESSAGE_COLUMNS
from lightning_otel.store import selection, settle
from lightning_otel.store.views import LAST_REWARD
from lightning_otel.types import Conversation, Report, Span, Transition
from lightning_otel.types import conventions as c

PEAK = """
import sys
from pathlib import Path
from lightning_otel import Store
Store(sys.argv[1]).transitions().to_parquet(sys.argv[2])
(peak,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
print(peak.split()[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's mark of a process is read")
def test_a_file_of_transitions_takes_the_same_memory_for_thrice_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settled spans are read, and rows are written, so many at a time."""
    monkeypatch.setattr(settle, "COMMIT_AHEAD_US", 2_000)  # else a quick reader reads segments
    peaks = []
    for count in (2_500, 7_500):
        store = Store(tmp_path / f"{count}.duckdb")
        for number in range(count):
            forest = Forest(rollout_id=f"r{number}", trace_id=f"{number:032x}", tick=10 * number)
            for _ in range(2):
                forest.call(os.urandom(1500).hex())
            store.add(forest.spans)
        store.writer().seal()
        store.settle()
        command = [sys.executable, "-c", PEAK, store.name, str(tmp_path / "t.parquet")]
        peaks.append(int(subprocess.run(command, capture_output=True, check=True).stdout))

    # DuckDB 1.5 keeps more of the file that it reads than 2.0.
    most = 1.6 if duckdb.__version__.startswith("1.") else 1.3
    assert peaks[1] < most * peaks[0]


@pytest.fixture
def chats(tmp_path: Path) -> Store:
    """Two rollouts: a planner of two turns that is rewarded, and a writer of one that is not."""
    forest = Forest()
    asked = [said("user", "héllo 🦆 \ud800")]
    with forest.agent("planner"):
        forest.call("a", asked)
        forest.call("b", [*asked, said("assistant", "a"), said("user", "and?")])
        forest.reward(0.5)
    other = Forest(rollout_id="r2", trace_id="b" * 32, process="p2", tick=50)
    with other.agent("writer"):
        other.call("c")
    store = Store(tmp_path / "traces.duckdb")
    store.add([*forest.spans, *other.spans])
    return store


def test_rows_are_conversations(chats: Store) -> None:
    """Iterated they are objects, with whose they are and what they were worth."""
    planner, writer = chats.messages()

    assert isinstance(planner, Conversation)
    assert (planner.rollout_id, planner.agent, planner.reward) == ("r1", "planner", 0.5)
    assert [item["role"] for item in planner.messages] == ["user", "assistant"] * 2
    assert (writer.rollout_id, writer.agent, writer.reward) == ("r2", "writer", None)


def test_rows_are_a_table(chats: Store, tmp_path: Path) -> None:
    """As columns, messages and tools are JSON; Arrow and Parquet read them without us."""
    table = chats.messages()

    (planner, writer) = table.dicts()
    assert table.columns == list(planner) == list(MESSAGE_COLUMNS)
    assert json.loads(planner["messages"])[1] == {"role": "assistant", "content": "a"}
    assert planner["answers"] == [1, 3]
    assert planner["rewards"] == [None, 0.5]
    assert (writer["reward"], json.loads(writer["tools"])) == (None, [])
    assert table.arrow().num_rows == 2
    table.to_parquet(tmp_path / "messages.parquet")
    assert (tmp_path / "messages.parquet").stat().st_size > 0


def test_rows_are_selected(chats: Store) -> None:
    """By agent, by rollout, and with the credit rule that is asked for."""
    (writer,) = chats.messages(agents="wr*")
    (planner,) = chats.messages(rollout_id="r1", credit="discounted", gamma=0.5)

    assert writer.rollout_id == "r2"
    assert planner.rewards == (0.25, 0.5)


def test_an_empty_store_has_no_rows(tmp_path: Path) -> None:
    """Nothing recorded is an empty table with all of its columns."""
    store = Store(tmp_path / "empty.duckdb")
    store.writer().seal()

    table = store.messages()

    assert table.rows() == []
    assert table.columns == list(MESSAGE_COLUMNS)


def _drawn() -> list[Span]:
    """The spans of every case, each in rollouts of its own."""
    cases = [drawing for drawing, _ in CASES.values()]
    return [
        replace(span, scope=span.scope or c.SCOPE)
        for number, drawing in enumerate(cases)
        for span in draw(
            re.sub(r"(@id=|rollout=)(?=\w)", rf"\g<1>{number}-", drawing),
            rollout_id=f"{number}-r1",
            process=f"p{number}-",
        ).spans
    ]


def _earned(steps: list[Transition]) -> dict[str, dict[str, float]]:
    return {step.span_id: dict(step.rewards) for step in steps}


def _lost(report: Report) -> tuple[int, int, Counter[str]]:
    return report.rewards, report.rewards_placed, Counter(each.span_id for each in report.dropped)


@pytest.mark.parametrize(
    ("place", "batch"), [("segments", 20_000), ("files", 1), ("memory", 1), ("files", 20_000)]
)
def test_rewards_reach_the_same_calls_however_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, batch: int
) -> None:
    """A rollout at a time or all at once; with bodies or without; given later or elsewhere."""
    # Replaced because no test should write as many spans as fill two real batches.
    monkeypatch.setattr(selection, "BATCH_SPANS", batch)
    store = Store(":memory:" if place == "memory" else tmp_path / "t.duckdb")
    spans = _drawn()
    store.add(reversed(spans))
    if place == "files":
        store.writer().seal()
        store.settle()
    found = TripletAdapter().explain(with_evaluations(spans))
    expected = _earned([step for path in found.trajectories for step in path.transitions])

    whole, thin = store.transitions(), store.transitions(bodies=False)

    assert _earned(whole.rows()) == _earned(thin.rows()) == expected
    reports = [each.report() for each in (whole, thin)]
    assert [_lost(each) for each in reports] == [_lost(found.report)] * 2
    assert _earned(store.transitions(rollout_id="2-r1").rows()).items() <= expected.items()


def test_spans_of_a_rollout_are_those_its_row_counts(store: Store, tmp_path: Path) -> None:
    """Rewards given elsewhere are among them, in order of time; live, settled and packed."""
    store.add(_drawn())
    rows = {row["rollout_id"]: row["spans"] for row in store.rollouts()}
    query = "SELECT rollout_id, attempt_id, rewards, reward, end_ns FROM rollouts ORDER BY ALL"

    live = list(store.sql(query).dicts())
    spans = {name: store.spans(rollout_id=name).rows() for name in rows}
    store.writer().seal()
    store.settle()
    store.pack(tmp_path / "packed.duckdb")

    counts = Counter(row["rollout_id"] for row in store.rollouts())
    assert {name: len(own) for name, own in spans.items() if counts[name] == 1} == {
        name: count for name, count in rows.items() if counts[name] == 1
    }
    assert all(
        [span.start_ns for span in own] == sorted(span.start_ns for span in own)
        for own in spans.values()
    )
    assert list(store.sql(query).dicts()) == live
    with duckdb.connect(str(tmp_path / "packed.duckdb"), read_only=True) as con:
        assert con.execute(query).fetchall() == [tuple(row.values()) for row in live]


def test_the_views_tell_a_late_reward_with_its_rollout(store: Store) -> None:
    """It has its link, and does not prolong the rollout."""
    store.add(draw(f"a@id=r1 {PLACES['LATE']} !.25@id=r1").spans)

    (reward,) = store.sql("FROM rewards")
    (row,) = store.rollouts()

    assert (reward["rollout_id"], reward["attempt_id"], reward["value"]) == ("r1", "1", 0.25)
    assert (reward["link_key"], reward["link_value"]) == (c.RESPONSE_ID, "r1")
    assert (row["spans"], row["traces"], row["rewards"], row["reward"]) == (2, 1, 1, 0.25)
    assert row["end_ns"] < reward["start_ns"]


def by_python(spans: list[Span]) -> dict[str, float]:
    """The adapter's."""
    return last_rewards(TripletAdapter().explain(spans).outcomes)


def by_sql(store: Store) -> dict[str, float]:
    """The view's."""
    query = f"SELECT rollout_id, {LAST_REWARD} AS reward FROM rollouts GROUP BY 1"
    found = {row["rollout_id"]: row["reward"] for row in store.sql(query)}
    return {name: value for name, value in found.items() if value is not None}


def is_placed_alike(spans: list[Span]) -> bool:
    """Whether no reward names, or lies in, a call that was dropped: the views know of none."""
    dropped = {each.span_id for each in TripletAdapter().explain(spans).report.dropped}
    rewards = [span for span in spans if c.REWARD_VALUE in span.attributes]
    targets = {span.attributes.get(f"{c.LINK_PREFIX}.0.value_match") for span in rewards}
    return not dropped & (targets | {span.parent_span_id for span in rewards})


IN_A_REPEATED_CALL = [
    ("open call", 0, 0), ("reward", 0, 0), ("twice within", 1, 0), ("close", 0, 0)
]  # fmt: skip


@example(spans_drawn(drawing_of(IN_A_REPEATED_CALL)))
@given(programs.filter(is_placed_alike))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_rewards_of_drawn_programs_are_the_same(tmp_path_factory: Any, spans: list[Span]) -> None:
    """So are those of programs nobody thought of."""
    store = Store(tmp_path_factory.mktemp("drawn") / "x.duckdb")
    store.add(spans)

    assert by_sql(store) == pytest.approx(by_python(spans))


@pytest.mark.parametrize(
    "drawing",
    ["a A[ !1 ]", "do:x !1 A[ a ]", "A[ a work( !1 ) ] B[ b ]", "A[ a B[ x( b ) ] x( !1 ) ]",
     "a +b b/!1", "a b@error b/!1", "A[ a +b b/!1 ]", "a b@error !1 c", "A[ a +b !1 ]",
     "+A@as=n[ b@scope=make n/!1"],
)  # fmt: skip
def test_an_attempt_earns_in_the_views_what_the_adapter_says(store: Store, drawing: str) -> None:
    """Where only a span above names the agent, or a call that came to nothing holds the reward."""
    spans = draw(drawing).spans
    store.add(spans)

    assert by_sql(store) == pytest.approx(by_python(spans))
