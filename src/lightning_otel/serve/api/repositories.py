"""Queue, resources and runs of the served store, each opened once, when first needed."""

import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.dataset import Store
from lightning_otel.serve.api.cache import Mark, read_fingerprint
from lightning_otel.store.layout import find_state

if TYPE_CHECKING:
    from lightning_otel.rewards.feedback import Keep

_KINDS: Final = {
    "pending": ("lightning_otel.rewards.pending", "Pending"),
    "queue": ("lightning_otel.state.queue", "Queue"),
    "resources": ("lightning_otel.resources", "Resources"),
    "runs": ("lightning_otel.state.runs", "Runs"),
    "requests": ("lightning_otel.state.requests", "Requests"),
}


class Repositories:
    """The state beside a store, and what stands in it, for any number of threads.

    Each is imported with the first: SQLAlchemy is as large as the web framework.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mark: Mark | None = None
        # Guards that whoever finds the mark as it is finds given what could be given by then.
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        """Open ``state``, ``pending``, ``queue``, ``resources``, ``runs`` or ``requests``."""
        if name == "state":
            from lightning_otel.state import State

            repository: object = State.beside(self._store)
        elif name in _KINDS:
            module, kind = _KINDS[name]
            repository = getattr(import_module(module), kind)(self.state)
        else:
            raise AttributeError(name)
        setattr(self, name, repository)
        return repository

    def deliver_feedback(self, keep: "Keep") -> None:
        """Give feedback that waits to what it judges, unless nothing was written since the last."""
        layout = self._store.layout
        if layout is None or not self.is_made or not self.pending.waiting().count:
            return
        with self._lock:
            # Taken before it is looked for: what comes meanwhile is looked at the next time.
            fingerprint = read_fingerprint(layout)
            if fingerprint != self._mark:
                self.pending.settle(self._store, keep)
                self._mark = fingerprint

    @property
    def is_made(self) -> bool:
        """True if there is state to read; opens nothing."""
        return find_state(self._store) is not None
