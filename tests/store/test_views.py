"""The views show every span once, to any number of readers, while others write and settle."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.store.layout import Layout
from lightning_otel.types import Span


@given(texts=st.lists(st.text(), min_size=1, max_size=30))
@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_spans_keep_any_text(
    tmp_path_factory: pytest.TempPathFactory, make_span: Callable[..., Span], texts: list[str]
) -> None:
    """Text of every kind comes through segment, view and Parquet unharmed."""
    store = Store(tmp_path_factory.mktemp('it\'s a "folder" ✓'))
    spans = [make_span(name=text, attributes={text: text, c.AGENT_NAME: text}) for text in texts]
    store.add(spans)
    live = store.spans().rows()
    store.writer().seal()
    store.settle()

    assert live == spans
    assert store.spans().rows() == spans
    agents = store.sql("SELECT agent FROM spans ORDER BY start_ns").rows()
    assert [row["agent"] for row in agents] == texts


def test_calls_and_rewards_are_spans_of_their_kind(
    store: Store, make_span: Callable[..., Span]
) -> None:
    """The views pick out requests to models and rewards, with the rollout they belong to."""
    call = make_span(
        attributes={
            c.OPERATION: "chat",
            c.PROVIDER: "openai",
            c.RESPONSE_MODEL: "m",
            c.INPUT_TOKENS: 3,
            c.FINISH_REASONS: ["stop"],
            c.INPUT_MESSAGES: "[]",
            c.ROLLOUT_ID: "r1",
        },
        end_ns=2_000_000,
        start_ns=1_000_000,
    )
    reward = make_span(
        attributes={c.REWARD_VALUE: 0.5, c.REWARD_NAME: "primary", c.ROLLOUT_ID: "r1"},
        start_ns=3_000_000,
        end_ns=3_000_000,
    )
    store.add([call, reward, make_span()])

    (found,) = store.sql("SELECT * FROM calls").rows()
    (given,) = store.sql("SELECT * FROM rewards").rows()

    assert (found["span_id"], found["rollout_id"], found["model"]) == (call.span_id, "r1", "m")
    assert (found["duration_ms"], found["input_tokens"]) == (1.0, 3)
    assert (found["finish_reasons"], found["input_messages"]) == ('["stop"]', "[]")
    assert (given["span_id"], given["rollout_id"]) == (reward.span_id, "r1")
    assert (given["value"], given["name"]) == (0.5, "primary")


CALL: Mapping[str, Any] = {c.OPERATION: "chat", c.ROLLOUT_ID: "r1", c.INPUT_TOKENS: 3}
OTHER = "opentelemetry.instrumentation.langchain"


@pytest.mark.parametrize(
    ("ours", "theirs", "calls"),
    [
        ({c.RESPONSE_ID: "a"}, {c.RESPONSE_ID: "a"}, 1),
        ({c.RESPONSE_ID: "a"}, {}, 1),
        ({}, {}, 1),
        ({c.RESPONSE_ID: "a"}, {c.RESPONSE_ID: "b"}, 2),
        ({c.REQUEST_MODEL: "m"}, {c.REQUEST_MODEL: "m-2026"}, 1),
        ({c.REQUEST_MODEL: "m"}, {c.REQUEST_MODEL: "n"}, 2),
    ],
)
def test_a_request_that_two_makes_recorded_is_one_call(
    store: Store,
    make_span: Callable[..., Span],
    ours: dict[str, Any],
    theirs: dict[str, Any],
    calls: int,
) -> None:
    """By id, else where they overlap and nothing speaks against it; the one of ours is kept."""
    kept = make_span(attributes={**CALL, **ours}, scope=c.SCOPE, start_ns=10, end_ns=20)
    other = make_span(attributes={**CALL, **theirs}, scope=OTHER, start_ns=5, end_ns=25)
    store.add([other, kept])

    found = [row["span_id"] for row in store.sql("SELECT span_id FROM calls").rows()]
    (rollout,) = store.sql("SELECT calls, input_tokens, spans FROM rollouts").rows()

    assert kept.span_id in found
    assert (len(found), rollout["calls"], rollout["input_tokens"]) == (calls, calls, 3 * calls)
    assert rollout["spans"] == 2


IN = {"trace_id": "5" * 32}
REQUESTS: tuple[tuple[str, int, list[dict[str, Any]]], ...] = (
    ("a server that repeats its ids answers one call after the other", 2, [
        {"id": "same", "start_ns": 10, "end_ns": 20},
        {"id": "same", "start_ns": 30, "end_ns": 40, "scope": OTHER},
    ]),
    ("of three at once two were told twice, one of them without its id", 3, [
        *({"id": f"id-{index}", "start_ns": 10 + index, "end_ns": 30} for index in range(3)),
        {"id": "id-0", "start_ns": 9, "end_ns": 31, "scope": OTHER},
        {"start_ns": 12, "end_ns": 31, "scope": OTHER},
    ]),
    ("without us a framework's record gives way to the client's within it", 1, [
        {**IN, "span_id": "a" * 16, "start_ns": 5, "end_ns": 25, "scope": OTHER},
        {**IN, "parent_span_id": "a" * 16, "id": "a", "start_ns": 10, "end_ns": 20,
         "scope": "opentelemetry.instrumentation.openai"},
    ]),
)  # fmt: skip


@pytest.mark.parametrize(("calls", "requests"), [each[1:] for each in REQUESTS])
def test_calls_are_requests(
    store: Store, make_span: Callable[..., Span], calls: int, requests: list[dict[str, Any]]
) -> None:
    """However many instrumentors tell of one."""
    for each in requests:
        fields = {"scope": c.SCOPE, **each}
        response = {c.RESPONSE_ID: fields.pop("id")} if "id" in fields else {}
        store.add([make_span(attributes={**CALL, **response}, **fields)])

    assert len(store.sql("SELECT span_id FROM calls").rows()) == calls


def test_catalogue_is_read_by_plain_duckdb_in_many_processes(
    store: Store, layout: Layout, make_span: Callable[..., Span], run_python: Callable[..., str]
) -> None:
    """Any number of DuckDB processes open ``X.duckdb`` read-only while this one writes."""
    store.add([make_span(attributes={c.OPERATION: "chat"}) for _ in range(10)])
    store.connect().close()
    script = """
    import os, sys
    children = []
    for _ in range(3):
        child = os.fork()
        if not child:
            import duckdb
            with duckdb.connect(sys.argv[1], read_only=True) as con:
                counts = [con.execute(f"SELECT count(*) FROM {view}").fetchone()[0]
                          for view in ("spans", "calls", "rewards", "rollouts")]
            os._exit(0 if counts[:2] == [10, 10] else 1)
        children.append(child)
    print([os.waitpid(child, 0)[1] for child in children])
    """

    counts = []
    with duckdb.connect(str(layout.catalogue), read_only=True) as reader:
        printed = run_python(script, layout.catalogue)
        for change in (store.writer, lambda: store.add([make_span()]), store.settle):
            change()
            counts.append(reader.execute("SELECT count(*) FROM spans").fetchone())
            store.writer().seal()

    assert printed.strip() == "[0, 0, 0]"
    assert counts == [(10,), (11,), (11,)]


def test_catalogue_is_made_anew_where_the_store_was_moved(
    store: Store, layout: Layout, tmp_path: Path, make_span: Callable[..., Span]
) -> None:
    """A moved or renamed store works after the first look of ours at it."""
    store.add(make_span() for _ in range(3))
    store.writer().seal()
    store.settle()
    moved = tmp_path / "elsewhere" / "renamed.duckdb"
    moved.parent.mkdir()
    shutil.move(layout.catalogue, moved)
    shutil.move(layout.root, f"{moved}.d")

    count = len(Store(moved).spans().rows())

    assert count == 3
    with duckdb.connect(str(moved), read_only=True) as reader:
        assert reader.execute("SELECT count(*) FROM spans").fetchone() == (3,)
    assert list((tmp_path / "elsewhere" / "renamed.duckdb.d" / "new").iterdir()) == []


READERS = """
import mmap, os, struct, sys, time
import duckdb
from lightning_otel import Store
from lightning_otel.store import journal, settle
from lightning_otel.types import Span
path, grace_us, is_plain = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "plain"
journal.ROTATE_BYTES, settle.BATCH_BYTES = 8_000, 20_000
settle.GRACE_US, settle.COMMIT_AHEAD_US = grace_us, 30_000
Store(path).layout.create()
shared = mmap.mmap(-1, 64)
QUERY = "SELECT count(*) AS n, count(DISTINCT span_id) AS d FROM spans"

