"""OpenLLMetry: ``traceloop.*`` around calls that are told in ``gen_ai.*``, today's or the old form.

Source: ``opentelemetry-semantic-conventions-ai`` 0.5; ``traceloop-sdk`` 0.62.
"""

from collections.abc import Mapping
from typing import Any, Final

from lightning_otel import conventions as c
from lightning_otel.adapter.attributes import text
from lightning_otel.adapter.readers import chat
from lightning_otel.types import Span

_KIND: Final = "traceloop.span.kind"
_ENTITY: Final = "traceloop.entity.name"
_INPUT: Final = "traceloop.entity.input"
_OUTPUT: Final = "traceloop.entity.output"

MARKS = (_KIND,)


def summary(name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the operation and the names of agents and tools."""
    operation, key = chat.KINDS.get(text(attributes, _KIND) or "", (None, ""))
    if operation is None:
        return {}
    entity = attributes.get(_ENTITY)
    named = {key: entity} if isinstance(entity, str) and entity else {}
    return {c.OPERATION: operation, **named}


def content(span: Span) -> dict[str, Any]:
    """A tool's arguments and result."""
    get = span.attributes.get
    if get(_KIND) != "tool":
        return {}
    return chat.called(get(_INPUT), get(_OUTPUT))
