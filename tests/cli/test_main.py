"""What every command has in common: help, errors, exit codes, pipes, stores that are not usable."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.cli.conftest import Cli, Start, lines_of_error
from tests.cli.reference import reference
from tests.manifests import seal_manifest

from lightning_otel import Resources, Span, State, Store, __version__
from lightning_otel.errors import install_command

READING = (
    "ls", "ls traces", "show", "show abc --transitions", "stats", "export spans", "plot", "analyze",
    "export triplets -o out.jsonl", "export spans -o out.parquet", "reward @last 1",
    "sql 'SELECT 1'", "pack out.duckdb", "diff @last @last~1", "export triplets --dry-run",
)  # fmt: skip
COMMANDS = re.findall(r"^## ([\w-]+)$", reference(), re.MULTILINE)


@pytest.mark.parametrize(
    "command", [*READING, "tail --once", "compact", "resources list", "train baseline"]
)
def test_reading_makes_no_store(
    cli: Cli, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no store stands, a reading command says so in three lines and leaves no trace."""
    monkeypatch.chdir(tmp_path)

    done = cli(*shlex.split(command))

    what, why, remedy = lines_of_error(done)
    assert done.returncode == 4
    assert what == f"no store at {tmp_path / 'default' / 'traces.duckdb'}"
    assert "never creates a store" in why
    assert "lightning-otel run" in remedy
    assert list(tmp_path.iterdir()) == []


def test_database_of_its_own_is_called_that(cli: Cli, copy: Path, tmp_path: Path) -> None:
    """What ``export duckdb`` wrote is no store, and is not changed by a look at it."""
    out = tmp_path / "everything.duckdb"
    cli("export", "duckdb", out, "--store", copy)

    what, _, remedy = lines_of_error(cli("ls", "--store", out))

    assert what.startswith(f"{out} is a database of its own, such as export duckdb writes")
    assert remedy.startswith("query it with duckdb")
    assert not Path(f"{out}.d").exists()


@pytest.mark.parametrize("name", ["s.duckdb", "a[1]?*.duckdb", "sp ace/s.duckdb"])
def test_the_store_that_is_meant_is_named(cli: Cli, tmp_path: Path, name: str) -> None:
    """A store's folder names it; never is the one that is not there offered in its own place."""
    path = tmp_path / name
    Store(path).add([Span("a" * 32, "b" * 16, None, "work", 1, 2)])
    Store(path).writer().seal()
    empty = path.with_name("empty.duckdb")
    Path(f"{empty}.d").mkdir()

    by_folder = cli("ls", "--json", "--store", f"{path}.d")
    what, _, remedy = lines_of_error(cli("ls", "--store", path.with_name("other.duckdb")))
    hollow, _, of_hollow = lines_of_error(cli("ls", "--store", empty))

    assert (by_folder.returncode, len(json.loads(by_folder.stdout))) == (0, 1)
    assert what == f"no store at {path.with_name('other.duckdb')}"
    assert remedy.startswith(f"there is {path}: name it with --store; or record one")
    assert hollow == f"no store at {empty}"
    assert of_hollow.startswith(f"{empty}.d has no manifest: put its copy back; there is {path}:")


@pytest.mark.parametrize("command", [*READING, "redact --list", "follow me --once"])
@pytest.mark.pain(18)
def test_newer_store_is_refused_by_name(cli: Cli, command: str, tmp_path: Path) -> None:
    """A store of a newer version is named, with both versions and the way out."""
    store = tmp_path / "newer.duckdb"
    Store(store).add([])
    Path(f"{store}.d", "manifest.ndjson").write_bytes(seal_manifest([], schema=99))

    done = cli(*shlex.split(command), "--store", store)

    what, _, remedy = lines_of_error(done)
    assert done.returncode == 4
    assert str(store) in what
    assert "schema 99" in what
    assert "pip install --upgrade" in remedy


@pytest.mark.parametrize(
    ("command", "code", "out", "err"),
    [
        ("ls", 0, 1, "no rollouts yet\n→ lightning-otel run -- python your_agent.py --store "),
        ("ls traces", 0, 1, "no traces yet\n"),
        ("ls --json", 0, 1, "no rollouts yet"),
        ("ls --jsonl", 0, 0, "no rollouts yet"),
        ("show", 3, 0, "error: "),
        ("stats", 0, 8, "→ "),
        ("export spans", 3, 0, "error: no span to export"),
        ("export triplets", 3, 0, "rollouts   0"),
        ("export sft", 3, 0, "nothing to train on: the store has no spans"),
        ("pack {}/out.duckdb", 0, 0, "0 spans → "),
        ("plot", 0, 7, "→ lightning-otel run -- python your_agent.py"),
        ("reward @last 1", 3, 0, "the store holds no span yet"),
        ("train --list", 0, 1, "no training run yet"),
        ("doctor", 0, 4, ""),
    ],
)
def test_empty_store_is_no_fault(
    cli: Cli, command: str, code: int, out: int, err: str, tmp_path: Path
) -> None:
    """A store without a span lists nothing, exports nothing, and has no @last."""
    path = tmp_path / "empty.duckdb"
    Store(path).add([])

    done = cli(*shlex.split(command.format(tmp_path)), "--store", path)

    assert (done.returncode, len(done.stdout.splitlines())) == (code, out)
    assert err in done.stderr