def write(which):
    store = Store(path)
    for number in range(150):
        span_id = (which + 1) * 1_000_000 + number
        store.add([Span(f"{span_id:032x}", f"{span_id:016x}", None, "s", number, number + 1)])
        struct.pack_into("Q", shared, 8 * which, number + 1)
        time.sleep(0.004)
    store.writer().seal()
    shared[16 + which] = 1

def settle_all():
    while not (shared[16] and shared[17]):
        Store(path).settle()
        time.sleep(0.1)
    time.sleep(0.1)
    Store(path).settle()

def read():
    store, last, reads = Store(path), 0, 0
    con = store.connect()
    while last < 300 or reads < 3:
        acked = sum(struct.unpack_from("2Q", shared))
        if is_plain:
            n, d = con.execute(QUERY).fetchone()
        else:
            (row,) = store.sql(QUERY)
            n, d = row["n"], row["d"]
        assert n == d >= max(acked, last), (n, d, acked, last)
        last, reads = n, reads + 1

children = []
for work, *arguments in ((write, 0), (write, 1), (settle_all,), (settle_all,), (read,), (read,)):
    child = os.fork()
    if not child:
        try:
            work(*arguments)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
print(Store(path).sql(QUERY).rows())
"""


@pytest.mark.parametrize(("grace_us", "way"), [(60_000_000, "plain"), (0, "retrying")])
def test_readers_never_see_fewer_or_doubled_spans(
    tmp_path: Path, run_python: Callable[..., str], grace_us: int, way: str
) -> None:
    """Two readers count in a loop while two processes write and two settle.

    With the period of grace a plain connection never fails; without one, our reads try again.
    """
    printed = run_python(READERS, tmp_path / "traces.duckdb", grace_us, way)

    assert printed.splitlines() == ["[0, 0, 0, 0, 0, 0]", "[{'n': 300, 'd': 300}]"]
