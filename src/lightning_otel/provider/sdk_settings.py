"""Settings of OpenTelemetry's SDK under which spans are missing, and nobody says so."""

import logging
from collections.abc import Set as AbstractSet
from typing import Final

from lightning_otel import config
from lightning_otel.types.values import suggest_name

log = logging.getLogger(__name__)

NO_SDK: Final = "it needs a distribution that sets up the SDK"
SAMPLER: Final = config.Setting[str]("OTEL_TRACES_SAMPLER", "", str.lower)


def _parse_ratio(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 1.0  # as the SDK takes it


_RATIO: Final = config.Setting[float]("OTEL_TRACES_SAMPLER_ARG", 1.0, _parse_ratio)


def sampler_fault() -> str:
    """Say that the SDK's sampler leaves spans out; empty where it takes them all."""
    sampler = SAMPLER.read()
    kind = sampler.removeprefix("parentbased_")
    is_choosy = kind == "always_off" or (kind == "traceidratio" and _RATIO.read() < 1)
    return f"{SAMPLER.name}={sampler} leaves spans out of the store" if is_choosy else ""


def warn_of_exporters(names: AbstractSet[str]) -> None:
    """Name the exporters that no span reaches: those that are not installed, and the others."""
    if not names:
        return
    from importlib import metadata

    valid = {"otlp", *metadata.entry_points(group="opentelemetry_traces_exporter").names}
    for name in sorted(names - valid):
        log.warning("no exporter %r is installed; %s", name, suggest_name(name, sorted(valid)))
    if unserved := sorted(names & valid):
        way = ", or write --traces_exporter otlp,duckdb" if "otlp" in unserved else ""
        log.warning(
            "no span is sent to %s: %s; pip install opentelemetry-distro%s",
            ", ".join(unserved),
            NO_SDK,
            way,
        )
