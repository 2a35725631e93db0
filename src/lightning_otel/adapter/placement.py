"""Where rewards went: each is placed whole, once, or left with a reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from lightning_otel.types import Reward

ALREADY_REWARDED: Final = "its call already has a reward of that name, and the first one counts"
UNKNOWN_TARGET: Final = "its link matches no span of the attempt it belongs to"
WRONG_LENGTH: Final = "its sequence has {} numbers for {} steps"
_SEQUENCE: Final = "sequence"


class Placed(NamedTuple):
    """A reward, the positions of the calls it went to, in order, and by what."""

    reward: Reward
    calls: tuple[int, ...]
    by: str


@dataclass(slots=True)
class Placement:
    """Where rewards went.

    Attributes:
        rewards: Named rewards of each call, by the call's position in the tree; primary first.
        placed: Each reward that found calls.
        unplaced: Each other reward with the reason.
        totals: The sum of all placed rewards by name; one that went to several calls counts once.
        value: The sum of what the calls have for a primary reward, likewise; None if none has.
    """

    rewards: dict[int, dict[str, float]] = field(default_factory=dict)
    placed: list[Placed] = field(default_factory=list)
    unplaced: list[tuple[Reward, str]] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    value: float | None = None

    def leave(self, reward: Reward, reason: str) -> None:
        """Report a reward that goes nowhere."""
        self.unplaced.append((reward, reason))

    def judge_whole(self) -> None:
        """Have the rewards of an attempt without a step judge it as a whole.

        Those of the first one's name are its value; of several that name one span the first counts.
        """
        known = [each for each, reason in self.unplaced if reason != UNKNOWN_TARGET]
        known.sort(key=lambda each: (each.span.start_ns, each.span.span_id))
        for reward in {each.links or each.span.span_id: each for each in reversed(known)}.values():
            for name, number in reward.values.items():
                self.totals[name] = self.totals.get(name, 0.0) + number
        if known:
            self.value = self.totals[next(iter(known[0].values))]

    def give(self, call: int | None, reward: Reward, by: str, otherwise: str) -> None:
        """Place a reward at one call, or report it."""
        if call is None:
            self.leave(reward, otherwise)
        else:
            self.give_all((call,), reward, by)

    def give_all(self, calls: Sequence[int], reward: Reward, by: str) -> None:
        """Place a reward at every one of some calls that has none of its names yet."""
        free = [
            call
            for call in calls
            if (held := self.rewards.get(call)) is None or not held.keys() & reward.values.keys()
        ]
        if not free:
            self.leave(reward, ALREADY_REWARDED)
            return
        self._count(free[-1], reward.values)
        for call in free:
            self.rewards.setdefault(call, {}).update(reward.values)
        self.placed.append(Placed(reward, tuple(free), by))

    def give_each(self, calls: Sequence[int], reward: Reward) -> None:
        """Place each number of a sequence at its call, or report the whole."""
        if len(calls) != len(reward.steps):
            self.leave(reward, WRONG_LENGTH.format(len(reward.steps), len(calls)))
            return
        (name,) = reward.values
        pairs = [
            (call, number)
            for call, number in zip(calls, reward.steps, strict=True)
            if number is not None
        ]
        if any(name in self.rewards.get(call, ()) for call, _ in pairs):
            self.leave(reward, ALREADY_REWARDED)
            return
        for call, number in pairs:
            self._count(call, {name: number})
            self.rewards.setdefault(call, {})[name] = number
        self.placed.append(Placed(reward, tuple(call for call, _ in pairs), _SEQUENCE))

    def _count(self, call: int, values: Mapping[str, float]) -> None:
        """Add a reward to what the attempt has got, before its call has it."""
        if call not in self.rewards:
            self.value = (self.value or 0.0) + next(iter(values.values()))
        for name, number in values.items():
            self.totals[name] = self.totals.get(name, 0.0) + number
