"""``triplets``: transitions as they are, one a row; nothing is lost, and they can be read again."""

from collections.abc import Iterable
from typing import Final

from lightning_otel.formats.format import Format, Made, distinct
from lightning_otel.formats.transition_rows import COLUMNS, row
from lightning_otel.types import Trajectory


def make(trajectories: Iterable[Trajectory]) -> Made:
    """One row a transition; one that several branches share appears once, on the first of them."""
    for step, trajectory in distinct(trajectories):
        yield row(step, trajectory.branch)


FORMAT: Final = Format(
    make, COLUMNS, used_by="pandas, polars, DuckDB, your own code", needs="nothing"
)
