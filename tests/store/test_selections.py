"""Selections come over a wire as they were, and nothing else does."""

from dataclasses import fields

import pytest

from lightning_otel.errors import QueryError
from lightning_otel.store.engines.selections import MAX_IDS, selection_of, text_of_selection
from lightning_otel.store.source import INDEX_COLUMNS, Selection


@pytest.mark.parametrize(
    "selection",
    [
        Selection(),
        Selection(rollout_ids=("a", "ü'"), trace_ids=("b",)),
        Selection(since_ns=0, until_ns=2**62, is_ordered=True),
        Selection(only=(("t", "s"), ("t", "u")), without=(("x", "y"),)),
        Selection(columns=INDEX_COLUMNS),
    ],
)
def test_a_selection_comes_as_it_was(selection: Selection) -> None:
    """Whatever it names."""
    assert selection_of(text_of_selection(selection).encode()) == selection


def test_every_field_comes_over_the_wire() -> None:
    """One that is added to selections, and not here, would be dropped without a word."""
    every = Selection(
        rollout_ids=("a",),
        trace_ids=("b",),
        since_ns=1,
        until_ns=2,
        only=(("t", "s"),),
        without=(("t", "u"),),
        is_ordered=True,
        columns=("name",),
    )

    assert all(
        getattr(every, each.name) != each.default for each in fields(every) if each.name != "also"
    )
    assert selection_of(text_of_selection(every).encode()) == every


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"no JSON",
        b"[]",
        b"null",
        b'{"also": {}}',
        b'{"rollout": ["a"]}',
        b'{"rollout_ids": "a"}',
        b'{"rollout_ids": [1]}',
        b'{"trace_ids": [null]}',
        b'{"columns": []}',
        b'{"columns": ["name; DROP TABLE spans"]}',
        b'{"columns": "name"}',
        b'{"since_ns": "now"}',
        b'{"since_ns": 1.5}',
        b'{"since_ns": true}',
        b'{"until_ns": 18446744073709551615}',
        b'{"only": ["ab"]}',
        b'{"only": [["a"]]}',
        b'{"only": [["a", 1]]}',
        b'{"without": {"a": "b"}}',
        b'{"is_ordered": 1}',
        b'{"rollout_ids": ["' + b"x" * 2000 + b'"]}',
        b'{"trace_ids": [' + b'"",' * MAX_IDS + b'""]}',
        b"[" * 5000,
    ],
)
def test_what_is_no_selection_is_refused(text: bytes) -> None:
    """With what is wrong with it."""
    with pytest.raises(QueryError):
        selection_of(text)
