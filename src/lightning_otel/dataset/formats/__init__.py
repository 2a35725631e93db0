"""Formats: what trainers read, made of trajectories; one member a format.

A member is a :class:`Format` or a plain function from trajectories to rows, and registers under the
entry point group ``lightning_otel.formats``, as anybody's does. Members do not know each other.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from lightning_otel.dataset.formats.format import Format, LeftOut, Row
from lightning_otel.dataset.formats.groups import by_group
from lightning_otel.dataset.registry import Registry
from lightning_otel.errors import ConfigError
from lightning_otel.types import Trajectory

GROUP: Final = "lightning_otel.formats"
_REGISTRY: Final = Registry("format", GROUP)

__all__ = ["Format", "LeftOut", "Row", "get", "names", "rows"]


def names() -> list[str]:
    """The formats that are installed, ours first."""
    return _REGISTRY.names()


def get(name: str) -> Format:
    """Return the format of a name."""
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
        left_out: Callback for each step that the format cannot represent.
        options: Those of the format, such as ``threshold`` of ``kto``.

    Raises:
        ConfigError: There is no such format, or it has no such option.
    """
    layout = get(name)
    layout.check(options)
    ready = by_group(trajectories) if layout.is_grouped else trajectories
    return _drop_notes(layout.make(ready, **options), left_out)


def _drop_notes(
    items: Iterable[Row | LeftOut], left_out: Callable[[LeftOut], None] | None
) -> Iterator[Row]:
    for item in items:
        if not isinstance(item, LeftOut):
            yield item
        elif left_out is not None:
            left_out(item)
