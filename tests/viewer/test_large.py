"""A trace too large to be adapted for a page: chat, tokens and rewards, a page at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.viewer.asking import Asking
from tests.viewer.test_tree import TRACE, said, span
from tests.viewer.visiting import KEY

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.adapter.tokens import encode_ids, encode_logprobs
from lightning_otel.emitters import reward_span
from lightning_otel.serve.viewer import large
from lightning_otel.serve.viewer.made import MOST_SPANS, adapted, credits, steps
from lightning_otel.serve.viewer.parts import part_of
from lightning_otel.serve.viewer.talk import talks
from lightning_otel.serve.viewer.tree import read_trace
from lightning_otel.types import Span

TURNS = 5
"""After so many an agent begins another conversation."""


def trace(calls: int, others: int = 0) -> Iterator[Span]:
    """Two agents by turns, each call with a reward after it, and other spans."""
    end_ns = 10_000 * (calls + 2) + 1_000
    yield span(1, end_ns=end_ns)
    for number, agent in enumerate(("planner", "writer"), 2):
        own = {c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: agent}
        yield span(number, 1, start_ns=1_000 + number, end_ns=end_ns - number, attributes=own)
    for turn in range(calls):
        yield from turn_of(turn)
    for number in range(others):
        yield span(1_000_000 + number, 1, start_ns=2_000 + number, end_ns=2_001 + number)


def turn_of(turn: int) -> Iterator[Span]:
    """A call, which goes on with the agent's last one, and its reward; every tenth call fails."""
    number, agent, since_ns = 10 + 2 * turn, 2 + turn % 2, 10_000 * (turn + 1)
    told = turn // 2 % TURNS
    begun = turn - 2 * told
    history = [("user", f"task {begun}")]
    for each in range(begun, turn, 2):
        history += [("assistant", f"answer {each}"), ("user", f"go on {each}")]
    attributes: dict[str, Any] = {
        c.OPERATION: c.CHAT,
        c.RESPONSE_ID: f"r-{turn}",
        c.OUTPUT_TOKENS: 2,
        c.INPUT_MESSAGES: said(*history),
        c.OUTPUT_MESSAGES: said(("assistant", f"answer {turn}")),
        c.PROMPT_TOKEN_IDS: encode_ids([range(3 + told)]),
        c.RESPONSE_TOKEN_IDS: encode_ids([[7, turn]]),
        c.RESPONSE_LOGPROBS: encode_logprobs([[-0.1, -0.2]]),
    }
    times = {"start_ns": since_ns, "end_ns": since_ns + 5_000}
    status = "ERROR" if turn % 10 == 9 else "OK"
    yield span(number, agent, status=status, attributes=attributes, **times)
    reward = {c.REWARD_VALUE: turn / 8, c.REWARD_NAME: "judge"}
    yield span(
        number + 1, agent, name=c.SPAN_ANNOTATION, attributes=reward,
        start_ns=since_ns + 6_000, end_ns=since_ns + 6_000,
    )  # fmt: skip


def test_a_page_at_a_time_tells_what_is_told_at_once(store: Store) -> None:
    """The same messages, tokens and rewards, wherever the pages are cut."""
    store.add(trace(43))
    store.add(
        [
            reward_span({"late": 0.5}, span_id=f"{10:016x}"),
            reward_span({"late": 0.7}, response_id="r-1"),
            reward_span({"late": 0.9}, response_id="none"),
        ]
    )
    found, _ = adapted(store, TRACE)
    shown = read_trace(store, TRACE)
    assert found is not None

    every = large.steps(shown)

    by_id = {each.step.span_id: each for each in steps(found)}
    for each in large.with_tokens(store, every):
        other = by_id.pop(each.step.span_id)
        assert each.notes == other.notes
        assert list(each.step.prompt_ids) == list(other.step.prompt_ids)
        assert list(each.step.logprobs) == list(other.step.logprobs)
    assert by_id == {}
    assert [bare(each) for each in large.credits(store, shown, every)] == unordered(
        [bare(each) for each in credits(found)], shown
    )
    at_once = {message for talk in talks(found) for message in words(talk.messages)}
    for size in (1, 7, 100):
        in_parts = [
            message
            for first in range(0, len(every), size)
            for talk in large.talks(store, every, part_of(len(every), size, first, "step"))
            for message in words(talk.messages)
        ]
        assert len(in_parts) == len(set(in_parts))
        assert set(in_parts) == at_once
    assert [each.reason for each in large.left_out(shown)] == 4 * [
        "failed: the call ended in an error"
    ]


def words(messages: Any) -> list[tuple[str, str, str]]:
    """Who said what in which call."""
    return [(each.role, each.parts[0].text, each.span_id) for each in messages]


def bare(credit: Any) -> tuple[Any, ...]:
    """A credit without labels, which name branches where they are known."""
    targets = [span_id for _, span_id in credit.targets]
    return credit.span_id, credit.name, credit.value, targets, credit.by, credit.left_out


def unordered(found: list[tuple[Any, ...]], shown: Any) -> list[tuple[Any, ...]]:
    """The same in the order of a trace's rows."""
    places = {row.span_id: at for at, row in enumerate(shown.rows)}
    return sorted(found, key=lambda each: places[each[0]])


@pytest.fixture
def asking(store: Store, served: Callable[..., str]) -> Asking:
    """A served store with a trace of more spans than are adapted for a page."""
    store.add(trace(600, MOST_SPANS))
    return Asking(served(store, "", key=KEY))


def test_a_large_trace_is_told_in_pages(asking: Asking) -> None:
    """Chat, tokens and rewards to the last one; a span leads to its page; none is heavy."""
    at = f"/traces/{TRACE}?tab="
    answers = {
        path: asking.get(at + path)
        for path in (
            "chat",
            "chat&first=525",
            f"chat&span={10 + 2 * 300:016x}",
            "tokens&first=400",
            "rewards",
            "rewards&first=400",
            "rewards&first=999999",
        )
    }

    told = {path: answer.words for path, answer in answers.items()}
    assert {answer.status for answer in answers.values()} == {200}
    assert max(len(answer.body) for answer in answers.values()) < 300_000
    assert "steps 1–50 of 540" in told["chat"]
    assert "task 0" in told["chat"]
    assert "60 calls that are no step" in told["chat"]
    assert "answer 597" in told["chat&first=525"]
    assert "steps 151–200" in told[f"chat&span={10 + 2 * 300:016x}"]
    assert "answer 300" in told[f"chat&span={10 + 2 * 300:016x}"]
    assert "steps 401–540" in told["tokens&first=400"]
    assert "rows 1–200 of 600" in told["rewards"]
    assert "74.88" in told["rewards&first=400"]
    assert told["rewards&first=999999"].count("judge") == told["rewards&first=400"].count("judge")
