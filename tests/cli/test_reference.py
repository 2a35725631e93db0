"""The reference names every command, and the documented exit codes are the ones returned."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.cli.reference import reference
from tests.pages import DOCS

from lightning_otel.cli.options import When

Cli = Callable[..., CompletedProcess[str]]


def test_reference_names_every_command(cli: Cli) -> None:
    """Each command of ``--help`` has a section, and subcommands have their own."""
    sections = re.findall(r"^## ([\w-]+)$", reference(), re.MULTILINE)
    listed = re.findall(
        r"^  ([a-z-]+)  ", cli("--help").stdout.partition("Commands:")[2], re.MULTILINE
    )

    assert sections == listed
    assert "\n### resources promote\n" in reference()


def _codes() -> set[int]:
    table = (DOCS / "looking.md").read_text().partition("## Exit codes")[2].partition("##")[0]
    return {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}


_GIVEN = {
    0: ("ls",),
    1: ("sql", "SELECT nothing FROM spans"),
    2: ("ls", "--sinc", "10m"),
    3: ("show", "nobody"),
    4: ("ls", "--store", "/nonexistent/t.duckdb"),
}


@pytest.mark.parametrize("code", sorted(_GIVEN))
def test_exit_code_is_given(code: int, cli: Cli, kept: Path) -> None:
    """As the table says; a failure is three lines on stderr and nothing on stdout."""
    command = _GIVEN[code]
    where = () if "--store" in command else ("--store", kept)

    done = cli(*command, *where)

    assert done.returncode == code
    if code:
        assert [line[:6].strip() for line in done.stderr.splitlines()] == ["error:", "why:", "try:"]
        assert done.stdout == ""


def test_the_table_names_no_other_code() -> None:
    """130 is that of a shell for Ctrl-C."""
    assert _codes() == {*_GIVEN, 130}


def test_follow_ends_with_ctrl_c_and_gives_0(copy: Path) -> None:
    """Ctrl-C is its way to end: what was delivered is kept."""
    child = subprocess.Popen(
        [sys.executable, "-m", "lightning_otel", "follow", "consumer", "--store", str(copy)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        assert child.stdout.readline().startswith("{")
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=20)
    finally:
        child.kill()

    assert child.returncode == 0


def test_a_reader_that_goes_away_is_no_error(kept: Path) -> None:
    """``| head -1`` ends the command in silence."""
    program = f"{sys.executable} -m lightning_otel"

    done = subprocess.run(
        ["bash", "-c", f"{program} show exp-two --jsonl --store '{kept}' | head -1; "
                       "echo ${PIPESTATUS[0]}"],
        capture_output=True, text=True, timeout=50, check=True,
    )  # fmt: skip

    assert done.stdout.splitlines()[-1] == "0"
    assert "Broken" not in done.stderr


@pytest.mark.parametrize(
    ("given", "meant"),
    [("tial", "tail"), ("redcat", "redact"), ("comfig", "config")],
)
def test_misspelt_command_names_the_one_that_is_meant(given: str, meant: str, cli: Cli) -> None:
    """Of what is near."""
    done = cli(given)

    assert done.returncode == 2
    assert f"did you mean '{meant}'?" in done.stderr


@pytest.mark.parametrize(
    "text", ["2026-11-01", "2026-11-01T12:00:00Z", "1795336813325710294", " 10m", "now", "1.5d"]
)
def test_times_are_ages_dates_and_numbers(text: str) -> None:
    """Each is a time in Unix nanoseconds."""
    assert When().convert(text, None, None) > 1_700_000_000_000_000_000


@pytest.mark.parametrize("text", ["yesterday", "10 fortnights", "", "20261301x"])
@pytest.mark.parametrize(
    "command", [("ls",), ("tail", "--once"), ("plot",), ("export", "sft"), ("apply-rewards", "f")]
)
def test_what_is_no_time_is_refused_alike(command: tuple[str, ...], text: str, cli: Cli) -> None:
    """Before anything is read, with what would do."""
    done = cli(*command, "--since", text)

    assert done.returncode == 2
    assert "10m, 2h or 3d" in done.stderr


def test_since_and_until_are_kept_to(cli: Cli, kept: Path) -> None:
    """A window without anything says so, and names what would show all."""
    inside = cli("ls", "--since", "1d", "--jsonl", "--store", kept)
    outside = cli("ls", "traces", "--until", "2020-01-01", "--store", kept)

    assert len(inside.stdout.splitlines()) == 5
    assert "no traces of that time" in outside.stderr


@pytest.mark.parametrize(
    "command",
    [("ls",), ("show",), ("show", "--transitions"), ("stats",), ("analyze",), ("plot",),
     ("diff", "@last", "@last~1"), ("config",), ("export", "triplets", "--dry-run"),
     ("resources", "list"), ("tail", "--once")],
)  # fmt: skip
def test_command_names_the_next_useful_one(command: tuple[str, ...], cli: Cli, kept: Path) -> None:
    """On stderr, after an arrow."""
    done = cli(*command, "--store", kept)

    assert done.returncode == 0
    assert re.search(r"^→ (\S*lightning-otel|.* -m lightning_otel) \w", done.stderr, re.MULTILINE)


def test_ids_count_back_from_the_last(cli: Cli, kept: Path) -> None:
    """@last~1 is the one before; further back than there are rollouts is nothing."""
    shown = cli("show", "@last~1", "--json", "--store", kept)
    far = cli("show", "@last~99", "--store", kept)
    odd = cli("show", "@lastly", "--store", kept)

    assert "exp-one" in shown.stdout
    assert (far.returncode, odd.returncode) == (3, 3)
    assert "@last~99" in far.stderr


@pytest.mark.parametrize(
    "command",
    [("ls",), ("ls", "traces"), ("show", "--transitions"), ("stats",), ("analyze",), ("plot",),
     ("sql", "SELECT name FROM spans"), ("diff", "@last", "@last~1"), ("doctor",), ("config",)],
)  # fmt: skip
def test_csv_has_the_same_columns_in_each_line(
    command: tuple[str, ...], cli: Cli, kept: Path
) -> None:
    """What stands in a text, be it lines or commas, parts no row."""
    import csv
    import io

    done = cli(*command, "--csv", "--store", kept)

    rows = list(csv.reader(io.StringIO(done.stdout)))
    assert len(rows) > 1
    assert {len(row) for row in rows} == {len(rows[0])}
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    "command",
    [("ls",), ("show",), ("stats",), ("plot",), ("analyze",), ("diff", "@last", "@last~1"),
     ("tail", "--once"), ("redact", "--list"), ("resources", "list"), ("train", "--list"),
     ("queue",), ("export", "triplets", "--dry-run"), ("compact",)],
)  # fmt: skip
def test_to_look_where_nothing_is_makes_nothing_and_says_what_to_do(
    command: tuple[str, ...], cli: Cli, tmp_path: Path
) -> None:
    """No store: what to try stands on stderr, and the folder stays empty."""
    place = tmp_path / "nothing" / "t.duckdb"

    done = cli(*command, "--store", place)

    assert done.returncode in (0, 4)
    assert re.search("^(try:|→) ", done.stderr, re.MULTILINE)
    assert not place.parent.exists()
