"""``X.duckdb`` is there from the first span, made without DuckDB, and any DuckDB opens it."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

import lightning_otel
from lightning_otel import Store

MAKER = Path(__file__).parents[2] / ".ci" / "template.py"
AGENT = """
import os, signal, sys
import lightning_otel as lo
calls, replace = [], os.replace
def replace_or_die(*arguments):
    calls.append(arguments)
    os.kill(os.getpid(), signal.SIGKILL) if str(len(calls)) in sys.argv[2:] else replace(*arguments)
os.replace = replace_or_die
with lo.auto_trace(store=sys.argv[1]):
    lo.emit_message("hello")
    print("duckdb" in sys.modules, flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""
PLAIN = """
import sys, duckdb
with duckdb.connect(sys.argv[1], read_only=True) as con:
    for view in ("spans WHERE end_ns IS NOT NULL", "calls", "rewards", "rollouts"):
        print(con.sql(f"SELECT count(*) FROM {view}").fetchall()[0][0])
"""


def start(path: Path, *killed_at: int) -> "subprocess.Popen[str]":
    """Start an agent, which may be killed as one of the files takes its place."""
    command = [sys.executable, "-c", AGENT, str(path), *map(str, killed_at)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("name", ["plain", "it's [a] *s?t[o]re* ü", "/".join(["deep" * 50] * 15)])
def test_plain_duckdb_reads_a_store_from_its_first_span(
    tmp_path: Path, run_python: Callable[..., str], name: str
) -> None:
    """M4: while the agent runs, and after ``kill -9``; the agent has no engine."""
    path = tmp_path / name / "traces.duckdb"
    with start(path) as agent:
        assert agent.stdout is not None
        has_engine, printed = agent.stdout.readline(), run_python(PLAIN, path)
        agent.communicate("\n")

    assert (has_engine, agent.returncode) == ("False\n", -signal.SIGKILL)
    assert printed == run_python(PLAIN, path) == "1\n0\n0\n1\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert not list(Path(f"{path}.d", "new").iterdir())


def test_shipped_template_is_of_the_views_as_they_are(tmp_path: Path) -> None:
    """Its first line is a hash of all statements. If it differs: ``python .ci/template.py``."""
    subprocess.run([sys.executable, MAKER, tmp_path], check=True)
    versions = [
        (folder / "catalogue.template").read_bytes().partition(b"\n")[0]
        for folder in (tmp_path, Path(lightning_otel.__file__).parent / "store")
    ]

    assert versions[0] == versions[1]


def test_reader_keeps_a_current_catalogue_and_renews_an_old_one(tmp_path: Path) -> None:
    """Processes that begin at once make one; readers leave it, until the views change."""
    path = tmp_path / "traces.duckdb"
    for agent in [start(path) for _ in range(4)]:
        agent.communicate("\n")
    Store(path).connect().close()
    stamp, inodes = Path(f"{path}.d", "catalogue.stamp"), []
    with duckdb.connect(path, read_only=True) as con:
        for content in (stamp.read_bytes(), b"of other views"):
            inodes.append(path.stat().st_ino)
            stamp.write_bytes(content)
            Store(path).connect().close()
        assert con.sql("SELECT count(*) FROM rollouts").fetchall() == [(4,)]

    assert inodes[0] == inodes[1] != path.stat().st_ino


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_kill_while_the_catalogue_is_made_leaves_it_to_the_next_process(
    tmp_path: Path, run_python: Callable[..., str], step: int
) -> None:
    """No half of a file stands there, and what somebody puts in its place stays."""
    path = tmp_path / "traces.duckdb"
    start(path, step).communicate("\n")
    assert path.exists() == (step == 4)
    start(path).communicate("\n")
    assert run_python(PLAIN, path) == "1\n0\n0\n1\n"

    path.write_bytes(b"somebody's work")
    start(path).communicate("\n")

    assert path.read_bytes() == b"somebody's work"
