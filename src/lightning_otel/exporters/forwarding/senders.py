"""One request to an OTLP endpoint, and what its answer means.

Source: OpenTelemetry Protocol specification 1.9, sections "OTLP/HTTP response", "Failures" and
"OTLP/gRPC throttling". Stricter than the SDK's exporters: a redirect, a page of HTML and a partial
success are not taken for a delivery.
"""

import enum
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from google.protobuf import json_format  # type: ignore[import-untyped]  # has no stubs
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # has no stubs
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from lightning_otel.config import OtlpEndpoint
from lightning_otel.errors import ConfigError

_MAX_ANSWER_BYTES: Final = 1 << 16
_MAX_REASON: Final = 200
_PATH: Final = "/v1/traces"
_EXPORT: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class Disposition(enum.Enum):
    """An endpoint's verdict on a request."""

    DELIVERED = "delivered"
    LATER = "later"
    """Nothing was taken, or nobody knows; try again."""
    TOO_LARGE = "too large"
    BAD = "bad"
    """Something in it will never be taken."""


_VERDICTS: Final = {400: Disposition.BAD, 413: Disposition.TOO_LARGE}


@dataclass(frozen=True, slots=True)
class Receipt:
    """An endpoint's answer.

    Attributes:
        reason: Why it took less than all.
        rejected: The number of spans of an accepted request that were left out for good.
        wait_s: The pause it asks for, seconds.
        is_silent: Whether there was no answer at all.
    """

    verdict: Disposition
    reason: str = ""
    rejected: int = 0
    wait_s: float = 0.0
    is_silent: bool = False


def sender_for(endpoint: OtlpEndpoint) -> "HttpSender | GrpcSender":
    """Return the sender for an endpoint's protocol.

    Raises:
        ConfigError: The URL cannot be used.
    """
    parts = urlsplit(endpoint.url)
    is_grpc = endpoint.protocol == "grpc"
    if not is_grpc and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ConfigError(
            f"{endpoint.url!r} is no OTLP endpoint; name one such as http://127.0.0.1:4318"
        )
    return GrpcSender(endpoint) if is_grpc else HttpSender(endpoint)


class HttpSender:
    """OTLP/HTTP with protobuf bodies."""

    def __init__(self, endpoint: OtlpEndpoint) -> None:
        import requests
        import urllib3

        parts = urlsplit(endpoint.url)
        path = parts.path.rstrip("/")
        if not endpoint.is_whole and not path.endswith(_PATH):
            path += _PATH
        self.url = parts._replace(path=path or "/").geturl()
        self._timeout_s = endpoint.timeout_s
        self._is_gzip = endpoint.compression == "gzip"
        self._failures = (requests.RequestException, urllib3.exceptions.HTTPError)
        self._session = requests.Session()
        self._session.headers.update(endpoint.headers)
        self._session.headers["Content-Type"] = "application/x-protobuf"
        if self._is_gzip:
            self._session.headers["Content-Encoding"] = "gzip"
        if endpoint.certificate:
            self._session.verify = endpoint.certificate
        if endpoint.client_certificate:
            pair = endpoint.client_certificate, endpoint.client_key
            self._session.cert = pair if endpoint.client_key else endpoint.client_certificate

    def send(self, body: bytes) -> Receipt:
        """Send one request; never raises for what the endpoint does."""
        try:
            with self._session.post(
                self.url,
                data=gzip.compress(body, 1) if self._is_gzip else body,
                timeout=self._timeout_s,
                allow_redirects=False,
                stream=True,
            ) as answer:
                return _read_answer(answer)
        except (*self._failures, OSError, ValueError) as exc:
            return Receipt(Disposition.LATER, _innermost_cause(exc), is_silent=True)


def _read_answer(answer: Any) -> Receipt:
    # Decompressed as it is read, and never more than so much of it.
    answer.raw.decode_content = True
    text: bytes = answer.raw.read(_MAX_ANSWER_BYTES + 1)
    kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    status, reason = answer.status_code, f"HTTP {answer.status_code} {answer.reason or ''}".strip()
    if len(text) > _MAX_ANSWER_BYTES:
        text, reason = b"", f"{reason}: an answer of more than {_MAX_ANSWER_BYTES} bytes"
    elif 200 <= status < 300:
        return _read_success(text, kind)
    elif message := _read_failure(text, kind):
        reason = f"{reason}: {message}"
    elif 300 <= status < 400 and (place := answer.headers.get("Location")):
        reason = f"{reason}, a redirect to {place}"
    wait_s = _wait_s(answer.headers.get("Retry-After"))
    return Receipt(_VERDICTS.get(status, Disposition.LATER), reason[:_MAX_REASON], wait_s=wait_s)


