"""Members that packages register as entry points: who they are by name, and how one is loaded."""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from lightning_otel.errors import ConfigError, LightningOtelError


class Registry(NamedTuple):
    """A group of entry points, ours and others'."""

    noun: str  # what a member is called in errors
    group: str
    key: Callable[[str], str] = str  # what of a name counts, such as str.lower
    error: type[LightningOtelError] = ConfigError  # raised where a member cannot be loaded

    def names(self) -> list[str]:
        """The members that are installed, ours first."""
        found = self.points()
        return sorted(found, key=lambda name: (not _is_ours(found[name]), name))

    def points(self) -> dict[str, EntryPoint]:
        """Each member's entry point, by name."""
        # Whoever takes one of our names has said that he wants his.
        points = sorted(entry_points(group=self.group), key=_is_ours, reverse=True)
        return {self.key(point.name): point for point in points}

    def load(self, name: str) -> Any:
        """Return the member of a name, or raise ``error`` if it cannot be loaded."""
        from difflib import get_close_matches

        found, wanted = self.points(), self.key(name)
        if wanted not in found:
            near = get_close_matches(wanted, found, n=1)
            guess = f"did you mean {near[0]!r}? " if near else ""
            known = ", ".join(self.names()) or "none"
            raise ConfigError(f"no {self.noun} {name!r}; {guess}there are {known}")
        point = found[wanted]
        try:
            return point.load()
        except Exception as exc:  # somebody else's code may raise anything
            dist = point.dist  # reads the package's metadata
            package = f", of {dist.name} {dist.version}" if dist is not None else ""
            raise self.error(
                f"the {self.noun} {name} ({point.value}{package}) cannot be loaded: "
                f"{type(exc).__name__}: {exc}; install what it needs"
            ) from exc


def _is_ours(point: EntryPoint) -> bool:
    return point.value.startswith("lightning_otel.")
