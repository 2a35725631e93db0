"""Linear attempts by facts of their spans: transitions without a look at messages.

The facts of a call are hashes of its history, and the few attributes that a transition tells. Of
what they do not tell for sure the general adapter reads the spans; a test compares the two.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, groupby, islice, repeat
from typing import Any, Final, NamedTuple

import orjson

from lightning_otel.adapter.agent_patterns import is_tracked, join_versions, resources_of
from lightning_otel.adapter.attributes import finish_reason, get_text
from lightning_otel.adapter.linear import Adaptation, Linear, Row, walk
from lightning_otel.adapter.rewards import note_choice, read_reward
from lightning_otel.adapter.tokens import (
    LENGTH,
    NO_IDS,
    SAMPLING_KEYS,
    notes_of,
    read_tokens,
    sampling_of,
)
from lightning_otel.types import (
    Call,
    CaptureLevel,
    Credited,
    Dropped,
    Report,
    Reward,
    Span,
    Trajectory,
    Transition,
)
from lightning_otel.types import conventions as c
from lightning_otel.types.transitions import fast_constructor

_TOKENS: Final = (c.PROMPT_TOKEN_IDS, c.RESPONSE_TOKEN_IDS, c.RESPONSE_LOGPROBS)
CALL_KEYS: Final = (
    c.TRACK_ONLY, c.RESOURCES, c.RESOURCE_VERSION, c.MODE, c.RESPONSE_MODEL, c.REQUEST_MODEL,
    c.FINISH_REASONS, c.LOGPROBS_MODE, *SAMPLING_KEYS, *_TOKENS,
)  # fmt: skip
"""Attributes of a call that its facts hold, in this order, as a JSON array with nulls."""
REWARDS: Final = 4
"""Named rewards of one span that its facts hold."""
REWARD_KEYS: Final = tuple(
    f"{c.REWARD_PREFIX}.{index}.{part}" for index in range(REWARDS) for part in ("name", "value")
)
"""Attributes of a reward that its facts hold."""
(_ID, _SPOT, _FACTS, _BEFORE, _AFTER, _HAS_TOKENS, _RESPONSE) = (0, *range(6, 12))
"""Places in a row of what the walk does not read: the row's number; of calls and rewards their
facts; of calls the hashes of the history and of that with the answer, whether there are tokens,
and the id of the response; then the span's id, start and end, and counts of tokens.
"""
_NOTHING: Final[Mapping[str, float]] = {}
_NO_SPAN: Final = Span("", "", None, "", 0, 0)
_NO_BODIES: Final = Call(_NO_SPAN, "", (), ())


class TokenFacts(NamedTuple):
    """The facts about a call's tokens: exactness, its reason, and notes."""

    capture: CaptureLevel
    inexact: str
    notes: tuple[str, ...]


class CallFacts(NamedTuple):
    """The facts that many calls share, named as those of a transition."""

    agent: str
    resource_version: str | None
    resources: Mapping[str, str]
    mode: str | None
    model: str | None
    finish_reason: str | None
    sampling: Mapping[str, Any]
    capture: CaptureLevel
    inexact: str
    notes: tuple[str, ...]


class Step(NamedTuple):
    """A transition in brief.

    Attributes:
        attempt: Ids of its rollout, its attempt and its trace.
        spot: Number of its call's row.
        step: Its number among its agent's.
        done: Whether it is the last of these.
        call: What its call says; one object for all that say the same.
        rewards: Its named rewards, the primary one first; likewise.
        rest: Ids of the response and the span, start, end, and counts of tokens.
    """

    attempt: Sequence[str]
    spot: int
    step: int
    done: bool
    call: CallFacts
    rewards: Mapping[str, float]
    rest: tuple[Any, ...]


