"""Text as one harmless line, for terminals, XML and HTML, and a table of it. Pure."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final

_UNSAFE: Final = re.compile(
    # What XML cannot hold, control characters, and all that turns the writing's direction.
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_ESCAPES: Final = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"}
)


def safe(text: object, cells: int | None = None) -> str:
    """Text for XML and HTML: escaped, on one line, and cut to so many cells if it is longer.

    Args:
        text: Anything; what is no text is taken as Python writes it.
        cells: Widths of a narrow character; wide ones take two.
    """
    return one_line(text, cells).translate(_ESCAPES)


def one_line(text: object, cells: int | None = None) -> str:
    """Text on one line that moves no cursor and turns no writing, cut as :func:`safe` cuts it."""
    found = text if isinstance(text, str) else str(text)
    found = _UNSAFE.sub(lambda match: " " if match[0] in "\t\n\r" else "\ufffd", found)
    return found if cells is None else _cut(found, max(1, cells))


def width_of(text: str) -> int:
    """How many cells of a terminal a line takes."""
    return sum(map(_cells, text))


def _cut(text: str, cells: int) -> str:
    taken = 0
    for index, character in enumerate(text):
        taken += _cells(character)
        if taken > cells:
            kept = text[:index]
            while kept and sum(map(_cells, kept)) >= cells:
                kept = kept[:-1]
            return kept.rstrip() + "…"
    return text


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """Rows as an HTML table of texts, each cut to a line.

    Args:
        columns: Their names.
        rows: A value for each.
        note: What is said below.
    """
    head = "".join(f'<th style="text-align:left">{safe(name)}</th>' for name in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="text-align:left">{"" if value is None else safe(value, 80)}</td>'
            for value in row
        )
        + "</tr>"
        for row in rows
    )
    told = f"<p>{safe(note)}</p>" if note else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{told}"
