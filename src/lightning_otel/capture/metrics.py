"""The conventions' histograms of model calls, where the program has OpenTelemetry's metrics.

Source: the GenAI semantic conventions, schema 1.42, ``gen_ai.client.operation.duration`` and
``gen_ai.client.token.usage``, with the bucket boundaries that they ask for.
"""

import logging
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, Final

from opentelemetry import metrics

from lightning_otel.types import conventions as c

log = logging.getLogger(__name__)

_DURATIONS: Final = tuple(0.01 * 2**step for step in range(14))
_TOKENS: Final = tuple(4**step for step in range(14))
_SHARED: Final = (
    c.OPERATION, c.PROVIDER, c.REQUEST_MODEL, c.RESPONSE_MODEL, c.SERVER_ADDRESS, c.SERVER_PORT,
)  # fmt: skip
_UNSET: Final = "_ProxyMeterProvider"
"""What the API gives as long as nobody has set a meter provider; the class is not public."""


class CallMeter:
    """Records ended calls with the meter provider of the program."""

    def __init__(self, provider: Any, meter: metrics.Meter) -> None:
        self.provider = provider
        self._durations = meter.create_histogram(
            c.METRIC_DURATION, "s", "GenAI operation duration.",
            explicit_bucket_boundaries_advisory=_DURATIONS,
        )  # fmt: skip
        self._tokens = meter.create_histogram(
            c.METRIC_TOKENS, "{token}", "Number of input and output tokens used.",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )  # fmt: skip

    def note_end(self, span: Any) -> None:
        """Record an ended span if it is a model call that the SDK kept."""
        attributes = getattr(span, "attributes", None) or {}
        if attributes.get(c.OPERATION) not in c.CALL_OPERATIONS:
            return
        shared = {key: attributes[key] for key in _SHARED if key in attributes}
        failed = {c.ERROR_TYPE: attributes[c.ERROR_TYPE]} if c.ERROR_TYPE in attributes else {}
        self._durations.record((span.end_time - span.start_time) / 1e9, {**shared, **failed})
        for kind, key in (("input", c.INPUT_TOKENS), ("output", c.OUTPUT_TOKENS)):
            if key in attributes:
                self._tokens.record(attributes[key], {**shared, c.TOKEN_TYPE: kind})


def find_meter(current: CallMeter | None) -> CallMeter | None:
    """Return what records calls, the one held as long as its provider stands; None without one."""
    provider = metrics.get_meter_provider()
    if current is not None and current.provider is provider:
        return current
    if type(provider).__name__ == _UNSET:
        return None
    meter = provider.get_meter(c.SCOPE)
    return None if isinstance(meter, metrics.NoOpMeter) else CallMeter(provider, meter)


def start_metrics(exporters: Sequence[str], protocol: str) -> None:
    """Set a meter provider for ``OTEL_METRICS_EXPORTER``'s names, if none is set."""
    names = [name for name in exporters if name != "none"]
    if not names or type(metrics.get_meter_provider()).__name__ != _UNSET:
        return
    otlp = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader

    readers = []
    for name in names:
        entry_name = otlp if name == "otlp" else name
        for entry in entry_points(group="opentelemetry_metrics_exporter", name=entry_name):
            exporter: Any = entry.load()()
            is_reader = isinstance(exporter, MetricReader)
            readers.append(exporter if is_reader else PeriodicExportingMetricReader(exporter))
            break
        else:
            log.warning("OTEL_METRICS_EXPORTER: no exporter %r is installed", name)
    if readers:
        metrics.set_meter_provider(MeterProvider(readers))
