"""What the API works with beside the store: made when it is first asked for, and once."""

from functools import cached_property
from typing import TYPE_CHECKING

from lightning_otel.store import Store
from lightning_otel.store.beside import state_place

if TYPE_CHECKING:
    from lightning_otel.queue import Queue
    from lightning_otel.resources import Resources
    from lightning_otel.rewarding.pending import Pending
    from lightning_otel.runs import Runs
    from lightning_otel.runs.requests import Requests
    from lightning_otel.state import State


class Rooms:
    """The state beside a store, and what stands in it.

    Every one is for any number of threads. Two that ask first at once may each make one, which are
    as good as one. Each is imported with the first: SQLAlchemy is as large as the web framework.
    """

    def __init__(self, store: Store) -> None:
        """Name the store; nothing is opened yet."""
        self._store = store

    @property
    def is_made(self) -> bool:
        """Whether there is anything to look at; to ask opens nothing."""
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
        from lightning_otel.queue import Queue

        return Queue(self.state)

    @cached_property
    def resources(self) -> "Resources":
        """What is tuned."""
        from lightning_otel.resources import Resources

        return Resources(self.state)

    @cached_property
    def runs(self) -> "Runs":
        """Training runs."""
        from lightning_otel.runs import Runs

        return Runs(self.state)

    @cached_property
    def requests(self) -> "Requests":
        """Training that was asked for."""
        from lightning_otel.runs.requests import Requests

        return Requests(self.state)
