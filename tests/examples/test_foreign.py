"""Each example program with another project's instrumentor switched on beside ours.

The environment that holds them all is ``foreign`` of ``tests/environments.py``.
"""

import os
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
from tests.examples.programs import AG2, CREWAI, LANGCHAIN, LANGGRAPH, LITELLM, PROGRAMS, Program

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
