"""Where Agent Lightning 0.3 and we should agree, we do: triplet by triplet, on generated rollouts.

``LIGHTNING_TEST_TREES`` is how many; ``test_differences.py`` has what differs, and why.
"""

import os

import pytest
from tests.adapter.differential.trees import Program
from tests.adapter.differential.upstream import ours, steps, theirs

TREES = int(os.environ.get("LIGHTNING_TEST_TREES", "600"))
PARTS = 6


@pytest.mark.parametrize("part", range(PARTS))
def test_generated_rollouts_are_adapted_alike(part: int) -> None:
    """Agent, messages, tool calls, token ids, logprobs, reward and order are those they find."""
    compared = rewarded = trees = 0
    for seed in range(part, TREES, PARTS):
        program = Program(seed)
        if not program.facts:
            continue

        found = ours(program.facts)

        expected = theirs(program.facts)
        assert steps(found) == expected, f"seed {seed}"
        assert len(expected) == program.calls, f"seed {seed}"
        trees += 1
        compared += len(expected)
        rewarded += sum(step.reward is not None for step in expected)
    assert trees > 0.9 * TREES / PARTS
    assert compared > 2 * trees
    assert rewarded > trees / 2