def check_tokens(facts: str, output_tokens: int | None, texts: Sequence[str | None]) -> TokenFacts:
    """Check the tokens of a call.

    Args:
        facts: What its attributes say.
        output_tokens: How many the server counted.
        texts: The prompt's ids, the response's and its logprobs, as they are stored.
    """
    attributes = _make_attributes(CALL_KEYS, facts)
    tokens = read_tokens(dict(zip(_TOKENS, texts, strict=True)))
    step = Transition(
        *("", "", "", 0, (), (), None, None, False),
        response_ids=tokens.response_ids,
        logprobs=tokens.logprobs,
        capture="exact" if len(tokens.prompt_ids) and len(tokens.response_ids) else "text",
        finish_reason=finish_reason(attributes.get(c.FINISH_REASONS)),
        output_tokens=output_tokens,
        sampling=sampling_of(attributes, {}),
    )
    return TokenFacts(step.capture, tokens.inexact, tuple(notes_of(step)))


def _make_attributes(keys: tuple[str, ...], facts: str) -> dict[str, Any]:
    pairs = zip(keys, orjson.loads(facts), strict=True)
    return {key: value for key, value in pairs if value is not None}


@lru_cache(maxsize=4096)
def _read_call(agent: str, facts: str, tokens: TokenFacts | None) -> CallFacts | None:
    """Read what a call says; None if the general adapter must look closer."""
    attributes = _make_attributes(CALL_KEYS, facts)
    is_closed = any(key in attributes for key in _TOKENS)
    if is_closed or not is_tracked(agent, attributes.get(c.TRACK_ONLY)):
        return None
    resources = resources_of(agent, attributes.get(c.RESOURCES))
    reason = finish_reason(attributes.get(c.FINISH_REASONS))
    return CallFacts(
        agent,
        get_text(attributes, c.RESOURCE_VERSION) or join_versions(resources),
        resources,
        get_text(attributes, c.MODE),
        get_text(attributes, c.RESPONSE_MODEL) or get_text(attributes, c.REQUEST_MODEL),
        reason,
        sampling_of(attributes, {}),
        *(tokens or ("text", NO_IDS, (LENGTH,) if reason == "length" else ())),
    )


@lru_cache(maxsize=4096)
def _read_rewards(facts: str) -> Mapping[str, float] | None:
    """Read the named rewards of a span; None if the general adapter must look closer."""
    attributes = _make_attributes(REWARD_KEYS, facts)
    reward = read_reward(Span("", "", None, c.SPAN_ANNOTATION, 0, 0, attributes=attributes))
    return reward.values if isinstance(reward, Reward) else None


