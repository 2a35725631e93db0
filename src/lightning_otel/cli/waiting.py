"""Feedback that came before what it judges: given before a command takes rewards anywhere."""

from typing import TYPE_CHECKING

from lightning_otel.cli.output import talk
from lightning_otel.errors import ConfigError, StateError

if TYPE_CHECKING:
    from lightning_otel.dataset import Store


def give_waiting(opened: "Store") -> None:
    """Give what waits to what is there by now, as a server does all the time.

    Where the state cannot be read that is said, and the command goes on: spans are no part of it.

    Args:
        opened: The store.

    Raises:
        StoreError: It cannot be read or written.
    """
    try:
        # Without SQLAlchemy there is no state, and nothing can wait in it.
        from lightning_otel.rewarding.pending import settle_waiting
    except ConfigError:
        return
    try:
        done = settle_waiting(opened)
    except StateError as exc:
        talk(f"feedback that waits was not given: {exc}")
        return
    if done.given:
        talk(f"{done.given} × feedback given that had waited for what it judges")
