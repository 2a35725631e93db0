"""The SDK is watched while it is switched on, and is as it was before and after."""

import asyncio
from types import ModuleType
from typing import Any

import pytest
from tests.instrumentors.outline import calls_of

from lightning_otel import Store, auto_trace, capture, provider
from lightning_otel.instrumentors import openai_agents
from lightning_otel.instrumentors.openai_agents import OpenAIAgentsInstrumentor

from .conftest import agents


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

    assert len(calls_of(recording)) == 1


def test_sdk_is_not_what_merely_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's own ``agents`` package is left alone, without a fault."""
    monkeypatch.setattr(openai_agents._spans, "scope", None)
    monkeypatch.setattr(OpenAIAgentsInstrumentor(), "_model", None, raising=False)
    before = capture.process.faults

    for name, patch in OpenAIAgentsInstrumentor().patches().items():
        stranger = ModuleType(name)
        patch(stranger)
        vars(stranger).update(Scope=None, SpanImpl=3, Model="none", AgentRunner=object)
        patch(stranger)

    assert capture.process.faults == before
    assert openai_agents._spans.innermost() is None
