"""Feedback on its way to what it judges: found in the store, and given there once."""

import hashlib
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, get_args

from opentelemetry.util.types import AttributeValue

from lightning_otel import conventions as c
from lightning_otel.dataset import Store
from lightning_otel.emitters import reward_span
from lightning_otel.rewarding.writing import add_surely, derived_id, identified
from lightning_otel.store.schema import NARROW_COLUMNS
from lightning_otel.store.source import INDEX_COLUMNS
from lightning_otel.store.sql import ROLLOUT, attribute, quoted
from lightning_otel.types import Span

if TYPE_CHECKING:
    import duckdb

Noun: TypeAlias = Literal["response", "rollout", "trace", "span", "conversation"]
"""What feedback may judge."""
NOUNS: Final[tuple[Noun, ...]] = get_args(Noun)
NAME: Final = "feedback"
"""What the reward is called."""

_CALLS: Final = ", ".join(quoted(name) for name in sorted(c.CALL_OPERATIONS))
_IS_CALL: Final = f"(operation IN ({_CALLS}) OR name = {quoted(c.SPAN_ACTION)})"
_COLUMNS: Final[Mapping[Noun, str]] = {
    "response": "response_id",
    "rollout": ROLLOUT,
    "trace": "trace_id",
    "span": "span_id",
    "conversation": attribute(c.CONVERSATION_ID),
}
# What a conversation came to when it was judged: its latest call then, else the first after that.
_FOUND: Final = f"""
SELECT n,
  coalesce(arg_max(home, start_ns) FILTER (is_before), arg_min(home, start_ns)),
  coalesce(arg_max(span_id, start_ns) FILTER (is_before), arg_min(span_id, start_ns)),
  max(end_ns)
FROM (
  SELECT asked.n, {ROLLOUT} AS home, span_id, start_ns, coalesce(end_ns, start_ns) AS end_ns,
    {{is_conversation}} AND start_ns <= asked.given_ns AS is_before
  FROM spans JOIN (
    SELECT unnest(?::INTEGER[]) AS n, unnest(?::VARCHAR[]) AS id, unnest(?::BIGINT[]) AS given_ns
  ) AS asked ON {{column}} = asked.id
  WHERE {{condition}}
) GROUP BY n"""
_HELD: Final = f"""
SELECT span_id, reward, {ROLLOUT} FROM spans
WHERE span_id IN (SELECT unnest(?::VARCHAR[])) AND reward IS NOT NULL"""

Keep: TypeAlias = Callable[[Sequence[Span]], None]


@dataclass(frozen=True, slots=True)
class Feedback:
    """One person's judgement, as a reward.

    Attributes:
        noun: What is judged.
        target: Its whole id.
        value: The reward, -1 to 1.
        given_ns: When it was said.
        attributes: What else is kept with it.
        feedback_id: What it is known by: kept once, however often it is sent. Empty if by nothing.
    """

    noun: Noun
    target: str
    value: float
    given_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    feedback_id: str = ""


class Given(NamedTuple):
    """A reward that stands in the store.

    Attributes:
        span_id: Its span.
        rollout_id: The rollout it judges.
        is_new: Whether it was not there before.
    """

    span_id: str
    rollout_id: str
    is_new: bool


class Clash(NamedTuple):
    """The id was given to other feedback before.

    Attributes:
        reason: What differs.
    """

    reason: str


class _Home(NamedTuple):
    """The target of feedback: a rollout, a span that stands for it, and its end."""

    rollout_id: str
    span_id: str
    end_ns: int


def give(
    store: Store,
    feedback: Sequence[Feedback],
    keep: Keep | None = None,
    known: Mapping[str, str] = MappingProxyType({}),
) -> list[Given | Clash | None]:
    """Give feedback to what it judges; None where the store does not hold that.

    Args:
        store: Where the targets are.
        feedback: Any number, each with an id of its own, if it has one.
        keep: Keeps spans; by default the store does.
        known: Rollouts by span, of spans that are there for certain; feedback on these alone, whose
            ids are all new, is given without a look at the store.

    Raises:
        StoreError: The store cannot be read or written; nothing, or not all of it, was given.
    """
    if not feedback:
        return []
    ids = [_span_id(each) for each in feedback]
    homes: list[_Home | None]
    if all(each.noun == "span" and each.target in known for each in feedback):
        homes = [_Home(known[each.target], each.target, 0) for each in feedback]
        held: dict[str, tuple[float, str]] = {}
    else:
        homes, held = _looked_up(store, feedback, ids)
    found: list[Given | Clash | None] = []
    spans: list[Span] = []
    for each, span_id, home in zip(feedback, ids, homes, strict=True):
        if home is None:
            found.append(None)
        elif span_id in held:
            found.append(_answer_repeat(each, span_id, home, *held[span_id]))
        else:
            spans.append(_make_span(each, span_id, home))
            found.append(Given(span_id, home.rollout_id, is_new=True))
    if spans:
        (keep or (lambda made: add_surely(store, made)))(spans)
    return found


