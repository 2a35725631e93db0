"""Programs under a tracer provider of the user's own: our exporter, or our processor, is enough."""

from pathlib import Path

import duckdb
import pytest
from tests.examples.checker import (
    call_problems,
    host_problems,
    recorded_in,
    run,
    structure_problems,
    transition_problems,
    view_problems,
)
from tests.examples.programs import PROGRAMS, Program

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
