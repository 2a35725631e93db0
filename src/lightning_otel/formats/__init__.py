"""Formats: what trainers read, made of trajectories; one member a format.

A member is a :class:`Format` or a plain function from trajectories to rows, and registers under the
entry point group ``lightning_otel.formats``, as anybody's does. Members do not know each other.
"""

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from lightning_otel.errors import ConfigError
from lightning_otel.formats.format import Format, LeftOut, Row
from lightning_otel.formats.groups import by_group
from lightning_otel.types import Trajectory

GROUP: Final = "lightning_otel.formats"

__all__ = ["Format", "LeftOut", "Row", "get", "names", "rows"]


def names() -> list[str]:
    """The formats that are installed, ours first."""
    found = _found()
    return sorted(found, key=lambda name: (not _is_ours(found[name]), name))


def get(name: str) -> Format:
    """The format of a name.

    Raises:
        ConfigError: There is none, or it cannot be loaded.
    """
    from difflib import get_close_matches

    found = _found()
    if name not in found:
        near = get_close_matches(name, found, n=1)
        guess = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names())}"
        raise ConfigError(f"no format {name!r}; {guess}")
    try:
        member = found[name].load()
    except (ImportError, AttributeError) as exc:
        raise ConfigError(
            f"the format {name!r} cannot be loaded ({exc}); install what {found[name].value} needs"
        ) from exc
    if isinstance(member, Format):
        return member
    if callable(member):
        return Format(member)
    raise ConfigError(f"the format {name!r} is {member!r}; register a function or a Format")


def rows(
    name: str,
    trajectories: Iterable[Trajectory],
    *,
    left_out: Callable[[LeftOut], None] | None = None,
    **options: Any,
) -> Iterator[Row]:
    """The rows of a format, one after the other; ``rows("sft", store.trajectories())``.

    Args:
        name: The format's name, as ``names()`` gives it.
        trajectories: What is made into rows, read once. A format that compares rollouts keeps them
            in a temporary file, not in memory.
        left_out: Told of everything that the format cannot hold.
        options: Those of the format, such as ``threshold`` of ``kto``.

    Raises:
        ConfigError: There is no such format, or it has no such option.
    """
    found = get(name)
    return made(found, trajectories, left_out or (lambda _: None), **found.checked(options))


def made(
    found: Format,
    trajectories: Iterable[Trajectory],
    left_out: Callable[[LeftOut], None],
    **options: Any,
) -> Iterator[Row]:
    """The rows of a format that is at hand.

    Args:
        found: The format.
        trajectories: What is made into rows.
        left_out: Told of everything that it cannot hold.
        options: Those of the format.
    """
    ready = by_group(trajectories) if found.is_grouped else trajectories
    for each in found.make(ready, **options):
        if isinstance(each, LeftOut):
            left_out(each)
        else:
            yield each


def _found() -> dict[str, EntryPoint]:
    # Whoever takes one of our names has said that he wants his.
    points = sorted(entry_points(group=GROUP), key=_is_ours, reverse=True)
    return {point.name: point for point in points}


def _is_ours(point: EntryPoint) -> bool:
    return point.value.startswith(f"{__name__}.")
