"""Settled files go into a lake once each, whatever dies on the way."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.pages import DOCS, blocks, part
from tests.store.lake import servers
from tests.waiting import wait_until

from lightning_otel import Store
from lightning_otel.errors import StoreError
from lightning_otel.store.engines.ducklake import attach_lake
from lightning_otel.store.engines.publish import LEAST_ROWS, _elect_publisher
from lightning_otel.store.lake import LakeAddress
from lightning_otel.types import Span

Spans = Callable[..., list[Span]]


def recorded(path: Path, spans: list[Span]) -> Store:
    """A local store whose segment with these spans is closed."""
    store = Store(path)
    store.add(spans)
    store.writer().seal()
    return store


def count(store: Store) -> tuple[int, int]:
    """Spans, and how many different ones."""
    (row,) = store.sql("SELECT count(*) AS n, count(DISTINCT (trace_id, span_id)) AS d FROM spans")
    return row["n"], row["d"]


def by_id(store: Store) -> list[Span]:
    """Every span, whatever started at the same time."""
    return sorted(store.spans(), key=lambda span: span.span_id)


def rows_of(address: LakeAddress, query: str) -> list[int]:
    """The numbers that a query in the lake itself gives."""
    with attach_lake(address, application="test", is_read_only=True) as con:
        return [number for (number,) in con.execute(query).fetchall()]


FILES = "SELECT spans FROM lake.published ORDER BY published_ns"
RAW = "SELECT count(*) FROM lake.spans"
"""Rows of each file, and all rows, whatever ids they have."""


@pytest.mark.parametrize("kind", ["lake", "remote_lake"])
def test_publish_puts_every_span_into_the_lake(
    kind: str, request: pytest.FixtureRequest, make_spans: Spans, tmp_path: Path
) -> None:
    """What a machine recorded is read from the lake, row for row and transition for transition."""
    lake = request.getfixturevalue(kind)
    local = recorded(tmp_path / "local", make_spans(300))

    done = local.publish(lake, is_rest_included=True)

    assert (done.spans, done.files, done.waiting) == (300, 1, 0)
    assert local.publish(lake, is_rest_included=True).spans == 0
    there = Store(lake)
    assert list(there.spans()) == list(local.spans())
    assert [*there.transitions()] == [*local.transitions()]
    assert len([*there.transitions()]) == 100
    assert [*there.rollouts()] == [*local.rollouts()]


def test_publish_waits_until_there_are_enough_spans(
    lake: str, address: LakeAddress, make_spans: Spans, tmp_path: Path
) -> None:
    """Small settled files wait, and become one file when they are enough together."""
    local = recorded(tmp_path / "local", make_spans(LEAST_ROWS // 2))

    first = local.publish(lake)
    local = recorded(tmp_path / "local", make_spans(LEAST_ROWS // 2, machine="b"))
    second = local.publish(lake)

    assert (first.spans, first.waiting) == (0, LEAST_ROWS // 2)
    assert (second.spans, second.files, second.waiting) == (LEAST_ROWS, 1, 0)
    assert rows_of(address, FILES) == [LEAST_ROWS]
    assert count(Store(lake)) == (LEAST_ROWS, LEAST_ROWS)


STEPS = [
    ("in", "CREATE TABLE"),
    ("before", "COPY"),
    ("in", "COPY"),
    ("after", "COPY"),
    ("in", "CALL"),
    ("after", "INSERT"),
    ("in", "COMMIT"),
    ("after", "COMMIT"),
]
TIMES = int(os.environ.get("LIGHTNING_TEST_KILLS", "1"))


@pytest.mark.timeout(60 + 60 * TIMES)
def test_publisher_killed_at_any_step_loses_and_doubles_nothing(
    lake: str, address: LakeAddress, make_spans: Spans, tmp_path: Path
) -> None:
    """After a SIGKILL at each step in turn the next publisher goes on: every span is there once."""
    path = tmp_path / "local"
    total = 0

    for number, (moment, statement) in enumerate(TIMES * STEPS):
        store = recorded(path, make_spans(30, machine=chr(1 + number)))
        total += 30
        ended = run_killed(store, lake, moment, statement)
        # A publisher is quicker through some steps than the one who is to end it.
        assert ended == -signal.SIGKILL or (moment == "in" and ended == 0), (moment, statement)
    Store(path).publish(lake, is_rest_included=True)

    assert count(Store(lake)) == (total, total)
    assert rows_of(address, RAW) == [total]
    assert sum(rows_of(address, FILES)) == total
    assert by_id(Store(lake)) == by_id(Store(path))


def run_killed(store: Store, lake: str, moment: str, statement: str) -> int:
    """The exit code of a publisher that ends itself."""
    program = Path(__file__).with_name("killed.py")
    command = [sys.executable, str(program), store.name, lake, moment, statement]
    return subprocess.run(command, timeout=50).returncode


def test_session_of_a_dead_publisher_is_ended_before_the_next_one_looks(
    lake: str,
    address: LakeAddress,
    postgres: servers.Postgres,
    database: str,
    make_spans: Spans,
    tmp_path: Path,
) -> None:
    """A commit that outlives its publisher in PostgreSQL cannot put the same spans in twice."""
    path = tmp_path / "local"
    recorded(path, make_spans(30)).publish(lake, is_rest_included=True)
    recorded(path, make_spans(60, machine="b"))
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
        "AND application_name LIKE 'lightning-otel publish%'"
    )
    program = Path(__file__).with_name("killed.py")

    with locked(postgres, database, "ducklake_snapshot"):
        command = [sys.executable, str(program), str(path), lake, "never", "-"]
        with subprocess.Popen(command) as first:
            wait_until(lambda: postgres.run(waiting) == "1")
            first.kill()
        outlived = postgres.run(waiting)
        second = threading.Thread(target=Store(path).publish, args=(lake,))
        second.start()
        wait_until(lambda: postgres.run(waiting) == "0")
    second.join(30)
    Store(path).publish(lake, is_rest_included=True)

    assert outlived == "1"
    assert rows_of(address, RAW) == [90]
    assert count(Store(lake)) == (90, 90)


@contextlib.contextmanager
def locked(postgres: servers.Postgres, database: str, table: str) -> Iterator[None]:
    """A block in which nobody can write into a table."""
    with subprocess.Popen(
        [postgres.psql, "-h", "127.0.0.1", "-p", str(postgres.port), "-U", "lake", "-qAtX",
         "-d", database],
        env={**os.environ, "PGPASSWORD": servers.PASSWORD},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as session:  # fmt: skip
        assert session.stdin is not None
        assert session.stdout is not None
        session.stdin.write(f"BEGIN; LOCK TABLE {table} IN SHARE MODE; SELECT 'held';\n")
        session.stdin.flush()
        assert session.stdout.readline() == "held\n"
        yield
        session.stdin.write("ROLLBACK;\n")
        session.stdin.close()


def test_maintenance_of_the_lake_brings_nothing_back(
    lake: str, address: LakeAddress, make_spans: Spans, tmp_path: Path
) -> None:
    """Where DuckLake merged files and forgot the old ones, what was published stays published."""
    path = tmp_path / "local"
    for machine in "ab":
        recorded(path, make_spans(30, machine=machine)).publish(lake, is_rest_included=True)

    with attach_lake(address, application="test", is_read_only=False) as con:
        for statement in documented(0):
            con.execute(statement)
        files = con.execute("FROM ducklake_list_files('lake', 'spans')").fetchall()
        # A week later.
        con.execute("CALL ducklake_expire_snapshots('lake', older_than => now())")
        con.execute("CALL ducklake_cleanup_old_files('lake', cleanup_all => true)")
    again = Store(path).publish(lake, is_rest_included=True)

    assert len(files) == 1
    assert again.spans == 0
    assert count(Store(lake)) == (60, 60)
    assert by_id(Store(lake)) == by_id(Store(path))


def test_retention_in_the_lake_brings_nothing_back(
    lake: str, address: LakeAddress, make_spans: Spans, tmp_path: Path
) -> None:
    """What was taken out of the lake as too old is not published again."""
    path = tmp_path / "local"
    now_ns = time.time_ns()
    recorded(path, make_spans(30)).publish(lake, is_rest_included=True)
    fresh = make_spans(30, machine="b", start_ns=now_ns, end_ns=now_ns)
    recorded(path, fresh).publish(lake, is_rest_included=True)

    with attach_lake(address, application="test", is_read_only=False) as con:
        for statement in documented(1):
            con.execute(statement)
    again = Store(path).publish(lake, is_rest_included=True)

    assert again.spans == 0
    assert by_id(Store(lake)) == fresh


def test_compaction_publishes_nothing_twice(
    lake: str, address: LakeAddress, make_spans: Spans, tmp_path: Path
) -> None:
    """Files in a lake and files that are not yet stay apart when the local ones are merged."""
    path = tmp_path / "local"
    recorded(path, make_spans(30)).publish(lake, is_rest_included=True)
    run_killed(recorded(path, make_spans(30, machine="b")), lake, "before", "CALL")
    for machine in "cd":
        recorded(path, make_spans(30, machine=machine)).settle()
    before = Store(path).layout

    Store(path).compact()
    assert before is not None
    files = before.read_manifest().live_files
    done = Store(path).publish(lake, is_rest_included=True)

    assert sorted((bool(file.publication), file.rows) for file in files) == [
        (False, 60), (True, 30), (True, 30),
    ]  # fmt: skip
    assert (done.spans, done.files) == (90, 2)
    assert rows_of(address, RAW) == [120]
    assert by_id(Store(lake)) == by_id(Store(path))


def documented(number: int) -> list[str]:
    """The statements of one of the blocks in the page about lakes."""
    found = blocks(part(DOCS / "store.md", __file__), "sql")
    assert len(found) == 2
    return [each for each in found[number].split(";\n") if each.strip()]


def test_publish_from_the_command_line(
    remote_lake: str, make_spans: Spans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the lake for its store ``publish`` needs no argument, and says what it did and left."""
    recorded(tmp_path / "local", make_spans(30))
    monkeypatch.setenv("LIGHTNING_OTEL_STORE", remote_lake)

    def cli(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "lightning_otel", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=50)

    first, second, listed = cli("publish"), cli("publish", "--all"), cli("ls", "--jsonl")

    assert "0 spans" in first.stderr
    assert "30 spans wait for more; --all" in first.stderr
    assert second.stderr.startswith("30 spans in 1 file → ducklake:postgres://lake@127.0.0.1:")
    assert servers.PASSWORD not in first.stderr + second.stderr + listed.stdout
    assert len(listed.stdout.splitlines()) == 10
    assert (first.returncode, second.returncode, listed.returncode) == (0, 0, 0)


def test_one_process_publishes_a_store_at_a_time(
    lake: str, make_spans: Spans, tmp_path: Path
) -> None:
    """A second publisher of the same store says so, and leaves it to the first."""
    local = recorded(tmp_path / "local", make_spans(30))
    assert local.layout is not None

    with _elect_publisher(local.layout), pytest.raises(StoreError, match="another process"):
        local.publish(lake, is_rest_included=True)

    assert local.publish(lake, is_rest_included=True).spans == 30


@pytest.mark.timeout(120)
def test_machines_that_make_one_lake_at_once(lake: str, make_spans: Spans, tmp_path: Path) -> None:
    """Whoever comes first makes the lake; all of them publish into it."""
    for machine in "abcd":
        recorded(tmp_path / machine, make_spans(30, machine=machine))
    program = Path(__file__).with_name("killed.py")

    publishers = [
        subprocess.Popen([sys.executable, str(program), str(tmp_path / name), lake, "never", "-"])
        for name in "abcd"
    ]
    codes = [each.wait(100) for each in publishers]

    assert codes == [0, 0, 0, 0]
    assert count(Store(lake)) == (120, 120)