@pytest.mark.parametrize("command", ["ls", "stats", "queue", "compact"])
def test_store_that_may_not_be_read_is_said(command: str, tmp_path: Path) -> None:
    """Its folder is somebody else's, or closed: exit code 4, as for all that cannot be read."""
    store = tmp_path / "closed.duckdb"
    Store(store).add([])
    folder = Path(f"{store}.d")
    folder.chmod(0)
    # Root may read all the same, but for this.
    alone = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    args = [*alone, sys.executable, "-m", "lightning_otel", command, "--store", str(store)]

    done = subprocess.run(args, capture_output=True, text=True, timeout=50)
    folder.chmod(0o700)

    what, _, remedy = lines_of_error(done)
    assert done.returncode == 4
    assert "Permission denied" in what
    assert str(folder) in remedy


@pytest.mark.parametrize("command", ["", *COMMANDS, "export spans", "export triplets"])
def test_help_is_short_and_on_stdout(cli: Cli, command: str) -> None:
    """Each command explains itself on one screen, no line wider than a terminal."""
    done = cli(*command.split(), "--help")

    short = cli(*command.split(), "-h")
    assert (done.returncode, done.stderr) == (0, "")
    assert (short.returncode, short.stderr, short.stdout) == (0, "", done.stdout)
    assert len(done.stdout.splitlines()) <= 52
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("command", "wanted", "remedy"),
    [
        ("frobnicate", "there are demo, run", "lightning-otel --help"),
        ("lss", "did you mean 'ls'?", ""),
        ("exprot", "did you mean 'export'?", ""),
        ("tial", "did you mean 'tail'?", ""),
        ("dcotor --json", "did you mean 'doctor'?", ""),
        ("export triplet", "did you mean 'triplets'?", ""),
        ("export span", "did you mean 'spans'?", ""),
        ("export --format sftt", "did you mean 'sft'?", ""),
        ("export --format", "", ""),
        ("resources publsh p", "did you mean 'publish'?", ""),
        ("ls everything", "everything", "lightning-otel ls --help"),
        ("ls --nonsense", "--nonsense", "lightning-otel ls --help"),
        ("ls --limit 0", "--limit", "lightning-otel ls --help"),
        ("reward @last", "VALUE", "lightning-otel reward --help"),
        ("reward @last much", "much", "lightning-otel reward --help"),
        ("run", "COMMAND", "lightning-otel run --help"),
        ("export triplets --credit x", "--credit", "lightning-otel export triplets --help"),
        ("export spans --format csv", "csv", "lightning-otel export spans --help"),
        ("demo --rollouts 0", "--rollouts", "lightning-otel demo --help"),
        ("train baseline --tasks none.jsonl", "none.jsonl' does not exist", "train --help"),
        ("train baseline --val none.jsonl", "none.jsonl' does not exist", "train --help"),
        ("resources publish p --file none", "none' does not exist", "publish --help"),
        ("import none.jsonl", "none.jsonl' does not exist", "import --help"),
        *(
            (f"{command} --since {text}", "10m, 2h or 3d", "--help")
            for command in ("ls", "tail --once", "plot", "export sft", "apply-rewards f")
            for text in ("last week", "20261301x")
        ),
    ],
)
def test_wrong_usage_names_the_usage(
    cli: Cli, command: str, wanted: str, remedy: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It exits with 2, and names the usage and, as the remedy, the command's help."""
    monkeypatch.chdir(tmp_path)

    done = cli(*command.split())

    what, why, found = lines_of_error(done)
    assert done.returncode == 2
    assert wanted in what
    assert why.startswith("lightning-otel")
    assert found.endswith(remedy)
    assert list(tmp_path.iterdir()) == []


def test_bare_command_prints_help(cli: Cli) -> None:
    """Without a command the help goes to stderr, for nothing was done."""
    done = cli()

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: lightning-otel [OPTIONS] COMMAND")


def test_own_fault_offers_the_traceback(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fault of ours is three lines too, and --debug shows where it was; mocked, to have one."""

    def break_down(*args: object) -> None:
        raise RuntimeError("a\nfault")

    monkeypatch.setattr(Store, "__init__", break_down)

    plain = cli("stats", "--store", tmp_path)
    full = cli("--debug", "stats", "--store", tmp_path)

    again = f"lightning-otel --debug stats --store {tmp_path}"
    assert lines_of_error(plain) == [
        "RuntimeError: a fault",
        "this is a bug in lightning-otel",
        again,
    ]
    assert plain.returncode == full.returncode == 1
    assert 'raise RuntimeError("a\\nfault")' in full.stderr
    assert full.stderr.splitlines()[-1] == f"try:   {again}"


def test_version_is_that_of_the_package(spawn: Cli) -> None:
    """``python -m lightning_otel`` and the console program are one."""
    beside = Path(sys.executable).with_name("lightning-otel")

    program = subprocess.run([beside, "--version"], capture_output=True, text=True, timeout=50)

    assert spawn("--version").stdout == program.stdout == f"lightning-otel {__version__}\n"


def test_reader_that_leaves_is_no_error(kept: Path, start: Start) -> None:
    """``| head -1`` gets its line, and nobody complains."""
    child = start("sql", "SELECT * FROM range(300000)", "--store", kept)
    assert child.stdout is not None
    assert child.stderr is not None
    first = child.stdout.readline()
    child.stdout.close()

    assert (first, child.stderr.read(), child.wait(50)) == ("range\n", "", 0)


def test_follow_ends_with_ctrl_c_and_gives_0(copy: Path, start: Start) -> None:
    """Ctrl-C is its way to end: what was delivered is kept."""
    child = start("follow", "consumer", "--store", copy)
    assert child.stdout is not None
    assert child.stdout.readline().startswith("{")
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=20)

    assert child.returncode == 0


def test_output_is_utf8_in_any_locale(spawn: Cli, copy: Path) -> None:
    """A pipe gets UTF-8 even where the locale says ASCII."""
    done = spawn("sql", "SELECT 'ärger →' AS x", "--store", copy, env={"PYTHONIOENCODING": "ascii"})

    assert (done.returncode, done.stdout) == (0, "x\närger →\n")


def run_without(
    missing: tuple[str, ...], *commands: tuple[str, ...], cwd: Path
) -> "CompletedProcess[str]":
    """Run commands, one after the other, where some libraries are not installed."""
    script = (
        f"import sys\nfor name in {missing}: sys.modules[name] = None\n"
        "from lightning_otel.cli import main\n"
        f"for command in {commands}:\n"
        "    sys.argv = ['lightning-otel', *command]\n"
        "    try: main()\n"
        "    except SystemExit as exc:\n"
        "        if exc.code: sys.exit(exc.code)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, cwd=cwd
    )


@pytest.mark.parametrize(
    ("command", "library", "what", "extra"),
    [
        ("queue", "sqlalchemy", "rollouts, resources and training need SQLAlchemy", "learn"),
        ("run --apply -- python none.py", "sqlalchemy", "rollouts, resources", "learn"),
        ("serve", "hypercorn", "serve needs hypercorn", "serve"),
        ("mcp", "mcp", "the MCP server needs the SDK mcp", "mcp"),
    ],
)
def test_a_library_that_is_missing_is_called_that(
    command: str, library: str, what: str, extra: str, tmp_path: Path
) -> None:
    """With the extra that brings it; nothing was wrong with how the command was given."""
    done = run_without((library,), tuple(command.split()), cwd=tmp_path)

    fault, why, remedy = lines_of_error(done)
    assert done.returncode == 2
    assert fault.startswith(what)
    assert why == ""
    assert remedy.endswith(install_command(extra))
    assert not list(tmp_path.rglob("*.duckdb.d"))


@pytest.mark.parametrize("has_state", [False, True])
def test_a_store_is_looked_at_without_any_extra(
    copy: Path, tmp_path: Path, has_state: bool
) -> None:
    """What a plain installation is for needs nothing but what it brings, whatever lies beside."""
    if has_state:
        Resources(State(copy)).publish("prompt", "Be brief.")
    commands = (
        "ls", "show @last", "show @last --transitions", "stats", "plot", "analyze", "doctor",
        "diff @last @last~1", "tail --once", "redact --list", "sql 'FROM calls'",
        "compact --dry-run", f"export triplets {tmp_path / 'rows.jsonl'}",
    )  # fmt: skip
    extras = ("sqlalchemy", "pydantic", "starlette", "jinja2", "nanoarrow", "numpy", "pandas",
              "pyarrow")  # fmt: skip

    done = run_without(
        extras, *((*shlex.split(each), "--store", str(copy)) for each in commands), cwd=tmp_path
    )

    assert done.returncode == 0, done.stderr
