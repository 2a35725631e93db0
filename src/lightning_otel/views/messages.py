"""Messages as people read them: in one line, or as parts of text, images and other media.

Each message of a growing history stands once; where a call was given another history, that is said.
"""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from lightning_otel.adapter.histories import is_same
from lightning_otel.messages import parse_messages, plain_text, read_message
from lightning_otel.messages.media import name_media, to_json, to_text
from lightning_otel.types import Message, Span, Trajectory, Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.text import count_noun
from lightning_otel.types.values import parse_json

Side: TypeAlias = Literal["input", "output"]

LONGEST: Final = 8_000
"""Characters of a part that stand on a page; the whole of it is behind a link."""
_LINE: Final = 72
"""JSON that is no longer stands in one line."""
_IMAGES: Final = {
    "image/png": "iVBORw0KGgo", "image/jpeg": "/9j/", "image/gif": "R0lGOD", "image/webp": "UklGR",
}  # fmt: skip
"""Images that pages show, and the beginning of each in base64."""
_LARGEST: Final = 8 << 20
"""Characters of base64 of an image that is shown."""
_TITLES: Final = {"text": "", "reasoning": "reasoning", "refusal": "refusal"}


class Part(NamedTuple):
    """A part of a message, or any other value.

    Attributes:
        kind: ``text``, ``reasoning``, ``refusal``, ``tool_call``, ``tool_result``, ``image``,
            ``media`` or ``other``.
        title: Its name, for people; empty for a plain text.
        text: Its text, or the beginning of it.
        length: Number of characters in all.
    """

    kind: str
    title: str
    text: str
    length: int

    @property
    def is_cut(self) -> bool:
        """True if there is more text."""
        return self.length > len(self.text)


class ShownMessage(NamedTuple):
    """A message, and where it stands.

    Attributes:
        span_id: The call that was given it or answered it.
        place: Its position among the messages on that side.
        reward: The reward of the step, of an answer; None if nothing says so.
        label: The step's name, of an answer.
        note: Why it stands here, where that is not plain.
        hidden: Number of new messages right before it that are not shown.
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
    hidden: int = 0


class Thread(NamedTuple):
    """The messages of one agent on one branch, in the order in which the model got to see them.

    ``cause`` is why the branch begins there; ``start`` for the first one.
    """

    agent: str
    branch: int
    cause: str
    messages: list[ShownMessage]


class MessageLimits(NamedTuple):
    """Limits of a step's messages.

    Attributes:
        messages: The last so many of those that it was given and that were new to it.
        characters: Of a part of a message.
        until: Position of the message before which they end; None for all.
    """

    messages: int = 1 << 30
    characters: int = LONGEST
    until: int | None = None


ALL: Final = MessageLimits()


def new_input(span: Span) -> list[Message]:
    """Return a call's new input: the messages after its own last answer, without instructions."""
    messages = parse_messages(span.attributes.get(c.INPUT_MESSAGES)) or ()
    answers = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    new = messages[max(answers, default=-1) + 1 :]
    return [message for message in new if message.get("role") != "system"]


def first_answer(span: Span) -> list[Message]:
    """Return what a call answered first; empty if it did not."""
    return [*(parse_messages(span.attributes.get(c.OUTPUT_MESSAGES)) or ())[:1]]


def word_messages(messages: Iterable[Message]) -> str:
    """Return the words of some messages in one line, with media by their names."""
    return " ".join(plain_text(map(name_media, messages)).split())


def show_messages(
    messages: Sequence[Message], span_id: str, side: Side, first: int = 0, longest: int = LONGEST
) -> list[ShownMessage]:
    """Messages of the conventions or of the chat API, from a position on, as they are shown."""
    return [
        ShownMessage(
            to_text(message.get("role")) or ("assistant" if side == "output" else "user"),
            to_text(message.get("name")),
            [show_part(part, longest) for part in _message_parts(message)],
            span_id,
            side,
            place,
        )
        for place, message in enumerate(messages[first:], first)
    ]


def show_thread(
    path: Trajectory,
    labels: Mapping[str, str],
    before: Transition | None = None,
    limits: MessageLimits = ALL,
) -> Thread:
    """Return the messages of a trajectory that were not shown before.

    ``labels`` names steps by span id; the first may go on from the step ``before``.
    """
    messages: list[ShownMessage] = []
    for step in path.transitions:
        messages += _input_messages(step, before, limits)
        for answer in show_messages(step.action, step.span_id, "output", 0, limits.characters):
            is_first, note = answer.place == 0, f"choice {answer.place + 1} of "
            messages.append(
                answer._replace(
                    label=labels[step.span_id],
                    reward=step.reward if is_first else None,
                    note="" if is_first else f"{note}{len(step.action)}",
                )
            )
        before = step
    return Thread(path.agent, path.branch, path.cause, messages)


