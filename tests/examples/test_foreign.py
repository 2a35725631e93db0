"""Each example program with another project's instrumentor switched on beside ours.

The environment that holds them all is ``foreign`` of ``tests/environments.py``.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.examples.checker import (
    OWN_HEADERS,
    host_problems,
    run_both,
    transition_problems,
    view_problems,
)
from tests.examples.programs import (
    AG2,
    CREWAI,
    EXAMPLES,
    LANGCHAIN,
    LANGGRAPH,
    LITELLM,
    PROGRAMS,
    Program,
)

from lightning_otel import Store, TripletAdapter
from lightning_otel.demo.server import DemoServer

DRIVER = Path(__file__).with_name("foreign.py")
THEIR_HEADERS = (*OWN_HEADERS, "traceparent")
"""OpenLLMetry sends its span's id, drawn at random, to the model's server."""


class Foreign(NamedTuple):
    """An instrumentor of another project."""

    name: str
    instrumentor: str
    of_langchain: bool = False


FOREIGN = (
    Foreign("official-openai", "opentelemetry.instrumentation.genai.openai:OpenAIInstrumentor"),
    Foreign("openinference-openai", "openinference.instrumentation.openai:OpenAIInstrumentor"),
    Foreign("openllmetry-openai", "opentelemetry.instrumentation.openai:OpenAIInstrumentor"),
    Foreign(
        "openinference-langchain",
        "openinference.instrumentation.langchain:LangChainInstrumentor",
        of_langchain=True,
    ),
    Foreign(
        "openllmetry-langchain",
        "opentelemetry.instrumentation.langchain:LangchainInstrumentor",
        of_langchain=True,
    ),
)
APART = (CREWAI, AG2, LITELLM)
"""They ask for another openai than the foreign instrumentors' newest releases."""
ARE_ALL = bool(os.environ.get("LIGHTNING_TEST_PAIRS"))
"""Whether every pair is tried, which is two processes each; by default one in ten."""
PAIRS = [
    pytest.param(foreign, program, id=f"{foreign.name}-{program.name}")
    for row, foreign in enumerate(FOREIGN)
    for column, program in enumerate(PROGRAMS)
    if (ARE_ALL or (row + 2 * column) % 10 == 0)
    and (
        program.source in (LANGCHAIN, LANGGRAPH)
        or not (foreign.of_langchain or program.source in APART)
    )
]


@pytest.mark.timeout(220)  # two programs
@pytest.mark.parametrize(("foreign", "program"), PAIRS)
def test_request_is_one_transition_beside(
    foreign: Foreign, program: Program, tmp_path: Path
) -> None:
    """Two instrumentors, one transition for each request; and the host is as with theirs alone."""
    for module in (foreign.instrumentor.partition(":")[0], *program.needs):
        pytest.importorskip(module)
    within = [str(DRIVER), foreign.instrumentor]

    theirs, recorded = run_both(program, tmp_path, within)

    found = [
        *host_problems(theirs, recorded.host, THEIR_HEADERS),
        *transition_problems(recorded),
        *view_problems(recorded),
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("program", ["openai_tools", "langchain_agent", "autogen_roundrobin"])
def test_requests_are_calls_are_transitions_beside_all(
    program: str, server: DemoServer, tmp_path: Path
) -> None:
    """All of them on at once under ``opentelemetry-instrument``; some open traces of their own."""
    for foreign in FOREIGN:
        pytest.importorskip(foreign.instrumentor.partition(":")[0])
    store = Store(tmp_path / "traces.duckdb")
    command = Path(sys.executable).with_name("opentelemetry-instrument")

    subprocess.run(
        [command, "--traces_exporter", "duckdb", sys.executable, EXAMPLES / f"{program}.py"],
        env={
            **os.environ,
            "LIGHTNING_OTEL_STORE": store.name,
            "OPENAI_BASE_URL": server.base_url,
            "OPENAI_API_KEY": "k",
        },
        timeout=100,
        check=True,
    )

    found = TripletAdapter().explain(store.spans())
    steps = {id(step) for path in found.trajectories for step in path.transitions}
    (rollout,) = store.sql("SELECT calls, traces FROM rollouts")
    assert len(steps) == rollout["calls"] == len(server.log) >= 5
    assert rollout["traces"] > 1
    scopes = {span.scope for span in store.spans()}
    assert scopes >= {"openinference.instrumentation.openai"}
