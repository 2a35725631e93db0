"""Transitions without bodies and the funnel are those of the adapter, whatever is asked for."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import orjson
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.adapter.forest import SECOND, draw
from tests.adapter.forests import forests

from lightning_otel import Store
from lightning_otel.adapter import Advantage, Composition
from lightning_otel.types import Credit, Report, Span
from lightning_otel.types import conventions as c

DRAWINGS = [
    "agentlightning.rollout( planner[ a@tokens=3 tool( ) b ] !1 )",
    "planner[ a b@error ] writer[ c ] !.5 !.5",
    "root( a !1@as=given !undo@span=given !2@span=gone )",
    "a !ok=1,tone=.5 b !:1,-",
    "#counted=no root( a<x|y +b see:wall do:left )",
    "root( a@lightning.resource.version=3 b !0.2@trace=none )",
    "+root( a !1 b !much=.1@agentlightning.reward.0.value=no",
    "do:left see:wall !1",
    "!1",
]
START_NS = 1_700_000_000 * SECOND
NOON_NS = START_NS + 3 * 10**10


def max_of(rewards: Mapping[str, float]) -> float | None:
    """Compose rewards by a function, of which nothing is kept."""
    return max(rewards.values())


OPTIONS: list[dict[str, Any]] = [
    {}, {"include_incomplete": True}, {"agents": "planner"}, {"agents": ["!planner"]},
    {"rollout_id": ["r0", "r2"]}, {"rollout_id": "none"}, {"rewarded": True}, {"rewarded": False},
    {"min_reward": 0.5}, {"max_reward": 0.5}, {"capture": "text"}, {"resource_version": "3"},
    {"mode": "val"}, {"since": NOON_NS}, {"until": NOON_NS}, {"gamma": 0.5},
    {"received": False}, {"credit": "step"}, {"truncated": False}, {"credit": "agents"},
    {"credit": "last"}, {"credit": "discounted", "gamma": 0.5, "agents": "planner"},
    {"credit": "step", "include_incomplete": True}, {"credit": "step", "max_reward": 0.5},
    {"credit": "step", "rollout_id": "r0"},
    {"reward": "ok"}, {"reward": "tone", "credit": "step", "rewarded": True},
    {"compose": Composition({"ok": 1.0, "tone": 0.5}, {"ok": 0.5})}, {"advantage": "grpo"},
    {"advantage": Advantage("rloo", size=2), "credit": "step", "include_incomplete": True},
    {"advantage": "dr_grpo", "reward": "ok", "agents": "planner"},
    {"advantage": "grpo", "credit": "discounted"}, {"advantage": "grpo", "rollout_id": "r0"},
    {"compose": max_of, "advantage": Advantage(group_by="prompt")},
]  # fmt: skip
BODIES = {
    "observation", "action", "next_observation", "tools", "prompt_ids", "response_ids", "logprobs",
}  # fmt: skip

STEPS = "SELECT sum(steps) AS n FROM rollouts WHERE status <> 'incomplete'"


def compare(store: Store, **options: Any) -> None:
    """Compare what is read without bodies with what is read with them."""
    whole, thin = store.transitions(**options), store.transitions(**options, bodies=False)
    wide = sorted(repr(_plain(row)) for row in whole.dicts())
    assert sorted(repr(_plain(row)) for row in thin.dicts()) == wide
    assert sorted(repr(_plain(orjson.loads(line))) for line in thin.lines()) == wide
    steps = {(step.trace_id, step.span_id): step for step in whole}
    for step in thin:
        own = steps[step.trace_id, step.span_id]
        assert step == replace(own, **{name: getattr(step, name) for name in BODIES})
        assert (step.observation, step.action) == ((), ())
    assert len(thin.rows()) == len(steps) == thin.page("start_ns", 1, 0)[1]
    funnel = _describe(whole.report())
    assert _describe(thin.report()) == _describe(store.report(**options)) == funnel


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """The row without bodies, its JSON parsed."""
    return {
        name: orjson.loads(value) if name in ("rewards", "resources", "sampling")
        and isinstance(value, str) else value
        for name, value in row.items() if name not in BODIES
    }  # fmt: skip


def _describe(report: Report) -> Report:
    return replace(
        report,
        dropped=tuple(sorted(report.dropped, key=repr)),
        repairs=tuple(sorted(report.repairs, key=repr)),
    )


def _number(spans: list[Span], number: int) -> list[Span]:
    """The spans as those of a rollout and a trace of their own."""
    own, later_ns = {c.ROLLOUT_ID: f"r{number}"}, START_NS + number * 10**10
    return [
        replace(
            span, trace_id=f"{number:02x}{span.trace_id[2:]}",
            attributes={**span.attributes, **own}, start_ns=span.start_ns + later_ns,
            end_ns=None if span.end_ns is None else span.end_ns + later_ns,
        )
        for span in spans
    ]  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("facts") / "t.duckdb")
    for number, drawing in enumerate(DRAWINGS):
        store.add(_number(draw(drawing, process=f"p{number}").spans, number))
    # The last one's clock was set back before it ended.
    for span in _number(draw("do:left", process="p50").spans, 50):
        store.add([replace(span, end_ns=span.start_ns - SECOND)])
    return store


# A function's text holds its address, which differs from process to process.
@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda options: str(options).partition(" at 0x")[0]
)
def test_options_choose_the_same(store: Store, options: dict[str, Any]) -> None:
    """Each option chooses the same rows, and the same funnel, with bodies and without."""
    compare(store, **options)


@settings(max_examples=5, deadline=None, phases=[Phase.generate],
          suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
@given(st.lists(forests, min_size=1, max_size=3), st.sampled_from(get_args(Credit)),
       st.sampled_from([{}, {"reward": "reward"}, {"advantage": "grpo"}]))  # fmt: skip
def test_any_forest_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory, found: list[list[Span]], credit: Credit, options: Any
) -> None:
    """So does whatever broken tracers leave behind."""
    store = Store(tmp_path_factory.mktemp("facts") / "t.duckdb")
    for number, spans in enumerate(found):
        store.add(_number(spans, number))

    compare(store)
    compare(store, include_incomplete=True)
    compare(store, credit=credit, **options)


def test_counts_follow_the_store(store: Store) -> None:
    """What was recorded since the last answer is in the next one."""
    (before,) = store.sql(STEPS)
    assert before["n"] == store.report().transitions == len(store.transitions().rows())
    compare(store, credit="step")
    store.add(_number(draw("planner[ late !1 ]", process="p99").spans, 40))
    (after,) = store.sql(STEPS)
    assert after["n"] == before["n"] + 1
    compare(store)
    compare(store, credit="step")
