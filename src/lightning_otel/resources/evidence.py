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
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from lightning_otel.errors import ConfigError
from lightning_otel.resources.neighbours import PairDifference

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
_AT_ONCE: Final = 64
"""Factors of capital, between 0.005 and 3, whose product is a number that can be written."""

Shares: TypeAlias = Mapping[tuple[float, int], Sequence[float]]
"""Differences, as shares of the width of the range, by weight and by how often they came."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Differences of rewards, as shares of the range, and their evidence of a mean."""

    shares: Shares
    width: float  # of the range

    @property
    def is_above(self) -> bool:
        """True if the mean is above 0 with confidence."""
        return _log_capital(self.shares, 0.0) >= ENOUGH

    @property
    def is_below(self) -> bool:
        """True if it is below."""
        return _log_capital(_mirror_shares(self.shares), 0.0) >= ENOUGH

    @property
    def mean(self) -> float:
        """The mean of the differences, each by its weight."""
        return _weighted_mean(self.shares) * self.width

    @property
    def low(self) -> float:
        """The lower end of the 95 % confidence interval of the mean, at any time."""
        return _lower_end(self.shares) * self.width

    @property
    def high(self) -> float:
        """The upper end."""
        return -_lower_end(_mirror_shares(self.shares)) * self.width

    @property
    def missing(self) -> int | None:
        """Estimate the differences until the mean is told from 0; 0 if it is, None if never."""
        if self.is_above or self.is_below:
            return 0
        total = sum(count * len(values) for (_, count), values in self.shares.items())
        growths = (
            _capital_growth(shares, bet, 0.0)
            for shares in (self.shares, _mirror_shares(self.shares))
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
    """Return a range of rewards, two numbers with the lower one first; None stays None."""
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
    differences: Iterable[PairDifference], reward_range: tuple[float, float]
) -> Evidence:
    """Take differences, one of which there is at least, as evidence of their mean."""
    width = reward_range[1] - reward_range[0]
    shares: defaultdict[tuple[float, int], list[float]] = defaultdict(list)
    for (value, weight), count in Counter(differences).items():
        shares[weight, count].append(value / width)
    return Evidence(shares, width)


def _mirror_shares(shares: Shares) -> Shares:
    return {kind: [-value for value in values] for kind, values in shares.items()}


def _weighted_mean(shares: Shares) -> float:
    total = sum(weight * count * len(values) for (weight, count), values in shares.items())
    return sum(weight * count * sum(values) for (weight, count), values in shares.items()) / total


def _lower_end(shares: Shares) -> float:
    """Return the largest mean that is ruled out, by false position.

    Source: Dowell and Jarratt, A modified regula falsi method for computing the root of an equation
    (1971), known as the Illinois algorithm.
    """
    low, high = -1.0, max(-1.0, _weighted_mean(shares))
    over, under = (_log_capital(shares, mean) - ENOUGH for mean in (low, high))
    if over < 0 or under >= 0:
        return low if over < 0 else high
    is_low_moved: bool | None = None
    for _ in range(_STEPS):
        if high - low <= _PRECISION:
            break
        middle = high - under * (high - low) / (under - over)
        excess = _log_capital(shares, middle) - ENOUGH
        if excess >= 0:
            low, over, under = middle, excess, under / 2 if is_low_moved is True else under
        else:
            high, under, over = middle, excess, over / 2 if is_low_moved is False else over
        is_low_moved = excess >= 0
    return low


def _log_capital(shares: Shares, mean: float) -> float:
    """The logarithm of what bets above a supposed mean have come to; it falls with that mean."""
    logs = [_capital_growth(shares, bet, mean) for bet in BETS]
    most = max(logs)
    return most + math.log(statistics.fmean(math.exp(log - most) for log in logs))


def _capital_growth(shares: Shares, bet: float, mean: float) -> float:
    scale, growth = 1 + max(mean, 0.0), 0.0
    for (weight, count), values in shares.items():
        stake = min(bet * weight, MOST_STAKE) / scale
        rest = 1 - stake * mean
        factors = [rest + stake * value for value in values]
        # One logarithm of a product, as each takes longer than all else here.
        for place in range(0, len(factors), _AT_ONCE):
            growth += count * math.log(math.prod(factors[place : place + _AT_ONCE]))
    return growth
