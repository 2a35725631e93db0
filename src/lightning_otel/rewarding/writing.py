"""Writing of rewards after the fact, under derived ids."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from lightning_otel.dataset import Store
from lightning_otel.errors import StoreError
from lightning_otel.types import Span


def add_surely(store: Store, spans: Iterable[Span]) -> None:
    """Keep spans, or say that they are not kept.

    Raises:
        StoreError: The store cannot be written.
    """
    if store.layout is None:
        store.add(spans)
        return
    try:
        store.writer().take(spans)
    except OSError as exc:
        raise StoreError(
            f"{store.name} refuses it: {exc.strerror or exc}; is it writable, and the disk "
            "not full?"
        ) from exc


def derived_id(text: str) -> str:
    """A span id made of a text: the same of the same."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def identified(span: Span, span_id: str, attributes: Mapping[str, Any]) -> Span:
    """The span with an id of one's own, and further attributes."""
    return replace(
        span,
        trace_id=span_id + hashlib.sha256(span_id.encode()).hexdigest()[:16],
        span_id=span_id,
        attributes={**span.attributes, **attributes},
    )
