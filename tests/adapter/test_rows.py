"""Training rows: joined on exact tokens alone, every sampled token in one of them, once."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.adapter.forests import forests
from tests.formats.made import exact, path

from lightning_otel.adapter import TripletAdapter, rows
from lightning_otel.types import Span, Trajectory, Transition


def drawn(text: str) -> list[Trajectory]:
    """Trajectories with ``;`` between, steps with ``,``: the prompt, ``>`` and what was sampled.

    ``@lp`` gives logprobs, the negative ids; ``@s`` shares the step, ``@a`` names its model.
    """
    paths = []
    for branch, line in enumerate(text.split(";")):
        steps = []
        for word in line.split(","):
            ids, *marks = word.split("@")
            prompt, sampled = (list(map(int, part.split())) for part in ids.split(">"))
            logprobs = [-float(n) for n in sampled] if "lp" in marks else []
            shared = "s" in marks
            model = next((mark for mark in marks if mark not in ("lp", "s")), None)
            steps.append(exact(prompt, sampled, logprobs=logprobs, is_shared=shared, model=model))
        paths.append(path(*steps, branch=branch))
    return paths


CASES = {
    "what is seen between is masked": ("1 2>3 4@lp,1 2 3 4 9 9>5@lp", "start 1 2|3 4 _9 _9 5"),
    "nothing was seen between": ("1>2@lp,1 2>3@lp", "start 1|2 3"),
    "a sampled token came back as another": (
        "1 2>3 4,1 2 8 4 9>6",
        "start 1 2|3 4, drift 1 2 8 4 9|6",
    ),
    "the answer was cut": ("1 2>3 4,1 2 3>6", "start 1 2|3 4, drift 1 2 3|6"),
    "something was put before": ("1 2>3 4,7 1 2 3 4>6", "start 1 2|3 4, drift 7 1 2 3 4|6"),
    "asked again": ("1 2>3 4,1 2>6", "start 1 2|3 4, drift 1 2|6"),
    "another conversation": ("1 2>3 4,5>6", "start 1 2|3 4, drift 5|6"),
    "another model": ("1>2@a,1 2 3>4@b", "start 1|2, model 1 2 3|4"),
    "no logprobs": (
        "1>2@lp,1 2 3>4,1 2 3 4 5>6@lp",
        "start 1|2, logprobs 1 2 3|4, logprobs 1 2 3 4 5|6",
    ),
    "a step of text": ("1>2,>,1 2 3>4", "start 1|2, gap 1 2 3|4"),
    "a shared step is trained once": (
        "1>2@s,1 2 3>4;1>2@s,1 2 5>6",
        "start 1|2 _3 4, shared 1 2 5|6",
    ),
    "a shared step that ends a path": ("1>2@s;1>2@s,1 2>3", "start 1|2, shared 1 2|3"),
    "one id, other tokens": ("1>2@s;1>3@s", "start 1|2, start 1|3"),
}


@pytest.mark.parametrize(("drawing", "expected"), CASES.values(), ids=CASES)
def test_steps_join_on_exact_tokens_alone(drawing: str, expected: str) -> None:
    """A row is its cause, its prompt and its completion, in which ``_`` masks what was given."""
    found = list(rows.rows_of(drawn(drawing)))

    told = []
    for row in found:
        pairs = list(zip(row.completion_ids, row.loss_mask, strict=True))
        completion = " ".join(f"{'' if mask else '_'}{token}" for token, mask in pairs)
        told.append(f"{row.cause} {' '.join(map(str, row.prompt_ids))}|{completion}")
        has_logprobs = "lp" in drawing and row.prompt_ids != (1, 2, 3)
        assert list(row.logprobs) == [-float(n) * mask for n, mask in pairs] * has_logprobs
    assert ", ".join(told) == expected


def test_token_level_values_lie_where_they_belong() -> None:
    """A reward on a step's last sampled token; advantage and weight on all that it sampled."""
    first = exact([1], [2, 3], reward=0.5, advantage=1.0, weight=0.25)
    second = exact([1, 2, 3, 9], [4, 5], reward=None, advantage=-1.0, weight=0.5)
    third = exact([1, 2, 3, 9, 4, 5, 9], [6], reward=2.0, advantage=0.0)

    (row,) = rows.rows_of([path(first, second, third)])

    assert row.completion_ids == (2, 3, 9, 4, 5, 9, 6)
    assert rows.last_tokens(row) == [1, 4, 6]
    assert rows.token_rewards(row) == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 2.0]
    assert rows.token_advantages(row) == [1.0, 1.0, 0.0, -1.0, -1.0, 0.0, 0.0]
    assert rows.token_weights(row) == [0.25, 0.25, 0.0, 0.5, 0.5, 0.0, 1.0]


def test_values_that_are_missing_stay_missing() -> None:
    """No reward is not a reward of 0, and a step without an advantage is not an average one."""
    (row,) = rows.rows_of([path(exact([1], [2], advantage=1.0), exact([1, 2], [3]))])

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
        made.append(exact(prompt, sampled, logprobs=logprobs, span_id=str(draw(st.integers(0, 9)))))
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


@pytest.mark.pain(8)
def test_forking_keeps_every_sampled_token_of_a_drifting_conversation() -> None:
    """Sixty conversations of three calls: of 120 joins 8 are clean, with 1,430 sampled tokens."""
    sizes = [8] * 170 + [7] * 10  # 1,430 tokens in 180 calls
    clean = {7 * n for n in range(8)}
    paths = []
    for number in range(60):
        held = [0, number]
        steps = []
        for turn in range(3):
            size = sizes[3 * number + turn]
            sampled = [100 * turn + 10 + n for n in range(size)]
            steps.append(exact(held, sampled))
            # The text encodes to other ids from its third token on, unless it happens to be sound.
            is_clean = turn == 0 and number in clean
            again = sampled if is_clean else [*sampled[:2], 1000 + turn, *sampled[3:]]
            held = [*held, *again, 5, 6]
        paths.append(path(*steps))

    found = list(rows.rows_of(paths))

    assert Counter(row.cause for row in found) == {"drift": 112, "start": 60}
    assert sum(sum(row.loss_mask) for row in found) == 1430
