"""Diagnosis: whatever keeps spans from being captured or read here, and how to mend it."""

from lightning_otel.dataset import Store
from lightning_otel.doctor.environment import environment
from lightning_otel.doctor.finding import Code, Finding
from lightning_otel.doctor.storage import feedback, storage

__all__ = ["Code", "Finding", "examine"]


def examine(store: Store) -> list[Finding]:
    """Return every finding, in the order a person would check."""
    kept = storage(store.layout, store) if store.layout is not None else ()
    return [*environment(), *kept, *feedback(store)]