def _input_messages(
    step: Transition, before: Transition | None, limits: MessageLimits
) -> Iterator[ShownMessage]:
    history: Sequence[Message] = () if before is None else before.observation
    prompt, answers = step.observation, () if before is None else before.action
    pairs = enumerate(zip(history, prompt, strict=False))
    same = next((at for at, two in pairs if not is_same(*two)), min(len(history), len(prompt)))
    note = ""
    if same < len(history):
        overlap = f"{count_noun(same, 'message')} kept" if same else "no message kept"
        note = f"history changed: {overlap}, {len(prompt) - same:,} new"
    elif same < len(prompt) and any(is_same(answer, prompt[same]) for answer in answers):
        same += 1
    prompt = prompt[: limits.until]
    first = max(same, len(prompt) - limits.messages)
    for item in show_messages(prompt, step.span_id, "input", first, limits.characters):
        yield item._replace(note=note, hidden=first - same) if item.place == first else item


def read_text(message: Message, index: int) -> str | tuple[str, bytes]:
    """Return the whole text of a message's part; the type and bytes of an image.

    Raises:
        IndexError: It has no such part.
        ValueError: The image cannot be decoded.
    """
    part: Any = list(_message_parts(message))[index]
    kind, _, text = _read_part(part)
    return (part["mime_type"], base64.b64decode(part["content"])) if kind == "image" else text


def show_part(part: object, longest: int = LONGEST) -> Part:
    """A part of a message, as it is shown."""
    kind, title, text = _read_part(part)
    return Part(kind, title, text[:longest], len(text))


def show_value(value: object, longest: int = LONGEST) -> Part:
    """Any value, as it is shown: a text as it is, anything else as JSON."""
    text = value_text(value)
    return Part("other", "", text[:longest], len(text))


def value_text(value: object) -> str:
    """A value as text; JSON within a text, as attributes have it, is laid out as well."""
    if isinstance(value, str) and value[:1] in ("{", "[") and len(value) < LONGEST:
        value = parse_json(value)
    return value if isinstance(value, str) else _laid_out(value)


def _message_parts(message: Message) -> Iterable[object]:
    content = message.get("parts")
    if isinstance(content, (list, tuple)):
        return content
    parts: Iterable[object] = read_message(message)["parts"]
    return parts


def _read_part(part: object) -> tuple[str, str, str]:
    if not isinstance(part, Mapping):
        return "text", "", to_text(part)
    kind = part.get("type")
    if kind in _TITLES:
        return str(kind), _TITLES[str(kind)], to_text(part.get("content"))
    if kind == "tool_call":
        arguments = part.get("arguments")
        text = "" if arguments is None else value_text(arguments)
        return "tool_call", f"calls {to_text(part.get('name')) or 'a tool'}", text
    if kind == "tool_call_response":
        return "tool_result", "tool answered", value_text(part.get("response"))
    if kind in ("blob", "uri", "file"):
        head, content = _IMAGES.get(to_text(part.get("mime_type"))), to_text(part.get("content"))
        is_begun = kind == "blob" and head is not None and content.startswith(head)
        return "image" if is_begun and len(content) <= _LARGEST else "media", *_word_medium(part)
    return "other", to_text(kind), _laid_out(part)


def _word_medium(part: Mapping[str, Any]) -> tuple[str, str]:
    """Word a medium, and its place or length; nothing is fetched."""
    words = [to_text(part.get(key)) for key in ("modality", "mime_type", "filename")]
    title = ", ".join(filter(None, words)) or to_text(part.get("type"))
    if part.get("type") == "blob":
        return title, f"{len(to_text(part.get('content'))):,} characters of base64, not shown"
    return title, to_text(part.get("uri", part.get("file_id")))


def _laid_out(value: object) -> str:
    if value is None:
        return ""
    try:
        line = json.dumps(value, ensure_ascii=False, default=str)
        if len(line) <= _LINE:
            return line
        return json.dumps(value, ensure_ascii=False, indent=2, default=str)
    except (ValueError, RecursionError):
        return to_json(value)
