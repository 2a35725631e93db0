"""A trace too large to be adapted whole for one page: its steps, a page at a time.

Which calls are steps, and what they earned, is known from :mod:`tree`, which reads no message. What
was said and sampled is read of the steps on the page alone.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final
from weakref import WeakKeyDictionary

import orjson

from lightning_otel import conventions as c
from lightning_otel.adapter import TripletAdapter, marks
from lightning_otel.adapter.calls import observation_of
from lightning_otel.adapter.exactness import notes_of, read_tokens
from lightning_otel.adapter.outline import label_of
from lightning_otel.dataset import Store
from lightning_otel.serve.viewer.made import Credit, Step
from lightning_otel.serve.viewer.parts import Part
from lightning_otel.serve.viewer.span import messages, read_spans
from lightning_otel.serve.viewer.talk import LeftOut, Limits, Talk, along
from lightning_otel.serve.viewer.tree import Trace
from lightning_otel.types import Span, Trajectory, Transition
from lightning_otel.views.trace_rows import SPAN_COLUMNS, spans_around

CALLS: Final = 50
"""Calls on a page of the chat."""
_LIMITS: Final = Limits(messages=8, characters=2_000)
"""So that a page stays below 300 KB where messages are not all long."""
_SAID: Final = ("input_messages", "output_messages", "system_instructions")
_SAMPLED: Final = ("prompt_token_ids", "response_token_ids", "response_logprobs")


def steps(trace: Trace) -> list[Step]:
    """Every transition of a trace, without messages and tokens, in the order of its rows."""
    found = [row.step for row in trace.rows if row.step is not None]
    attempts = len({(step.rollout_id, step.attempt_id) for step in found})
    agents = len({step.agent for step in found})
    return [Step(step, label_of(step, 0, attempts, agents), []) for step in found]


def left_out(trace: Trace) -> list[LeftOut]:
    """Calls that are no step, each with its reason."""
    return [
        LeftOut(row.span_id, row.name, row.left_out)
        for row in trace.rows
        if row.kind == "call" and row.step is None
    ]


def place_of(trace: Trace, span_id: str) -> int:
    """The position among the steps of a span's own, or of the last one before it."""
    position = trace.find(span_id) or 0
    return max(0, sum(row.step is not None for row in trace.rows[: position + 1]) - 1)


def with_tokens(store: Store, found: Sequence[Step]) -> list[Step]:
    """Some steps with their tokens, and what a trainer should know of these."""
    spans = read_spans(store, [each.step for each in found], _SAMPLED)
    return [_with_tokens(each, spans.get(each.step.span_id)) for each in found]


def _with_tokens(found: Step, span: Span | None) -> Step:
    prompt_ids, response_ids, logprobs, _ = read_tokens({} if span is None else span.attributes)
    step = replace(found.step, prompt_ids=prompt_ids, response_ids=response_ids, logprobs=logprobs)
    return Step(step, found.label, notes_of(step))


def talks(store: Store, found: Sequence[Step], part: Part) -> list[Talk]:
    """Read the messages of some of the steps, by agent and history.

    Args:
        store: Where they are.
        found: Every step of the trace.
        part: Which of them.
    """
    chains = _number_histories(each.step for each in found)
    before = {chain: at for at, chain in enumerate(chains[: part.first])}
    shown: dict[int, list[int]] = {}
    for at in range(part.first, part.end):
        shown.setdefault(chains[at], []).append(at)
    wanted = {at for own in shown.values() for at in own}
    wanted |= {before[chain] for chain in shown if chain in before}
    told = _with_messages(store, {at: found[at].step for at in sorted(wanted)})
    labels = {(each.step.trace_id, each.step.span_id): each.label for each in found[part.places]}
    return [
        talk
        for chain, own in shown.items()
        for talk in along(
            [_make_trajectory([told[at] for at in own])],
            labels,
            told[before[chain]] if chain in before else None,
            _LIMITS,
        )
    ]


def _number_histories(found: Iterable[Transition]) -> list[int]:
    """For each step the number of the conversation that it goes on with.

    An agent begins another one with its first step; where it went back or was given another
    history, its messages tell.
    """
    chains: list[int] = []
    latest: dict[tuple[str, str, str], int] = {}
    for at, step in enumerate(found):
        agent = (step.rollout_id, step.attempt_id, step.agent)
        if step.step == 0 or agent not in latest:
            latest[agent] = at
        chains.append(latest[agent])
    return chains


def _make_trajectory(own: Sequence[Transition]) -> Trajectory:
    first = own[0]
    return Trajectory(first.rollout_id, first.attempt_id, first.agent, 0, tuple(own))


def _with_messages(store: Store, found: Mapping[int, Transition]) -> dict[int, Transition]:
    spans = read_spans(store, list(found.values()), _SAID)
    return {at: _add_messages(step, spans.get(step.span_id)) for at, step in found.items()}


def _add_messages(step: Transition, span: Span | None) -> Transition:
    if span is None:
        return step
    if marks.is_mark(span):
        return replace(step, action=(marks.message_of(span),))
    return replace(step, observation=observation_of(span), action=tuple(messages(span, "output")))


_CREDITS: "WeakKeyDictionary[Store, tuple[Trace, list[Credit]]]" = WeakKeyDictionary()


def credits(store: Store, trace: Trace, found: Sequence[Step]) -> list[Credit]:
    """Every reward of a trace, held for its next page.

    Args:
        store: Where it is.
        trace: The trace.
        found: Its steps.
    """
    held = _CREDITS.get(store)
    if held is None or held[0] is not trace:
        held = _CREDITS[store] = trace, _read_credits(store, trace, found)
    return held[1]


def _read_credits(store: Store, trace: Trace, found: Sequence[Step]) -> list[Credit]:
    labels = {each.step.span_id: each.label for each in found}
    spans = spans_around(store.source, trace.trace_id, SPAN_COLUMNS)
    adapted = TripletAdapter().explain(_answered(each, trace.steps) for each in spans)
    given = {(each.trace_id, each.span_id): each for each in adapted.credited}
    told = []
    for row in trace.rows:
        if row.kind != "reward":
            continue
        credit = None if row.left_out else given.get((row.trace_id, row.span_id))
        calls = () if credit is None else credit.calls
        told.append(
            Credit(
                trace_id=row.trace_id,
                span_id=row.span_id,
                name=row.facts.get("reward_name") or c.PRIMARY_REWARD,
                value=row.reward,
                given_ns=row.start_ns,
                targets=[(labels[call], call) for call in calls if call in labels],
                by="" if credit is None else credit.by,
                left_out=row.left_out,
            )
        )
    return told


def _answered(span: Span, steps: Collection[tuple[str, str]]) -> Span:
    """Give a span that became a step an answer of its own in place of the one that was not read."""
    if (span.trace_id, span.span_id) not in steps:
        return span
    said = orjson.dumps(
        [{"role": "assistant", "parts": [{"type": "text", "content": span.span_id}]}]
    )
    return replace(span, attributes={**span.attributes, c.OUTPUT_MESSAGES: said.decode()})
