"""Each example program: the same with us as without, and every request captured once."""

from pathlib import Path

import pytest
from tests.examples.checker import problems, run_both
from tests.examples.programs import EXAMPLES, PROGRAMS, Program

MOST_LINES = 80


@pytest.mark.timeout(220)  # two programs, whose imports alone take CrewAI ten seconds each
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_program_is_captured_once_and_undisturbed(program: Program, tmp_path: Path) -> None:
    """Same output, same requests; one call span a request, right in every fact; one whole tree."""
    for module in program.needs:
        pytest.importorskip(module)

    plain, recorded = run_both(program, tmp_path)

    found = problems(program, plain, recorded)
    assert not found, "\n".join(found)


def test_every_program_is_declared_short_and_unaware() -> None:
    """No program is left out; none holds instrumentation; none is longer than it may be."""
    found = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}

    assert sorted(found) == sorted(program.name for program in PROGRAMS)
    for name, text in found.items():
        assert text.count("\n") <= MOST_LINES, name
        assert "lightning" not in text, name
        assert "opentelemetry" not in text, name
