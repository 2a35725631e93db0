"""Two texts beside each other: which lines differ, and within them which words. Pure."""

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from typing import Final, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["same", "changed", "removed", "added", "gap"]

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
    """A line of either text, or one of both; or a gap, for as many equal ones as its number says.

    Each text has its line's number from 1, or 0, and its words.
    """

    kind: Kind
    number_a: int
    number_b: int
    a: tuple[Piece, ...] = ()
    b: tuple[Piece, ...] = ()


def compare_lines(a: Sequence[str], b: Sequence[str]) -> list[Line]:
    """Return the lines of two texts, those that are the same or alike beside each other."""
    matcher = SequenceMatcher(None, a, b, autojunk=len(a) + len(b) > _MOST_LINES)
    lines: list[Line] = []
    for _, low_a, high_a, low_b, high_b in matcher.get_opcodes():
        pairs = min(high_a - low_a, high_b - low_b)
        for step in range(pairs):
            lines += _compare_pair(
                low_a + step + 1, low_b + step + 1, a[low_a + step], b[low_b + step]
            )
        rest_a, rest_b = range(low_a + pairs, high_a), range(low_b + pairs, high_b)
        lines += (Line("removed", at + 1, 0, (Piece(a[at]),)) for at in rest_a)
        lines += (Line("added", 0, at + 1, (), (Piece(b[at]),)) for at in rest_b)
    return lines


def fold_lines(lines: Sequence[Line], context: int = 3) -> list[Line]:
    """Return the lines with gaps for those that are further than some from any difference."""
    visible = {
        at + step
        for at, line in enumerate(lines)
        if line.kind != "same"
        for step in range(-context, context + 1)
    }
    folded: list[Line] = []
    for is_near, numbers in groupby(range(len(lines)), key=visible.__contains__):
        places = list(numbers)
        gap = Line("gap", len(places), len(places))
        folded += [lines[at] for at in places] if is_near else [gap]
    return folded


def _compare_pair(number_a: int, number_b: int, a: str, b: str) -> Iterator[Line]:
    """Yield two lines as one in two versions, word by word, or as two that are not alike."""
    if a == b:
        yield Line("same", number_a, number_b, (Piece(a),), (Piece(b),))
        return
    words_a, words_b = _WORDS.findall(a), _WORDS.findall(b)
    if len(words_a) + len(words_b) > _MOST_WORDS:
        yield Line("changed", number_a, number_b, (Piece(a, True),), (Piece(b, True),))
        return
    matcher = SequenceMatcher(None, words_a, words_b, autojunk=False)
    if matcher.ratio() < _ALIKE:
        yield Line("removed", number_a, 0, (Piece(a),))
        yield Line("added", 0, number_b, (), (Piece(b),))
        return
    codes = matcher.get_opcodes()
    pieces_a = [Piece("".join(words_a[i:j]), tag != "equal") for tag, i, j, _, _ in codes if j > i]
    right = [Piece("".join(words_b[i:j]), tag != "equal") for tag, _, _, i, j in codes if j > i]
    yield Line("changed", number_a, number_b, tuple(pieces_a), tuple(right))
