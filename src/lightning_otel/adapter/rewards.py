"""Spans read into rewards, and what they are linked to; what cannot be read gets a reason."""

from collections.abc import Mapping
from typing import Any

from lightning_otel import conventions as c
from lightning_otel.adapter.attributes import number, shown, text
from lightning_otel.types import Reward, Span

NOT_A_NUMBER = "the reward's value is not a number"
NOT_FINITE = "the reward's value is not finite"
NO_PRIMARY = "the reward names values, but its first and primary one is missing"
UNKNOWN_LINK = "the reward's link names neither a span id nor a response id, but {}"


def read_reward(span: Span) -> Reward | str | None:
    """The reward a span carries; None if it is no reward, a reason if it is a damaged one."""
    attributes = span.attributes
    if c.REWARD_VALUE not in attributes:
        is_damaged = span.name == c.SPAN_ANNOTATION and any(
            key.startswith(f"{c.REWARD_PREFIX}.") for key in attributes
        )
        return NO_PRIMARY if is_damaged else None
    values: dict[str, float] = {}
    key, index = c.REWARD_VALUE, 0
    while key in attributes:
        value = number(attributes[key])
        if value is None:
            is_number = type(attributes[key]) in (int, float)
            return NOT_FINITE if is_number else NOT_A_NUMBER
        name = text(attributes, f"{c.REWARD_PREFIX}.{index}.name") or (
            c.PRIMARY_REWARD if index == 0 else f"reward_{index}"
        )
        values.setdefault(name, value)
        index += 1
        key = f"{c.REWARD_PREFIX}.{index}.value"
    links = read_links(attributes)
    if links and not (links.get(c.LINK_SPAN_ID) or links.get(c.RESPONSE_ID)):
        return UNKNOWN_LINK.format(", ".join(sorted(links)))
    return Reward(
        span=span,
        values=values,
        value=next(iter(values.values())),
        span_id=links.get(c.LINK_SPAN_ID) or None,
        response_id=links.get(c.RESPONSE_ID) or None,
    )


def read_links(attributes: Mapping[str, Any]) -> dict[str, str]:
    """What a span is linked to, by the key that is matched; of one key the first value counts."""
    links: dict[str, str] = {}
    index = 0
    while (key := attributes.get(f"{c.LINK_PREFIX}.{index}.key_match")) is not None:
        value = attributes.get(f"{c.LINK_PREFIX}.{index}.value_match", "")
        links.setdefault(shown(key), shown(value))
        index += 1
    return links
