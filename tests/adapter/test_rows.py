"""Training rows: joined on exact tokens alone, every sampled token in one of them, once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.adapter.forest import Forest, said, token_attributes
from tests.adapter.forests import forests

from lightning_otel.adapter import TripletAdapter, rows
from lightning_otel.types import Span, TrainingRow, Trajectory, Transition

Ids = Sequence[int]


def step(prompt: Ids, sampled: Ids, logprobs: Sequence[float] = (), **fields: Any) -> Transition:
    """A transition of tokens; exact where it has some of both."""
    made: dict[str, Any] = {
        "rollout_id": "r",
        "attempt_id": "1",
        "agent": "a",
        "step": 0,
        "observation": (said("user", "q"),),
        "action": (said("assistant", "a"),),
        "reward": None,
        "next_observation": None,
        "done": False,
        "prompt_ids": prompt,
        "response_ids": sampled,
        "logprobs": logprobs,
        "capture": "exact" if prompt and sampled else "text",
        **fields,
    }
    return Transition(**made)


def path(*steps: Transition, branch: int = 0) -> Trajectory:
    """A trajectory of steps."""
    return Trajectory("r", "1", "a", branch, steps)


def joined(*steps: Transition) -> list[TrainingRow]:
    """The rows of one trajectory."""
    return list(rows.rows_of([path(*steps)]))


def test_steps_join_where_the_prompt_begins_with_what_is_held() -> None:
    """What the next prompt adds is masked, without a logprob of its own; the rest is trained."""
    first = step([1, 2], [3, 4], [-0.5, -1.0])
    second = step([1, 2, 3, 4, 9, 9, 9], [5], [-2.0])

    (row,) = joined(first, second)

    assert row == TrainingRow(
        transitions=(first, second),
        prompt_ids=(1, 2),
        completion_ids=(3, 4, 9, 9, 9, 5),
        loss_mask=(1, 1, 0, 0, 0, 1),
        logprobs=(-0.5, -1.0, 0.0, 0.0, 0.0, -2.0),
    )


def test_steps_join_where_nothing_was_seen_between() -> None:
    """A prompt of exactly what is held adds nothing: not the whole prompt once more."""
    (row,) = joined(step([1], [2], [-1.0]), step([1, 2], [3], [-3.0]))

    assert (row.completion_ids, row.loss_mask) == ((2, 3), (1, 1))
    assert row.logprobs == (-1.0, -3.0)


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ([1, 2, 8, 4, 9], "a sampled token came back as another"),
        ([1, 2, 3], "the answer was cut out of the history"),
        ([7, 1, 2, 3, 4], "something was put before"),
        ([1, 2], "the same was asked again"),
        ([5], "another conversation"),
    ],
)
def test_steps_fork_where_the_prompt_begins_otherwise(prompt: Ids, why: str) -> None:
    """Anything but an exact beginning makes a row of its own, and overwrites nothing."""
    first, second = step([1, 2], [3, 4]), step(prompt, [6, 7])

    found = joined(first, second)

    assert [row.completion_ids for row in found] == [(3, 4), (6, 7)], why
    assert [row.cause for row in found] == ["start", "drift"]
    assert found[1].prompt_ids == tuple(prompt)


def test_steps_fork_at_another_model() -> None:
    """Two models never share a row, though their token ids happen to continue each other."""
    found = joined(step([1], [2], model="a"), step([1, 2, 3], [4], model="b"))

    assert [row.cause for row in found] == ["start", "model"]


def test_a_step_without_logprobs_costs_the_others_none() -> None:
    """Steps with and without logprobs are rows apart, so that those with some keep them."""
    found = joined(step([1], [2], [-1.0]), step([1, 2, 3], [4]), step([1, 2, 3, 4, 5], [6], [-6.0]))

    assert [row.logprobs for row in found] == [(-1.0,), (), (-6.0,)]
    assert [row.cause for row in found] == ["start", "logprobs", "logprobs"]


def test_a_step_of_text_stands_between_rows() -> None:
    """A step without token ids is in no row, and nobody joins across it."""
    paths = [path(step([1], [2]), step([], [], inexact="none given"), step([1, 2, 3], [4]))]

    found = list(rows.rows_of(paths))

    assert [row.cause for row in found] == ["start", "gap"]


def test_a_shared_step_is_trained_once() -> None:
    """The second branch has the shared step's tokens in its prompt, where no loss is taken."""
    shared = step([1], [2], [-1.0], is_shared=True, span_id="s")
    left, right = step([1, 2, 3], [4], [-4.0]), step([1, 2, 5], [6], [-6.0])

    found = list(rows.rows_of([path(shared, left), path(shared, right, branch=1)]))

    assert [row.completion_ids for row in found] == [(2, 3, 4), (6,)]
    assert found[1].prompt_ids == (1, 2, 5)
    assert [row.cause for row in found] == ["start", "shared"]


