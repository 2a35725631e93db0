"""Verdicts on two versions, with a look after every rollout: how often false, and how soon right.

Each series ends with its first verdict: python benchmarks/verdicts.py [--quick]
"""

import argparse
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from lightning_otel.resources import evidence, neighbours
from lightning_otel.resources.neighbours import Difference, Unit

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
        gains = [Difference(b - a) for a, b in pairs]
        if kind == "normal":  # its range is as wide as what was seen
            looks = (evidence.weigh_differences(gains[:n], evidence.find_range(sum(pairs[:n], ())))
                     for n in range(1, tasks + 1))  # fmt: skip
            ends.append(_first_verdict((look.is_above - look.is_below) for look in looks))
        else:
            ends.append(decide(gains))
    return _sum_up(ends)


def _log_growth(gains: Sequence[Difference], width: float = 1.0) -> np.ndarray:
    """Logarithms of what each bet makes of each difference: [above or below, bets, differences]."""
    values, weights = np.array(gains).T
    stakes = np.minimum(np.outer(evidence.BETS, weights), evidence.MOST_STAKE) * values / width
    return np.log1p(np.stack([stakes, -stakes]))


def _is_decided(growth: np.ndarray) -> np.ndarray:
    return np.logaddexp.reduce(growth, axis=1) - np.log(len(evidence.BETS)) >= evidence.ENOUGH


def decide(gains: Sequence[Difference], width: float = 1.0) -> tuple[int, int]:
    """Return the first verdict on differences that came one by one, and how many it took."""
    above, below = _is_decided(_log_growth(gains, width).cumsum(axis=2))
    count = int(np.argmax(above | below))
    verdict = int(above[count]) - int(below[count])
    return verdict, count + 1 if verdict else len(gains)


def _first_verdict(verdicts: Iterator[int]) -> tuple[int, int]:
    count = 0
    for count, verdict in enumerate(verdicts, 1):
        if verdict:
            return verdict, count
    return 0, count


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


TRAFFIC: Final[Mapping[str, tuple[Traffic, int, tuple[float, float]]]] = {
    "half": (_by_rollout(_half, lambda rng, _, gain: _coin(0.5)(rng, gain)), 2000, (0, 1)),
    "ramped share, easier tasks": (_by_rollout(_ramp, _easier), 2000, (0, 1)),
    "ramped, easier at once": (
        _by_rollout(lambda time: 0.1 if time < 0.5 else 0.5, _easier_at_once), 2000, (0, 1),
    ),
    "sticky users": (_by_key(lambda rng, _: str(rng.randrange(40)), lambda _: 0.3), 300, (0, 1)),
    "sticky users, ramped": (
        _by_key(lambda rng, n: str(rng.randrange(20 + n // 8)), _ramp), 300, (0, 1),
    ),
    "version per group of 8": (_by_key(lambda _, n: str(n // 8), _half), 400, (0, 1)),
    "version per group of 4": (_by_key(lambda _, n: str(n // 4), _half), 300, (0, 1)),
    "rare penalties, stated": (_either(1.0, -50.0, 0.02), 2000, (-50, 1)),
    "rare jackpots, stated": (_either(0.0, 100.0, 0.01), 2000, (0, 100)),
    "20 recurring tasks": (_recurring(20, _half, 0.0), 2000, (0, 1)),
    "20 recurring, ramped, easier": (_recurring(20, _ramp, 0.6), 2000, (0, 1)),
}  # fmt: skip
"""Traffic, the rollouts of a series, and the range of rewards."""


def judge(kind: str, gain: float, *, series: int, rollouts: int | None = None) -> Verdicts:
    draw, count, (low, high) = TRAFFIC[kind]
    ends: list[tuple[int, int]] = []
    for number in range(series):
        units = list(draw(random.Random(f"{kind}/{gain}/{number}"), rollouts or count, gain))
        first_b = [unit.is_b for unit in units].index(True) if any(u.is_b for u in units) else 0
        units = units[first_b:]  # as compare() does, from where both were in use
        if "recurring" in kind:
            ends.append(_first_verdict(_judge_tasks(units)))
        elif len({unit.key for unit in units}) < len(units):
            ends.append(_first_verdict(_judge_keys(units)))
        else:  # what was compared once stays so
            verdict, gains = decide(neighbours.compare_neighbours(units), high - low)
            ends.append(
                (verdict, round(gains / len(neighbours.compare_neighbours(units)) * len(units)))
            )
    return _sum_up(ends)


def _judge_tasks(units: Sequence[Unit]) -> Iterator[int]:
    tasks: dict[str, list[Unit]] = {}
    capital: dict[str, np.ndarray] = {}
    total = np.zeros((2, len(evidence.BETS)))
    for unit in units:
        rows = tasks.setdefault(unit.key, [])
        rows.append(unit)
        if len({row.is_b for row in rows}) == 2:
            logs = _log_growth(neighbours.compare_task(rows)).sum(axis=2)
            total += logs - capital.get(unit.key, 0.0)
            capital[unit.key] = logs
        above, below = _is_decided(total)
        yield int(above) - int(below)


def _judge_keys(units: Sequence[Unit]) -> Iterator[int]:
    for count in range(1, len(units) + 1):
        known = units[:count]
        if len({unit.is_b for unit in known}) < 2:
            yield 0
            continue
        rows = known if not neighbours.is_sticky(known) else neighbours.join_units(known)
        above, below = _is_decided(_log_growth(neighbours.compare_neighbours(rows)).sum(axis=2))
        yield int(above) - int(below)


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
        note(kind, gain, TRAFFIC[kind][1], judge(kind, gain, series=series))
    head = ["rewards", "difference", "series, tasks or rollouts", "better", "worse", "median"]
    harness.table("Verdicts, with a look after every task or rollout", head, rows)
    print(f"\nA fixed test takes {fixed_tasks(0.1):.0f} tasks: {fixed:.2f} ×")
    harness.finish(options, figures, "lightning-otel")


if __name__ == "__main__":
    import harness  # the tests run this file without its folder in the path

    harness.run(main)
