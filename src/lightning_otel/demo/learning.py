"""Learning of the demo's policy, from stored transitions alone.

Belongs here: the policy gradient of three numbers, which is all the toy has. What the policy
answered is known here by what the store says of it, and by nothing else.
"""

import math
import random
from collections.abc import Iterable

from lightning_otel.demo.policy import STYLES, ToyPolicy, style_of
from lightning_otel.messages import plain_text
from lightning_otel.types import Transition

RATE = 2.0


def learn(
    policy: ToyPolicy, steps: Iterable[Transition], *, dealt_by: random.Random | None = None
) -> int:
    """Make what earned more than the others likelier, by one step of the policy's gradient.

    Source: Williams 1992, REINFORCE, with the mean reward as the baseline.
    """
    told = [(_style_of(step), step.reward) for step in steps]
    seen = [(style, reward) for style, reward in told if style is not None and reward is not None]
    if not seen:
        return 0
    rewards = [reward for _, reward in seen]
    if dealt_by is not None:
        dealt_by.shuffle(rewards)
    mean = sum(rewards) / len(rewards)
    likely = {style: math.exp(logprob) for style, logprob in policy.logprobs().items()}
    change = dict.fromkeys(STYLES, 0.0)
    for (chosen, _), reward in zip(seen, rewards, strict=True):
        for style in STYLES:
            change[style] += (reward - mean) * ((style == chosen) - likely[style]) / len(seen)
    weights = policy.weights
    policy.set_weights({style: weights[style] + RATE * change[style] for style in STYLES})
    return len(seen)


def _style_of(step: Transition) -> str | None:
    return style_of(plain_text(step.observation[-1:]), plain_text(step.action[:1]))
