"""Text for people: one harmless line, messages in short, numbers with their unit. Pure."""

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lightning_otel.types.transitions import Transition

UNSAFE: Final = re.compile(
    # What XML cannot hold, control characters, and all that turns the writing's direction.
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
HIDDEN: Final = re.compile(
    # What moves a cursor, turns the writing or is not seen, but for tabs and ends of lines: control
    # characters, marks of direction, separators, halves of pairs, the byte order mark and tags.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069"
    "\ud800-\udfff\ufeff\U000e0000-\U000e007f]"
)
_FORMULA: Final = re.compile(r"[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
"""How a formula begins, in full width, too. Source: OWASP, "CSV Injection"."""
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
NESTED: Final = "(nested too deeply)"
"""Stands for what no serializer follows."""


def one_line(text: object, cells: int | None = None) -> str:
    """Text on one line that moves no cursor and turns no writing, cut to a number of cells."""
    line = text if isinstance(text, str) else str(text)
    line = UNSAFE.sub(lambda match: " " if match[0] in "\t\n\r" else "\ufffd", line)
    return line if cells is None else _cut_text(line, max(1, cells))


def visible(text: object) -> str:
    """Text of several lines in which everything that would not be seen is: ``‹U+202E›``."""
    line = text if isinstance(text, str) else str(text)
    return HIDDEN.sub(lambda match: f"‹U+{ord(match[0]):04X}›", line.replace("\r\n", "\n"))


def format_number(value: float, digits: int = 4) -> str:
    """Format a number for people; what binary fractions leave of a sum that is zero is 0."""
    return f"{round(value, 12) + 0.0:.{digits}g}"


def csv_cell(value: object, text: str) -> str:
    """Return a value's text in CSV, with a quote before what spreadsheets run as a formula."""
    is_number = isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)
    return f"'{text}" if not is_number and _FORMULA.match(text) else text


def width_of(text: str) -> int:
    """Return the number of terminal cells of a line."""
    return sum(map(_count_cells, text))


def plain_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of messages: texts and tool calls, one line each."""
    return "\n".join(_part_line(part) for item in messages for part in _message_parts(item))


def count_noun(count: int, noun: str) -> str:
    """Return a number and its noun, with an s unless there is exactly one: ``1,000 spans``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_duration(duration_s: float) -> str:
    """Return a duration in the unit people would say it in."""
    if duration_s < 1:
        return f"{duration_s * 1e3:.0f} ms"
    return f"{duration_s:.1f} s" if duration_s < 120 else f"{duration_s / 60:.0f} min"


def format_age(start_ns: int, now_ns: int) -> str:
    """Return the time between two moments, in one unit."""
    age_s = max(0.0, (now_ns - start_ns) / 1e9)
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if age_s < limit:
            return f"{age_s / size:.0f} {unit}"
    return f"{age_s / 86_400:.0f} d"


def format_size(size_bytes: int) -> str:
    """Return a size in the unit people would say it in."""
    return f"{size_bytes / 1e3:.0f} kB" if size_bytes < 1e6 else f"{size_bytes / 1e6:,.1f} MB"


def step_row(step: "Transition") -> dict[str, object]:
    """Return a step as a row for people: agent, last message, action and reward."""
    return {
        "rollout": step.rollout_id,
        "agent": step.agent,
        "step": step.step,
        "observation": plain_text(step.observation[-1:]),
        "action": plain_text(step.action[:1]),
        "reward": step.reward,
        "done": step.done,
        "capture": step.capture,
    }


def _cut_text(text: str, cells: int) -> str:
    width = 0
    for index, character in enumerate(text):
        width += _count_cells(character)
        if width > cells:
            head = text[:index]
            while head and sum(map(_count_cells, head)) >= cells:
                head = head[:-1]
            return head.rstrip() + "…"
    return text


def _count_cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _message_parts(item: Mapping[str, Any]) -> Sequence[object]:
    parts = item.get("parts")
    return parts if isinstance(parts, (list, tuple)) else ()


def _part_line(part: object) -> str:
    try:
        if not isinstance(part, Mapping):
            return str(part)
        if part.get("type") == "tool_call":
            return f"{part.get('name')}({json.dumps(part.get('arguments'))})"
        content = part.get("content", part.get("response", part.get("uri", "")))
        return content if isinstance(content, str) else json.dumps(content)
    except (TypeError, ValueError, RecursionError):
        return NESTED


def parse_size(text: str) -> int | None:
    """Return the bytes that ``10GB``, ``500 MB`` or ``1.5GiB`` names; None if it names none."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    number, unit, is_binary = match.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** _POWERS[unit.lower()])
