"""Verdicts on two versions, with a look after every rollout: how often false, how soon right."""

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from lightning_otel.resources import evidence, neighbours
from lightning_otel.resources.neighbours import PairDifference, Unit

Draw = Callable[[random.Random, float], float]


def _coin(share: float) -> Draw:
    return lambda rng, gain: float(rng.random() < share + gain)


def _mean_of_some(draw: Draw) -> Draw:
    return lambda rng, gain: statistics.fmean(draw(rng, gain) for _ in range(rng.randint(1, 6)))


KINDS: Final[Mapping[str, tuple[Draw, Draw]]] = {
    "coin": (_coin(0.5),) * 2, "rare": (_coin(0.04),) * 2,
    "uneven": (_coin(0.04), _mean_of_some(_coin(0.04))),
    "unlike": (lambda rng, gain: 0.1, _coin(0.1)),
    "uniform": (lambda rng, gain: round(rng.random(), 1) + gain,) * 2,
    "normal": (lambda rng, gain: round(rng.gauss(gain, 10)),) * 2,
}  # fmt: skip
"""How rewards of tasks done with both are drawn with the one version, and with the other."""


class Verdicts(NamedTuple):
    better: int
    worse: int
    median_tasks: float


def measure(kind: str, gain: float, *, series: int, tasks: int) -> Verdicts:
    of_a, of_b = KINDS[kind]
    ends: list[tuple[int, int]] = []
    for number in range(series):
        rng = random.Random(f"0/{kind}/{gain}/True/{number}")
        pairs = [(of_a(rng, 0.0), of_b(rng, gain)) for _ in range(tasks)]
        gains = [PairDifference(b - a) for a, b in pairs]
        if kind == "normal":  # its range is as wide as what was seen
            looks = [evidence.weigh_differences(gains[:n], evidence.find_range(sum(pairs[:n], ())))
                     for n in range(1, tasks + 1)]  # fmt: skip
            ends.append(_first_verdict(np.array([x.is_above - x.is_below for x in looks])))
        else:
            ends.append(_first_verdict(_judge_growth(_log_growth(gains))))
    return _sum_up(ends)


def _log_growth(gains: Sequence[PairDifference], width: float = 1.0) -> np.ndarray:
    """Logarithms of what each bet makes of each difference: [above or below, bets, differences]."""
    values, weights = np.array(gains).T
    stakes = np.minimum(np.outer(evidence.BETS, weights), evidence.MOST_STAKE) * values / width
    return np.log1p(np.stack([stakes, -stakes]))


def _judge_growth(growth: np.ndarray) -> np.ndarray:
    """Return the verdict after each difference."""
    capital = np.logaddexp.reduce(growth.cumsum(axis=2), axis=1) - np.log(len(evidence.BETS))
    above, below = (capital >= evidence.ENOUGH).astype(int)
    return above - below


def _first_verdict(verdicts: np.ndarray) -> tuple[int, int]:
    count = int(np.argmax(verdicts != 0))
    verdict = int(verdicts[count])
    return verdict, count + 1 if verdict else len(verdicts)


def _sum_up(ends: Sequence[tuple[int, int]]) -> Verdicts:
    verdicts, counts = zip(*ends, strict=True)
    return Verdicts(verdicts.count(1), verdicts.count(-1), statistics.median(counts))


Traffic = Callable[[random.Random, int, float], Iterator[Unit]]
"""Draws so many rollouts, whose better version gains so much."""


def _by_rollout(
    share_at: Callable[[float], float], draw: Callable[[random.Random, float, float], float]
) -> Traffic:
    def run(rng: random.Random, count: int, gain: float) -> Iterator[Unit]:
        for number in range(count):
            is_b = rng.random() < share_at(number / count)
            yield Unit(str(number), is_b, draw(rng, number / count, gain * is_b))

    return run


