"""Queue, resources and runs of the served store, each opened once, when first needed."""

import threading
from functools import cached_property
from typing import TYPE_CHECKING

from lightning_otel.dataset import Store
from lightning_otel.store.layout import state_place

if TYPE_CHECKING:
    from lightning_otel.resources import Resources
    from lightning_otel.rewarding.feedback import Keep
    from lightning_otel.rewarding.pending import Pending
    from lightning_otel.serve.api.fresh import Mark
    from lightning_otel.state import State
    from lightning_otel.state.queue import Queue
    from lightning_otel.state.requests import Requests
    from lightning_otel.state.runs import Runs


class Rooms:
    """The state beside a store, and what stands in it.

    Every one is for any number of threads. Two that ask first at once may each make one, which are
    as good as one. Each is imported with the first: SQLAlchemy is as large as the web framework.
    """

    def __init__(self, store: Store) -> None:
        """Name the store; nothing is opened yet."""
        self._store = store
        self._mark: Mark | None = None
        # Guards that whoever finds the mark as it is finds given what could be given by then.
        self._lock = threading.Lock()

    def give_waiting(self, keep: "Keep") -> None:
        """Give feedback that waits to what it judges, unless nothing was written since the last.

        Args:
            keep: Keeps the rewards.

        Raises:
            StateError: The state cannot be read or changed.
            StoreError: The store cannot be read or written.
        """
        from lightning_otel.serve.api.fresh import mark_of

        layout = self._store.layout
        if layout is None or not self.is_made or not self.pending.waiting().count:
            return
        with self._lock:
            # Taken before it is looked for: what comes meanwhile is looked at the next time.
            found = mark_of(layout)
            if found != self._mark:
                self.pending.settle(self._store, keep)
                self._mark = found

    @property
    def is_made(self) -> bool:
        """True if there is state to read; opens nothing."""
        return state_place(self._store) is not None

    @cached_property
    def state(self) -> "State":
        """The state."""
        from lightning_otel.state import State

        return State.beside(self._store)

    @cached_property
    def pending(self) -> "Pending":
        """Feedback that waits."""
        from lightning_otel.rewarding.pending import Pending

        return Pending(self.state)

    @cached_property
    def queue(self) -> "Queue":
        """Rollouts to be run."""
        from lightning_otel.state.queue import Queue

        return Queue(self.state)

    @cached_property
    def resources(self) -> "Resources":
        """The versioned resources."""
        from lightning_otel.resources import Resources

        return Resources(self.state)

    @cached_property
    def runs(self) -> "Runs":
        """Training runs."""
        from lightning_otel.state.runs import Runs

        return Runs(self.state)

    @cached_property
    def requests(self) -> "Requests":
        """Training that was asked for."""
        from lightning_otel.state.requests import Requests

        return Requests(self.state)
