"""Documents of a file of spans, whichever of the known forms each has.

A document is a line, or a whole file of JSON: a trace request of OTLP as a Collector's file
exporter writes it, a span as ``export spans`` and the SDK print it, a span or a page of spans of
Agent Lightning 0.3, or a list of those.
"""

from collections.abc import Iterator
from typing import Final

from lightning_otel.errors import ReceiveError
from lightning_otel.receivers import Limits, Rejected, agentlightning, otlpjson, sdkjson
from lightning_otel.types import Span

IMPORTED: Final = "import"
"""How a span came that was read from a file."""
FILE_LIMITS: Final = Limits(body_bytes=256 << 20, messages=5_000_000)
"""Of one document: a file that the user names is trusted further than a sender."""
_UNKNOWN: Final = "neither OTLP JSON nor a span of the SDK's or of Agent Lightning 0.3"


def spans_in(body: bytes) -> Iterator[Span | Rejected]:
    """The spans of a document, one by one.

    Raises:
        TooLargeError: It is larger than a document may be.
        ReceiveError: It is no JSON, or of no known form.
    """
    otlpjson.check(body, FILE_LIMITS)
    document = otlpjson.loaded(body)
    if isinstance(document, dict) and isinstance(document.get("items"), list):
        document = document["items"]
    if isinstance(document, list):
        return (found for item in document for found in _spans_of(item))
    if not _is_known(document):
        raise ReceiveError(_UNKNOWN)
    return _spans_of(document)


def _is_known(document: object) -> bool:
    return isinstance(document, dict) and (
        "resourceSpans" in document
        or agentlightning.is_stored_span(document)
        or sdkjson.is_printed_span(document)
    )


def _spans_of(document: object) -> Iterator[Span | Rejected]:
    if not isinstance(document, dict) or not _is_known(document):
        yield Rejected(_UNKNOWN)
    elif "resourceSpans" in document:
        yield from otlpjson.spans_of(document, IMPORTED, FILE_LIMITS)
    elif agentlightning.is_stored_span(document):
        yield agentlightning.span_of(document, IMPORTED)
    else:
        yield sdkjson.span_of(document, IMPORTED)
