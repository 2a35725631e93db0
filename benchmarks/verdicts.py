"""Verdicts on two versions, with a look after every task: how often false, and how soon right.

Each series ends with its first verdict: python benchmarks/verdicts.py [--quick]
"""

import argparse
import random
import statistics
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from lightning_otel.resources.comparison import spread_rewards
from lightning_otel.resources.evidence import weigh_differences

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
"""How rewards are drawn with the one version, whose gain is 0, and with the other."""


class Verdicts(NamedTuple):
    better: int
    worse: int
    median_tasks: float


def measure(kind: str, gain: float, *, series: int, tasks: int, is_paired: bool = True) -> Verdicts:
    of_a, of_b = KINDS[kind]
    ends: list[tuple[float, int]] = []
    for number in range(series):
        rng = random.Random(f"0/{kind}/{gain}/{is_paired}/{number}")
        rewards: tuple[list[float], list[float]] = ([], [])
        verdict, count = 0.0, 0
        while not verdict and count < tasks:
            count += 1
            for side in (0, 1) if is_paired else (rng.randrange(2),):
                rewards[side].append(of_b(rng, gain) if side else of_a(rng, 0.0))
            paired = [b - a for a, b in zip(*rewards, strict=True)] if is_paired else None
            if differences := spread_rewards(*rewards) if paired is None else paired:
                found = weigh_differences(differences, rewards[0] + rewards[1])
                verdict = found.is_above - found.is_below
        ends.append((verdict, count))
    verdicts, counts = zip(*ends, strict=True)
    return Verdicts(
        sum(each > 0 for each in verdicts), sum(each < 0 for each in verdicts),
        statistics.median(counts),
    )  # fmt: skip


def fixed_tasks(gain: float, share: float = 0.5, power: float = 0.8) -> float:
    spread = share * (1 - share) + (share + gain) * (1 - share - gain)
    normal = statistics.NormalDist()
    return (normal.inv_cdf(0.975) + normal.inv_cdf(power)) ** 2 * spread / gain**2


def main(options: argparse.Namespace) -> None:
    series = 200 if options.quick else 2000
    cases = [(kind, 0.0, 400 if kind == "coin" else 100, True) for kind in KINDS]
    cases += [("coin", 0.0, 400, False), ("coin", -0.05, 400, True), ("coin", 0.1, 2000, True)]
    rows, figures = [], []
    for kind, gain, tasks, is_paired in cases:
        harness.say(f"{kind} {gain:+.2f}")
        found = measure(kind, gain, series=series, tasks=tasks, is_paired=is_paired)
        figures.append({"kind": kind, "gain": gain, "paired": is_paired, **found._asdict()})
        rows.append(
            (kind if is_paired else f"{kind}, unpaired", f"{gain:+.2f}", f"{series:,} × {tasks:,}",
             *(f"{n / series:.2%}" for n in found[:2]), f"{found.median_tasks:g}")
        )  # fmt: skip
    head = ["rewards", "difference", "series, tasks", "better", "worse", "median tasks"]
    harness.table("Verdicts, with a look after every task", head, rows)
    fixed = fixed_tasks(0.1)
    print(f"\nA fixed test takes {fixed:.0f} tasks: {figures[-1]['median_tasks'] / fixed:.2f} ×")
    harness.finish(options, figures, "lightning-otel")


if __name__ == "__main__":
    import harness  # the tests run this file without its folder in the path

    harness.run(main)
