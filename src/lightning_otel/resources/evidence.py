"""Evidence that one mean is above another, which stays right however often one looks.

Each difference of rewards is bet on: that it lies above a supposed mean, and below it. Where the
supposed mean is the true one, nobody's capital grows forty-fold but with a chance of one in forty,
at any time. Means at which it did are ruled out; what is left is the interval.

It is assumed that rewards lie within a range as wide as the widest seen, 1 at least, and that one
difference tells nothing of the next. For rewards from 0 to 1, and wherever both ends of the range
were seen, the guarantee holds for any number of differences; else as their number grows.

Source: Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, Journal of
the Royal Statistical Society B 86 (2024): hedged capital, divided over a grid of constant bets;
Ville, Étude critique de la notion de collectif (1939).
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

CONFIDENCE: Final = 0.95
_RANGE: Final = 1.0
_BETS: Final = tuple(0.995 / 2**power for power in range(7))
"""Shares of the capital that are staked; the smallest finds differences of a hundredth."""
_ENOUGH: Final = math.log(2 / (1 - CONFIDENCE))
"""Logarithm of the capital that rules a mean out, on each side."""
_STEPS: Final = 40
"""Halvings of the range when an end of the interval is sought."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Differences of rewards, and what they say of their mean.

    Attributes:
        counts: How often each difference was seen, as a share of the width of the range.
        width: That width.
    """

    counts: Mapping[float, int]
    width: float

    @property
    def is_above(self) -> bool:
        """True if the mean is above 0 with confidence."""
        return _log_capital(self.counts, 0.0) >= _ENOUGH

    @property
    def is_below(self) -> bool:
        """True if it is below."""
        return _log_capital(_mirror_counts(self.counts), 0.0) >= _ENOUGH

    @property
    def low(self) -> float:
        """The lower end of the 95 % confidence interval of the mean, at any time."""
        return _lower_end(self.counts) * self.width

    @property
    def high(self) -> float:
        """The upper end."""
        return -_lower_end(_mirror_counts(self.counts)) * self.width

    @property
    def missing(self) -> int | None:
        """About how many more differences tell the mean from 0, if they are like these.

        0 if it is told already, None if no end is in sight.
        """
        if self.is_above or self.is_below:
            return 0
        total = sum(self.counts.values())
        growths = (
            _capital_growth(counts, bet, 0.0)
            for counts in (self.counts, _mirror_counts(self.counts))
            for bet in _BETS
        )  # fmt: skip
        fastest = max(growths) / total
        if fastest <= 0:
            return None
        return max(1, math.ceil((_ENOUGH + math.log(len(_BETS))) / fastest) - total)


def format_verdict(verdict: float, missing: int | None, unit: str) -> str:
    """Say better, worse, or about how many more of a unit it takes."""
    if verdict:
        return "better" if verdict > 0 else "worse"
    if missing is None:
        return "not significantly different, and no end is in sight"
    return f"not significantly different: about {missing:,} more {unit} are needed"


def weigh_differences(differences: Iterable[float], rewards: Sequence[float]) -> Evidence:
    """Take differences, one of which there is at least, as evidence of their mean."""
    width = max(_RANGE, max(rewards) - min(rewards))
    return Evidence(Counter(each / width for each in differences), width)


def _mirror_counts(counts: Mapping[float, int]) -> dict[float, int]:
    return {-value: count for value, count in counts.items()}


def _lower_end(counts: Mapping[float, int]) -> float:
    """The least mean, from -1 to 1, that is not ruled out."""
    low = -1.0
    high = max(low, sum(value * count for value, count in counts.items()) / sum(counts.values()))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _log_capital(counts, middle) >= _ENOUGH:
            low = middle
        else:
            high = middle
    return low


def _log_capital(counts: Mapping[float, int], mean: float) -> float:
    """The logarithm of what bets above a supposed mean have come to; it falls with that mean."""
    logs = [_capital_growth(counts, bet, mean) for bet in _BETS]
    most = max(logs)
    return most + math.log(statistics.fmean(math.exp(each - most) for each in logs))


def _capital_growth(counts: Mapping[float, int], bet: float, mean: float) -> float:
    stake = bet / (1 + max(mean, 0.0))
    return sum(count * math.log1p(stake * (value - mean)) for value, count in counts.items())
