"""``Store.messages()``: conversations as rows."""

import json
from pathlib import Path

import pytest
from tests.adapter.forest import Forest, said

from lightning_otel import Store
from lightning_otel.dataset.messages import MESSAGE_COLUMNS
from lightning_otel.types import Conversation


@pytest.fixture
def store(tmp_path: Path) -> Store:
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


def test_rows_are_conversations(store: Store) -> None:
    """Iterated they are objects, with whose they are and what they were worth."""
    planner, writer = store.messages()

    assert isinstance(planner, Conversation)
    assert (planner.rollout_id, planner.agent, planner.reward) == ("r1", "planner", 0.5)
    assert [item["role"] for item in planner.messages] == ["user", "assistant"] * 2
    assert (writer.rollout_id, writer.agent, writer.reward) == ("r2", "writer", None)


def test_rows_are_a_table(store: Store, tmp_path: Path) -> None:
    """As columns, messages and tools are JSON; Arrow and Parquet read them without us."""
    table = store.messages()

    (planner, writer) = table.dicts()
    assert table.columns == list(planner) == list(MESSAGE_COLUMNS)
    assert json.loads(planner["messages"])[1] == {"role": "assistant", "content": "a"}
    assert planner["answers"] == [1, 3]
    assert planner["rewards"] == [None, 0.5]
    assert (writer["reward"], json.loads(writer["tools"])) == (None, [])
    assert table.arrow().num_rows == 2
    table.to_parquet(tmp_path / "messages.parquet")
    assert (tmp_path / "messages.parquet").stat().st_size > 0


def test_rows_are_selected(store: Store) -> None:
    """By agent, by rollout, and with the credit rule that is asked for."""
    (writer,) = store.messages(agents="wr*")
    (planner,) = store.messages(rollout_id="r1", credit="discounted", gamma=0.5)

    assert writer.rollout_id == "r2"
    assert planner.rewards == (0.25, 0.5)


def test_an_empty_store_has_no_rows(tmp_path: Path) -> None:
    """Nothing recorded is an empty table with all of its columns."""
    store = Store(tmp_path / "empty.duckdb")
    store.writer().seal()

    table = store.messages()

    assert table.rows() == []
    assert table.columns == list(MESSAGE_COLUMNS)