def test_a_shared_step_read_back_is_still_one() -> None:
    """Branches that were stored and read again hold copies of the step they share."""
    shared = step([1], [2], is_shared=True, span_id="s")
    again = replace(shared, response_ids=list(shared.response_ids))

    found = list(rows.rows_of([path(shared), path(again, step([1, 2], [3]), branch=1)]))

    assert [row.completion_ids for row in found] == [(2,), (3,)]


def test_shared_steps_with_one_id_are_told_apart_by_their_tokens() -> None:
    """Ids that broken tracers repeat lose nobody's tokens."""
    one, other = (step([1], [n], is_shared=True, span_id="0") for n in (2, 3))

    assert len(list(rows.rows_of([path(one), path(other, branch=1)]))) == 2


def test_rows_leave_transitions_as_they_are() -> None:
    """Making the rows twice gives the same: no list of a transition grows."""
    steps = [step([1], [2], [-1.0]), step([1, 2, 3], [4], [-4.0])]
    before = [list(each.logprobs) for each in steps]

    assert joined(*steps) == joined(*steps)
    assert [list(each.logprobs) for each in steps] == before


def test_token_level_values_lie_where_they_belong() -> None:
    """A reward on a step's last sampled token; advantage and weight on all that it sampled."""
    first = step([1], [2, 3], reward=0.5, advantage=1.0, weight=0.25)
    second = step([1, 2, 3, 9], [4, 5], reward=None, advantage=-1.0, weight=0.5)
    third = step([1, 2, 3, 9, 4, 5, 9], [6], reward=2.0, advantage=0.0)

    (row,) = joined(first, second, third)

    assert row.completion_ids == (2, 3, 9, 4, 5, 9, 6)
    assert rows.last_tokens(row) == [1, 4, 6]
    assert rows.reward_of(row) == 2.5
    assert rows.token_rewards(row) == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 2.0]
    assert rows.token_advantages(row) == [1.0, 1.0, 0.0, -1.0, -1.0, 0.0, 0.0]
    assert rows.token_weights(row) == [0.25, 0.25, 0.0, 0.5, 0.5, 0.0, 1.0]


def test_values_that_are_missing_stay_missing() -> None:
    """No reward is not a reward of 0, and a step without an advantage is not an average one."""
    (row,) = joined(step([1], [2], advantage=1.0), step([1, 2], [3]))

    assert rows.reward_of(row) is None
    assert rows.token_rewards(row) is None
    assert rows.token_advantages(row) is None


tokens = st.lists(st.integers(0, 3), min_size=0, max_size=4)


@st.composite
def trees(draw: st.DrawFn) -> list[Trajectory]:
    """Trajectories that share beginnings, of steps that continue each other or not."""
    made: list[Transition] = []
    before: list[int] = []
    for index in range(draw(st.integers(1, 8))):
        previous = draw(st.integers(-1, index - 1))
        held = [*made[previous].prompt_ids, *made[previous].response_ids] if previous >= 0 else []
        prompt = [*held, *draw(tokens)] if draw(st.booleans()) else draw(tokens)
        sampled = draw(tokens)
        logprobs = [-float(n) for n in sampled] if draw(st.booleans()) else []
        made.append(step(prompt, sampled, logprobs, span_id=str(draw(st.integers(0, 9)))))
        made[-1] = replace(made[-1], start_ns=index)
        before.append(previous)
    leaves = set(range(len(made))) - set(before)
    chains = []
    for leaf in sorted(leaves):
        chain, node = [], leaf
        while node >= 0:
            chain.append(node)
            node = before[node]
        chains.append(chain[::-1])
    uses = Counter(node for chain in chains for node in chain)
    steps = [replace(each, is_shared=uses[node] > 1) for node, each in enumerate(made)]
    return [path(*(steps[n] for n in chain), branch=i) for i, chain in enumerate(chains)]


