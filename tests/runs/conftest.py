"""Runs lie where the queue does: in SQLite, and in PostgreSQL where it is installed."""

from tests.queue.conftest import cluster, place

__all__ = ["cluster", "place"]
