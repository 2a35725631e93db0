"""Messages as a page shows them: parts of plain text, cut where they are long, media named only."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from lightning_otel.messages import read_message
from lightning_otel.messages.media import dumped, plain
from lightning_otel.types import Message

Side: TypeAlias = Literal["input", "output"]

LONGEST: Final = 8_000
"""Characters of a part that stand on a page; the whole of it is behind a link."""
_LINE: Final = 72
"""JSON that is no longer stands in one line."""
_TITLES: Final = {"text": "", "reasoning": "reasoning", "refusal": "refusal"}


class Part(NamedTuple):
    """A part of a message, or any other value.

    Attributes:
        kind: ``text``, ``reasoning``, ``refusal``, ``tool_call``, ``tool_result``, ``media`` or
            ``other``.
        title: What it is, for people; empty for a plain text.
        text: What it says; its beginning, if it is long.
        length: How many characters it has in all.
    """

    kind: str
    title: str
    text: str
    length: int

    @property
    def is_cut(self) -> bool:
        """True if there is more text."""
        return self.length > len(self.text)


class Said(NamedTuple):
    """A message, and where it stands.

    Attributes:
        span_id: The call that was given it or answered it.
        side: Which of the two.
        place: Its position among the messages on that side.
        reward: What the step was worth, of an answer; None if nothing says so.
        label: The step's name, of an answer.
        note: Why it stands here, where that is not plain.
    """

    role: str
    name: str
    parts: list[Part]
    span_id: str
    side: Side
    place: int
    reward: float | None = None
    label: str = ""
    note: str = ""


def said(
    message: Message,
    span_id: str,
    side: Side,
    index: int,
    *,
    reward: float | None = None,
    label: str = "",
    note: str = "",
    longest: int = LONGEST,
) -> Said:
    """A message of the conventions or of the chat API, as it is shown."""
    parts = [part_of(part, longest) for part in _message_parts(message)]
    role = plain(message.get("role")) or ("assistant" if side == "output" else "user")
    name = message.get("name")
    return Said(role, plain(name), parts, span_id, side, index, reward, label, note)


def whole(message: Message, index: int) -> str:
    """The whole text of a message's part.

    Raises:
        IndexError: It has no such part.
    """
    return _read_part(list(_message_parts(message))[index])[2]


def part_of(part: object, longest: int = LONGEST) -> Part:
    """A part of a message, as it is shown."""
    kind, title, text = _read_part(part)
    return Part(kind, title, text[:longest], len(text))


def value_part(value: object, longest: int = LONGEST) -> Part:
    """Any value, as it is shown: a text as it is, anything else as JSON."""
    text = value_text(value)
    return Part("other", "", text[:longest], len(text))


def value_text(value: object) -> str:
    """A value as text; JSON within a text, as attributes have it, is laid out as well."""
    if isinstance(value, str):
        if value[:1] in ("{", "[") and len(value) < LONGEST:
            try:
                return _laid_out(json.loads(value))
            except (ValueError, RecursionError):
                return value
        return value
    return _laid_out(value)


def _message_parts(message: Message) -> Iterable[object]:
    found = message.get("parts")
    if isinstance(found, (list, tuple)):
        return found
    parts: Iterable[object] = read_message(message)["parts"]
    return parts


def _read_part(part: object) -> tuple[str, str, str]:
    """A part's kind, title and whole text."""
    if not isinstance(part, Mapping):
        return "text", "", plain(part)
    kind = part.get("type")
    if kind in _TITLES:
        return str(kind), _TITLES[str(kind)], plain(part.get("content"))
    if kind == "tool_call":
        arguments = part.get("arguments")
        text = "" if arguments is None else value_text(arguments)
        return "tool_call", f"calls {plain(part.get('name')) or 'a tool'}", text
    if kind == "tool_call_response":
        return "tool_result", "tool answered", value_text(part.get("response"))
    if kind in ("blob", "uri", "file"):
        return "media", _word_medium(part), _word_place(part)
    return "other", plain(kind), _laid_out(part)


def _word_medium(part: Mapping[str, Any]) -> str:
    words = [plain(part.get(key)) for key in ("modality", "mime_type", "filename")]
    return ", ".join(filter(None, words)) or plain(part.get("type"))


def _word_place(part: Mapping[str, Any]) -> str:
    """Word the place or the length of a medium; fetch and draw nothing."""
    if part.get("type") == "blob":
        return f"{len(plain(part.get('content'))):,} characters of base64, not shown"
    return plain(part.get("uri", part.get("file_id")))


def _laid_out(value: object) -> str:
    if value is None:
        return ""
    try:
        line = json.dumps(value, ensure_ascii=False, default=str)
        if len(line) <= _LINE:
            return line
        return json.dumps(value, ensure_ascii=False, indent=2, default=str)
    except (ValueError, RecursionError):
        return dumped(value)
