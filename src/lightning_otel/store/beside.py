"""The place of the small state beside a store, found without opening it.

SQLAlchemy, which opens it, takes 13 MB: who has recorded spans and nothing else does without.
"""

from typing import TYPE_CHECKING

from lightning_otel import config
from lightning_otel.store.layout import Layout

if TYPE_CHECKING:
    from lightning_otel.store import SpanStore


def state_place(store: "SpanStore") -> str | None:
    """Return the place of a store's state, as ``State`` takes it; None if there is none.

    A shared one is taken to be there.
    """
    named = config.named_state()
    if named is not None and "://" in named:
        return named
    layout = store.local.layout if named is None else Layout(named)
    if layout is None or not layout.has_state():
        return None
    return str(layout.catalogue)