@given(trees())
@pytest.mark.pain(8)
def test_every_sampled_token_is_trained_exactly_once(paths: list[Trajectory]) -> None:
    """Whatever continues, forks and is shared: each step with tokens is in one row, whole."""
    found = list(rows.rows_of(paths))

    distinct = {each.start_ns: each for p in paths for each in p.transitions}.values()
    wanted = Counter(each.start_ns for each in distinct if each.prompt_ids and each.response_ids)
    assert Counter(each.start_ns for row in found for each in row.transitions) == wanted
    for row in found:
        ids = row.prompt_ids, row.completion_ids
        assert len(row.loss_mask) == len(row.completion_ids)
        assert len(row.logprobs) in (0, len(row.completion_ids))
        trained = [n for n, mask in zip(row.completion_ids, row.loss_mask, strict=True) if mask]
        assert trained == [n for each in row.transitions for n in each.response_ids]
        whole = [*ids[0], *ids[1]]
        for end, each in zip(rows.last_tokens(row), row.transitions, strict=True):
            size = len(row.prompt_ids) + end + 1
            assert whole[:size] == [*each.prompt_ids, *each.response_ids]
        if row.logprobs:
            kept = [p for p, mask in zip(row.logprobs, row.loss_mask, strict=True) if mask]
            assert kept == [p for each in row.transitions for p in each.logprobs]
            given_too = zip(row.logprobs, row.loss_mask, strict=True)
            assert all(p == 0.0 for p, mask in given_too if not mask)
        else:
            assert all(len(each.logprobs) != len(each.response_ids) for each in row.transitions)


@given(trees())
def test_steps_are_joined_wherever_they_continue_each_other(paths: list[Trajectory]) -> None:
    """No row of its own begins but where its cause says so."""
    for each in paths:
        for one, other in pairwise(rows.rows_of([each])):
            held = [*one.prompt_ids, *one.completion_ids]
            is_next = list(other.prompt_ids[: len(held)]) == held
            if other.cause == "drift":
                assert not is_next
            assert other.cause != "start"


@given(forests)
def test_every_exact_step_of_any_forest_is_in_one_row(spans: list[Span]) -> None:
    """Branches, several processes and rollouts: what the adapter gives is trained once."""
    paths = TripletAdapter().adapt(spans)

    found = Counter(id(each) for row in rows.rows_of(paths) for each in row.transitions)

    steps = {id(each): each for p in paths for each in p.transitions}
    assert found == Counter(n for n, each in steps.items() if each.capture == "exact")


def test_rows_of_what_the_adapter_gives() -> None:
    """Three turns of a conversation through the adapter are one row, with the last one's reward."""
    forest = Forest()
    held = [1, 2]
    for turn in range(3):
        span_id = forest.open_call(f"answer {turn}", f"question {turn}")
        forest._made[span_id].attributes |= token_attributes(held, [10 + turn], [-1.0])
        forest.close(span_id)
        held = [*held, 10 + turn, 5]
    forest.reward(1.0)

    (row,) = rows.rows_of(TripletAdapter().adapt(forest.spans))

    assert row.completion_ids == (10, 5, 11, 5, 12)
    assert row.loss_mask == (1, 0, 1, 0, 1)
    assert rows.token_rewards(row) == [0.0, 0.0, 0.0, 0.0, 1.0]


def overwritten(steps: Sequence[Transition]) -> int:
    """Sampled tokens left where each prompt overwrites what was held, as some trainers do."""
    held: list[int] = []
    mask: list[int] = []
    for each in steps:
        prompt = list(each.prompt_ids)
        same = next((i for i, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), None)
        kept = min(len(held), len(prompt)) if same is None else same
        mask = [*mask[:kept], *[0] * (len(prompt) - kept), *[1] * len(each.response_ids)]
        held = [*prompt, *each.response_ids]
    return sum(mask)


@pytest.mark.pain(8)
def test_forking_keeps_every_sampled_token_of_a_drifting_conversation() -> None:
    """Sixty conversations of three calls, of whose 120 joins 8 are clean, and 1,430 sampled tokens.

    The case DESIGN.md measured (decision 18): forking trains all 1,430 tokens, in 172 rows;
    overwriting, in 60 rows, kept 735 of them.
    """
    sizes = [8] * 170 + [7] * 10  # 1,430 tokens in 180 calls
    clean = {7 * n for n in range(8)}
    paths = []
    for number in range(60):
        held = [0, number]
        steps = []
        for turn in range(3):
            size = sizes[3 * number + turn]
            sampled = [100 * turn + 10 + n for n in range(size)]
            steps.append(step(held, sampled, [-1.0] * size))
            # The text encodes to other ids from its third token on, unless it happens to be sound.
            is_clean = turn == 0 and number in clean
            again = sampled if is_clean else [*sampled[:2], 1000 + turn, *sampled[3:]]
            held = [*held, *again, 5, 6]
        paths.append(path(*steps))

    found = list(rows.rows_of(paths))

    assert Counter(row.cause for row in found) == {"drift": 112, "start": 60}
    assert sum(sum(row.loss_mask) for row in found) == 1430
    assert 700 < sum(overwritten(each.transitions) for each in paths) < 800
