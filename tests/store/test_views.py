"""The views show every span once, to any number of readers, while others write and settle."""

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import duckdb
import pytest
from tests.adapter.forest import draw

from lightning_otel import Store
from lightning_otel.store.layout import Layout
from lightning_otel.store.views import NAMES
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

OTHER = "opentelemetry.instrumentation.langchain"
REQUESTS = (
    # By id, else where two overlap and nothing speaks against it.
    ("a@at=10-20@id=a", "b@at=5-25@id=a", 1),
    ("a@at=10-20@id=a", "b@at=5-25", 1),
    ("a@at=10-20", "b@at=5-25", 1),
    ("a@at=10-20@id=a", "b@at=5-25@id=b", 2),
    ("a@at=10-20@model=m", "b@at=5-25@model=m-2026", 1),
    ("a@at=10-20@model=m", "b@at=5-25@model=n", 2),
    # A server that repeats its ids answers one call after the other.
    ("a@at=10-20@id=a", "b@at=30-40@id=a", 2),
    # Of three at once two were told twice, one of them without its id.
    ("a@at=10-30@id=a b@at=11-30@id=b c@at=12-30@id=c", "d@at=9-31@id=a e@at=12-31", 3),
    # Without us a framework's record gives way to the client's within it.
    ("", "+a@at=5-25 a/b@at=10-20@id=a@scope=opentelemetry.instrumentation.openai -a", 1),
)


@pytest.mark.parametrize(("ours", "theirs", "calls"), REQUESTS)
def test_a_request_that_several_makes_recorded_is_one_call(
    store: Store, ours: str, theirs: str, calls: int
) -> None:
    """The one of ours is kept, however many instrumentors tell of it."""
    makes = [
        text.replace("@at", f"@tokens=3@scope={scope}@at")
        for text, scope in ((theirs, OTHER), (ours, c.SCOPE))
    ]
    forest = draw(" ".join(makes))
    store.add(forest.spans)

    found = {row["span_id"] for row in store.sql("SELECT span_id FROM calls").rows()}
    (rollout,) = store.sql("SELECT calls, input_tokens, spans FROM rollouts").rows()

    assert {forest.named[word[0]] for word in ours.split()} <= found
    assert (len(found), rollout["calls"], rollout["input_tokens"]) == (calls, calls, 3 * calls)
    assert rollout["spans"] == len(forest.spans)


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("SELECT count(*) FROM spans WHERE trace_id = ? AND name <> 'why?'", {"spans"}),
        ("SELECT count(*) FROM calls WHERE trace_id = $1", {"spans", "calls"}),
        ("SELECT count(*) FROM duckdb_views() WHERE sql = ?", NAMES),
    ],
)
def test_only_the_views_that_a_query_reads_are_made(
    store: Store, query: str, names: Collection[str]
) -> None:
    """To bind a view costs as much as a small read; parameters hide none."""
    store.add([Span("a" * 32, "b" * 16, None, "x", 1, 2)])

    con = store.source.connect(query=query, parameters=["a"])

    found = con.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()
    assert {name for (name,) in found} == set(names)


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

    assert printed.splitlines()[-1] == "[0, 0, 0]"
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
