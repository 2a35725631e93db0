"""``doctor`` as a command: signs for people, JSON for programs, an exit code for scripts."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from lightning_otel import Store, auto_trace, emit_message

Cli = Callable[..., CompletedProcess[str]]


def test_doctor_is_content_with_a_sound_store(cli: Cli, kept: Path) -> None:
    """Everything in place is one line each, a tick before it, and exit 0."""
    done = cli("doctor", "--store", kept)

    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert done.stderr == ""
    assert lines[0].startswith("✓ python 3.")
    (instrumentors,) = [line for line in lines if line.startswith("✓ instrumentors: ")]
    assert "lightning-openai" in instrumentors
    assert any(line.startswith(f"✓ {kept}: 18 spans") for line in lines)
    assert lines[-1] == "nothing wrong"


def test_doctor_notes_a_missing_store(cli: Cli, tmp_path: Path) -> None:
    """That nothing was recorded yet is no problem, and the first step is named."""
    done = cli("doctor", "--store", tmp_path / "none.duckdb")

    assert done.returncode == 0
    assert f"! no store at {tmp_path / 'none.duckdb'} yet" in done.stdout
    assert "    lightning-otel run -- python your_agent.py" in done.stdout


def test_doctor_exits_1_with_problems(
    cli: Cli, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each problem is followed by what mends it, and they are counted."""
    monkeypatch.setenv("LIGHTNING_OTEL", "0")
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "NO_CONTENT")

    done = cli("doctor", "--store", kept)
    found = json.loads(cli("doctor", "--json", "--store", kept).stdout)

    assert done.returncode == 1
    assert done.stdout.count("✗") == 2
    assert done.stdout.splitlines()[-1] == "2 problems"
    problems = [finding for finding in found if finding["level"] == "problem"]
    assert [set(finding) for finding in found] == [{"code", "level", "text", "remedy"}] * len(found)
    assert [finding["code"] for finding in problems] == ["recording-off", "content-off"]
    assert all(f"[{finding['code']}]" in done.stdout for finding in found)
    assert [finding["remedy"].split()[0] for finding in problems] == ["unset", "unset"]


def test_doctor_names_the_damage_and_the_command_that_mends_it(cli: Cli, store: Store) -> None:
    """First the problem with its command; then the command does what it says; then all is well."""
    layout = store.layout
    assert layout is not None
    with auto_trace(store=store):
        emit_message("hello")
    store.writer().seal()
    store.settle()
    for segment in layout.segments():
        segment.unlink()
    (path,) = layout.data.glob("spans-*.parquet")
    path.write_bytes(path.read_bytes()[:-100])

    found = cli("doctor", "--store", store.name)
    stats = cli("stats", "--store", store.name)
    repaired = cli("doctor", "--repair", "--store", store.name)
    after = cli("doctor", "--store", store.name)

    lines = found.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if path.name in line)
    assert found.returncode == 1
    assert lines[at].startswith(f"✗ data file {path.name} is damaged (the checksum")
    assert lines[at].endswith(": 2 of its 2 spans cannot be read [quarantined]")
    assert lines[at + 1] == f"    lightning-otel doctor --repair --store {store.name}"
    assert "missing      2 spans in damaged files" in stats.stdout
    assert f"{path.name}: 0 of 2 spans are there, 2 are gone" in repaired.stderr
    assert "repaired, but 2 spans could not be got back" in repaired.stdout
    assert "nothing wrong" not in repaired.stdout
    assert (repaired.returncode, after.returncode) == (1, 0)
    assert f"! 2 of 2 spans are gone with {path.name}" in after.stdout
    assert "gone         2 spans with damaged files" in cli("stats", "--store", store.name).stdout
