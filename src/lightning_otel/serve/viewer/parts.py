"""Parts of long lists; the address holds the position."""

from typing import NamedTuple


class Part(NamedTuple):
    """A part of a list.

    Attributes:
        first: Position of its first member.
        size: How many a page has at most.
        total: How many there are in all.
        noun: What they are.
    """

    first: int
    size: int
    total: int
    noun: str

    @property
    def end(self) -> int:
        """Position after its last member."""
        return min(self.first + self.size, self.total)

    @property
    def last(self) -> int:
        """The position of the last page."""
        return max(0, self.total - 1) // self.size * self.size

    @property
    def places(self) -> slice:
        """Its members among all."""
        return slice(self.first, self.end)


def part_of(total: int, size: int, first: int, noun: str) -> Part:
    """The part that begins at a position; the last one, where the list ends before it."""
    found = Part(first, size, total, noun)
    return found._replace(first=min(first, found.last))
