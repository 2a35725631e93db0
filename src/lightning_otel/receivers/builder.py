"""Spans of other tools' records, with ids that follow from theirs: repetition is harmless."""

import contextlib
import re
from base64 import b64decode
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, Final, NamedTuple

from lightning_otel.receivers.otlp import (
    SPAN_ID_BYTES,
    TIMES,
    TRACE_ID_BYTES,
    InvalidSpanError,
    mark_received,
    read_integer,
)
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

IMPORTED: Final = "import"
"""How a span came that was read from a file."""
MOST_BYTES: Final = 7 << 20
"""Of the texts of one span: a record of the store holds 8 MiB, and is cut beyond."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_HEX: Final = re.compile(r"(?=.*[1-9a-f])[0-9a-f]+")


class Builder(NamedTuple):
    """The maker of the spans of one trace.

    Attributes:
        identity: The namespace of the records' ids.
        common: Attributes of every span.
    """

    identity: str
    trace: object
    common: Mapping[str, Any]

    def id_of(self, key: object, size: int = SPAN_ID_BYTES) -> str:
        """Return the id of a key; ids stay, MLflow's in base64 and with a prefix too."""
        if isinstance(key, str):
            plain = key.removeprefix("tr-")
            with contextlib.suppress(ValueError):
                plain = plain if _HEX.fullmatch(plain) else b64decode(plain, validate=True).hex()
            if len(plain) == 2 * size and _HEX.fullmatch(plain):
                return plain
        text = f"{self.identity}\n{key}".encode("utf-8", "replace")
        return sha256(text).hexdigest()[: 2 * size]

    def make_span(
        self, key: object, parent: object, name: str, start_ns: int, end_ns: int | None,
        /, **fields: Any,
    ) -> Span:  # fmt: skip
        """Return a span of a key below another; attributes that are None are left out."""
        values = {**self.common, **fields.pop("attributes", {})}
        facts = {key: value for key, value in values.items() if value is not None}
        mark_received(facts, IMPORTED)
        ids = self.id_of(self.trace, TRACE_ID_BYTES), self.id_of(key)
        above, scope = self.id_of(parent) if parent else None, fields.pop("scope", c.SCOPE)
        return Span(*ids, above, name, start_ns, end_ns, attributes=facts, scope=scope, **fields)

    def make_reward(
        self, key: object, judged: object, values: Mapping[str, float], time_ns: int,
        attributes: Mapping[str, Any] | None = None,
    ) -> Span:  # fmt: skip
        """Return a reward, the primary number first, of the span of a key, or of the trace."""
        facts: dict[str, Any] = dict(attributes or {})
        if judged:
            facts[f"{c.LINK_PREFIX}.0.key_match"] = c.LINK_SPAN_ID
            facts[c.LINK_VALUE] = self.id_of(judged)
        for index, (name, value) in enumerate(values.items()):
            facts[f"{c.REWARD_PREFIX}.{index}.name"] = name
            facts[f"{c.REWARD_PREFIX}.{index}.value"] = float(value)
        return self.make_span(key, judged, c.SPAN_ANNOTATION, time_ns, time_ns, attributes=facts)


def read_time(value: object) -> int:
    """Return a span's time in nanoseconds, from ISO 8601 or from nanoseconds.

    Raises:
        InvalidSpanError: It is none.
    """
    time_ns = parse_time(value)
    if time_ns not in TIMES:
        raise InvalidSpanError(f"time is {time_ns}" if time_ns else "a time is missing")
    return time_ns


def parse_time(value: object) -> int:
    """Return any time likewise; 0 for none."""
    try:
        if isinstance(value, str) and not value.isdecimal():
            time = datetime.fromisoformat(value)
            aware = time if time.tzinfo else time.replace(tzinfo=UTC)
            value = (aware - _EPOCH) // timedelta(microseconds=1) * 1000
    except ValueError as exc:
        raise InvalidSpanError(f"time is {value!r}, not ISO 8601") from exc
    return read_integer(value, "time")
