"""CrewAI as it is used, on its own storage, silent towards its maker, over the demo server."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_otel.demo.server import DemoServer

# Read when CrewAI is imported; a test must not send its telemetry anywhere. Its own switch, since
# OpenTelemetry's would switch off our spans, too.
os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"
os.environ["CREWAI_TESTING"] = "true"
os.environ["CREWAI_TRACING_ENABLED"] = "false"
# LiteLLM would fetch its list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


@pytest.fixture(autouse=True)
def _own_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What CrewAI remembers is remembered in the test's folder; its open clients are dropped."""
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path / "crewai"))
    yield
    gc.collect()


@pytest.fixture
def llm(server: DemoServer) -> Callable[..., Any]:
    """Makes models of the demo server."""
    import crewai

    def make(model: str = "openai/toy", **options: Any) -> Any:
        return crewai.LLM(model=model, base_url=server.base_url, api_key="k", **options)

    return make