class Walk:
    """The walk over many attempts, one after the other.

    Attributes:
        steps: The transitions of all linear attempts, those of one agent in one attempt together.
        rollouts: The rollout of each of these attempts.
    """

    def __init__(self, tokens: Mapping[int, TokenFacts]) -> None:
        """Take the facts about the calls that have tokens, by the number of their rows."""
        self.steps: list[Step] = []
        self.rollouts: list[str] = []
        self.tokens = tokens
        self._named: dict[tuple[tuple[str, float], ...], Mapping[str, float]] = {}
        self._spans = self._judged = 0
        self._dropped: list[Dropped] = []
        self._credited: list[tuple[str, str, str]] = []
        self._earned: dict[tuple[str, ...], float | None] = {}

    def add(self, attempt: Sequence[str], rows: Sequence[Row]) -> bool:
        """Add an attempt's transitions; return whether it is linear.

        Args:
            attempt: Ids of its rollout, of itself and of its trace.
            rows: All its spans in order of their start, each ended, of one process.
        """
        found, calls = self._walk_rows(rows)
        judged = 0 if found is None else len(found.placed) + len(found.dropped)
        if found is None or judged == len(rows):  # rewards alone may wait for what they judge
            return False
        for own in found.calls.values():
            for step, position in enumerate(own):
                row, named = rows[position], found.rewards.get(position, _NOTHING)
                named = self._named.setdefault(tuple(named.items()), named)
                is_last, call = position == own[-1], calls[position]
                self.steps.append(
                    Step(attempt, row[_SPOT], step, is_last, call, named, row[_RESPONSE:])
                )
        self.rollouts.append(attempt[0])
        self._spans += len(rows)
        self._judged += judged
        self._earned[tuple(attempt[:2])] = found.value
        self._credited += (
            (rows[position][_ID], attempt[2], rows[call][_ID]) for position, call in found.placed
        )
        self._dropped += (
            Dropped(rows[position][_ID], attempt[2], "reward", reason)
            for position, reason in found.dropped
        )
        return True

    def _walk_rows(self, rows: Sequence[Row]) -> tuple[Linear | None, dict[int, CallFacts]]:
        calls: dict[int, CallFacts] = {}
        own: dict[str, list[int]] = {}
        responses: set[str] = set()

        def take_call(position: int, agent: str) -> bool:
            """Take a call; return whether it continues its agent's latest one, or all begin anew.

            Of a mixture only the messages tell whether something was asked again, or a history cut.
            """
            row, earlier = rows[position], own.setdefault(agent, [])
            # One response twice is one request, or a server that repeats its ids.
            if row[_RESPONSE] in responses:
                return False
            tokens = None
            if row[_HAS_TOKENS]:
                tokens = self.tokens.get(row[_SPOT])
                if tokens is None:
                    return False
            call = _read_call(agent, row[_FACTS], tokens)
            if call is None:
                return False
            if earlier:
                before = rows[earlier[-1]]
                has_history = len(earlier) == 1 or before[_BEFORE] is not None
                is_continued = row[_BEFORE] == before[_AFTER] and has_history
                # Of an unnamed agent only the messages tell who asks.
                is_anew = before[_BEFORE] is None and agent != ""
                if not (is_anew if row[_BEFORE] is None else is_continued):
                    return False
            responses.add(row[_RESPONSE])
            calls[position] = call
            earlier.append(position)
            return True

        return walk(rows, take_call, lambda at: _read_rewards(rows[at][_FACTS])), calls

    def report(self) -> Report:
        """Return the funnel of the linear attempts."""
        inexact: Counter[str] = Counter()
        notes: Counter[str] = Counter()
        calls = {id(step.call): step.call for step in self.steps}
        for name, count in Counter(id(step.call) for step in self.steps).items():
            if calls[name].capture != "exact":
                inexact[calls[name].inexact] += count
            notes.update(dict.fromkeys(calls[name].notes, count))
        notes.update(note for step in self.steps for note in note_choice(step.rewards))
        steps = len(self.steps)
        return Report(
            spans=self._spans,
            rollouts=len(self.rollouts),
            calls=steps,
            transitions=steps,
            exact=steps - inexact.total(),
            rewards=self._judged,
            rewards_placed=self._judged - len(self._dropped),
            rewarded=sum(bool(step.rewards) for step in self.steps),
            dropped=tuple(self._dropped),
            inexact=inexact,
            notes=notes,
        )

    def transitions(self, calls: Sequence[Call] = ()) -> Iterator[Transition]:
        """Make the transitions; without the call of each step they have no bodies."""
        make = fast_constructor(Transition)
        bodies: Iterable[Call] = calls or repeat(_NO_BODIES)
        following: Iterable[Call] = chain(islice(calls, 1, None), repeat(_NO_BODIES))
        for (attempt, _, step, done, call, named, rest), own, after in zip(
            self.steps, bodies, following, strict=False
        ):
            response, span, start, end, given, made = rest
            # By position, in the order of the fields: names would cost half as much again.
            yield make(
                attempt[0], attempt[1], call.agent, step, own.observation, own.action,
                next(iter(named.values()), None), None if done else after.observation, done,
                dict(named), False, own.tools, own.prompt_ids, own.response_ids, own.logprobs,
                call.capture, call.resource_version, call.model, response, call.finish_reason,
                attempt[2], span, start, end, given, made, dict(call.resources),
                dict(call.sampling), "", None, 1.0, call.mode, call.inexact,
            )  # fmt: skip

    def adaptation(self) -> Adaptation:
        """Return the trajectories without bodies, and where each reward went."""
        paths = [
            Trajectory(*key, 0, tuple(steps), reward=self._earned[key[:2]])
            for key, steps in groupby(
                self.transitions(), lambda step: (step.rollout_id, step.attempt_id, step.agent)
            )
        ]
        credited = [
            Credited(span_id, trace_id, (call,), "previous")
            for span_id, trace_id, call in self._credited
        ]
        return Adaptation(paths, self.report(), credited)
