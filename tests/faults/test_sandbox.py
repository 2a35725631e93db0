"""S4: whatever is asked of the SQL box, only the views answer, and nothing outlives its limits."""

import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from lightning_otel import Store, auto_trace, emit_reward
from lightning_otel.errors import QueryError, StoreMissingError
from lightning_otel.store.layout import Layout, now_us
from lightning_otel.views.sandbox import Limits, _ChildProcess, run_statement, statement

CANARY = "sk-canary-in-a-file-outside"
SHORT = Limits(wall_s=20.0, memory_bytes=512 << 20)


def statements() -> dict[str, list[str]]:
    """The list, by what a statement is after."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in Path(__file__).with_name("statements.sql").read_text().splitlines():
        if not line:
            continue
        if line.startswith("-- "):
            lines = found.setdefault(line.removeprefix("-- "), [])
        else:
            lines.append(line)
    return {group: lines for group, lines in found.items() if lines}


HARMLESS = statements()["harmless"]
ATTACKS = [text for group, texts in statements().items() if group != "harmless" for text in texts]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """A store with a Parquet file and a live segment, read once so that its catalogue stands."""
    path = tmp_path_factory.mktemp("sandbox") / "traces.duckdb"
    for round_ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LIGHTNING_OTEL_STORE", str(path))
            with auto_trace():
                for value in range(3):
                    emit_reward(value + round_)
            Store(path).writer().seal()
            if not round_:
                Store(path).settle()
    layout = Layout(path)
    # What was settled counts from a moment on that lies a little ahead; then the catalogue changes.
    while any(each.settled_us > now_us() for each in layout.read_manifest().segments):
        time.sleep(0.05)
    assert asked(layout, "SELECT count(*) FROM spans") == [(8,)]
    assert len(list(layout.data.glob("[!_]*.parquet"))) == 1
    assert layout.segments()
    return layout


@pytest.fixture
def fill(kept: Layout, tmp_path: Path, port: "Port") -> Callable[[str], str]:
    """A function that puts real places into a statement."""
    (tmp_path / "secret.txt").write_text(CANARY)
    with duckdb.connect(str(tmp_path / "other.duckdb")) as con:
        con.execute(f"CREATE TABLE t AS SELECT '{CANARY}' AS x")
    places = {
        "{file}": str(tmp_path / "secret.txt"),
        "{db}": str(tmp_path / "other.duckdb"),
        "{out}": str(tmp_path / "out"),
        "{store}": str(kept.root),
        "{port}": str(port.number),
    }
    return lambda text: re.sub(r"\{[a-z]+\}", lambda found: places.get(found[0], found[0]), text)


@pytest.fixture(autouse=True)
def unchanged(kept: Layout) -> Iterator[None]:
    """Every test leaves the store as it was, to the byte."""
    before = fingerprint(kept)
    yield
    assert fingerprint(kept) == before


def fingerprint(layout: Layout) -> dict[str, tuple[str, int]]:
    """Every file of a store with its content and mode."""
    return {
        str(path.relative_to(layout.catalogue.parent)): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_mode,
        )
        for path in layout.catalogue.parent.rglob("*")
    }


def asked(layout: Layout, text: str, limits: Limits = SHORT) -> list[tuple[Any, ...]]:
    with run_statement(layout, text, limits) as answer:
        return list(answer)


def test_the_list_is_long_enough() -> None:
    """The list has not lost its sections."""
    assert len(ATTACKS) > 200
    assert len(HARMLESS) > 45


def test_no_attack_passes_the_first_wall(fill: Callable[[str], str]) -> None:
    """A statement that asks for more than the views is refused before anything of it is bound."""
    with duckdb.connect() as con:
        passed = [text for text in ATTACKS if refusal(con, fill(text)) is None]

    assert passed == []


def test_harmless_statements_pass_the_first_wall() -> None:
    """What people ask of the views is not refused."""
    with duckdb.connect() as con:
        refused = [(text, why) for text in HARMLESS if (why := refusal(con, text)) is not None]

    assert refused == []


def refusal(con: duckdb.DuckDBPyConnection, text: str) -> str | None:
    """Why a statement is refused; None if it is not."""
    try:
        statement.check(con, text)
    except QueryError as exc:
        return str(exc)
    return None


BEHIND = """
import sys
from pathlib import Path
import duckdb
from lightning_otel.store.layout import Layout
from lightning_otel.views.sandbox import Limits, child
import json, os
store, texts = json.loads(sys.stdin.read())
layout = Layout(store)
os.chdir(layout.root)
limits = Limits(wall_s=50, memory_bytes=512 << 20)
child.check = lambda con, text: None
is_bound = child.landlock.give_up()
views = "FROM spans, calls, rewards, rollouts"
con = child._open_connection(child._layout_inside(layout), views, limits).con
found = []
for text in texts:
    if not is_bound and "USE_TMP_FILE" in text:
        found.append("not tried: this kernel cannot keep a process from truncating a file")
        continue
    try:
        done = con.execute(text)
        found.append(str(done.fetchall() if done else None))
    except (duckdb.Error, RuntimeError) as exc:
        found.append("refused: " + str(exc))
    con.execute("ROLLBACK") if text == "BEGIN" else None
