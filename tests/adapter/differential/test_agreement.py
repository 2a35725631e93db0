"""Where Agent Lightning 0.3 and we should agree, we do: triplet by triplet, on generated rollouts.

``LIGHTNING_TEST_TREES`` is how many; ``test_differences.py`` has what differs, and why.
"""

import os

import pytest
from tests.adapter.differential.trees import Program
from tests.adapter.differential.upstream import ours, steps, stored_there, theirs
from tests.adapter.readers.test_readers import stored

from lightning_otel import TripletAdapter
from lightning_otel.types import Credit

TREES = int(os.environ.get("LIGHTNING_TEST_TREES", "600"))
PARTS = 4
RULES: dict[Credit, str] = {"next": "first_occurrence", "sibling": "first_sibling"}
"""Our rules of credit, and their policies that should do the same."""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("rule", "policy"), RULES.items())
def test_generated_rollouts_are_adapted_alike(rule: Credit, policy: str, part: int) -> None:
    """Agent, messages, tool calls, token ids, logprobs, reward and order are those they find."""
    compared = rewarded = trees = 0
    for seed in range(part, TREES, PARTS):
        program = Program(seed)
        # A reward at the end has no sibling, or one that is not meant.
        if not program.facts or (rule == "sibling" and program.is_judged_at_the_end):
            continue

        found = ours(program.facts, rule)

        expected = theirs(program.facts, policy)
        assert steps(found) == expected, f"seed {seed}"
        assert len(expected) == program.calls, f"seed {seed}"
        trees += 1
        compared += len(expected)
        rewarded += sum(step.reward is not None for step in expected)
    assert trees > 0.6 * TREES / PARTS
    assert compared > 2 * trees
    assert rewarded > trees / 2


@pytest.mark.parametrize("name", ["openai_agents", "langgraph"])
def test_recorded_agents_are_told_alike(name: str) -> None:
    """Agent and reward of each call that its own tracer recorded."""
    expected = stored_there(name)

    assert expected
    assert {
        step.response_id: (step.agent, step.reward)
        for path in TripletAdapter().adapt(stored(name))
        for step in path.transitions
    } == expected