def _read_success(text: bytes, kind: str) -> Receipt:
    response = ExportTraceServiceResponse()
    try:
        if kind == "application/json":
            json_format.Parse(text or b"{}", response, ignore_unknown_fields=True)
        elif kind in ("application/x-protobuf", "application/octet-stream", "") or not text:
            response.ParseFromString(text)
        else:
            return Receipt(
                Disposition.LATER, f"the answer is {kind}, not OTLP's; is the URL right?"
            )
    except (DecodeError, json_format.ParseError, ValueError):
        return Receipt(Disposition.LATER, "the answer is not OTLP's; is the URL right?")
    partial = response.partial_success
    if partial.rejected_spans <= 0:
        return Receipt(Disposition.DELIVERED)
    reason = f"partial success: {partial.error_message or 'without a reason'}"[:_MAX_REASON]
    return Receipt(Disposition.DELIVERED, reason, rejected=partial.rejected_spans)


def _read_failure(text: bytes, kind: str) -> str:
    if kind == "application/x-protobuf":
        from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # has no stubs

        try:
            reply = Status.FromString(text).message
        except DecodeError:
            return ""
    elif kind in ("text/plain", "application/json"):
        reply = text.decode("utf-8", "replace")
    else:
        return ""
    return " ".join("".join(char if char.isprintable() else " " for char in reply).split())


def _wait_s(text: str | None) -> float:
    from urllib3 import Retry
    from urllib3.exceptions import InvalidHeader

    try:
        return Retry().parse_retry_after(text) if text else 0.0
    except InvalidHeader:
        return 0.0


def _innermost_cause(exc: BaseException) -> str:
    text = str(exc)
    if "BadStatusLine('\\x00\\x00" in text:  # settings of HTTP/2, which gRPC speaks
        return "this is a gRPC port: set OTEL_EXPORTER_OTLP_PROTOCOL=grpc"
    while (cause := exc.__cause__ or exc.__context__) is not None:
        exc = cause
    if isinstance(exc, TimeoutError) or "timed out" in text:
        return "no answer in time"
    inner = str(exc) or type(exc).__name__
    return " ".join(inner.split())[:_MAX_REASON]


class GrpcSender:
    """OTLP/gRPC."""

    def __init__(self, endpoint: OtlpEndpoint) -> None:
        import grpc  # type: ignore[import-untyped]  # has no stubs

        parts = urlsplit(endpoint.url if "://" in endpoint.url else f"//{endpoint.url}")
        self._timeout_s = endpoint.timeout_s
        self._metadata = [(key.lower(), value) for key, value in endpoint.headers.items()]
        self._grpc = grpc
        algorithm = grpc.Compression.Gzip if endpoint.compression == "gzip" else None
        is_secure = parts.scheme == "https" or (parts.scheme != "http" and not endpoint.is_insecure)
        if is_secure:
            files = (endpoint.certificate, endpoint.client_key, endpoint.client_certificate)
            texts = (Path(path).read_bytes() if path else None for path in files)
            credentials = grpc.ssl_channel_credentials(*texts)
            channel = grpc.secure_channel(parts.netloc, credentials, compression=algorithm)
        else:
            channel = grpc.insecure_channel(parts.netloc, compression=algorithm)
        self._export = channel.unary_unary(_EXPORT)

    def send(self, body: bytes) -> Receipt:
        """Send one request."""
        code = self._grpc.StatusCode
        try:
            text = self._export(body, timeout=self._timeout_s, metadata=self._metadata)
        except self._grpc.RpcError as exc:
            reason = f"gRPC {exc.code().name}: {exc.details()}"[:_MAX_REASON]
            if exc.code() is code.INVALID_ARGUMENT:
                return Receipt(Disposition.BAD, reason)
            # The one of two meanings that waiting does not help.
            if exc.code() is code.RESOURCE_EXHAUSTED and "larger than max" in (exc.details() or ""):
                return Receipt(Disposition.TOO_LARGE, reason)
            return Receipt(Disposition.LATER, reason, is_silent=True)
        return _read_success(text, "application/x-protobuf")
