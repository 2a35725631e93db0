"""Errors that GEPA swallows."""

import contextlib
from collections.abc import Iterator


class Fault:
    """The first thing that went wrong where GEPA would go on: it ends the search instead.

    Attributes:
        first: What was raised; None as long as nothing was.
    """

    def __init__(self) -> None:
        self.first: BaseException | None = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is raised within, and let it pass."""
        try:
            yield
        except BaseException as exc:
            self.first = self.first or exc
            raise

    def check(self) -> None:
        """Raise what was noted, if anything was."""
        if self.first is not None:
            raise self.first
