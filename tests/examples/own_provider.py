"""Runs a program under a tracer provider of the user's own, as its docs page shows.

Usage: own_provider.py exporter|processor instrumentors|instrument program.py
"""

import runpy
import sys

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

import lightning_otel
from lightning_otel.instrumentors.autogen import AutoGenInstrumentor
from lightning_otel.instrumentors.langchain import LangChainInstrumentor
from lightning_otel.instrumentors.openai import OpenAIInstrumentor


def main(pipeline: str, switch: str, program: str) -> None:
    """Set the provider, switch the instrumentors on, then be the program."""
    provider = TracerProvider()
    if pipeline == "exporter":
        processor = BatchSpanProcessor(lightning_otel.DuckDBSpanExporter())
    else:
        processor = lightning_otel.LightningSpanProcessor()
    provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    if switch == "instrument":
        lightning_otel.instrument()
    else:
        for instrumentor in (OpenAIInstrumentor, LangChainInstrumentor, AutoGenInstrumentor):
            instrumentor().instrument()
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
