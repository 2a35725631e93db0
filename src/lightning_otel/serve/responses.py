"""Answers in the sender's own format: OTLP wants the content type of the request on its answer.

Source: OTLP 1.x, "OTLP/HTTP Response": errors are ``google.rpc.Status``.
"""

from collections.abc import Mapping
from typing import Final

import orjson
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # no stubs
from starlette.responses import Response

from lightning_otel import errors
from lightning_otel.errors import LightningOtelError

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
CONTENT_TYPES: Final = (PROTOBUF, JSON)
"""What a body may be. A web page can send neither across origins without being asked about."""
FORM: Final = "application/x-www-form-urlencoded"
"""What a page's own form sends; any page anywhere can, so its origin counts."""
CODES: Final = {401: 16, 403: 7, 404: 5, 408: 4, 413: 8, 429: 8, 503: 14}
"""gRPC's, by HTTP's."""
INVALID_ARGUMENT: Final = 3
_MOST_REASONS: Final = 10
_STATUSES: Final[tuple[tuple[type[LightningOtelError], int], ...]] = (
    (errors.NotFoundError, 404),
    (errors.StoreMissingError, 404),
    (errors.TooLargeError, 413),
    (errors.StoreError, 503),
    (errors.ChangedError, 409),
    (errors.StateError, 503),
)


class RefusalError(Exception):
    """A request is not served; nothing of it is repeated in the answer."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


def base_type(content_type: str | None) -> str:
    """A content type without its parameters."""
    return (content_type or "").partition(";")[0].strip().lower()


def busy() -> RefusalError:
    """Return the refusal of one request too many at a time, which may come again."""
    return RefusalError(503, "too much at once; come again", {"Retry-After": "1"})


def refusal_of(error: LightningOtelError) -> RefusalError:
    """Return the refusal that an error of ours becomes."""
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 400)
    return RefusalError(status, str(error))


def refused(content_type: str, refusal: RefusalError) -> Response:
    """The answer that a request is not served."""
    code, message = CODES.get(refusal.status, INVALID_ARGUMENT), str(refusal)
    if content_type == PROTOBUF:
        status = Status(code=code, message=message)
        body, kind = status.SerializeToString(), PROTOBUF
    else:
        body, kind = orjson.dumps({"code": code, "message": message}), JSON
    return Response(body, refusal.status, refusal.headers, media_type=kind)


def said(rejected: Mapping[str, int]) -> str:
    """Word the reasons for rejected spans, the most frequent first."""
    reasons = sorted(rejected.items(), key=lambda item: -item[1])
    texts = [f"{count} × {reason}" for reason, count in reasons[:_MOST_REASONS]]
    return "; ".join([*texts, "…"] if len(reasons) > _MOST_REASONS else texts)