print(json.dumps(found))
"""


def test_the_second_wall_holds_by_itself(
    kept: Layout, fill: Callable[[str], str], tmp_path: Path, port: "Port"
) -> None:
    """Without the check, no attack reads a file, reaches a network, or writes a byte."""
    # What takes pointers ends the process, what changes the views hides what follows, what turns
    # on a log in a file that may not be written fails whatever follows.
    fatal = ("_scan", "map_function", "DROP", "ALTER", "OR REPLACE", "DETACH", "USE ", "enable_")
    texts = [fill(text) for text in ATTACKS if not any(word in text for word in fatal)]
    before = set(os.listdir(tmp_path))

    found = behind(kept, texts)

    assert len(found) > 200
    assert [text for text, said in found.items() if CANARY in said] == []
    reads = [text for text in found if "secret.txt" in text and "which" not in text]
    signs = ("refused: ", '[(\'{"error":true')
    assert [text for text in reads if not found[text].startswith(signs)] == []
    assert set(os.listdir(tmp_path)) == before
    assert port.visits == 0


def test_harmless_statements_answer(kept: Layout) -> None:
    """What people ask of the views is answered behind the second wall."""
    found = behind(kept, HARMLESS)

    refused = [(text, said) for text, said in found.items() if said.startswith("refused")]
    assert refused == []
    assert found["SELECT count(*) AS n FROM spans"] == "[(8,)]"


def behind(layout: Layout, texts: list[str]) -> dict[str, str]:
    """What each statement gives in a process that has locked itself in, but checks none."""
    done = subprocess.run(
        [sys.executable, "-c", BEHIND],
        input=json.dumps([str(layout.catalogue), texts]),
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(texts, json.loads(done.stdout), strict=True))


class Port:
    """A port on loopback that counts who comes."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self.number: int = server.getsockname()[1]

    @property
    def visits(self) -> int:
        self._server.setblocking(False)
        count = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self._server.accept()[0].close()
                count += 1
        return count


@pytest.fixture
def port() -> Iterator[Port]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Port(server)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM read_text('{file}')",
        "WITH d AS (DELETE FROM spans RETURNING *) SELECT * FROM d",
        "SELECT * FROM duckdb_settings()",
        "SET lock_configuration = false",
        "COPY (SELECT 1) TO '{out}'",
        "SELECT nothing FROM spans",
        "SELECT name::INTEGER FROM spans",
        "SELEC 1",
        "",
        "SELECT $1",
        "SELECT '\x00', 1 FROM spa\x00ns",
    ],
    ids=lambda text: text[:40].replace("\x00", ""),
)
def test_a_refusal_is_one_error(kept: Layout, fill: Callable[[str], str], text: str) -> None:
    """What is refused raises one error with a reason that tells nothing of the machine."""
    with pytest.raises(QueryError) as caught:
        asked(kept, fill(text))

    assert len(str(caught.value)) > 20
    assert str(kept.root) not in str(caught.value)
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT " + "(" * 3000 + "1" + ")" * 3000,
        "SELECT " + "[" * 3000 + "1" + "]" * 3000,
        "SELECT 1" + " + 1" * 100_000,
        "SELECT * FROM (" * 500 + "SELECT 1" + ")" * 500,
        "SELECT '" + "x" * 5_000_000 + "' = ''",
        "SELECT " + "(SELECT 1)," * 2_000 + "1",
        "SELECT 1 IN (" + "1, " * 20_000 + "1)",
    ],
    ids=["brackets", "lists", "sum", "queries", "literal", "subqueries", "values"],
)
def test_a_monstrous_text_is_one_answer_or_one_error(kept: Layout, text: str) -> None:
    """A text that overflows a parser ends nobody but its own process."""
    with contextlib.suppress(QueryError):
        assert len(asked(kept, text)) == 1