def _looked_up(
    store: Store, feedback: Sequence[Feedback], span_ids: Sequence[str]
) -> tuple[list[_Home | None], dict[str, tuple[float, str]]]:
    """Look targets up, and the rewards that are there already."""
    is_wide = any(each.noun == "conversation" for each in feedback)
    columns = (*NARROW_COLUMNS, "attributes") if is_wide else INDEX_COLUMNS
    con = store.source.connect(("spans",), columns)
    return _find_homes(con, feedback), _read_held(con, span_ids)


def _span_id(feedback: Feedback) -> str:
    if feedback.feedback_id:
        return derived_id(f"{NAME} {feedback.feedback_id}")
    return secrets.token_hex(8)


def _answer_repeat(
    feedback: Feedback, span_id: str, home: _Home, value: float, rollout_id: str
) -> Given | Clash:
    """Answer feedback whose id is there already."""
    told = f"feedback {feedback.feedback_id!r} was kept"
    if value != feedback.value:
        return Clash(f"{told} as {value:g} and cannot become {feedback.value:g}")
    if rollout_id != home.rollout_id:
        return Clash(f"{told} of rollout {rollout_id!r} and cannot go to {home.rollout_id!r}")
    return Given(span_id, rollout_id, is_new=False)


def _make_span(feedback: Feedback, span_id: str, home: _Home) -> Span:
    linked = {"span": feedback.target, "conversation": home.span_id}.get(feedback.noun)
    made = reward_span(
        {NAME: feedback.value},
        rollout_id=home.rollout_id,
        span_id=linked,
        response_id=feedback.target if feedback.noun == "response" else None,
    )
    attributes = dict(feedback.attributes)
    if feedback.feedback_id:
        attributes[c.FEEDBACK_ID] = feedback.feedback_id
    if feedback.noun == "conversation":
        attributes[c.FEEDBACK_CONVERSATION] = feedback.target
    # It judges all that there is of it, be that from a machine whose clock is ahead of ours.
    given_ns = max(feedback.given_ns, home.end_ns)
    timed = replace(made, start_ns=given_ns, end_ns=given_ns)
    return identified(timed, span_id, attributes)


def _find_homes(
    con: "duckdb.DuckDBPyConnection", feedback: Sequence[Feedback]
) -> list[_Home | None]:
    """The rollout of what each judges, and the span that stands for a conversation."""
    found: list[_Home | None] = [None] * len(feedback)
    for noun in NOUNS:
        asked = [(n, each) for n, each in enumerate(feedback) if each.noun == noun]
        if not asked:
            continue
        is_conversation = noun == "conversation"
        query = _FOUND.format(
            is_conversation=str(is_conversation).lower(),
            column=_COLUMNS[noun],
            condition=_IS_CALL if is_conversation else "true",
        )
        ids = [each.target for _, each in asked]
        times = [each.given_ns for _, each in asked]
        numbers = [n for n, _ in asked]
        for n, rollout_id, span_id, end_ns in con.execute(query, [numbers, ids, times]).fetchall():
            found[n] = _Home(str(rollout_id), str(span_id), int(end_ns))
    return found


def _read_held(
    con: "duckdb.DuckDBPyConnection", span_ids: Collection[str]
) -> dict[str, tuple[float, str]]:
    """Return the rewards that are there already, each with its number and rollout."""
    rows: Iterable[tuple[str, float, str]] = con.execute(_HELD, [list(span_ids)]).fetchall()
    return {span_id: (float(value), str(rollout_id)) for span_id, value, rollout_id in rows}


def digest(feedback: Feedback) -> str:
    """Hash feedback without its time and origin, to tell repeats from clashes."""
    said = sorted(item for item in feedback.attributes.items() if item[0] != c.RECEIVED)
    told = repr((feedback.noun, feedback.target, feedback.value, said))
    return hashlib.sha256(told.encode("utf-8", "replace")).hexdigest()
