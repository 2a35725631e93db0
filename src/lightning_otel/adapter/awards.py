"""Awards of rewards to the calls that they judge, in an order that arrival does not decide.

What a program declares primary counts first, then its other rewards by their start, then by name;
last, likewise, what comes from outside: feedback, evaluations, scores of reward functions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

from lightning_otel.adapter.attributes import to_text
from lightning_otel.adapter.rewards import ALREADY_REWARDED, add_decimals, add_named
from lightning_otel.types import Reward, Span
from lightning_otel.types import conventions as c

UNKNOWN_TARGET: Final = "its link matches no span of the attempt it belongs to"
WRONG_LENGTH: Final = "its sequence has {} numbers for {} steps"

PRIMARY, OTHER, OUTSIDE = range(3)
"""Ranks of rewards: declared primary by the program, its others, and those from outside."""
_OUTSIDE_KEYS: Final = frozenset(
    {
        c.REWARD_FUNCTION, c.REWARD_AUTHOR, c.REWARD_AUTHOR_KIND, c.EVALUATION_NAME,
        c.EVALUATION_SCORE, c.FEEDBACK_ID, c.FEEDBACK_QUALITY, c.FEEDBACK_RATING,
        c.FEEDBACK_SATISFIED, c.FEEDBACK_USED, c.FEEDBACK_TEXT, c.FEEDBACK_METADATA,
        c.FEEDBACK_CONVERSATION,
    }
)  # fmt: skip
"""Attributes that a reward of the program itself does not have."""

Rewards = Mapping[int, Reward]
"""Rewards by position, in order."""
Source: TypeAlias = tuple[int, int]
"""A number: its reward's position and, in a sequence, its own."""


class Precedence(NamedTuple):
    """The place of a named number among those of one call; the least one counts."""

    rank: int
    start: int
    is_further: bool  # not the first number of its span
    name: str
    position: int


class Claim(NamedTuple):
    """A reward and the calls that it judges, whatever other rewards these have.

    Attributes:
        position: Position of its span in the tree.
        reward: The reward.
        calls: Positions of the calls, in order.
        by: The rule or statement by which it judges them.
        reason: The reason why it counts for none, if there is none.
        is_ruled: Whether a rule chose the calls, and not the reward itself.
    """

    position: int
    reward: Reward
    calls: Sequence[int]
    by: str
    reason: str
    is_ruled: bool = False


class Placed(NamedTuple):
    """A reward's position, the positions of the calls it went to, in order, and by what."""

    position: int
    calls: tuple[int, ...]
    by: str


@dataclass(slots=True)
class Awards:
    """The credited rewards, by call.

    Attributes:
        rewards: Named rewards of each call, by the call's position in the tree; what counts first.
        placed: Where each reward went that judges calls.
        unplaced: Each other reward with the reason.
        totals: The sum of all placed rewards by name; one that went to several calls counts once.
        value: The sum of the first rewards of the calls, likewise; None if no call has one.
    """

    rewards: dict[int, dict[str, float]] = field(default_factory=dict)
    placed: list[Placed] = field(default_factory=list)
    unplaced: list[tuple[Reward, str]] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    value: float | None = None


class _Share(NamedTuple):
    """The part of a reward that is for one call, and its place in a sequence."""

    call: int
    values: Mapping[str, float]
    place: int = 0


def order_rewards(
    spans: Sequence[Span], starts: Sequence[int], rewards: Rewards
) -> dict[int, Precedence]:
    """Return the precedence of each reward of an attempt, by its position."""
    is_local = not all(
        position in rewards or c.RECEIVED in span.attributes for position, span in enumerate(spans)
    )
    return {
        position: Precedence(
            _rank_reward(reward, is_local=is_local),
            starts[position],
            False,
            next(iter(reward.values)),
            position,
        )
        for position, reward in rewards.items()
    }


def is_from_outside(span: Span, *, is_local: bool = True) -> bool:
    """Return whether a reward is not the program's; ``is_local`` says that it was recorded here."""
    attributes = span.attributes
    return not _OUTSIDE_KEYS.isdisjoint(attributes) or (is_local and c.RECEIVED in attributes)


def _rank_reward(reward: Reward, *, is_local: bool) -> int:
    if is_from_outside(reward.span, is_local=is_local):
        return OUTSIDE
    is_declared = len(reward.values) > 1 or reward.span.attributes.get(c.REWARD_PRIMARY) is True
    return PRIMARY if is_declared else OTHER


