"""Each example program, also with a provider of its own: as without us, each request once."""

from collections.abc import Collection
from pathlib import Path

import duckdb
import pytest
from tests.examples.checker import (
    call_problems,
    host_problems,
    problems,
    recorded_in,
    run,
    run_both,
    structure_problems,
    transition_problems,
    view_problems,
)
from tests.examples.programs import EXAMPLES, FRAMEWORKS, PROGRAMS, Program


@pytest.mark.timeout(220)  # two programs, whose imports alone take CrewAI ten seconds each
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_program_is_captured_once_and_undisturbed(program: Program, tmp_path: Path) -> None:
    """Same output, same requests; one call span a request, right in every fact; one whole tree."""
    for module in program.needs:
        pytest.importorskip(module)

    plain, recorded = run_both(program, tmp_path)

    found = problems(program, plain, recorded)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("folder", "names", "most_lines"),
    [(EXAMPLES, {program.name for program in PROGRAMS}, 80),
     (EXAMPLES / "frameworks", FRAMEWORKS, 60)],
)  # fmt: skip
def test_every_program_is_declared_short_and_unaware(
    folder: Path, names: Collection[str], most_lines: int
) -> None:
    """No program is left out; none holds instrumentation; none is longer than it may be."""
    found = {path.stem: path.read_text() for path in folder.glob("*.py")}

    assert sorted(found) == sorted(names)
    for name, text in found.items():
        assert text.count("\n") <= most_lines, name
        assert "lightning" not in text, name
        assert "opentelemetry" not in text, name


DRIVER = Path(__file__).with_name("own_provider.py")
NAMES = ("openai_tools", "openai_stream", "langchain_agent", "autogen_roundrobin")


@pytest.mark.timeout(220)  # two programs
@pytest.mark.parametrize("switch", ["instrumentors", "instrument"])
@pytest.mark.parametrize("pipeline", ["exporter", "processor"])
@pytest.mark.parametrize(
    "program",
    [program for program in PROGRAMS if program.name in NAMES],
    ids=lambda each: each.name,
)
def test_pipeline_of_the_users_own_keeps_each_request(
    program: Program, pipeline: str, switch: str, tmp_path: Path
) -> None:
    """Each request is a call with its content, and a transition; the file is there at the end."""
    plain = run(program, tmp_path)
    path = tmp_path / "traces.duckdb"

    host = run(program, tmp_path, [str(DRIVER), pipeline, switch], LIGHTNING_OTEL_STORE=str(path))

    with duckdb.connect(str(path), read_only=True) as con:  # before anything of ours looks at it
        ((calls,),) = con.sql("SELECT count(*) FROM calls").fetchall()
    recorded = recorded_in(path, host)
    found = [
        *host_problems(plain, host),
        *call_problems(recorded),
        *structure_problems(program, recorded),
        *transition_problems(recorded),
        *view_problems(recorded),
    ]
    assert not found, "\n".join(found)
    assert calls == len(recorded.requests)
    assert len({span.rollout_id for span in recorded.calls}) == 1
