"""The SDK is watched while it is switched on, and is as it was before and after."""

import asyncio
import gc
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_otel import Store, auto_trace, capture, provider
from lightning_otel.instrumentors import openai_agents
from lightning_otel.instrumentors.openai_agents import OpenAIAgentsInstrumentor

from .conftest import agents, model_calls, named

WATCHED = [
    ("tracing.spans", "SpanImpl", ("start", "finish")),
    ("tracing.spans", "NoOpSpan", ("start", "finish", "set_error")),
    ("tracing.traces", "TraceImpl", ("start", "finish")),
    ("tracing.traces", "NoOpTrace", ("start", "finish")),
    ("tracing.traces", "ReattachedTrace", ("start", "finish")),
    ("tracing.provider", "DefaultTraceProvider", ("create_trace",)),
    ("tool_context", "ToolContext", ("__init__",)),
    ("run", "AgentRunner", ("run", "run_streamed")),
    ("models.openai_chatcompletions", "OpenAIChatCompletionsModel", ("get_response",)),
    ("models.openai_responses", "OpenAIResponsesModel", ("get_response", "stream_response")),
]


def methods() -> dict[tuple[str, str], Any]:
    """All that is watched, as it stands now."""
    found = {}
    for module, name, wanted in WATCHED:
        owner = getattr(sys.modules[f"agents.{module}"], name)
        found.update({(name, each): owner.__dict__[each] for each in wanted})
    return found


def test_sdk_is_as_it_was_after_uninstrument() -> None:
    """The very functions; in between none of them is."""
    before = methods()

    provider.instrument("agents")
    between = methods()
    provider.uninstrument()

    assert methods() == before
    assert not [name for name, found in between.items() if found is before[name]]


def test_sdk_is_watched_again_after_uninstrument(store: Store, model: Any) -> None:
    """Off nothing is recorded of it but the client's calls; on again everything is."""
    agent = agents.Agent(name="a", model=model)
    with auto_trace(store=store) as recording:
        asyncio.run(agents.Runner.run(agent, "one"))
        provider.uninstrument()
        asyncio.run(agents.Runner.run(agent, "two"))
        provider.instrument()
        asyncio.run(agents.Runner.run(agent, "three"))

    assert len(named(recording, "invoke_agent")) == 2
    assert len(model_calls(recording)) == 2


def test_sdk_outside_a_recording_makes_no_spans(model: Any) -> None:
    """Nor is anything kept of its own."""
    provider.instrument("agents")
    gc.collect()
    before = set(openai_agents._spans._nodes)

    asyncio.run(agents.Runner.run(agents.Agent(name="a", model=model), "one"))

    assert set(openai_agents._spans._nodes) <= before


def test_sdk_models_defined_later_are_watched(store: Store) -> None:
    """The program's own classes, of any depth, once an agent runs."""
    pytest.importorskip("agents.testing.model", reason="this openai-agents has no testing module")
    provider.instrument()

    class Mine(agents.testing.ScriptedModel):  # type: ignore[misc]  # of a module imported if there
        """A model of the program's own."""

        async def get_response(self, *args: Any, **kwargs: Any) -> Any:
            """As its base class does."""
            return await super().get_response(*args, **kwargs)

    said = agents.testing.model.assistant_message("x")
    with auto_trace(store=store) as recording:
        asyncio.run(agents.Runner.run(agents.Agent(name="a", model=Mine([[said]])), "one"))

    assert len(model_calls(recording)) == 1


def test_sdk_is_not_what_merely_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's own ``agents`` package is left alone, without a fault."""
    monkeypatch.setattr(openai_agents._spans, "scope", None)
    monkeypatch.setattr(OpenAIAgentsInstrumentor(), "_model", None, raising=False)
    before = capture.faults()

    for name, patch in OpenAIAgentsInstrumentor().patches().items():
        stranger = ModuleType(name)
        patch(stranger)
        vars(stranger).update(Scope=None, SpanImpl=3, Model="none", AgentRunner=object)
        patch(stranger)

    assert capture.faults() == before
    assert openai_agents._spans.innermost() is None


PROGRAM = """
import sys
import lightning_otel
lightning_otel.instrument()
assert "agents" not in sys.modules
import agents
with lightning_otel.auto_trace(store=sys.argv[1]):
    pass
from agents.tracing import setup
assert setup.GLOBAL_TRACE_PROVIDER is None
import threading
assert threading.active_count() == 1
"""


def test_sdk_is_neither_imported_nor_made_to_send(tmp_path: Path) -> None:
    """Switching on makes no trace provider, and so no exporter to OpenAI and no thread."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "t.duckdb")],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
