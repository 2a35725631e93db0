"""Runs a program with another project's instrumentor switched on, as its users do.

Usage: foreign.py MODULE:CLASS program.py
"""

import runpy
import sys
from importlib import import_module

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider


def main(instrumentor: str, program: str) -> None:
    """Switch it on, then be the program."""
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        # It spans where there is a provider: what it does then is what ours is compared with.
        trace.set_tracer_provider(TracerProvider())
    module, _, name = instrumentor.partition(":")
    getattr(import_module(module), name)().instrument()
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