def award_calls(claims: Iterable[Claim], order: Mapping[int, Precedence]) -> Awards:
    """Give each call the rewards that judge it; of one name the one that comes first.

    A reward that names its call comes before one of its rank that a rule brings there. Each goes to
    those of its calls that have none of its names; a sequence to all of them, or to none. What a
    further judge gave under a name has the judge's behind it.
    """

    def rank(claim: Claim) -> tuple[int, bool, Precedence]:
        precedence = order[claim.position]
        return precedence.rank, claim.is_ruled, precedence

    placement = Awards()
    awards: dict[int, dict[str, tuple[Precedence, float, Source]]] = {}
    sums: dict[str, dict[Source, float]] = {}
    for claim in sorted(claims, key=rank):
        reward, shares = claim.reward, _share_reward(claim)
        free = _find_free(shares, awards)
        if shares and not free and c.REWARD_AUTHOR in reward.span.attributes:
            shares = _share_reward(_name_author(claim))
            free = _find_free(shares, awards)
        if not free or (reward.steps and len(free) < len(shares)):
            placement.unplaced.append((reward, _explain(claim, is_rival=bool(shares))))
            continue
        for call, values, place in free:
            source = claim.position, place
            for name, number in values.items():
                precedence = order[claim.position]
                if name != precedence.name:  # a further name declares nothing
                    precedence = precedence._replace(
                        rank=max(precedence.rank, OTHER), is_further=True, name=name
                    )
                awards.setdefault(call, {})[name] = precedence, number, source
                sums.setdefault(name, {})[source] = number
        calls = tuple([share.call for share in free])
        placement.placed.append(
            Placed(claim.position, calls, "sequence" if reward.steps else claim.by)
        )
    earned: dict[Source, float] = {}
    for call, numbers in awards.items():
        ordered = sorted(numbers.values())
        placement.rewards[call] = {precedence.name: number for precedence, number, _ in ordered}
        _, number, source = ordered[0]
        earned[source] = number
    placement.totals = {name: add_decimals(numbers.values()) for name, numbers in sums.items()}
    placement.value = add_decimals(earned.values()) if earned else None
    return placement


def _find_free(shares: Iterable[_Share], awards: Mapping[int, Mapping[str, Any]]) -> list[_Share]:
    """Return the shares of calls that have no reward of their names."""
    return [share for share in shares if awards.get(share.call, {}).keys().isdisjoint(share.values)]


def _name_author(claim: Claim) -> Claim:
    """Return a judge's reward under names that tell it from what another one gave."""
    author = to_text(claim.reward.span.attributes[c.REWARD_AUTHOR])
    values = {f"{name} ({author})": value for name, value in claim.reward.values.items()}
    return claim._replace(reward=replace(claim.reward, values=values))


def _share_reward(claim: Claim) -> list[_Share]:
    """Return the part of each call; none if a sequence is of another length."""
    reward, calls = claim.reward, claim.calls
    if not reward.steps:
        return [_Share(call, reward.values) for call in calls]
    if len(calls) != len(reward.steps):
        return []
    (name,) = reward.values
    return [
        _Share(call, {name: number}, place)
        for place, (call, number) in enumerate(zip(calls, reward.steps, strict=True))
        if number is not None
    ]


def _explain(claim: Claim, *, is_rival: bool) -> str:
    """Return the reason why a reward counts for no call."""
    if is_rival:
        return ALREADY_REWARDED
    if claim.calls:
        return WRONG_LENGTH.format(len(claim.reward.steps), len(claim.calls))
    return claim.reason


def judge_whole(claims: Iterable[Claim], order: Mapping[int, Precedence]) -> Awards:
    """Return what an attempt without a step has earned as a whole.

    The rewards of the first one's name are its value; of several that name one span the first
    counts.
    """
    placement = Awards()
    first: dict[object, Reward] = {}
    for claim in sorted(claims, key=lambda claim: order[claim.position]):
        placement.unplaced.append((claim.reward, claim.reason))
        if claim.reason != UNKNOWN_TARGET:
            first.setdefault(claim.reward.links or claim.position, claim.reward)
    placement.totals = add_named(reward.values for reward in first.values())
    placement.value = next(iter(placement.totals.values()), None)
    return placement
