"""Two texts beside each other: which lines differ, and within them which words. Pure."""

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Final, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["same", "changed", "removed", "added", "gap"]

AROUND: Final = 3
"""Equal lines shown before and after one that differs."""
_WORDS: Final = re.compile(r"\s+|\w+|[^\w\s]")
_MOST_WORDS: Final = 2000
"""In two lines together, beyond which only the lines are compared: it takes their product."""
_MOST_LINES: Final = 4000
"""In two texts together, beyond which frequent lines are not looked for."""
_ALIKE: Final = 0.4
"""How much of two lines must be the same for one to be a change of the other."""


class Piece(NamedTuple):
    """A part of a line."""

    text: str
    is_changed: bool = False


class Line(NamedTuple):
    """A line of either text, or one of both.

    Attributes:
        kind: How they compare; a ``gap`` stands for lines that are the same and not shown.
        number_a: Its number in the first text, from 1; 0 where it is not in it; of a gap how many
            lines it stands for.
        number_b: Likewise in the second.
        a: What it says in the first text.
        b: What it says in the second.
    """

    kind: Kind
    number_a: int
    number_b: int
    a: tuple[Piece, ...] = ()
    b: tuple[Piece, ...] = ()


def compared(a: Sequence[str], b: Sequence[str]) -> list[Line]:
    """The lines of two texts, those that are the same beside each other.

    Args:
        a: The lines of one.
        b: The lines of the other.
    """
    matcher = SequenceMatcher(None, a, b, autojunk=len(a) + len(b) > _MOST_LINES)
    found: list[Line] = []
    for tag, low_a, high_a, low_b, high_b in matcher.get_opcodes():
        if tag == "equal":
            for step in range(high_a - low_a):
                same = (Piece(a[low_a + step]),)
                found.append(Line("same", low_a + step + 1, low_b + step + 1, same, same))
        else:
            found += _compare_lines(a, b, range(low_a, high_a), range(low_b, high_b))
    return found


def folded(lines: Sequence[Line], around: int = AROUND) -> list[Line]:
    """The lines without those that are far from any difference, for which gaps stand.

    Args:
        lines: As :func:`compared` gives them.
        around: How many equal lines stay beside one that differs.
    """
    near = [False] * len(lines)
    for place, line in enumerate(lines):
        if line.kind != "same":
            for beside in range(max(0, place - around), min(len(lines), place + around + 1)):
                near[beside] = True
    found: list[Line] = []
    hidden = 0
    for line, is_near in zip(lines, near, strict=True):
        if not is_near:
            hidden += 1
            continue
        if hidden:
            found.append(Line("gap", hidden, hidden))
            hidden = 0
        found.append(line)
    return [*found, Line("gap", hidden, hidden)] if hidden else found


def _compare_lines(a: Sequence[str], b: Sequence[str], of_a: range, of_b: range) -> Iterator[Line]:
    """Lines of one text in place of those of the other; in turn, as far as they are alike."""
    pairs = min(len(of_a), len(of_b))
    for place_a, place_b in zip(of_a[:pairs], of_b[:pairs], strict=True):
        words = _compare_words(a[place_a], b[place_b])
        if words is None:
            yield _removed_line(a, place_a)
            yield _added_line(b, place_b)
        else:
            yield Line("changed", place_a + 1, place_b + 1, *words)
    yield from (_removed_line(a, place) for place in of_a[pairs:])
    yield from (_added_line(b, place) for place in of_b[pairs:])


def _removed_line(a: Sequence[str], place: int) -> Line:
    return Line("removed", place + 1, 0, (Piece(a[place]),))


def _added_line(b: Sequence[str], place: int) -> Line:
    return Line("added", 0, place + 1, (), (Piece(b[place]),))


def _compare_words(a: str, b: str) -> tuple[tuple[Piece, ...], tuple[Piece, ...]] | None:
    """The lines in pieces, each changed or not; None where one is no change of the other."""
    words_a, words_b = _WORDS.findall(a), _WORDS.findall(b)
    if len(words_a) + len(words_b) > _MOST_WORDS:
        return (Piece(a, is_changed=True),), (Piece(b, is_changed=True),)
    matcher = SequenceMatcher(None, words_a, words_b, autojunk=False)
    if matcher.ratio() < _ALIKE:
        return None
    left: list[Piece] = []
    right: list[Piece] = []
    for tag, low_a, high_a, low_b, high_b in matcher.get_opcodes():
        is_changed = tag != "equal"
        if high_a > low_a:
            left.append(Piece("".join(words_a[low_a:high_a]), is_changed))
        if high_b > low_b:
            right.append(Piece("".join(words_b[low_b:high_b]), is_changed))
    return tuple(left), tuple(right)
