"""Quality, cost and latency as one reward: what is measured, weighed, gated and missing."""

from dataclasses import replace
from typing import Any

import openai
import pytest

from lightning_otel import (
    Composition,
    Price,
    Store,
    Trajectory,
    Transition,
    Worth,
    apply_rewards,
    auto_trace,
    emit_action,
    emit_reward,
)
from lightning_otel.demo.server import DemoServer
from lightning_otel.errors import ConfigError

STEP = Transition(
    "r1", "1", "calc", 0, (), (), None, None, done=False,
    model="big-2026", input_tokens=1_000, output_tokens=200,
    start_ns=1_000_000_000, end_ns=2_000_000_000,
)  # fmt: skip
PRICES = {"big-*": Price(input=10.0, output=50.0), "small": Price(input=1.0, output=2.0)}


def paths(*steps: Transition) -> tuple[Trajectory, ...]:
    """One trajectory of the steps."""
    return (Trajectory("r1", "1", "calc", 0, steps),)


def test_worth_weighs_quality_against_cost_and_time() -> None:
    """Tokens have their model's price, and time runs from the first start to the last end."""
    later = replace(STEP, model="small", start_ns=3_000_000_000, end_ns=5_500_000_000)
    worth = Worth(Composition({"ok": 1.0, "cost": -10.0, "seconds": -0.1}), prices=PRICES)

    found = worth(paths(STEP, later), {"ok": 1.0, "tone": 0.5})

    cost = (1_000 * 10 + 200 * 50 + 1_000 * 1 + 200 * 2) / 1e6
    expected = {"worth": 1.0 - 10 * cost - 0.1 * 4.5, "cost": cost, "seconds": 4.5}
    assert found == pytest.approx(expected)


def test_worth_counts_a_shared_step_once() -> None:
    """A step that two branches run through was paid once."""
    worth = Worth(Composition({"tokens": 1.0}))

    found = worth((*paths(STEP), *paths(STEP, replace(STEP, step=1))), {})

    assert found == {"worth": 2_400.0, "tokens": 2_400.0}


def test_worth_behind_a_gate_is_the_floor() -> None:
    """What is wrong is not made up for by being cheap."""
    cheap = Composition({"ok": 1.0, "cost": -1.0}, gates={"ok": 0.5}, floor=-1.0)

    found = Worth(cheap, prices=PRICES)(paths(STEP), {"ok": 0.0})

    assert found is not None
    assert found["worth"] == -1.0


def test_worth_of_a_missing_reward_is_missing() -> None:
    """Where a reward it weighs is missing there is none; what one is named is not measured."""
    worth = Worth(Composition({"ok": 1.0, "seconds": -1.0}), name="value")

    assert worth(paths(STEP), {}) is None
    assert worth(paths(STEP), {"ok": 1.0, "seconds": 0.25}) == {"value": 0.75}


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        ({"model": "other"}, "the model 'other' has no price; there are prices of big-*, small"),
        ({"output_tokens": None}, "does not say how many tokens the model 'big-2026' took"),
    ],
)
def test_cost_that_cannot_be_known_is_told(step: dict[str, Any], fault: str) -> None:
    """No price and no token is made up."""
    with pytest.raises(ConfigError) as raised:
        Worth(Composition({"cost": -1.0}), prices=PRICES)(paths(replace(STEP, **step)), {})

    assert fault in str(raised.value)


def test_cost_needs_prices() -> None:
    """It is said at once that nothing has a price, and a price is a number."""
    with pytest.raises(ConfigError, match="nothing has a price; give prices="):
        Worth(Composition({"cost": -1.0}))
    with pytest.raises(ConfigError, match="a price for output is -1"):
        Price(input=1.0, output=-1.0)


def test_worth_is_applied_to_what_is_stored(store: Store, server: DemoServer) -> None:
    """After the functions it builds on it is applied as they are, to real calls."""
    with (
        openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client,
        auto_trace(store=store, rollout_id="r1"),
    ):
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hi"}])
        emit_reward("ok", 1.0)
    with auto_trace(store=store, rollout_id="r2"):
        emit_action("say", "by hand, of no model")
        emit_reward("ok", 1.0)
    weights = Composition({"ok": 1.0, "cost": -1.0})

    done = apply_rewards(store, Worth(weights, prices={"toy*": Price(input=1e6, output=0.0)}))

    first = next(iter(store.transitions(rollout_id="r1")))
    assert (done.rewards, dict(done.failed)) == (1, {"ConfigError": 1})
    assert first.input_tokens
    assert dict(first.rewards) == {
        "ok": 1.0, "worth": 1.0 - first.input_tokens, "cost": first.input_tokens
    }  # fmt: skip
