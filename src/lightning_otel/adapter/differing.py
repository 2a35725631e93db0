"""Two outlines beside each other: what they came to, in figures, and where they said other things.

Pure data; the command line prints it.
"""

from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any, Final, Literal, NamedTuple

from lightning_otel import conventions as c
from lightning_otel.adapter.attributes import number
from lightning_otel.adapter.outline import Node, Outline
from lightning_otel.adapter.rewards import read_reward
from lightning_otel.messages import parse_messages, plain_text
from lightning_otel.types import Message, Reward, Span

MOST_LINES: Final = 2_000
"""Of more lines a side only the first are laid beside each other: it takes the square of them."""

Sign = Literal[" ", "-", "+"]
"""Said on both sides, on the first alone, on the second alone."""


class Figure(NamedTuple):
    """One thing that can be told of both sides; None where it is not known."""

    name: str
    a: Any
    b: Any

    @property
    def change(self) -> float | None:
        """The second less the first, where both are numbers."""
        is_known = None not in (number(self.a), number(self.b))
        return self.b - self.a if is_known else None


class Said(NamedTuple):
    """A line of what was said, and on which side."""

    sign: Sign
    text: str


class Difference(NamedTuple):
    """The differences of two outlines.

    Attributes:
        figures: Counts, tokens, times, rewards.
        said: Both conversations as one.
        left_a: Lines of the first side that were not laid beside the others.
        left_b: And of the second.
    """

    figures: list[Figure]
    said: list[Said]
    left_a: int
    left_b: int


def differ(a: Outline, b: Outline, most_lines: int | None = MOST_LINES) -> Difference:
    """Compare two outlines.

    Args:
        a: One side.
        b: The other.
        most_lines: How many lines of each side are laid beside each other; None for all.
    """
    one, other = list(transcript(a)), list(transcript(b))
    first, second = one[:most_lines], other[:most_lines]
    return Difference(
        _compare_figures(a, b),
        list(_compare_lines(first, second)),
        len(one) - len(first),
        len(other) - len(second),
    )


def transcript(found: Outline) -> Iterator[str]:
    """Yield speakers and words, a line each, in the order of the outline, without repeats."""
    for node in found.nodes:
        get = node.span.attributes.get
        if node.kind == "call":
            for message in heard(node.span):
                yield f"{message.get('role')}: {_one_line_of(plain_text([message]))}"
            for message in (parse_messages(get(c.OUTPUT_MESSAGES)) or ())[:1]:
                yield f"{node.agent or 'assistant'}: {_one_line_of(plain_text([message]))}"
        elif node.kind == "tool":
            name = get(c.TOOL_NAME) or node.span.name
            given, result = map(_one_line_of, (get(c.TOOL_ARGUMENTS), get(c.TOOL_RESULT)))
            yield f"{name}: {given} → {result}"
        if node.span.status == "ERROR":
            yield f"error in {node.span.name}: {_one_line_of(node.span.status_message)}"


def heard(span: Span) -> tuple[Message, ...]:
    """Return a call's new input: the messages after its own last answer, without instructions."""
    found = parse_messages(span.attributes.get(c.INPUT_MESSAGES)) or ()
    answers = [at for at, each in enumerate(found) if each.get("role") == "assistant"]
    new = found[max(answers, default=-1) + 1 :]
    return tuple(each for each in new if each.get("role") != "system")


def _compare_figures(a: Outline, b: Outline) -> list[Figure]:
    of: dict[str, Callable[[Outline], Any]] = {
        "spans": lambda each: len(each.nodes),
        "calls": lambda each: _count_nodes(each, lambda node: node.kind == "call"),
        "tool calls": lambda each: _count_nodes(each, lambda node: node.kind == "tool"),
        "errors": lambda each: _count_nodes(each, lambda node: node.span.status == "ERROR"),
        "transitions": lambda each: each.report.transitions,
        "exact": lambda each: each.report.exact,
        "tokens in": lambda each: _sum_attribute(each, c.INPUT_TOKENS),
        "tokens out": lambda each: _sum_attribute(each, c.OUTPUT_TOKENS),
        "seconds": _seconds_of,
        "agents": lambda each: ", ".join(sorted({n.agent for n in each.nodes if n.agent})) or None,
        "models": lambda each: ", ".join(sorted(_find_models(each))) or None,
    }
    found = [Figure(name, ask(a), ask(b)) for name, ask in of.items()]
    one, other = _read_rewards(a), _read_rewards(b)
    names = list(dict.fromkeys([*one, *other]))
    found += [Figure(f"reward {name}", one.get(name), other.get(name)) for name in names]
    return found


def _count_nodes(found: Outline, is_one: Callable[[Node], bool]) -> int:
    return sum(map(is_one, found.nodes))


def _sum_attribute(found: Outline, key: str) -> int | None:
    values = [node.span.attributes.get(key) for node in found.nodes if node.kind == "call"]
    known = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return sum(known) if known else None


def _seconds_of(found: Outline) -> float | None:
    acted = [node.span for node in found.nodes if node.kind != "reward"]
    ends = [span.end_ns for span in acted if span.end_ns is not None]
    if not ends:
        return None
    return round((max(ends) - min(span.start_ns for span in acted)) / 1e9, 6)


def _find_models(found: Outline) -> set[str]:
    attributes = [node.span.attributes for node in found.nodes if node.kind == "call"]
    names = [each.get(c.RESPONSE_MODEL) or each.get(c.REQUEST_MODEL) for each in attributes]
    return {name for name in names if isinstance(name, str)}


def _read_rewards(found: Outline) -> dict[str, float]:
    """The last value of each reward, by name."""
    read = [read_reward(node.span) for node in found.nodes]
    return {k: v for each in read if isinstance(each, Reward) for k, v in each.values.items()}


def _compare_lines(a: Sequence[str], b: Sequence[str]) -> Iterator[Said]:
    for kind, a0, a1, b0, b1 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind == "equal":
            yield from (Said(" ", text) for text in a[a0:a1])
            continue
        yield from (Said("-", text) for text in a[a0:a1])
        yield from (Said("+", text) for text in b[b0:b1])


def _one_line_of(value: object) -> str:
    return " ".join(str("" if value is None else value).split())
