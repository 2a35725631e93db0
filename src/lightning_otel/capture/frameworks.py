"""Frameworks whose agents only their own telemetry names, and what switches that on."""

import sys
from collections.abc import Mapping
from typing import Final

_INSTRUMENTOR: Final = "pip install openinference-instrumentation-{}, and instrument it"

FRAMEWORKS: Final[Mapping[str, str]] = {
    "agent_framework": "ENABLE_INSTRUMENTATION=true",
    "pydantic_ai": "Agent.instrument_all()",
    "semantic_kernel": "SEMANTICKERNEL_EXPERIMENTAL_GENAI_ENABLE_OTEL_DIAGNOSTICS=true",
    "smolagents": _INSTRUMENTOR.format("smolagents"),
    "agno": _INSTRUMENTOR.format("agno"),
    "haystack": "pip install opentelemetry-haystack, and enable its OpenTelemetryTracer",
    "llama_index": _INSTRUMENTOR.format("llama-index"),
}
"""By module what brings the names of its agents.

Source: the frameworks' pages on observability (Agent Framework and Semantic Kernel on
learn.microsoft.com, Pydantic AI on ai.pydantic.dev); the packages of Arize-ai/openinference, under
``python/instrumentation``.
"""


def find_framework() -> str | None:
    """Return the framework that this process has imported, if any."""
    return next((name for name in FRAMEWORKS if name in sys.modules), None)
