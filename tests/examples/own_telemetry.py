"""Runs a program with a framework's own telemetry, and in a rollout that it closes with a reward.

Usage: own_telemetry.py off|on STORE program.py [stream]; an empty STORE leaves the recording to
whoever started this.
"""

import contextlib
import importlib
import os
import runpy
import sys
from pathlib import Path

from opentelemetry import trace

import lightning_otel as lo

INSTRUMENTORS = {
    "smolagents_agents": "smolagents:SmolagentsInstrumentor",
    "dspy_react": "dspy:DSPyInstrumentor",
    "agno_agents": "agno:AgnoInstrumentor",
    "llama_index_agents": "llama_index:LlamaIndexInstrumentor",
}
"""Frameworks without spans of their own: OpenInference's instrumentor for each."""
_KERNEL = "SEMANTICKERNEL_EXPERIMENTAL_GENAI_ENABLE_OTEL_DIAGNOSTICS"
VARIABLES = {
    "agent_framework_agents": ("ENABLE_INSTRUMENTATION", "ENABLE_SENSITIVE_DATA"),
    "semantic_kernel_agents": (_KERNEL, f"{_KERNEL}_SENSITIVE"),
}
"""Frameworks that the environment switches."""


def switch(name: str, state: str) -> None:
    """Switch a framework's telemetry; ADK's and Strands' is always on."""
    for variable in VARIABLES.get(name, ()):
        os.environ[variable] = str(state == "on").lower()
    if state == "off":
        return
    if name in INSTRUMENTORS:
        module, _, instrumentor = INSTRUMENTORS[name].partition(":")
        module = importlib.import_module(f"openinference.instrumentation.{module}")
        getattr(module, instrumentor)().instrument()
    if name == "haystack_agents":
        theirs = importlib.import_module("haystack_integrations.tracing.opentelemetry")
        tracer = theirs.OpenTelemetryTracer(trace.get_tracer("haystack"))
        importlib.import_module("haystack.tracing").enable_tracing(tracer)
    if name == "pydantic_ai_agents":
        importlib.import_module("pydantic_ai").Agent.instrument_all()


def main(state: str, store: str, program: str) -> None:
    """Be the program."""
    sys.argv = sys.argv[3:]
    recording = lo.auto_trace(store=store) if store else contextlib.nullcontext()
    with recording:
        switch(Path(program).stem, state)
        runpy.run_path(program, run_name="__main__")
        lo.emit_reward(1.0)


if __name__ == "__main__":
    main(*sys.argv[1:4])
