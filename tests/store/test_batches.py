"""A store gives what the adapter makes of all its spans at once, however it reads them."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest
from tests.adapter.forest import draw
from tests.adapter.test_credit import CASES, LATE, UNLIKE_SQL

from lightning_otel import Store, TripletAdapter
from lightning_otel import conventions as c
from lightning_otel.dataset import batches
from lightning_otel.types import Report, Span, Transition


def _drawn() -> list[Span]:
    """The spans of every case, each in rollouts of its own."""
    cases = [drawing for name, (drawing, _) in CASES.items() if name not in UNLIKE_SQL]
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


@pytest.mark.parametrize("place", ["segments", "files", "memory"])
@pytest.mark.parametrize("batch", [1, 20_000])
def test_rewards_reach_the_same_calls_however_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, batch: int
) -> None:
    """A rollout at a time or all at once; with bodies or without; given later or elsewhere."""
    # Replaced because no test should write as many spans as fill two real batches.
    monkeypatch.setattr(batches, "BATCH_SPANS", batch)
    store = Store(":memory:" if place == "memory" else tmp_path / "t.duckdb")
    spans = _drawn()
    store.add(reversed(spans))
    if place == "files":
        store.writer().seal()
        store.settle()
    found = TripletAdapter().explain(spans)
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
    store.add(draw(f"a@id=r1 {LATE} !.25@id=r1").spans)

    (reward,) = store.sql("FROM rewards")
    (row,) = store.rollouts()

    assert (reward["rollout_id"], reward["attempt_id"], reward["value"]) == ("r1", "1", 0.25)
    assert (reward["link_key"], reward["link_value"]) == (c.RESPONSE_ID, "r1")
    assert (row["spans"], row["traces"], row["rewards"], row["reward"]) == (2, 1, 1, 0.25)
    assert row["end_ns"] < reward["start_ns"]
