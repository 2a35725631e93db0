"""One conversation as nine packages really recorded it: all give the transitions that ours give.

What a source does not carry is said for each of them, and checked to be missing: a reader that
learns to read it must say so here.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from tests.adapter.fixtures import SPANS, recorded

from lightning_otel.adapter import TripletAdapter
from lightning_otel.types import Report, Span, Trajectory, Transition
from lightning_otel.types import conventions as c


class Carried(NamedTuple):
    """What a source tells."""

    exact: Sequence[int] = ()
    has_agent: bool = True
    has_tools: bool = True
    reward: float | None = None
    has_spans_of_tools: bool = True
    has_usage_of_streams: bool = True


SOURCES = {
    "lightning": Carried(exact=(0, 1, 2, 3), reward=1.0, has_spans_of_tools=False),
    "current": Carried(),
    "legacy": Carried(has_agent=False, has_tools=False, has_spans_of_tools=False),
    "flattened": Carried(has_agent=False, has_spans_of_tools=False, has_usage_of_streams=False),
    "openinference": Carried(exact=(0, 1, 2, 3)),
    "openllmetry": Carried(),
    "agentops": Carried(),
    "agentlightning": Carried(exact=(0, 1), has_agent=False, reward=1.0, has_spans_of_tools=False),
}
OURS = recorded("lightning")


def adapted(spans: Sequence[Span]) -> tuple[list[Transition], Report]:
    """The transitions of the one trajectory there must be, and the report."""
    found = TripletAdapter().explain(spans)
    (trajectory,) = found.trajectories
    return list(trajectory.transitions), found.report


def words(step: Transition) -> dict[str, Any]:
    """What every source carries of a step."""
    return {
        "observation": step.observation,
        "action": step.action,
        "next_observation": step.next_observation,
        "done": step.done,
        "step": step.step,
        "model": step.model,
        "response_id": step.response_id,
        "finish_reason": step.finish_reason,
    }


def token_data(step: Transition) -> tuple[list[int], list[int], list[float]]:
    """Token ids and logprobs of a step."""
    return list(step.prompt_ids), list(step.response_ids), list(step.logprobs)


def test_there_is_a_fixture_for_every_source_and_no_other() -> None:
    """Each file is tested, and each test has its file."""
    assert {path.stem for path in SPANS.glob("*.jsonl")} == {*SOURCES, "litellm"}


@pytest.mark.parametrize("source", SOURCES)
def test_source_gives_the_same_transitions(source: str) -> None:
    """Observations, actions, order, ids, model and reasons are ours, in any order, told twice."""
    ours, _ = adapted(OURS)

    spans = recorded(source)

    steps, report = adapted(spans)

    assert len(steps) == 4
    assert adapted([*reversed(spans), *spans])[0] == steps
    assert [words(step) for step in steps] == [words(step) for step in ours]
    assert report.dropped == ()


@pytest.mark.parametrize(("source", "carried"), SOURCES.items())
def test_source_carries_what_is_said_of_it(source: str, carried: Carried) -> None:
    """Token ids, logprobs, tools, agents and rewards are ours where the source has them at all."""
    ours, _ = adapted(OURS)

    steps, _ = adapted(recorded(source))

    nothing: tuple[list[int], list[int], list[float]] = ([], [], [])
    for number, (step, own) in enumerate(zip(steps, ours, strict=True)):
        is_exact = number in carried.exact
        assert token_data(step) == (token_data(own) if is_exact else nothing)
        assert step.capture == ("exact" if is_exact else "text")
        assert step.tools == (own.tools if carried.has_tools else ())
        assert step.agent == ("calc" if carried.has_agent else "")
        has_usage = number < 2 or carried.has_usage_of_streams
        usage = (own.input_tokens, own.output_tokens) if has_usage else (None, None)
        assert (step.input_tokens, step.output_tokens) == usage
    assert [step.reward for step in steps] == [None, None, None, carried.reward]


def of_one_rollout(spans: Sequence[Span]) -> list[Span]:
    """The spans as a proxy's are that was told of the rollout."""
    return [replace(s, attributes={**s.attributes, c.ROLLOUT_ID: "r1"}) for s in spans]


def test_litellm_tells_whole_answers_exactly() -> None:
    """Of an answer that was no stream, the raw body below the request gives token ids and all."""
    ours, _ = adapted(OURS)

    found = TripletAdapter().explain(of_one_rollout(recorded("litellm")))

    steps = {step.response_id: step for each in found.trajectories for step in each.transitions}
    for own in ours[:2]:
        step = steps[own.response_id]
        assert words(step) == words(own) | {"next_observation": step.next_observation}
        assert (token_data(step), step.tools) == (token_data(own), own.tools)
        assert (step.input_tokens, step.output_tokens) == (own.input_tokens, own.output_tokens)
    assert found.report.reasons() == {"duplicate: litellm recorded the same request": 2}
    assert (found.report.calls, found.report.transitions, found.report.exact) == (4, 4, 2)


def test_litellm_loses_token_ids_and_tool_call_ids_of_streams() -> None:
    """Of a stream only words, names, arguments and usage are there; no tool call has its id."""
    ours, _ = adapted(OURS)

    found = TripletAdapter().adapt(of_one_rollout(recorded("litellm")))

    steps = {step.response_id: step for each in found for step in each.transitions}
    third, last = (steps[own.response_id] for own in ours[2:])
    (own_part,) = ours[2].action[0]["parts"]
    assert third.action[0]["parts"] == [{**own_part, "id": None}]
    assert (third.observation, last.observation) == (ours[2].observation, ours[3].observation)
    assert (last.action, last.finish_reason) == (ours[3].action, "stop")
    assert [third.capture, last.capture] == ["text", "text"]
    # The next request repeats this answer all the same: ids of calls are no part of identities.
    assert sorted(map(ids, found)) == [[1, 2, 3, 4]]


def ids(trajectory: Trajectory) -> list[int]:
    """The numbers in the response ids of a trajectory."""
    return [int(str(step.response_id).rpartition("-")[2]) for step in trajectory.transitions]


def test_litellm_streams_are_traces_of_their_own() -> None:
    """Without a rollout id its streamed calls are rollouts of their own, as it made them."""
    found = TripletAdapter().adapt(recorded("litellm"))

    assert sorted(len(trajectory.transitions) for trajectory in found) == [1, 1, 2]


def test_agentlightning_names_its_rollout_in_the_resource() -> None:
    """Its rollout and attempt ids, which stand on the resource, are the trajectory's."""
    spans = recorded("agentlightning")

    (trajectory,) = TripletAdapter().adapt(spans)

    assert trajectory.rollout_id == spans[0].otel_resource[c.ROLLOUT_ID]
    assert trajectory.attempt_id == spans[0].otel_resource[c.ATTEMPT_ID]
