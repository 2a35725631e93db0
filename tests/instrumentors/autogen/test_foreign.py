"""OpenInference's instrumentor of AutoGen beside ours, switched on before or after it."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")
pytest.importorskip(
    "openinference.instrumentation.autogen_agentchat",
    reason="needs openinference-instrumentation-autogen-agentchat",
)

from openinference.instrumentation.autogen_agentchat import AutogenAgentChatInstrumentor
from opentelemetry import trace
from tests.instrumentors.autogen import programs
from tests.instrumentors.autogen.stage import Stage
from tests.instrumentors.autogen.test_programs import CALLS, every_program

from lightning_otel import instrument, uninstrument
from lightning_otel.types import conventions as c

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=["before", "after"])
def _beside(request: pytest.FixtureRequest, exported: object) -> Iterator[None]:
    """Theirs is on, switched on before or after ours."""
    theirs = AutogenAgentChatInstrumentor()
    if request.param == "after":
        instrument()
    theirs.instrument(tracer_provider=trace.get_tracer_provider())
    yield
    # Those that came last go first: theirs puts back what it found.
    if request.param == "before":
        uninstrument()
    theirs.uninstrument()


@every_program
@pytest.mark.usefixtures("_beside")
def test_each_request_is_still_one_transition_of_its_agent(stage: Stage, program: Any) -> None:
    """Theirs puts its own spans around and between ours, and nothing is lost or doubled."""
    result = stage.trace(program)

    assert stage.recording is not None
    spans = stage.recording.spans()
    ids = {span.span_id for span in spans}
    ours = [s for s in spans if s.scope == c.SCOPE and s.attributes.get(c.OPERATION) == c.CHAT]
    assert len(ours) == len(stage.server.log)
    assert [s.name for s in spans if s.parent_span_id and s.parent_span_id not in ids] == []
    found = Counter(path.agent for path in stage.recording.trajectories() for _ in path.transitions)
    assert found == CALLS[program.__name__]
    if program is programs.one_agent:
        assert result.messages[-1].content == "calc says that the work is done"
