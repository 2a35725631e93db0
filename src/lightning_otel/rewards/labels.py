"""Labels: feedback of a named person under a name of their choice, one of each that counts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.errors import ConfigError
from lightning_otel.store.source import read_overview
from lightning_otel.tracing.emitters import retraction_span
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import check_types

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

KIND: Final = "HUMAN"
"""The kind of a label's author."""
_LONGEST: Final = 100
_LABELS: Final = """
SELECT rollout_id, span_id, name, value, author, link_value, start_ns FROM rewards
WHERE author IS NOT NULL AND rollout_id IN (SELECT unnest(?)) ORDER BY start_ns"""


def _check_word(what: str, text: str) -> str:
    word = text.strip()
    if not word or len(word) > _LONGEST or "," in word or not word.isprintable():
        raise ConfigError(
            f"{what} is {text[:40]!r}; write 1 to {_LONGEST} characters without a comma"
        )
    return word


def describe_author(name: str | None = None, author: str | None = None) -> dict[str, str]:
    """Return the attributes of a reward that say its name and who gave it."""
    check_types({"name": name, "author": author}, describe_author.__annotations__)
    attributes = {}
    if name is not None:
        attributes[c.REWARD_NAME] = _check_word("name", name)
        if attributes[c.REWARD_NAME] == c.PRIMARY_REWARD:
            raise ConfigError("primary is the program's own reward; give the score another name")
    if author is not None:
        attributes[c.REWARD_AUTHOR] = _check_word("author", author)
        attributes[c.REWARD_AUTHOR_KIND] = KIND
    return attributes


def retract_earlier(store: "Store", spans: Sequence[Span]) -> list[Span]:
    """Return retractions of labels that later ones replace."""
    own: dict[tuple[object, ...], Span] = {}
    retractions = []
    for span in (span for span in spans if c.REWARD_AUTHOR in span.attributes):
        if earlier := own.get(_identify(span)):
            retractions.append(_retract(earlier.span_id, span))
        own[_identify(span)] = span
    if not own:
        return []
    return retractions + [
        _retract(row["span_id"], later)
        for row in list_labels(store, list({span.rollout_id for span in own.values()}))
        if (later := own.get((row["rollout_id"], row["name"], row["author"], row["link_value"])))
    ]


def _retract(span_id: str, later: Span) -> Span:
    return retraction_span(span_id, later.rollout_id, later.attributes.get(c.RECEIVED))


def _identify(span: Span) -> tuple[object, ...]:
    keys = (c.REWARD_NAME, c.REWARD_AUTHOR, c.LINK_VALUE)
    return span.rollout_id, *(span.attributes.get(key) for key in keys)


def list_labels(store: "Store", rollout_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return the labels of some rollouts that count: whose, when, name and value."""
    return read_overview(store.source, _LABELS, [list(rollout_ids)])
