"""Working beside Agent Lightning 0.3: its store takes our spans and rewards, and gives us its own.

Nothing in here imports ``agentlightning``, which lives in an environment of its own: its running
store is spoken to over HTTP.
"""

from lightning_otel.microsoft.handing import Handed, hand_over
from lightning_otel.microsoft.reading import ReadBack, read_back

__all__ = ["Handed", "ReadBack", "hand_over", "read_back"]
