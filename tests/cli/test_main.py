"""What every command has in common: help, errors, exit codes, pipes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from lightning_otel import Resources, State, Store
from lightning_otel.store.layout import Layout

Cli = Callable[..., CompletedProcess[str]]

READING = [
    ("ls",),
    ("ls", "traces"),
    ("show",),
    ("show", "abc", "--transitions"),
    ("stats",),
    ("export", "spans"),
    ("export", "triplets", "-o", "out.jsonl"),
    ("export", "spans", "-o", "out.parquet"),
    ("reward", "@last", "1"),
    ("sql", "SELECT 1"),
    ("pack", "out.duckdb"),
]
COMMANDS = ["demo", "run", "ls", "show", "stats", "export", "reward", "sql", "pack", "doctor"]


def lines_of_error(done: CompletedProcess[str]) -> list[str]:
    """What follows ``error:``, ``why:`` and ``try:`` on the three lines of an error."""
    lines = done.stderr.splitlines()
    assert [line.split(" ", 1)[0] for line in lines] == ["error:", "why:", "try:"]
    return [line.split(" ", 1)[1].strip() for line in lines]


@pytest.mark.parametrize("args", READING, ids=" ".join)
def test_reading_makes_no_store(
    cli: Cli, args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no store stands, a reading command says so in three lines and leaves no trace."""
    monkeypatch.chdir(tmp_path)

    done = cli(*args)

    what, why, remedy = lines_of_error(done)
    assert done.returncode == 4
    assert done.stdout == ""
    assert what == f"no store at {tmp_path / 'default' / 'traces.duckdb'}"
    assert "never creates a store" in why
    assert "lightning-otel run" in remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "code", "out"),
    [
        (("ls",), 0, 1),
        (("ls", "traces"), 0, 1),
        (("ls", "--json"), 0, 1),
        (("ls", "--jsonl"), 0, 0),
        (("show",), 3, 0),
        (("show", "abc"), 3, 0),
        (("stats",), 0, 8),
        (("export", "spans"), 0, 0),
        (("export", "triplets"), 0, 0),
        (("reward", "@last", "1"), 3, 0),
        (("sql", "SELECT span_id FROM spans"), 0, 1),
        (("doctor",), 0, 4),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_empty_store_is_no_fault(
    cli: Cli, args: tuple[str, ...], code: int, out: int, tmp_path: Path
) -> None:
    """A store without a span lists nothing, exports nothing, and has no @last."""
    path = tmp_path / "empty.duckdb"
    Layout(path).create()

    done = cli(*args, "--store", path)

    assert done.returncode == code
    assert len(done.stdout.splitlines()) == out
    assert done.stderr != "" or code == 0
    if code == 3:
        lines_of_error(done)


def test_empty_list_names_the_first_step(cli: Cli, tmp_path: Path) -> None:
    """Who lists an empty store is told how to record."""
    Layout(tmp_path / "empty.duckdb").create()

    done = cli("ls", "--store", tmp_path / "empty.duckdb")

    assert done.stderr.splitlines() == [
        "no rollouts yet",
        f"→ lightning-otel run -- python your_agent.py --store {tmp_path / 'empty.duckdb'}",
    ]


@pytest.mark.parametrize("args", [("ls",), ("stats",), ("queue",), ("compact",)], ids=" ".join)
def test_store_that_may_not_be_read_is_said(args: tuple[str, ...], tmp_path: Path) -> None:
    """Its folder is somebody else's, or closed: exit code 4, as for all that cannot be read."""
    layout = Layout(tmp_path / "closed.duckdb")
    layout.create()
    layout.root.chmod(0)
    # Root may read all the same, but for this.
    alone = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    command = [*alone, sys.executable, "-m", "lightning_otel", *args]
    command += ["--store", str(layout.catalogue)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    layout.root.chmod(0o700)

    what, _, remedy = lines_of_error(done)
    assert done.returncode == 4
    assert "Permission denied" in what
    assert str(layout.root) in remedy


@pytest.mark.parametrize("args", READING, ids=" ".join)
@pytest.mark.pain(18)
def test_newer_store_is_refused_by_name(cli: Cli, args: tuple[str, ...], tmp_path: Path) -> None:
    """A store of a newer version is named, with both versions and the way out."""
    layout = Layout(tmp_path / "newer.duckdb")
    layout.create()
    layout.manifest_path.write_text(json.dumps({"kind": "store", "schema": 99}) + "\n")

    done = cli(*args, "--store", layout.catalogue)

    what, _, remedy = lines_of_error(done)
    assert done.returncode == 4
    assert str(layout.catalogue) in what
    assert "schema 99" in what
    assert "pip install --upgrade" in remedy


@pytest.mark.parametrize("command", ["", *COMMANDS, "export spans", "export triplets"])
def test_help_is_short_and_on_stdout(cli: Cli, command: str) -> None:
    """Each command explains itself on one screen, no line wider than a terminal."""
    done = cli(*command.split(), "--help")
    short = cli(*command.split(), "-h")

    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout == short.stdout
    assert len(done.stdout.splitlines()) <= 45
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "..." not in done.stdout.replace("COMMAND...", "").replace("[ARGS]...", "")


@pytest.mark.parametrize(
    ("args", "guess"),
    [
        (["lss"], "'ls'"),
        (["exprot"], "'export'"),
        (["export", "triplet"], "'triplets'"),
        (["export", "span"], "'spans'"),
        (["dcotor", "--json"], "'doctor'"),
    ],
)
def test_near_miss_is_guessed(cli: Cli, args: list[str], guess: str) -> None:
    """A misspelt command is answered with the one that may have been meant."""
    done = cli(*args)

    what, _, _ = lines_of_error(done)
    assert done.returncode == 2
    assert done.stdout == ""
    assert what.endswith(f"did you mean {guess}?")


@pytest.mark.parametrize(
    ("args", "wanted", "remedy"),
    [
        (["frobnicate"], "there are demo, run", "lightning-otel --help"),
        (["ls", "everything"], "everything", "lightning-otel ls --help"),
        (["ls", "--nonsense"], "--nonsense", "lightning-otel ls --help"),
        (["ls", "--limit", "0"], "--limit", "lightning-otel ls --help"),
        (["reward", "@last"], "VALUE", "lightning-otel reward --help"),
        (["reward", "@last", "much"], "much", "lightning-otel reward --help"),
        (["run"], "COMMAND", "lightning-otel run --help"),
        (["export", "triplets", "--credit", "x"], "--credit", "... export triplets --help"),
        (["export", "spans", "--format", "csv"], "csv", "... export spans --help"),
        (["demo", "--rollouts", "0"], "--rollouts", "lightning-otel demo --help"),
    ],
)  # fmt: skip
def test_wrong_usage_is_three_lines(cli: Cli, args: list[str], wanted: str, remedy: str) -> None:
    """Wrong usage exits with 2, the usage as the reason and the command's help as the remedy."""
    done = cli(*args)

    what, why, found = lines_of_error(done)
    assert done.returncode == 2
    assert done.stdout == ""
    assert wanted in what
    assert why.startswith("Usage: lightning-otel")
    assert found == remedy.replace("...", "lightning-otel")


def test_url_is_refused_as_a_setting(cli: Cli) -> None:
    """A store this version has no engine for is a wrong setting."""
    done = cli("ls", "--store", "mongodb://host")

    assert done.returncode == 2
    assert "mongodb://host" in lines_of_error(done)[0]


def test_bare_command_prints_help(cli: Cli) -> None:
    """Without a command the help goes to stderr, for nothing was done."""
    done = cli()

    assert done.returncode == 2
    assert done.stdout == ""
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

    what, why, remedy = lines_of_error(plain)
    assert plain.returncode == full.returncode == 1
    assert (what, why) == ("RuntimeError: a fault", "a fault of lightning-otel")
    assert remedy == f"lightning-otel --debug stats --store {tmp_path}"
    assert "Traceback" not in plain.stderr
    assert 'raise RuntimeError("a\\nfault")' in full.stderr
    assert full.stderr.splitlines()[-3].startswith("error: ")
    assert full.stderr.splitlines()[-1] == f"try:   {remedy}"


def test_error_cannot_reach_the_terminal(cli: Cli, kept: Path) -> None:
    """What the user typed is shown back without its control characters."""
    done = cli("show", "\x1b[31m\x9b\u202e", "--store", kept)

    assert done.returncode == 3
    assert not set("\x1b\x9b\u202e") & set(done.stderr)


def test_damaged_data_file_is_made_anew_of_what_segments_hold(cli: Cli, copy: Path) -> None:
    """Whoever reads next gets every span, and the store is whole again."""
    before = cli("ls", "--json", "--store", copy)
    Store(copy).settle()
    (data,) = (path for path in Layout(copy).data.glob("spans-*.parquet"))
    data.write_bytes(b"rubbish" * 100)

    done = cli("ls", "--json", "--store", copy)
    examined = cli("doctor", "--store", copy)

    assert (done.returncode, done.stdout) == (0, before.stdout)
    assert "nothing wrong" in examined.stdout + examined.stderr


def test_version_is_that_of_the_package(spawn: Cli) -> None:
    """``python -m lightning_otel`` and the console program are one."""
    from lightning_otel import __version__

    module = spawn("--version")
    program = subprocess.run(
        [Path(sys.executable).with_name("lightning-otel"), "--version"],
        capture_output=True,
        text=True,
        timeout=50,
    )

    assert module.stdout == program.stdout == f"lightning-otel {__version__}\n"
    assert module.returncode == program.returncode == 0


def test_reader_that_leaves_is_no_error(kept: Path) -> None:
    """``| head -1`` gets its line, and nobody complains."""
    with subprocess.Popen(
        [
            sys.executable, "-m", "lightning_otel", "sql", "SELECT * FROM range(300000)",
            "--store", str(kept),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stderr is not None
        first = child.stdout.readline()
        child.stdout.close()

        complaint = child.stderr.read()

        assert (first, complaint) == ("range\n", "")
        assert child.wait(50) == 0


def test_output_is_utf8_in_any_locale(spawn: Cli, copy: Path) -> None:
    """A pipe gets UTF-8 even where the locale says ASCII."""
    done = spawn("sql", "SELECT 'ärger →' AS x", "--store", copy, env={"PYTHONIOENCODING": "ascii"})

    assert (done.returncode, done.stdout) == (0, "x\närger →\n")


@pytest.mark.parametrize(
    "args",
    [
        ("train", "baseline", "--tasks", "none.jsonl"),
        ("train", "baseline", "--val", "none.jsonl"),
        ("resources", "publish", "prompt", "--file", "none.txt"),
        ("import", "none.jsonl"),
    ],
    ids=" ".join,
)
def test_a_file_that_is_not_there_is_said_first(
    cli: Cli, args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is wrong usage, and neither an agent was loaded nor a store made for it."""
    monkeypatch.chdir(tmp_path)

    done = cli(*args)

    what, _, remedy = lines_of_error(done)
    assert done.returncode == 2
    assert f"{args[-1]}' does not exist" in what
    assert remedy.endswith("--help")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("args", [("queue",), ("run", "--apply", "--", "python", "none.py")])
def test_a_library_that_is_missing_is_called_that(args: tuple[str, ...], tmp_path: Path) -> None:
    """With the extra that brings it; nothing was wrong with how the command was given."""
    script = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "from lightning_otel.cli import main\n"
        f"sys.argv = {['lightning-otel', *args]}; main()\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, cwd=tmp_path
    )

    what, why, remedy = lines_of_error(done)
    assert done.returncode == 2
    assert what == "rollouts, resources and training need SQLAlchemy"
    assert why == "A library that this needs is not installed here."
    assert remedy == "pip install 'lightning-otel[learn]'"


_EXTRAS = (
    "sqlalchemy",
    "pydantic",
    "starlette",
    "jinja2",
    "nanoarrow",
    "numpy",
    "pandas",
    "pyarrow",
)


@pytest.mark.parametrize("has_state", [False, True])
def test_a_store_is_looked_at_without_any_extra(
    copy: Path, tmp_path: Path, has_state: bool
) -> None:
    """What a plain installation is for needs nothing but what it brings, whatever lies beside."""
    if has_state:
        Resources(State(copy)).publish("prompt", "Be brief.")
    commands = (
        ("ls",), ("show", "@last"), ("show", "@last", "--transitions"), ("stats",), ("plot",),
        ("analyze",), ("diff", "@last", "@last~1"), ("tail", "--once"), ("redact", "--list"),
        ("sql", "FROM calls"), ("doctor",), ("compact", "--dry-run"),
        ("export", "triplets", str(tmp_path / "rows.jsonl")),
    )  # fmt: skip
    script = (
        "import sys\n"
        f"for name in {_EXTRAS}: sys.modules[name] = None\n"
        "from lightning_otel.cli import main\n"
        f"for command in {commands}:\n"
        f"    sys.argv = ['lightning-otel', *command, '--store', {str(copy)!r}]\n"
        "    try: main()\n"
        "    except SystemExit as exc:\n"
        "        if exc.code: sys.exit(' '.join(command))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50, cwd=tmp_path
    )

    assert done.returncode == 0, done.stderr
