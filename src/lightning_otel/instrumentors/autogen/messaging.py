"""AutoGen's own spans of messages between agents, about thirty a chat: not made where we record.

They stand between the team and its agents; left out later, they would leave orphans behind.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Span

from lightning_otel import capture, config
from lightning_otel.instrumentors.autogen import runs
from lightning_otel.instrumentors.autogen.agents import IsWanted

Block = Callable[..., AbstractContextManager[Span]]


def trace_block(is_wanted: IsWanted) -> Callable[[Block], Block]:
    """Return the replacement of ``TraceHelper.trace_block``."""

    def make(original: Block) -> Block:
        def trace_block(self: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[Span]:
            if is_wanted() and capture.guarded(_is_noise, self):
                return runs.no_span()
            return original(self, *args, **kwargs)

        return trace_block

    return make


def _is_noise(helper: Any) -> bool:
    """Return whether neither AutoGen's switch nor a provider asks for these spans."""
    if config.has_chosen_autogen_messaging():
        return False
    provider = helper.tracer_provider
    return provider is trace.get_tracer_provider() or isinstance(
        provider, trace.ProxyTracerProvider
    )