def _by_key(key_of: Callable[[random.Random, int], str], ramp: Callable[[float], float]) -> Traffic:
    """Each key, such as a user, has a level and a version of its own, which the ramp may change."""

    def run(rng: random.Random, count: int, gain: float) -> Iterator[Unit]:
        keys: dict[str, tuple[float, float]] = {}
        for number in range(count):
            key = key_of(rng, number)
            place, level = keys.setdefault(key, (rng.random(), rng.betavariate(0.5, 0.5)))
            easier = 0.3 * number / count
            is_b = place < ramp(number / count)
            yield Unit(key, is_b, float(rng.random() < 0.7 * level + easier + gain * is_b))

    return run


def _ramp(time: float) -> float:
    return 0.1 if time < 0.25 else 0.2 if time < 0.5 else 0.5


def _either(often: float, rarely: float, chance: float) -> Traffic:
    return _by_rollout(_half, lambda rng, *_: rarely if rng.random() < chance else often)


def _easier(rng: random.Random, time: float, gain: float) -> float:
    return float(rng.random() < 0.2 + 0.6 * time + gain)


def _easier_at_once(rng: random.Random, time: float, gain: float) -> float:
    return float(rng.random() < (0.2 if time < 0.5 else 0.8) + gain)


def _recurring(tasks: int, share_at: Callable[[float], float], drift: float) -> Traffic:
    def run(rng: random.Random, count: int, gain: float) -> Iterator[Unit]:
        for number in range(count):
            time = number / count
            is_b = rng.random() < share_at(time)
            chance = 0.5 - drift / 2 + drift * time + gain * is_b
            yield Unit(str(rng.randrange(tasks)), is_b, float(rng.random() < chance))

    return run


def _half(_: float) -> float:
    return 0.5


