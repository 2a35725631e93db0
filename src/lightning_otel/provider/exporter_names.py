"""The names in ``OTEL_TRACES_EXPORTER``, where nothing sets up the SDK with them."""

import logging
from collections.abc import Set as AbstractSet
from typing import Final

log = logging.getLogger(__name__)

NO_SDK: Final = "it needs a distribution that sets up the SDK"


def warn_of_exporters(names: AbstractSet[str]) -> None:
    """Name the exporters that no span reaches: those that are not installed, and the others."""
    if not names:
        return
    from difflib import get_close_matches
    from importlib import metadata

    known = {"otlp", *metadata.entry_points(group="opentelemetry_traces_exporter").names}
    for name in sorted(names - known):
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
        log.warning("no exporter %r is installed; %s", name, hint)
    if unserved := sorted(names & known):
        way = ", or write --traces_exporter otlp,duckdb" if "otlp" in unserved else ""
        log.warning(
            "no span is sent to %s: %s; pip install opentelemetry-distro%s",
            ", ".join(unserved),
            NO_SDK,
            way,
        )
