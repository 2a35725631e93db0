"""Evidence that one mean is above another, which stays right however often one looks.

Each difference of rewards is bet on: that it lies above a supposed mean, and below it. Where the
supposed mean is the true one, nobody's capital grows forty-fold but with a chance of one in forty,
at any time (Ville's inequality). Means at which it did are ruled out; what is left is the interval.

The theorem assumes two things. Rewards lie within a range: the stated one, or else one as wide as
the widest seen, 1 at least; the guarantee holds for any number of differences where the range is
stated or both ends were seen, and else as their number grows. And the mean of a difference, given
all earlier ones, is the supposed one: :mod:`lightning_otel.resources.neighbours` makes it so.

Source: Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, Journal of
the Royal Statistical Society B 86 (2024), theorem 3 and section 4: capital of bets, divided over a
grid of them; Ville, Étude critique de la notion de collectif (1939).
"""

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from lightning_otel.errors import ConfigError
from lightning_otel.resources.neighbours import Difference

CONFIDENCE: Final = 0.95
_RANGE: Final = 1.0
MOST_STAKE: Final = 0.995
BETS: Final = tuple(MOST_STAKE / 2**power for power in range(7))
"""Shares of the capital staked on a difference of weight 1; the smallest finds a hundredth."""
ENOUGH: Final = math.log(2 / (1 - CONFIDENCE))
"""Logarithm of the capital that rules a mean out, on each side."""
_STEPS: Final = 40
"""Most looks at a mean when an end of the interval is sought; it takes ten."""
_PRECISION: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Evidence:
    """Differences of rewards, and what they say of their mean.

    Attributes:
        counts: Frequency of each difference, as a share of the width of the range.
        width: That width.
    """

    counts: Mapping[Difference, int]
    width: float

    @property
    def is_above(self) -> bool:
        """True if the mean is above 0 with confidence."""
        return _log_capital(self.counts, 0.0) >= ENOUGH

    @property
    def is_below(self) -> bool:
        """True if it is below."""
        return _log_capital(_mirror_counts(self.counts), 0.0) >= ENOUGH

    @property
    def mean(self) -> float:
        """The mean of the differences, each by its weight."""
        return _weighted_mean(self.counts) * self.width

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
        """Estimate the differences until the mean is told from 0; 0 if it is, None if never."""
        if self.is_above or self.is_below:
            return 0
        total = sum(self.counts.values())
        growths = (
            _capital_growth(counts, bet, 0.0)
            for counts in (self.counts, _mirror_counts(self.counts))
            for bet in BETS
        )  # fmt: skip
        fastest = max(growths) / total
        if fastest <= 0:
            return None
        return max(1, math.ceil((ENOUGH + math.log(len(BETS))) / fastest) - total)


def format_verdict(verdict: float, missing: int | None, unit: str) -> str:
    """Say better, worse, or about how many more of a unit it takes."""
    if verdict:
        return "better" if verdict > 0 else "worse"
    if missing is None:
        return "not significantly different, and no end is in sight"
    return f"not significantly different: about {missing:,} more {unit} are needed"


def check_range(reward_range: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return a range of rewards; None stays None.

    Raises:
        ConfigError: It is not two numbers, the lower one first.
    """
    with contextlib.suppress(TypeError, ValueError):
        if reward_range is None:
            return None
        low, high = reward_range
        if -math.inf < low < high < math.inf:
            return low, high
    raise ConfigError(
        f"reward_range is {reward_range!r}; name the lowest and the highest reward: (0, 1)"
    )


def find_range(
    rewards: Iterable[float], stated: tuple[float, float] | None = None
) -> tuple[float, float]:
    """Return the range of rewards: the stated one if they lie in it, else 1 wide at least."""
    values = [*rewards, *(stated or ())]
    return min(values), max(max(values), min(values) + (0.0 if stated else _RANGE))


def weigh_differences(
    differences: Iterable[Difference], reward_range: tuple[float, float]
) -> Evidence:
    """Take differences, one of which there is at least, as evidence of their mean."""
    width = reward_range[1] - reward_range[0]
    return Evidence(Counter(Difference(value / width, n) for value, n in differences), width)


def _mirror_counts(counts: Mapping[Difference, int]) -> dict[Difference, int]:
    return {Difference(-value, weight): count for (value, weight), count in counts.items()}


def _weighted_mean(counts: Mapping[Difference, int]) -> float:
    total = sum(weight * count for (_, weight), count in counts.items())
    return sum(value * weight * count for (value, weight), count in counts.items()) / total


def _lower_end(counts: Mapping[Difference, int]) -> float:
    """Return the largest mean that is ruled out, by false position.

    Source: Dowell and Jarratt, A modified regula falsi method for computing the root of an equation
    (1971), known as the Illinois algorithm.
    """
    low, high = -1.0, max(-1.0, _weighted_mean(counts))
    over, under = (_log_capital(counts, mean) - ENOUGH for mean in (low, high))
    if over < 0 or under >= 0:
        return low if over < 0 else high
    is_low_moved: bool | None = None
    for _ in range(_STEPS):
        if high - low <= _PRECISION:
            break
        middle = high - under * (high - low) / (under - over)
        excess = _log_capital(counts, middle) - ENOUGH
        if excess >= 0:
            low, over, under = middle, excess, under / 2 if is_low_moved is True else under
        else:
            high, under, over = middle, excess, over / 2 if is_low_moved is False else over
        is_low_moved = excess >= 0
    return low


def _log_capital(counts: Mapping[Difference, int], mean: float) -> float:
    """The logarithm of what bets above a supposed mean have come to; it falls with that mean."""
    logs = [_capital_growth(counts, bet, mean) for bet in BETS]
    most = max(logs)
    return most + math.log(statistics.fmean(math.exp(log - most) for log in logs))


def _capital_growth(counts: Mapping[Difference, int], bet: float, mean: float) -> float:
    scale, log1p = 1 + max(mean, 0.0), math.log1p
    terms = [
        count * log1p(min(bet * weight, MOST_STAKE) / scale * (value - mean))
        for (value, weight), count in counts.items()
    ]
    return sum(terms)
