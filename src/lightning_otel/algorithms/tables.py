"""Rows of a format as a dataset of Hugging Face's, nested values as they are."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lightning_otel import formats
from lightning_otel.algorithms import models
from lightning_otel.types import Trajectory

_KINDS: Mapping[str, str] = {"VARCHAR": "string", "BOOLEAN": "bool", "DOUBLE": "float64"}


class Made(NamedTuple):
    """Rows of a format, and how many steps are in none, by reason."""

    rows: list[dict[str, Any]]
    left: Counter[str]


def made(name: str, trajectories: Iterable[Trajectory], **options: Any) -> Made:
    """The rows of a format.

    Args:
        name: The format's.
        trajectories: What they are made of.
        **options: The format's.
    """
    left: Counter[str] = Counter()

    def note(each: formats.LeftOut) -> None:
        if not each.is_row_written:
            left[each.reason] += 1

    rows = list(formats.rows(name, trajectories, left_out=note, **options))
    return Made(rows, left)


def dataset(name: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Any:
    """A dataset of some columns of a format's rows; one that no row has a value in is left out.

    Nested values are JSON there: as tables, missing keys would be filled up with nulls, and shown
    to the model.

    Args:
        name: The format's.
        rows: Its rows.
        columns: Which columns.
    """
    datasets = models.library("datasets")
    kinds = formats.get(name).columns
    held = [each for each in columns if any(row.get(each) is not None for row in rows)]
    features = {each: _make_feature(datasets, kinds[each]) for each in held}
    values = {each: [row.get(each) for row in rows] for each in held}
    return datasets.Dataset.from_dict(values, features=datasets.Features(features))


def _make_feature(datasets: Any, kind: str) -> Any:
    if kind == "JSON":
        return datasets.Json()
    if kind.endswith("[]"):
        return datasets.List(datasets.Value("int64"))
    return datasets.Value(_KINDS[kind])
