"""Versions, instrumentors and settings, which decide if anything is captured here."""

import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any, Final

from lightning_otel import config
from lightning_otel.doctor.finding import Finding, note, ok, problem
from lightning_otel.errors import ConfigError
from lightning_otel.forwarding.sending import Verdict, sender_for
from lightning_otel.provider import NO_SDK

_FOREIGN: Final = re.compile(
    r"openinference-instrumentation-.+|opentelemetry-instrumentation-(?:genai-.+|openai(?:-v2)?"
    r"|openai-agents(?:-v2)?|langchain|crewai|ag2|autogen|agno|anthropic|bedrock|cohere|google-.+"
    r"|groq|haystack|litellm|llamaindex|mistralai|ollama|replicate|together|vertexai|watsonx)"
)
"""Distributions whose instrumentors record agents and models too: of three families."""
_VERSIONS = ("duckdb", "opentelemetry-sdk", "opentelemetry-instrumentation", "openai")
_DISABLED_ENV = "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"
_FEW_FILES = 1024
_PATIENCE_S = 2.0


def environment() -> Iterator[Finding]:
    """Look at what is installed here and how it is set."""
    yield from _check_versions()
    yield from _check_instrumentors()
    yield from _check_settings()


def _check_versions() -> Iterator[Finding]:
    found = [f"python {'.'.join(map(str, sys.version_info[:3]))}"]
    found += [f"{name} {version}" for name in _VERSIONS if (version := _installed_version(name))]
    yield ok("versions", ", ".join(found))
    if _installed_version("openai") is None:
        yield note("no-openai", "openai is not installed here", "pip install openai")
    httpx = _installed_version("httpx")
    if httpx is not None and httpx.startswith("1.0") and "dev" in httpx:
        yield problem(
            "httpx-pre-release",
            f"httpx {httpx} is a pre-release: every openai call fails once it is imported",
            "pip install 'httpx<1'",
        )


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_instrumentors() -> Iterator[Finding]:
    ours, foreign = [], []
    for entry in metadata.entry_points(group="opentelemetry_instrumentor"):
        package = entry.dist.name.lower().replace("_", "-") if entry.dist is not None else "?"
        if package == "lightning-otel":
            ours.append(entry.name)
        elif _FOREIGN.fullmatch(package):
            foreign.append((package, entry))
    if ours:
        yield ok("instrumentors", f"instrumentors: {', '.join(sorted(ours))}")
    else:
        yield problem(
            "no-entry-points",
            "lightning-otel's entry points are not installed, so opentelemetry-instrument cannot "
            "find it",
            "pip install --force-reinstall lightning-otel",
        )
    for package, entry in sorted(foreign, key=lambda found: found[0]):
        yield _check_foreign(package, entry)


def _check_foreign(package: str, entry: metadata.EntryPoint) -> Finding:
    """Look at another family's instrumentor."""
    known = f"{package} {_installed_version(package)}"
    was_imported = entry.module in sys.modules
    try:
        instrumentor = entry.load()
    except (ImportError, AttributeError, TypeError) as exc:
        return problem(
            "foreign-broken",
            f"{known} cannot be imported ({exc}); opentelemetry-instrument says nothing of that",
            f"pip uninstall {package}",
        )
    treated = "its spans are read, and a request that ours recorded too stays one transition"
    if was_imported and _is_active(instrumentor):
        return note("foreign", f"{known} is active in this process: {treated}")
    return note(
        "foreign",
        f"{known} is installed, and active under opentelemetry-instrument: {treated}",
        f"to record each request once: {_DISABLED_ENV}={entry.name}",
    )


def _is_active(instrumentor: Any) -> bool:
    """Return True if an instrumentor has been switched on.

    An instrumentor is one object whose constructor may reset its settings, so it is not called.
    """
    try:
        return bool(instrumentor.__new__(instrumentor).is_instrumented_by_opentelemetry)
    except (AttributeError, TypeError):
        return False


def _check_settings() -> Iterator[Finding]:
    if not config.is_enabled():
        yield problem(
            "recording-off",
            "recording is switched off by LIGHTNING_OTEL or OTEL_SDK_DISABLED",
            f"unset {config.ENABLED.name} OTEL_SDK_DISABLED",
        )
    if not config.COLLECT.read():
        yield problem(
            "collect-off",
            "no span is kept, as the environment asks",
            f"unset {config.COLLECT.name}",
        )
    content = config.content()
    if not content.is_kept:
        yield problem(
            "content-off",
            f"{config.CONTENT.name} keeps messages out of the store: transitions will be empty",
            f"unset {config.CONTENT.name}",
        )
    elif content.is_exported:
        yield note("content-exported", "messages are sent out with spans, as the environment asks")
    if config.wants_otlp():
        yield from _check_sending()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FEW_FILES:
        yield note(
            "few-files",
            f"only {soft} files may be open at once; large stores need more",
            "ulimit -n 4096",
        )


def _check_sending() -> Iterator[Finding]:
    """Look at what keeps spans from being sent: a hook without an SDK, or the endpoint."""
    has_sdk = any(metadata.entry_points(group="opentelemetry_configurator"))
    exporters = config.traces_exporters()
    if "otlp" in exporters and "duckdb" not in exporters and not has_sdk:
        yield problem(
            "otlp",
            f"opentelemetry-instrument sends no span: {NO_SDK}",
            "export OTEL_TRACES_EXPORTER=otlp,duckdb",
        )
    endpoint = config.otlp_endpoint()
    if endpoint is None:
        return
    try:
        quick = replace(endpoint, timeout_s=min(endpoint.timeout_s, _PATIENCE_S))
        answer = sender_for(quick).send(b"")
    except ConfigError as exc:
        yield problem("otlp", f"no span is sent by OTLP: {exc.what}", exc.remedy)
        return
    where = f"by OTLP ({endpoint.protocol}) to {endpoint.url}"
    if answer.verdict is Verdict.DELIVERED:
        yield ok("otlp", f"spans are also sent out {where}")
    else:
        remedy = "lightning-otel forward --once"
        yield problem("otlp", f"no span is sent {where}: {answer.reason}", remedy)
