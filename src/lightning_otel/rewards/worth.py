"""A reward that weighs quality against cost and time, read from the transitions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from lightning_otel.adapter.advantages import Composition
from lightning_otel.errors import ConfigError
from lightning_otel.store.prices import Price, Prices, TokenCounts
from lightning_otel.types import Trajectory, Transition
from lightning_otel.types.transitions import distinct_steps

COST: Final = "cost"
SECONDS: Final = "seconds"
TOKENS: Final = "tokens"


@dataclass(frozen=True, slots=True)
class Worth:
    """A reward function that weighs rewards against cost, seconds and tokens.

    ``apply_rewards(store, Worth(Composition({"exact_match": 1.0, "cost": -20.0})))``, after the
    functions that give what it weighs. Of what the composition names, ``cost`` (by the prices),
    ``seconds`` (from the start of the first step to the end of the last) and ``tokens`` (given and
    answered) are measured, where no reward has that name; they stand beside the reward. A step that
    branches share counts once.

    Attributes:
        composition: Weights and gates; what shall be little has a weight below 0.
        prices: Of each model, by its name or a glob.
        name: The reward's name.
    """

    composition: Composition
    prices: Mapping[str, Price] = field(default_factory=dict)
    name: str = "worth"

    def __post_init__(self) -> None:
        if COST in self._named_parts() and not self.prices:
            raise ConfigError(
                f"{COST} is weighed and nothing has a price; give prices={{'gpt-5*': "
                "Price(input=1.25, output=10.0)}, per million tokens"
            )

    def __call__(
        self, trajectories: tuple[Trajectory, ...], rewards: Mapping[str, float]
    ) -> dict[str, float] | None:
        """The worth, with what was measured beside it; None where a reward it needs is missing.

        Raises:
            ConfigError: A model has no price, or did not say how many tokens it took.
        """
        steps = distinct_steps(trajectories)
        missing = [name for name in self._named_parts() if name not in rewards]
        measured = {name: self._measure_part(name, steps) for name in missing if name in _MEASURED}
        value = self.composition({**rewards, **measured})
        return None if value is None else {self.name: value, **measured}

    def _named_parts(self) -> list[str]:
        return list(dict.fromkeys([*self.composition.weights, *self.composition.gates]))

    def _measure_part(self, name: str, steps: Sequence[Transition]) -> float:
        if name == SECONDS:
            start_ns = min((step.start_ns for step in steps), default=0)
            return (max((step.end_ns for step in steps), default=0) - start_ns) / 1e9
        if name == TOKENS:
            return float(sum(sum(_count_tokens(step)) for step in steps))
        prices = _make_table(tuple(self.prices.items()))
        return sum(self._cost_of(step, prices) for step in steps)

    def _cost_of(self, step: Transition, prices: Prices) -> float:
        cost = prices.cost_of((step.model, None), TokenCounts(*_count_tokens(step)))
        if cost is not None:
            return cost
        raise ConfigError(
            f"the model {step.model or ''!r} has no price; there are prices of "
            f"{', '.join(self.prices)}"
        )


_MEASURED: Final = (COST, SECONDS, TOKENS)
_make_table: Final = lru_cache(8)(Prices)


def _count_tokens(step: Transition) -> tuple[int, int]:
    prompt_count, answered = step.input_tokens, step.output_tokens
    if prompt_count is None:
        prompt_count = len(step.prompt_ids) or None
    if answered is None:
        answered = len(step.response_ids) or None
    if prompt_count is None or answered is None:
        raise ConfigError(
            f"step {step.step} does not say how many tokens the model {step.model!r} took; leave "
            f"{COST} and {TOKENS} out"
        )
    return prompt_count, answered
