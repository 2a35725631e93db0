"""Answers while another process writes: each is of one moment, and agrees with itself."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from tests.viewer.client import Ask

from lightning_otel import Store
from lightning_otel.views.nouns import ATTEMPTS
from lightning_otel.views.summary import store_stats
from lightning_otel.views.table import View
from lightning_otel.views.traces import TRACES

_WRITER = """
    import sys, time
    from lightning_otel import Store
    from lightning_otel.types import Span, conventions as c

    store, start_ns = Store(sys.argv[1]), time.time_ns()
    for n in range(1, 20_000):
        text = "x" * ((1 << 20) if n < 40 else 2_000)
        said = '[{"role":"%s","parts":[{"type":"text","content":"%s"}]}]'
        call = {
            c.OPERATION: c.CHAT, c.RESPONSE_ID: f"a{n}", c.INPUT_MESSAGES: said % ("user", text),
            c.OUTPUT_MESSAGES: said % ("assistant", "yes"),
        }
        kinds = {c.SPAN_ROLLOUT: {}, "chat": call, c.SPAN_ANNOTATION: {c.REWARD_VALUE: 1.0}}
        for place, (name, attributes) in enumerate(kinds.items(), 1):
            own = {c.ROLLOUT_ID: f"r{n}", c.ATTEMPT_ID: "1", **attributes}
            parent = f"{n:08x}00000001" if place > 1 else None
            at_ns = start_ns + n * 1_000 + place
            span = Span(f"{n:032x}", f"{n:08x}{place:08x}", parent, name, at_ns, at_ns + 9,
                        attributes=own, scope=c.SCOPE)
            store.add([span])
        if n == 40:
            print("large", flush=True)
        time.sleep(0.002 if n > 40 else 0)
"""


@pytest.fixture
def growing(store: Store) -> Iterator[Store]:
    """A store with a live segment of more than 32 MiB, to which a process goes on writing."""
    command = [sys.executable, "-c", textwrap.dedent(_WRITER), store.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"large\n"
        yield store
        assert writer.poll() is None, "it ended too soon to tell anything"
        writer.kill()


@pytest.mark.timeout(180)
def test_every_page_stands_while_a_segment_grows(ask: Ask, growing: Store) -> None:
    """Two looks at it in one answer would see different spans."""
    paths = ["/", "/traces", "/rollouts", "/transitions", "/rollouts/r41"]
    paths += [f"/traces/{41:032x}", "/home/funnel", "/home/tiles", "/traces?q=xxx"]
    for path in paths:
        assert ask(growing, path).status == 200, path


@pytest.mark.parametrize("view", [TRACES, ATTEMPTS], ids=lambda view: view.columns[0])
def test_a_list_has_as_many_rows_as_it_says(growing: Store, view: View) -> None:
    """And each with its details, whatever came since it was begun."""
    for _ in range(2):
        rows, total, _ = view.read(growing)
        assert len(rows) == total > 40


def test_counts_beside_each_other_agree(growing: Store) -> None:
    """The funnel, the accounts and the views of one answer count the same spans."""
    both = "SELECT count(*) AS n, (SELECT sum(spans) FROM rollouts) AS of_rollouts FROM spans"
    last = 0
    for _ in range(2):
        (row,) = growing.sql(both)
        assert row["n"] == row["of_rollouts"] > last, "it grows"
        last = row["n"]
        told = store_stats(growing)
        assert told["funnel"]["spans"] == told["accounting"]["ended"]
        assert told["accounting"]["missing"] == 0
