"""Ids as people write them find the one thing they name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.errors import NotFoundError
from lightning_otel.types import Span


@pytest.fixture
def filled(store: Store, make_span: Callable[..., Span]) -> Store:
    """A store with two rollouts, one of them without a name."""
    store.add(
        [
            make_span(
                trace_id="a" * 32,
                span_id="b" * 16,
                attributes={c.ROLLOUT_ID: "run-1", c.RESPONSE_ID: "resp-7"},
            ),
            make_span(trace_id="c" * 32, span_id="d" * 16),
        ]
    )
    return store


def test_find_takes_a_prefix(filled: Store) -> None:
    """A rollout, trace, span or response is found by the beginning of its id."""
    wanted = {
        "run": ("rollout", "run-1"),
        "run-1": ("rollout", "run-1"),
        "aa": ("trace", "a" * 32),
        "bbb": ("span", "b" * 16),
        "resp": ("response", "resp-7"),
        "cc": ("rollout", "c" * 32),
        "d": ("span", "d" * 16),
        "@last": ("rollout", "c" * 32),
    }

    assert {prefix: filled.find(prefix) for prefix in wanted} == wanted


def test_find_says_why_nothing_is_found(
    filled: Store, make_span: Callable[..., Span], tmp_path: Path
) -> None:
    """A prefix is taken by the letter; of several candidates a few are listed, in order."""
    filled.add(make_span(attributes={c.ROLLOUT_ID: f"job-{number}"}) for number in range(20, 40))
    filled.add([make_span(attributes={c.ROLLOUT_ID: "job-2"})])
    empty = Store(tmp_path / "empty.duckdb")
    empty.writer()

    assert filled.find("job-2") == ("rollout", "job-2")
    for prefix in ("x", "RUN", "' OR 1=1 --", "%", "run-1x"):
        with pytest.raises(NotFoundError, match="no rollout, trace, span or response id begins"):
            filled.find(prefix)
    with pytest.raises(NotFoundError, match=r"several rollout ids: job-2, job-20, .*more"):
        filled.find("job")
    with pytest.raises(NotFoundError, match="no span yet"):
        empty.find("@last")