BOMBS = {
    "not interruptible": "SELECT length(lpad('x', 2000000000, 'y'))",
    "one huge value": "SELECT repeat('x', 4000000000)",
    "huge values": "SELECT sum(length(repeat('x' || i, 100000000))) FROM range(50) t(i)",
    "a long range": "SELECT sum(hash(i)) FROM range(1000000000000) t(i)",
    "a big list": "SELECT list(i) FROM range(1000000000) t(i)",
    "endless": "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT 0 FROM t) SELECT count(*) FROM t",
    "doubling": (
        "WITH RECURSIVE t AS (SELECT 1 UNION ALL SELECT 1 FROM t, range(2)) SELECT count(*) FROM t"
    ),
    "quadratic": "SELECT count(*) FROM range(9000000) a(i), range(9000000) WHERE hash(i) % 7 = 1",
    "sleep": "SELECT count(pg_sleep(100)) FROM spans",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_a_bomb_ends_at_its_limit(kept: Layout, text: str) -> None:
    """A statement that would take all time or memory is an error one second after its limit."""
    limits = Limits(wall_s=1.5, memory_bytes=256 << 20)
    begun = time.monotonic()

    with pytest.raises(QueryError):
        asked(kept, text, limits)

    assert time.monotonic() - begun < limits.wall_s + 1


def test_rows_and_bytes_are_cut_and_said_to_be(kept: Layout) -> None:
    """An answer of too many rows or bytes ends early and says by which limit."""
    text = "SELECT i, repeat('x', 1000) FROM range(100000) t(i)"

    with run_statement(kept, text, replace(SHORT, rows=700)) as by_rows:
        rows = list(by_rows)
    with run_statement(kept, text, replace(SHORT, size_bytes=50_000)) as by_bytes:
        some = list(by_bytes)
    with run_statement(kept, "SELECT i FROM range(700) t(i)", replace(SHORT, rows=700)) as whole:
        every = list(whole)

    assert (len(rows), by_rows.cut) == (700, "rows")
    assert (len(some), by_bytes.cut) == (49, "bytes")
    assert (len(every), whole.cut) == (700, "")
    assert rows[699] == (699, "x" * 1000)


def test_values_arrive_as_they_were(kept: Layout) -> None:
    """Every kind of value DuckDB has comes over as what DuckDB's own Python gives."""
    text = (
        "SELECT 1, 2::HUGEINT * 10^30::HUGEINT, true, NULL, 'ünï', 'a'::BLOB, 1.25::DECIMAL(5, 2), "
        "DATE '2026-11-21', TIME '01:02:03.000004', TIMESTAMP '2026-11-21 01:02:03', "
        "INTERVAL 90 MINUTE, 'infinity'::DOUBLE, [1, NULL], {'a': [1.5], 'map': 'x'}, "
        "MAP {1: 'one'}, '00000000-0000-0000-0000-000000000001'::UUID, (1, 'b'), '101'::BIT"
    )
    with duckdb.connect() as con:
        expected = con.execute(text).fetchone()

    (found,) = asked(kept, text)

    assert expected is not None
    lists = [list(value) if isinstance(value, tuple) else value for value in expected]
    assert list(found) == lists


def test_a_path_beyond_ascii_is_found(tmp_path: Path) -> None:
    """A store in a folder of any name answers, whatever the locale."""
    store = Store(tmp_path / "überzahl 二" / "it's.duckdb")
    store.writer().seal()
    assert store.layout is not None

    assert asked(store.layout, "SELECT count(*) FROM spans") == [(0,)]


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """Asking makes no store."""
    with pytest.raises(StoreMissingError):
        run_statement(Layout(tmp_path / "none"), "SELECT 1")

    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_told_of_and_read_without(
    kept: Layout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever asks learns of the spans that the answer lacks, though another process reads them."""
    copy = Layout(tmp_path / "traces.duckdb")
    shutil.copytree(kept.root, copy.root)
    (data,) = copy.data.glob("[!_]*.parquet")
    data.write_bytes(data.read_bytes()[:-20])

    for segment in copy.read_manifest().segments:
        (copy.live / segment.name).unlink()

    rows = asked(copy, "SELECT count(*) FROM spans")

    assert rows == [(4,)]
    assert f"4 spans cannot be read, for a file is damaged or missing ({data.name})" in caplog.text


def test_nobody_who_asked_is_left(kept: Layout) -> None:
    """The process is gone when its time is over, though its rows are not read."""
    text = "SELECT i, repeat('x', 1000) FROM range(10000000) t(i)"
    limits = replace(SHORT, wall_s=1.5, rows=10**9, size_bytes=1 << 40)
    answer = run_statement(kept, text, limits)
    child = answer._process._child
    begun = time.monotonic()

    code = child.wait(timeout=10)

    assert time.monotonic() - begun < limits.wall_s + 1
    assert code == -signal.SIGALRM
    with pytest.raises(QueryError, match=r"1\.5 s"):
        list(answer)
    answer.close()


def test_a_child_ends_with_its_parent(kept: Layout) -> None:
    """Killed, the program that asked leaves no statement running."""
    script = (
        "import sys\n"
        "from lightning_otel.store.layout import Layout\n"
        "from lightning_otel.views.sandbox import Limits, run_statement, _ChildProcess\n"
        "text = 'SELECT sum(hash(i)) FROM range(1000000000000) t(i)'\n"
        "asked = _ChildProcess(Layout(sys.argv[1]), text, Limits(wall_s=50), lambda: True)\n"
        "print(asked._child.pid, flush=True)\n"
        "asked.message()\n"
    )
    asker = subprocess.Popen(
        [sys.executable, "-c", script, str(kept.catalogue)], stdout=subprocess.PIPE, text=True
    )
    assert asker.stdout is not None
    child = int(asker.stdout.readline())
    time.sleep(0.7)

    asker.kill()
    asker.wait()
    asker.stdout.close()

    for _ in range(100):
        if is_gone(child):
            break
        time.sleep(0.05)
    assert is_gone(child)


def is_gone(process: int) -> bool:
    """Whether a process has ended, be it that nobody has asked how."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return True


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
def test_no_key_of_the_environment_goes_along(
    kept: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process knows none of its parent's variables."""
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    text = "SELECT sum(hash(i)) FROM range(1000000000) t(i)"
    process = _ChildProcess(kept, text, SHORT, lambda: True)
    try:
        found = Path(f"/proc/{process._child.pid}/environ").read_bytes()
    finally:
        process.kill()

    assert CANARY.encode() not in found


def test_the_asker_is_left_as_it_was(kept: Layout) -> None:
    """No descriptor, process, handler or limit of the caller changes, whatever is asked."""
    before = state()

    asked(kept, "SELECT count(*) FROM spans")
    with pytest.raises(QueryError):
        asked(kept, "SELECT repeat('x', 4000000000)")
    run_statement(kept, "SELECT * FROM range(100000)").close()

    assert state() == before


def state() -> tuple[object, ...]:
    """What of a process a statement may not touch."""
    return (
        sorted(os.listdir("/dev/fd"))[:-1],
        resource.getrlimit(resource.RLIMIT_AS),
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.getsignal(signal.SIGALRM),
        threading.active_count(),
        os.getcwd(),
    )


def test_many_ask_at_once(kept: Layout) -> None:
    """Statements of several threads do not mix, one of them a bomb."""
    found: list[object] = []

    def one(number: int) -> None:
        found.append(asked(kept, f"SELECT {number}, count(*) FROM spans"))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(map(str, found)) == [f"[({number}, 8)]" for number in range(4)]
