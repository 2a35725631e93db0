"""Pictures of rewards in characters, for the terminal."""

from collections.abc import Sequence

_LEVELS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def sparkline(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> str:
    """One character a value, its height between the bounds; values beyond them are clipped."""
    span = (high - low) or 1.0
    steps = len(_LEVELS) - 1
    return "".join(
        _LEVELS[round(steps * min(1.0, max(0.0, (value - low) / span)))] for value in values
    )


def bar(share: float, width: int = 24) -> str:
    """A bar of a share, 0 to 1, drawn to an eighth of a character."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def running_mean(values: Sequence[float]) -> list[float]:
    """The mean of the values so far, at each value."""
    means = []
    total = 0.0
    for count, value in enumerate(values, 1):
        total += value
        means.append(total / count)
    return means
