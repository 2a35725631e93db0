"""Members that packages register as entry points: who they are by name, and how one is loaded."""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from lightning_otel.errors import ConfigError, LightningOtelError


class Registry(NamedTuple):
    """A group of entry points, ours and others'.

    Attributes:
        noun: What a member is called in errors.
        group: The group's name.
        key: What of a name counts, such as :meth:`str.lower`.
        error: What is raised where a member cannot be loaded.
    """

    noun: str
    group: str
    key: Callable[[str], str] = str
    error: type[LightningOtelError] = ConfigError

    def names(self) -> list[str]:
        """The members that are installed, ours first."""
        points = self.points()
        return sorted(points, key=lambda name: (not _is_ours(points[name]), name))

    def points(self) -> dict[str, EntryPoint]:
        """Each member's entry point, by name."""
        # Whoever takes one of our names has said that he wants his.
        points = sorted(entry_points(group=self.group), key=_is_ours, reverse=True)
        return {self.key(point.name): point for point in points}

    def load(self, name: str) -> Any:
        """The member of a name.

        Raises:
            ConfigError: There is none.
            LightningOtelError: It cannot be loaded; ``error`` says which one.
        """
        from difflib import get_close_matches

        points, key = self.points(), self.key(name)
        if key not in points:
            guesses = get_close_matches(key, points, n=1)
            guess = f"did you mean {guesses[0]!r}? " if guesses else ""
            names = ", ".join(self.names()) or "none"
            raise ConfigError(f"no {self.noun} {name!r}; {guess}there are {names}")
        point = points[key]
        package = f", of {point.dist.name} {point.dist.version}" if point.dist is not None else ""
        try:
            return point.load()
        except Exception as exc:  # somebody else's code may raise anything
            raise self.error(
                f"the {self.noun} {name} ({point.value}{package}) cannot be loaded: "
                f"{type(exc).__name__}: {exc}; install what it needs"
            ) from exc


def _is_ours(point: EntryPoint) -> bool:
    return point.value.startswith("lightning_otel.")
