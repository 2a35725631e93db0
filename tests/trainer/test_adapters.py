"""Trainers with adapters of one's own: their rewards count, wherever one does."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import pytest
from tests.trainer.made import Seeing, record, spans_of

import lightning_otel as lo
from lightning_otel import Store, TripletAdapter
from lightning_otel.adapter import Adaptation
from lightning_otel.types import Span, Trajectory


def judge_steps(spans: Iterable[Any]) -> list[Trajectory]:
    return [
        replace(path, transitions=tuple(
            replace(step, reward=(step.reward or 0.0) + 2) for step in path.transitions
        ))
        for path in TripletAdapter().adapt(spans)
    ]  # fmt: skip


def judge_whole(spans: Iterable[Any]) -> list[Trajectory]:
    paths = TripletAdapter().adapt(spans)
    return [replace(path, reward=(path.reward or 0.0) + 2) for path in paths]


class Plain:
    """An adapter that only makes trajectories, and states nothing of the whole."""

    def adapt(self, spans: Iterable[Span]) -> list[Trajectory]:
        """Judge the steps."""
        return [replace(path, reward=None) for path in judge_steps(spans)]


class Reporting:
    """An adapter that reports."""

    def explain(self, spans: Iterable[Span], *, incomplete: Any = ()) -> Adaptation:
        """Judge the steps."""
        own = list(spans)
        usual = TripletAdapter().explain(own, incomplete=incomplete)
        return usual._replace(trajectories=judge_steps(own))


class Inherited(TripletAdapter):
    """Ours, with another ``adapt``."""

    def adapt(self, spans: Iterable[Any]) -> list[Trajectory]:
        """Judge the whole."""
        return judge_whole(spans)


ADAPTERS: Final[list[Any]] = [judge_steps, judge_whole, Plain(), Reporting(), Inherited()]


def act(task: str) -> None:
    """Say something, for no reward."""
    lo.emit_action("say", task)


@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_rewards_of_an_adapter_count(store: Store, adapter: Any, is_set: bool) -> None:
    """Of recorded rollouts, rewarded or not; of tasks; of an evaluation; in exports."""
    record(store, {"t": [0.25, None], "u": [1.0]})
    algorithm = Seeing(2)
    if is_set:
        algorithm.set_adapter(adapter)
    select = {} if is_set else {"adapter": adapter}

    lo.Trainer(store=store, algorithm=algorithm, min_batch_size=2, select=select).fit()

    assert algorithm.batch.rewards == {"r0-t": 2.25, "r1-t": 2.0}
    rows = list(store.rows("sft", adapter=adapter, threshold=1.5))
    assert sorted(row["reward"] for row in rows) == [2.0, 2.25, 3.0]
    acting = lo.Trainer(act, algorithm, store=store, select=select)
    acting.fit(["a", "a"])
    assert set(algorithm.batch.rewards.values()) == {2.0}
    assert acting.evaluate(["b"]).reward == 2.0


@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
def test_batches_give_one_float_a_span(store: Store, adapter: Any) -> None:
    """In the spans' order, 0.0 without one; what no step earned stands at the rollout's start."""
    record(store, {"t": [0.25, 0.5]})
    store.add([span for span in spans_of("own", "t", 0.5) if span.name != "chat toy"])
    algorithm = Seeing()
    algorithm.needs_steps = False

    lo.Trainer(store=store, algorithm=algorithm, select={"adapter": adapter}).fit()

    batch = algorithm.batch
    spans, rewards = batch["spans"], batch["rewards"]
    assert sum(rewards) == pytest.approx(sum(batch.rewards.values()))
    pairs = zip(spans, rewards, strict=True)
    more = 0.0 if adapter is None else 2.0
    assert [(span.name, reward) for span, reward in pairs if reward] == [
        ("chat toy", 0.25 + more), ("chat toy", 0.5 + more), ("agentlightning.rollout", 0.5)
    ]  # fmt: skip
