"""Switching on and off: what is replaced, what AutoGen does itself meanwhile, and that all ends."""

from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")
pytest.importorskip("autogen_ext.models.openai")

from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import SingleThreadedAgentRuntime
from autogen_core.models import ChatCompletionClient
from autogen_ext.models.replay import ReplayChatCompletionClient
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.instrumentors.autogen import programs
from tests.instrumentors.autogen.stage import Stage
from tests.instrumentors.conftest import instrumentor

from lightning_otel import auto_trace, instrument, uninstrument
from lightning_otel.types import conventions as c


def scopes(exporter: InMemorySpanExporter) -> dict[str, int]:
    """How many spans each scope has."""
    found: dict[str, int] = {}
    for span in exporter.get_finished_spans():
        name = span.instrumentation_scope.name if span.instrumentation_scope else ""
        found[name] = found.get(name, 0) + 1
    return found


def test_subclass_made_meanwhile_is_put_back_too() -> None:
    """And those that come later are left alone."""
    instrument("autogen_core")

    class Late(ReplayChatCompletionClient):
        """Made while it is on."""

        component_provider_override = "tests.Late"

        async def create(self, *args: Any, **kwargs: Any) -> Any:
            return await super().create(*args, **kwargs)

    own = Late.__dict__["create"].__wrapped__
    uninstrument()

    assert Late.__dict__["create"] is own
    for base in (BaseChatAgent, ChatCompletionClient):
        assert "lightning_otel" not in getattr(base.__init_subclass__, "__module__", "")


def test_autogen_makes_its_own_spans_outside_recordings(
    stage: Stage, exported: InMemorySpanExporter
) -> None:
    """A program's other telemetry is as it was where nothing is recorded."""
    with auto_trace(store=stage.store):
        pass
    exported.clear()

    stage.run(programs.round_robin)

    found = scopes(exported)
    assert found["autogen SingleThreadedAgentRuntime"] > 20
    assert found["autogen-core"] >= 4
    assert c.SCOPE not in found


@pytest.mark.parametrize("choice", ["true", "false"])
def test_choice_of_the_user_is_kept(
    stage: Stage,
    exported: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    choice: str,
) -> None:
    """Who set AutoGen's own switch has its messages' spans, or has not; agents hang as ever."""
    monkeypatch.setenv("AUTOGEN_DISABLE_RUNTIME_TRACING", choice)

    stage.trace(programs.round_robin)

    has_messages = "autogen SingleThreadedAgentRuntime" in scopes(exported)
    assert has_messages == (choice == "false")
    ids = {span.span_id for span in stage.spans}
    assert [s.name for s in stage.spans if s.parent_span_id and s.parent_span_id not in ids] == []
    for call in stage.calls():
        assert stage.path(call)[0] == "invoke_workflow RoundRobinGroupChat"


def test_runtime_of_the_programs_own_leaves_no_orphans(stage: Stage) -> None:
    """Its messages go to the provider the user named; its tasks know nothing of the recording."""
    exporter = InMemorySpanExporter()
    own = TracerProvider()
    own.add_span_processor(SimpleSpanProcessor(exporter))

    async def program(client: Any) -> None:
        runtime = SingleThreadedAgentRuntime(tracer_provider=own)
        runtime.start()
        writers: Any = [programs.agent(name, client) for name in ("writer", "critic")]
        team = RoundRobinGroupChat(writers, max_turns=2, runtime=runtime)
        with auto_trace(store=stage.store) as stage.recording:
            await team.run(task="go")
        await runtime.stop_when_idle()

    stage.run(program)

    assert scopes(exporter)["autogen SingleThreadedAgentRuntime"] > 5
    stage.check()
    assert {stage.path(call)[0] for call in stage.calls()} == {
        "invoke_workflow RoundRobinGroupChat"
    }


def test_agents_made_before_the_recording_make_no_trace_of_their_own(
    stage: Stage, exported: InMemorySpanExporter
) -> None:
    """A span of an agent's making stands in a run, or is not there."""
    instrumentor("autogen").instrument(skip_dep_check=True)
    replay = ReplayChatCompletionClient(["one"])

    programs.agent("alone", replay)
    tracer = trace.get_tracer("program")
    with tracer.start_as_current_span("program"):
        programs.agent("within", replay)

    made = [s for s in exported.get_finished_spans() if s.name.startswith("create_agent")]
    assert [span.name for span in made] == ["create_agent within"]
    assert made[0].parent is not None


def test_invalid_name_of_an_agent_fails_its_making(stage: Stage) -> None:
    """AutoGen's own error passes, and the span says so."""

    async def program(client: Any) -> None:
        with pytest.raises(ValueError, match="valid Python identifier"):
            AssistantAgent("not a name", client)

    stage.trace(program)

    assert stage.recording is not None
    (made,) = [s for s in stage.recording.spans() if s.name.startswith("create_agent")]
    assert (made.status, made.attributes[c.ERROR_TYPE]) == ("ERROR", "ValueError")
