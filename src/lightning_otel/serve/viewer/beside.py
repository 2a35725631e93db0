"""The state beside the store that is looked at; to look never makes one."""

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from lightning_otel.dataset import Store
from lightning_otel.errors import StoreMissingError
from lightning_otel.store.layout import state_place

if TYPE_CHECKING:
    from lightning_otel.state import State

_STATES: "WeakKeyDictionary[Store, State]" = WeakKeyDictionary()


def state_of(store: Store) -> "State | None":
    """The state of a store; None if there is nothing in it yet.

    Raises:
        ConfigError: SQLAlchemy is not installed.
    """
    if state_place(store) is None:
        return None
    from lightning_otel.state import State

    found = _STATES.get(store)
    if found is None:
        # Two threads may both make one; either will do.
        found = _STATES[store] = State.beside(store)
    return found


def required(store: Store, what: str) -> "State":
    """The same, where it must be there.

    Args:
        store: The store.
        what: What is looked for in it, such as ``rollout 'r1'``.

    Raises:
        ConfigError: SQLAlchemy is not installed.
        StoreMissingError: There is nothing in it.
    """
    found = state_of(store)
    if found is None:
        raise StoreMissingError(f"there is no {what}; nothing was queued, published or trained yet")
    return found
