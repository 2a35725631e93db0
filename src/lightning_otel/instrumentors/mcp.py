"""MCP's clients: the servers that they start are recorded, in the traces of the calls.

The library makes the spans itself (``mcp`` 2, scope ``mcp-python-sdk``). Child processes, and no
other servers, get the settings of the run and the ids of its spans.

Source: ``mcp.client.stdio``; the ids' place is ``params._meta`` of a request (SEP-414).
"""

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lightning_otel import capture, config
from lightning_otel.instrumentors.base import LibraryInstrumentor, Patch
from lightning_otel.messages import fields_of

_STARTUP: Final = ("lightning_otel", "provider", "startup")
_write_ids = TraceContextTextMapPropagator().inject


class MCPInstrumentor(LibraryInstrumentor):
    """Switches the recording of MCP's servers on and off; ``mcp`` itself is never imported."""

    requires = ("mcp >= 1.9",)

    def patches(self) -> Mapping[str, Patch]:
        """The module of the transport that starts servers."""
        return {"mcp.client.stdio": self._patch_stdio}

    def _patch_stdio(self, module: ModuleType) -> None:
        self.wrap(module, "stdio_client", self._make_client)

    def _make_client(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @asynccontextmanager
        async def stdio_client(server: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            handed = capture.guard_call(_handed_environment) if self.is_wanted() else None
            if handed:
                server = capture.guard_call(_hand_on, server, handed) or server
            async with original(server, *args, **kwargs) as streams:
                if handed:
                    capture.guard_call(_carry_ids, streams[1])
                yield streams

        return stdio_client


def _handed_environment() -> dict[str, str]:
    """Return the variables that record children, without keys; empty outside of such a run."""
    environment = config.read_environment("LIGHTNING_OTEL", "TRACEPARENT", "PYTHONPATH")
    if config.RUN.name not in environment or config.TOKEN.name in environment:
        return {}
    environment.pop(config.ENDPOINT_KEY.name, None)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    startup = next((path for path in paths if Path(path).parts[-3:] == _STARTUP), "")
    return environment | {"PYTHONPATH": startup}


def _hand_on(server: Any, handed: Mapping[str, str]) -> Any:
    environment = dict(server.env or {})
    paths = (handed["PYTHONPATH"], environment.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, paths))
    return server.model_copy(update={"env": {**handed, **environment, "PYTHONPATH": path}})


def _carry_ids(stream: Any) -> None:
    send = stream.send

    async def send_with_ids(message: Any) -> None:
        capture.guard_call(_add_ids, message)
        await send(message)

    stream.send = send_with_ids


def _add_ids(message: Any) -> None:
    request = getattr(message.message, "root", message.message)
    fields = fields_of(request)
    if "id" not in fields or "method" not in fields or not trace.get_current_span().is_recording():
        return
    params = fields.get("params") or {}
    meta = dict(params.get("_meta") or {})
    if "traceparent" not in meta:
        _write_ids(meta)
        request.params = {**params, "_meta": meta}
