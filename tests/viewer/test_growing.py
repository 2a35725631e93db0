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
from lightning_otel.views.traces import TRACES

_WRITER = """
    import sys, time
    from lightning_otel import Store
    from lightning_otel.types import Span, conventions as c

    store, said = Store(sys.argv[1]), '[{"role":"%s","parts":[{"type":"text","content":"%s"}]}]'
    for n in range(1, 20_000):
        asked = said % ("user", "x" * ((1 << 20) if n < 36 else 2_000))
        call = {c.OPERATION: c.CHAT, c.INPUT_MESSAGES: asked, c.RESPONSE_ID: f"a{n}",
                c.OUTPUT_MESSAGES: said % ("assistant", "yes")}
        kinds = {c.SPAN_ROLLOUT: {}, "chat": call, c.SPAN_ANNOTATION: {c.REWARD_VALUE: 1.0}}
        for place, (name, attributes) in enumerate(kinds.items(), 1):
            own = {c.ROLLOUT_ID: f"r{n}", c.ATTEMPT_ID: "1", **attributes}
            parent, at_ns = f"{n:08x}00000001" if place > 1 else None, time.time_ns()
            store.add([Span(f"{n:032x}", f"{n:08x}{place:08x}", parent, name, at_ns, at_ns + 9,
                            attributes=own, scope=c.SCOPE)])
        if n == 40:
            print("large", flush=True)
        time.sleep(0.02 if n > 40 else 0)
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
    assert {path: ask(growing, path).status for path in paths} == dict.fromkeys(paths, 200)


@pytest.mark.timeout(180)
def test_lists_and_counts_agree_with_themselves_while_a_segment_grows(growing: Store) -> None:
    """As many rows as a list says, and each noun counted alike by all that count it."""
    both = "SELECT count(*) AS n, (SELECT sum(spans) FROM rollouts) AS of_rollouts FROM spans"
    for view in (TRACES, ATTEMPTS):
        (row,) = growing.sql(both)
        assert row["n"] == row["of_rollouts"]
        rows, total, _ = view.read(growing)
        assert len(rows) == total >= 40
        told = store_stats(growing)
        assert told["funnel"]["spans"] == told["accounting"]["ended"] > row["n"], "it grows"
        assert told["accounting"]["missing"] == 0
