"""Credit and advantages through a real store: late feedback, links, and two passes over it."""

import json

import pytest
from tests.adapter.forest import draw

from lightning_otel import Store, auto_trace, emit_action, emit_reward, operation
from lightning_otel.adapter import Advantage, Composition, TripletAdapter
from lightning_otel.types import Span
from lightning_otel.types import conventions as c


def rollout(name: str, task: str, *values: float, calls: int = 2) -> list[Span]:
    """A rollout on a task with calls and rewards."""
    words = [f"{c.SPAN_ROLLOUT}@ticket={name}(", *(f"{name}-{index}" for index in range(calls))]
    words += [*(f"!{value}" for value in values), ")"]
    forest = draw(" ".join(words), rollout_id=name, trace_id=name.ljust(32, "0"), process=name)
    forest.tag(forest.named[c.SPAN_ROLLOUT], **{c.TASK: json.dumps(task)})
    return forest.spans


# --- late feedback -------------------------------------------------------------------------------


def test_emitted_links_and_sequences_come_back_as_given(store: Store) -> None:
    """From the emitter through the store to the step, by attributes of any type."""
    with auto_trace(store=store) as recording:
        for index in range(3):
            with operation(f"part {index}"):
                emit_action("act", str(index))
        emit_reward([1, None, 0.5])
        emit_reward("named", [0.25, 0.5, 0.75])
        emit_reward("linked", 2.0, match={c.OPERATION_NAME: "part 1"})

    (path,) = recording.trajectories()
    (stored,) = store.trajectories()

    assert [dict(step.rewards) for step in path.transitions] == [
        {"primary": 1.0, "named": 0.25},
        {"named": 0.5, "linked": 2.0},
        {"primary": 0.5, "named": 0.75},
    ]
    assert stored == path
    values = store.sql("SELECT name, value FROM rewards ORDER BY start_ns").dicts()
    assert [tuple(row.values()) for row in values] == [
        ("primary", 1.5), ("named", 1.5), ("linked", 2.0),
    ]  # fmt: skip


# --- advantages ----------------------------------------------------------------------------------


@pytest.fixture
def groups(store: Store) -> Store:
    """Two tasks of three rollouts each, one of them without a reward."""
    spans = [
        rollout("a0", "a", 1.0), rollout("b0", "b", 2.0, calls=4), rollout("a1", "a", 0.0),
        rollout("b1", "b", 4.0, calls=1), rollout("a2", "a", 0.5), rollout("b2", "b"),
    ]  # fmt: skip
    store.add([span for each in spans for span in each])
    return store


@pytest.mark.parametrize("batch", [1, 20_000])
def test_transitions_carry_advantages_of_the_whole_store(
    groups: Store, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Compared across batches, stamped on every row, with the reasons in the same report."""
    # Replaced because no test should write as many spans as fill two real batches.
    monkeypatch.setattr("lightning_otel.store.selection.BATCH_SPANS", batch)

    table = groups.transitions(advantage="dr_grpo")

    rows = list(table.dicts())
    found = {(row["rollout_id"], row["group_id"], row["advantage"]) for row in rows}
    assert found == {
        ("a0", '"a"', 0.5), ("a1", '"a"', -0.5), ("a2", '"a"', 0.0),
        ("b0", '"b"', -1.0), ("b1", '"b"', 1.0), ("b2", '"b"', None),
    }  # fmt: skip
    assert {(r["rollout_id"], r["weight"]) for r in rows} >= {("b0", 0.25), ("b1", 1.0)}
    assert table.report().reasons() == {"no advantage: its rollout has no reward": 1}
    assert groups.report(advantage="dr_grpo").reasons() == {
        "no advantage: its rollout has no reward": 1
    }
    every = [span for spans in (groups.spans(),) for span in spans]
    assert {
        (path.rollout_id, path.transitions[0].advantage)
        for path in TripletAdapter(advantage="dr_grpo").adapt(every)
    } == {(name, advantage) for name, _, advantage in found}


def test_one_rollouts_advantage_is_among_all_of_its_task(groups: Store) -> None:
    """What is not asked for is compared all the same."""
    found = {step.advantage for step in groups.transitions(rollout_id="a0", advantage="dr_grpo")}

    assert found == {0.5}


def test_late_feedback_reopens_advantages(groups: Store) -> None:
    """A reward that came later makes its group whole, and changes the others' advantage."""
    how = Advantage("dr_grpo", size=3)
    before = {s.rollout_id: s.advantage for s in groups.transitions(advantage=how)}

    groups.add(
        [Span("f" * 32, "f" * 16, None, c.SPAN_ANNOTATION, 10**18, 10**18,
              attributes={c.REWARD_VALUE: 0.0, c.ROLLOUT_ID: "b2"})]
    )  # fmt: skip

    after = {s.rollout_id: s.advantage for s in groups.transitions(advantage=how)}
    assert [before[name] for name in ("b0", "b1", "b2")] == [None, None, None]
    assert [after[name] for name in ("b0", "b1", "b2")] == [0.0, 2.0, -2.0]
    assert before["a0"] == after["a0"] == 0.5


def test_transitions_take_a_composition_and_groups_of_ones_own(groups: Store) -> None:
    """The store's options are the adapter's."""
    table = groups.transitions(
        compose=Composition({"primary": 2.0}),
        advantage=Advantage("rloo", group_by=lambda spans: "all"),
    )

    found = {step.rollout_id: (step.reward, step.advantage) for step in table if step.reward}

    assert found["b1"] == (8.0, pytest.approx(8.0 - (2.0 + 4.0 + 0.0 + 1.0) / 4))
