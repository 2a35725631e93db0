"""Formats: what trainers read, made of trajectories; one member a format.

A member is a :class:`Format` or a plain function from trajectories to rows, and registers under the
entry point group ``lightning_otel.formats``, as anybody's does. Members do not know each other.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from lightning_otel.errors import ConfigError
from lightning_otel.formats.format import Format, LeftOut, Row
from lightning_otel.formats.groups import by_group
from lightning_otel.registry import Registry
from lightning_otel.types import Trajectory

GROUP: Final = "lightning_otel.formats"
_REGISTRY: Final = Registry("format", GROUP)

__all__ = ["Format", "LeftOut", "Row", "get", "names", "rows"]


def names() -> list[str]:
    """The formats that are installed, ours first."""
    return _REGISTRY.names()


def get(name: str) -> Format:
    """The format of a name.

    Raises:
        ConfigError: There is none, or it cannot be loaded.
    """
    member = _REGISTRY.load(name)
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
