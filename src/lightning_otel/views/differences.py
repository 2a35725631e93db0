"""Two rollouts or traces beside each other: their figures, and where they said other things."""

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from lightning_otel.adapter.attributes import get_text, to_number
from lightning_otel.adapter.rewards import read_reward
from lightning_otel.store.prices import read_prices
from lightning_otel.store.source import at_moment
from lightning_otel.types import Reward
from lightning_otel.types import conventions as c
from lightning_otel.views.analysis import sum_calls
from lightning_otel.views.messages import first_answer, new_input, word_messages
from lightning_otel.views.stored_trace import load_spans, read_trace
from lightning_otel.views.trace import Trace

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

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
        is_known = None not in (to_number(self.a), to_number(self.b))
        return self.b - self.a if is_known else None


class DiffLine(NamedTuple):
    """A line of what was said, and on which side."""

    sign: Sign
    text: str


class Difference(NamedTuple):
    """The differences of two rollouts or traces.

    Attributes:
        figures: Counts, tokens, times, rewards.
        said: Both conversations as one.
        left_a: Lines of the first side that were not laid beside the others.
        left_b: And of the second.
    """

    figures: list[Figure]
    said: list[DiffLine]
    left_a: int
    left_b: int


def compare_ids(
    store: "Store", a: str, b: str, most_lines: int | None = MOST_LINES
) -> tuple[tuple[str, str], tuple[str, str], Difference]:
    """Return what two ids name, each its noun and whole id, and how these differ."""
    store = at_moment(store)
    one, other = store.find(a), store.find(b)
    first, second = (_read_whole(store, *side) for side in (one, other))
    return one, other, compare_traces(first, second, most_lines)


def _read_whole(store: "Store", noun: str, whole_id: str) -> Trace:
    trace = read_trace(store, noun, whole_id)
    load_spans(store, trace.rows)
    return trace


def compare_traces(a: Trace, b: Trace, most_lines: int | None = MOST_LINES) -> Difference:
    """Compare two traces whose spans are whole: so many lines of each side, or all."""
    one, other = _read_figures(a), _read_figures(b)
    figures = [
        Figure(name, one.get(name), other.get(name)) for name in dict.fromkeys([*one, *other])
    ]
    first_lines, right = list(_read_lines(a)), list(_read_lines(b))
    first, second = first_lines[:most_lines], right[:most_lines]
    conversation: list[DiffLine] = []
    for kind, a0, a1, b0, b1 in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if kind == "equal":
            conversation += (DiffLine(" ", text) for text in first[a0:a1])
        else:
            conversation += (DiffLine("-", text) for text in first[a0:a1])
            conversation += (DiffLine("+", text) for text in second[b0:b1])
    return Difference(
        figures, conversation, len(first_lines) - len(first), len(right) - len(second)
    )


def _read_lines(trace: Trace) -> Iterator[str]:
    for row in trace.rows:
        get = row.span.attributes.get
        if row.kind == "call":
            for message in new_input(row.span):
                yield f"{message.get('role')}: {word_messages([message])}"
            for message in first_answer(row.span):
                yield f"{row.agent or 'assistant'}: {word_messages([message])}"
        elif row.kind == "tool":
            name = get(c.TOOL_NAME) or row.span.name
            arguments, result = map(_one_line_of, (get(c.TOOL_ARGUMENTS), get(c.TOOL_RESULT)))
            yield f"{name}: {arguments} → {result}"
        if row.is_fault:
            yield f"error in {row.span.name}: {_one_line_of(row.span.status_message)}"


def _read_figures(trace: Trace) -> dict[str, Any]:
    totals = sum_calls(trace, read_prices())
    is_counted = totals.uncounted < totals.calls
    has_ended = any(row.span.end_ns is not None for row in trace.rows if row.kind != "reward")
    agents = {row.agent for row in trace.rows if row.agent}
    calls = (row.span.attributes for row in trace.rows if row.is_call)
    models = {get_text(call, c.RESPONSE_MODEL) or get_text(call, c.REQUEST_MODEL) for call in calls}
    rewards = [read_reward(row.span) for row in trace.rows]
    return {
        "spans": len(trace.rows),
        "calls": totals.calls,
        "tool calls": sum(row.kind == "tool" for row in trace.rows),
        "errors": sum(row.is_fault for row in trace.rows),
        "transitions": trace.report.transitions,
        "exact": trace.report.exact,
        "tokens in": totals.input_tokens if is_counted else None,
        "tokens out": totals.output_tokens if is_counted else None,
        "cost in dollars": totals.cost,
        "seconds": round(totals.duration_s, 6) if has_ended else None,
        "agents": ", ".join(sorted(agents)) or None,
        "models": ", ".join(sorted(filter(None, models))) or None,
        **{
            f"reward {name}": value
            for reward in rewards
            if isinstance(reward, Reward)
            for name, value in reward.values.items()
        },
    }


def _one_line_of(value: object) -> str:
    return " ".join(str("" if value is None else value).split())