TRAFFIC: Final[Mapping[str, tuple[Traffic, tuple[float, float]]]] = {
    "half": (_by_rollout(_half, lambda rng, _, gain: _coin(0.5)(rng, gain)), (0, 1)),
    "ramped share, easier tasks": (_by_rollout(_ramp, _easier), (0, 1)),
    "ramped, easier at once": (
        _by_rollout(lambda time: 0.1 if time < 0.5 else 0.5, _easier_at_once), (0, 1),
    ),
    "sticky users": (_by_key(lambda rng, _: str(rng.randrange(40)), lambda _: 0.3), (0, 1)),
    "sticky users, ramped": (
        _by_key(lambda rng, n: str(rng.randrange(20 + n // 8)), _ramp), (0, 1),
    ),
    "version per group of 8": (_by_key(lambda _, n: str(n // 8), _half), (0, 1)),
    "version per group of 4": (_by_key(lambda _, n: str(n // 4), _half), (0, 1)),
    "rare penalties, stated": (_either(1.0, -50.0, 0.02), (-50, 1)),
    "rare jackpots, stated": (_either(0.0, 100.0, 0.01), (0, 100)),
    "20 recurring tasks": (_recurring(20, _half, 0.0), (0, 1)),
    "20 recurring, ramped, easier": (_recurring(20, _ramp, 0.6), (0, 1)),
}  # fmt: skip
"""Traffic, and the range of its rewards."""
ROLLOUTS: Final = 2000


def judge(kind: str, gain: float, *, series: int, rollouts: int = ROLLOUTS) -> Verdicts:
    draw, (low, high) = TRAFFIC[kind]
    ends: list[tuple[int, int]] = []
    for number in range(series):
        units = list(draw(random.Random(f"{kind}/{gain}/{number}"), rollouts, gain))
        ends.append(_first_verdict(judge_looks(units, high - low, are_tasks="recurring" in kind)))
    return _sum_up(ends)


class _Evidence:
    """Differences that come and go with rollouts; by themselves, ``compare_neighbours``."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int, PairDifference]] = []
        self.pairing = neighbours.Neighbours()

    def add(self, look: int, unit: Unit) -> None:
        if (gain := self.pairing.add(unit)) is not None:
            self.note(look, [gain])

    def note(
        self, look: int, new: Sequence[PairDifference], old: Sequence[PairDifference] = ()
    ) -> None:
        self.events += [(look, -1, gain) for gain in old]
        self.events += [(look, 1, gain) for gain in new]

    def judge(self, looks: int, width: float) -> np.ndarray:
        if not self.events:
            return np.zeros(looks, int)
        places, signs, gains = zip(*self.events, strict=True)
        verdicts = _judge_growth(_log_growth(gains, width) * signs)
        return np.concatenate([[0], verdicts])[np.searchsorted(places, np.arange(looks), "right")]


class _Means(_Evidence):
    """The same of ``join_units``, while each key has one version: means of keys move."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.shares = np.identity(keys)  # of the mean of each key in a difference
        self.places: dict[str, int] = {}
        self.means, self.counts = np.zeros(keys), np.zeros(keys)
        self.current: list[PairDifference] = []
        self.holders: dict[int, tuple[int, float]] = {}  # of a key: its difference, its share

    def add(self, look: int, unit: Unit) -> None:
        is_new = unit.key not in self.places
        place = self.places.setdefault(unit.key, len(self.places))
        self.counts[place] += 1
        step = (unit.reward - self.means[place]) / self.counts[place]
        self.means[place] += step
        gain = self.pairing.add(unit._replace(reward=self.shares[place])) if is_new else None
        if gain is not None:
            self.holders |= {k: (len(self.current), gain.value[k]) for k in gain.value.nonzero()[0]}
            self.current.append(gain._replace(value=gain.value @ self.means))
            self.note(look, self.current[-1:])
        elif place in self.holders:
            number, share = self.holders[place]
            old = self.current[number]
            self.current[number] = old._replace(value=old.value + share * step)
            self.note(look, [self.current[number]], [old])


class _Tasks(_Evidence):
    """``compare_task`` of all tasks done with both."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, list[Unit]] = {}
        self.pairings: dict[str, neighbours.Neighbours] = {}
        self.pairs: dict[str, list[PairDifference]] = {}
        self.current: dict[str, list[PairDifference]] = {}
        self.changes: Counter[str] = Counter()
        self.counts, self.paired = [0, 0], [0, 0]  # rollouts of each version

    @property
    def are_most(self) -> bool:
        rarer = self.counts[0] >= self.counts[1]
        return 2 * self.paired[rarer] >= self.counts[rarer]

    def add(self, look: int, unit: Unit) -> None:
        rows = self.rows.setdefault(unit.key, [])
        was_paired = self.changes[unit.key] > 0
        self.changes[unit.key] += bool(rows) and rows[-1].is_b != unit.is_b
        rows.append(unit)
        self.counts[unit.is_b] += 1
        for row in [unit] if was_paired else rows if self.changes[unit.key] else []:
            self.paired[row.is_b] += 1
        gain = self.pairings.setdefault(unit.key, neighbours.Neighbours()).add(unit)
        pairs = self.pairs.setdefault(unit.key, [])
        pairs += [] if gain is None else [gain]
        if pairs and self.current.get(unit.key) is pairs:
            self.note(look, [] if gain is None else [gain])
        elif self.changes[unit.key]:
            old, is_mixed = self.current.get(unit.key, []), self.changes[unit.key] > 1
            self.current[unit.key] = (is_mixed and pairs) or neighbours.compare_task(rows)
            self.note(look, self.current[unit.key], old)


class _Draws:
    """``is_sticky`` and ``join_units``: what versions were drawn by."""

    def __init__(self) -> None:
        self.last: dict[str, bool] = {}
        self.of_one = ({}, {})  # keys with one version, by it
        self.changes = [0, 0]
        self.count = self.of_b = self.repeats = 0
        self.is_mixed = False

    def add(self, unit: Unit) -> bool:
        """Return whether it is the first of its key."""
        key, is_b, _ = unit
        is_first = key not in self.last
        self.count += 1
        self.of_b += is_b
        if is_first:
            self.of_one[is_b][key] = True
        else:
            self.repeats += 1
            self.changes[is_b] += self.last[key] != is_b
            self.is_mixed |= self.of_one[not is_b].pop(key, False)
        self.last[key] = is_b
        return is_first

    @property
    def is_sticky(self) -> bool:
        share = self.of_b / self.count
        limit = neighbours.STICKY * share * (1 - share) * self.repeats
        return self.repeats > 0 and all(self.of_one) and min(self.changes) <= limit


def judge_looks(units: Sequence[Unit], width: float, *, are_tasks: bool) -> np.ndarray:
    """Return what ``compare_versions`` says after each rollout; keys are of tasks or of users."""
    versions = [unit.is_b for unit in units]
    if len(set(versions)) < 2:
        return np.zeros(len(units), int)
    start = max(versions.index(False), versions.index(True))  # both are in use
    draws = _Draws()
    ways = _Evidence(), _Evidence(), _Means(len({unit.key for unit in units})), _Tasks()
    plain, firsts, means, tasks = ways
    choices = np.zeros(len(units), int)
    for look, unit in enumerate(units):
        if are_tasks:
            tasks.add(look, unit)
        if look >= start:
            is_first = draws.add(unit)
            plain.add(look, unit)
            means.add(look, unit)
            if is_first:
                firsts.add(look, unit)
            if draws.is_sticky:
                choices[look] = 1 if draws.is_mixed else 2
            elif are_tasks and tasks.are_most:
                choices[look] = 3
    verdicts = np.stack([way.judge(len(units), width) for way in ways])
    return verdicts[choices, np.arange(len(units))]


def fixed_tasks(gain: float, share: float = 0.5, power: float = 0.8) -> float:
    spread = share * (1 - share) + (share + gain) * (1 - share - gain)
    normal = statistics.NormalDist()
    return (normal.inv_cdf(0.975) + normal.inv_cdf(power)) ** 2 * spread / gain**2


def main(options: argparse.Namespace) -> None:
    series = 200 if options.quick else 2000
    cases = [(kind, 0.0, 400 if kind == "coin" else 100) for kind in KINDS]
    cases += [("coin", -0.05, 400), ("coin", 0.1, 2000)]
    rows, figures = [], []

    def note(kind: str, gain: float, count: int, verdicts: Verdicts) -> None:
        figures.append({"kind": kind, "gain": gain, **verdicts._asdict()})
        rows.append(
            (kind, f"{gain:+.2f}", f"{series:,} × {count:,}",
             *(f"{n / series:.2%}" for n in verdicts[:2]), f"{verdicts.median_tasks:g}")
        )  # fmt: skip

    for kind, gain, tasks in cases:
        harness.say(f"{kind} {gain:+.2f}")
        note(kind, gain, tasks, measure(kind, gain, series=series, tasks=tasks))
    fixed = figures[-1]["median_tasks"] / fixed_tasks(0.1)
    gains = ("half", "20 recurring tasks")
    for kind, gain in [*((kind, 0.0) for kind in TRAFFIC), *((kind, 0.1) for kind in gains)]:
        harness.say(f"{kind} {gain:+.2f}")
        note(kind, gain, ROLLOUTS, judge(kind, gain, series=series))
    head = ["rewards", "difference", "series, tasks or rollouts", "better", "worse", "median"]
    harness.table("Verdicts, with a look after every task or rollout", head, rows)
    print(f"\nA fixed test takes {fixed_tasks(0.1):.0f} tasks: {fixed:.2f} ×")
    harness.finish(options, figures, "lightning-otel")


if __name__ == "__main__":
    import harness  # the tests run this file without its folder in the path

    harness.run(main)
