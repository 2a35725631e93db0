"""Receivers: OTLP of any form, and Agent Lightning's stores, become spans.

Pure decoding with limits, checked before anything is built: no web, no files, no clock. A span that
cannot be kept is a :class:`Rejected` with its reason and never takes its neighbours with it; only
what is no batch at all raises.
"""

from lightning_otel.receivers.limits import DEFAULT_LIMITS, Limits
from lightning_otel.receivers.spans import Rejected

__all__ = ["DEFAULT_LIMITS", "Limits", "Rejected"]
