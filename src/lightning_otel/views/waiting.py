"""States that wait: for what feedback judges, for a worker, for rollouts with a canary."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from lightning_otel.dataset import Store
from lightning_otel.errors import NotInstalledError
from lightning_otel.store.layout import find_state

if TYPE_CHECKING:
    from lightning_otel.rewards.pending import Pending

_LONG_S: Final = 3600.0
_FEW: Final = 3


class Wait(NamedTuple):
    """A state that waits, and what to do."""

    code: Literal["feedback-waits", "training-waits", "canary-waits"]
    text: str
    remedy: str


def find_waits(store: Store) -> Iterator[Wait]:
    """Yield what waits; of training and canaries only what waits in vain.

    Raises:
        LightningOtelError: The state or the store cannot be read.
    """
    if find_state(store) is None:
        return  # nor is SQLAlchemy needed, which is as large as the web framework
    try:
        from lightning_otel.resources import Resources
        from lightning_otel.resources.waiting import explain_waiting
        from lightning_otel.rewards.pending import Pending
        from lightning_otel.state import State
        from lightning_otel.state.requests import Requests
    except NotInstalledError:
        return
    state = State.beside(store)
    yield from _find_feedback(Pending(state))
    for request in Requests(state).all():
        if request.status == "waiting" and request.reason:
            text, _, remedy = request.reason.partition("; ")
            yield Wait("training-waits", f"{request.request_id} waits: {text}", remedy)
    resources = Resources(state)
    for name in resources.names():
        if reason := explain_waiting(resources, name, store):
            text, _, remedy = reason.partition("; ")
            yield Wait("canary-waits", f"the canary of {name} waits in vain: {text}", remedy)


def _find_feedback(pending: "Pending") -> Iterator[Wait]:
    counts = pending.waiting()
    if counts.oldest_ns is None:
        return
    few = [f"{feedback.noun} {feedback.target}" for feedback in pending.all(_FEW)]
    age_s = (time.time_ns() - counts.oldest_ns) / 1e9
    is_one = counts.count == 1
    counted = "1 piece of feedback waits" if is_one else f"{counts.count} pieces of feedback wait"
    more = ", …" if counts.count > len(few) else ""
    yield Wait(
        "feedback-waits",
        f"{counted} for what it judges, the oldest for {age_s:.0f} s: {', '.join(few)}{more}",
        "is it this store that the agent records into?" if age_s > _LONG_S else "",
    )
