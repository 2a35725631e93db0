"""Requests for what the server keeps, such as a response that it made in the background."""

import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from opentelemetry.trace import SpanKind

from lightning_otel import capture
from lightning_otel.capture import operations
from lightning_otel.dialects.dialect import Attributes, Json
from lightning_otel.dialects.stored import StoredResponse
from lightning_otel.instrumentors.body import ResponseRecorder
from lightning_otel.instrumentors.model_requests import server_attributes
from lightning_otel.instrumentors.wrappers import WrappedRun
from lightning_otel.types import conventions as c


class StoredRequest(WrappedRun):
    """One request for what the server keeps: a span only if the answer tells something new."""

    def __init__(self, client: Any, options: Any, dialect: StoredResponse, path_id: str) -> None:
        self._dialect, self._path_id, self._body = dialect, path_id, body_of(options)
        self._server = server_of(client, str(options.url))
        self._start_ns, self._started_s = time.time_ns(), time.perf_counter()
        self._parent = operations.parent_context()

    def succeed(self, result: Any) -> None:
        """Read the answer, or let a stream pass by."""
        if hasattr(result, "model_dump_json"):
            self._end(result.model_dump_json(exclude_unset=True).encode())
            return
        response = getattr(result, "response", None) or getattr(result, "http_response", None)
        if response is not None and response.is_closed:
            self._end(response.content)
        elif response is not None:
            ResponseRecorder(response, self._started_s, self._end)

    def _end(self, body: bytes, **_: Any) -> None:
        answer = self._dialect.read_body(body).body
        exchange = self._dialect.read_exchange(self._path_id, self._body, answer)
        if not exchange:
            return
        attributes = {k: v for k, v in exchange.items() if k not in c.CONTENT_KEYS}
        content = {k: v for k, v in exchange.items() if k in c.CONTENT_KEYS}
        operation = operations.Operation(
            self._dialect.operation,
            SpanKind.CLIENT,
            {c.OPERATION: self._dialect.operation, **self._server, **attributes},
            content if capture.process.content.is_kept else {},
            self._start_ns,
            self._parent,
        )
        error = self._dialect.error_of(answer)
        operation.fail_with(*error) if error is not None else operation.stop()


def body_of(options: Any) -> Json:
    """Return the JSON object that a request sends; empty if it sends none."""
    body = options.json_data if isinstance(options.json_data, Mapping) else {}
    return {**body, **options.extra_json} if options.extra_json else body


def server_of(client: Any, sent_to: str) -> Attributes:
    """Return provider and address of the server that a request goes to."""
    url = sent_to if "://" in sent_to else str(client.base_url)
    provider = "azure.ai.openai" if is_azure(type(client)) else "openai"  # type: ignore[arg-type]  # a class has a hash
    return {c.PROVIDER: provider, **server_attributes(url)}


@lru_cache(64)
def is_azure(client: type) -> bool:
    """Return whether a class of clients is of Azure."""
    # By name, not issubclass: the Azure class is known only to a module we do not import.
    return any(cls.__name__ == "BaseAzureClient" for cls in client.__mro__)
