"""The folder that ``lightning-otel run`` puts on ``PYTHONPATH``, and what started a process."""

import re
import sys
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lightning_otel import config

_WORKER: Final = re.compile(
    r"--multiprocessing-fork$|from \w+\.(spawn|forkserver|resource_tracker) import "
    r"|(\w+\.)*loky\.backend\.|.*/ray/_private/workers/"
    r"|import sys;exec\(eval\(sys\.stdin\.readline"
)
"""Words by which multiprocessing, loky, Ray and pytest-xdist start workers of a program."""


def enter_process() -> str | None:
    """Return the executed program's id, empty for the first's; None if it is not to be recorded."""
    is_worker = any(map(_WORKER.match, sys.orig_argv[1:]))
    program_id, children = config.enter_process(is_worker=is_worker), config.CHILDREN.read()
    is_left_out = (program_id and children != "all") or (is_worker and children == "none")
    return None if is_left_out else program_id


def inherited_parent() -> Context | None:
    """Return the span that a parent process names in the environment, as a context."""
    carrier = {"traceparent": config.TRACE_PARENT.read()}
    read = TraceContextTextMapPropagator().extract(carrier, Context())
    parent = trace.get_current_span(read).get_span_context()
    if not parent.is_valid:
        return None
    # Taken for sampled whatever it says: this process was told to record.
    sampled = SpanContext(
        parent.trace_id, parent.span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )
    return trace.set_span_in_context(NonRecordingSpan(sampled), Context())
