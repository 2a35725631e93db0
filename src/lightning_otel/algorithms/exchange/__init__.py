"""Working beside Agent Lightning 0.3: its store takes our spans and rewards, and gives us its own.

Its running store is spoken to over HTTP, and may live in an environment of its own. Where the
package is wanted here, ``choose_backend`` says if it can be; ``algorithms/microsoft.py`` runs it.
"""

from lightning_otel.algorithms.exchange.backend import Backend, ChosenBackend, choose_backend
from lightning_otel.algorithms.exchange.exchange import (
    HandOverCounts,
    ReadBackCounts,
    hand_over,
    read_back,
)

__all__ = [
    "Backend",
    "ChosenBackend",
    "HandOverCounts",
    "ReadBackCounts",
    "choose_backend",
    "hand_over",
    "read_back",
]
