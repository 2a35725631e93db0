"""Feedback that waits for what it judges: how much, for how long, and for what."""

import time
from collections.abc import Iterator

from lightning_otel.doctor.finding import Finding
from lightning_otel.errors import LightningOtelError, NotInstalledError
from lightning_otel.store import Store

_LONG_S = 3600.0
_FEW = 3


def feedback(store: Store) -> Iterator[Finding]:
    """What is known of it; nothing where none ever came."""
    try:
        from lightning_otel.rewarding.pending import Pending
        from lightning_otel.state import State
    except NotInstalledError:  # without SQLAlchemy there is no state to look into
        return
    try:
        state = State.beside(store)
        if not state.is_made:
            return
        pending = Pending(state)
        waiting = pending.waiting()
        if waiting.oldest_ns is None:
            return
        few = [f"{each.noun} {each.target}" for each in pending.all(_FEW)]
    except LightningOtelError as exc:
        yield Finding("state-unreadable", "problem", exc.what, exc.remedy)
        return
    age_s = (time.time_ns() - waiting.oldest_ns) / 1e9
    counted = f"{waiting.count} pieces of feedback wait" if waiting.count > 1 else (
        "1 piece of feedback waits"
    )  # fmt: skip
    more = ", …" if waiting.count > len(few) else ""
    yield Finding(
        "feedback-waits",
        "note",
        f"{counted} for what it judges, the oldest for {age_s:.0f} s: {', '.join(few)}{more}",
        "is it this store that the agent records into?" if age_s > _LONG_S else "",
    )
