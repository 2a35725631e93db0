"""The one reader of the environment: every setting, its variable and its default.

Nonsense in a variable never stops a program: the default is taken and one warning is logged.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote

log = logging.getLogger(__name__)

STORE_ENV: Final = "LIGHTNING_OTEL_STORE"
ENABLED_ENV: Final = "LIGHTNING_OTEL"
STATE_ENV: Final = "LIGHTNING_OTEL_STATE"
TOKEN_ENV: Final = "LIGHTNING_OTEL_TOKEN"
EXPORT_CONTENT_ENV: Final = "LIGHTNING_OTEL_EXPORT_CONTENT"
DEBUG_ENV: Final = "LIGHTNING_OTEL_DEBUG"
"""Whether what is kept and what is not, and why, is told on stderr."""
ROLLOUT_ENV: Final = "LIGHTNING_OTEL_ROLLOUT_ID"
ATTEMPT_ENV: Final = "LIGHTNING_OTEL_ATTEMPT_ID"
RUN_ENV: Final = "LIGHTNING_OTEL_RUN"
"""Set by ``lightning-otel run`` in its child: trace from the start; the parent forwards."""
AGENT_ENV: Final = "LIGHTNING_OTEL_RUN_AGENT"
"""Set by ``lightning-otel run`` in its child: who acts where the program does not say."""
MAX_SIZE_ENV: Final = "LIGHTNING_OTEL_MAX_SIZE"
"""What a store may take; its oldest rollouts are dropped for what is beyond."""
TRANSFORMS_ENV: Final = "LIGHTNING_OTEL_TRANSFORMS"
RETOKENIZATION_FIX_ENV: Final = "LIGHTNING_OTEL_RETOKENIZATION_FIX"
"""Whether requests ask vLLM-like servers for the token ids they work with."""
TRAIN_ENV: Final = "LIGHTNING_OTEL_TRAIN"
"""Whether a training run may begin; nothing trains unless a program or a person asks for it."""
COLLECT_ENV: Final = "LIGHTNING_OTEL_COLLECT"
"""Whether what is captured is kept; without, requests can still be made with live resources."""
APPLY_ENV: Final = "LIGHTNING_OTEL_APPLY"
"""Whether requests are made with the resources that are live instead of what the agent wrote."""
ENDPOINT_KEY_ENV: Final = "LIGHTNING_OTEL_ENDPOINT_KEY"
"""The key for endpoints elsewhere than where the agent's client sends its own."""
CONTENT_ENV: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"

PREFIX: Final = "LIGHTNING_OTEL"
OURS: Final = tuple(
    sorted(value for name, value in globals().items()
           if name.endswith("_ENV") and str(value).startswith(PREFIX))
)  # fmt: skip
"""Every variable of our own that is read."""

DEFAULT_STORE: Final = ".lightning/traces.duckdb"

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"0", "false", "no", "off"})
_CONTENT_ON_SPANS: Final = frozenset({"span_only", "span_and_event"}) | _YES
_CONTENT_OFF: Final = frozenset({"no_content", "event_only"}) | _NO
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class Content:
    """Where message content may go.

    Attributes:
        is_kept: Into the local store. On unless the user's own setting says otherwise.
        is_exported: Onto spans that other processors and exporters see. Off unless asked for.
    """

    is_kept: bool
    is_exported: bool


def _warn_once(name: str, value: str, wanted: str) -> None:
    if name not in _warned:
        _warned.add(name)
        log.warning("%s=%r is not %s; taking the default", name, value, wanted)


def _flag(name: str, *, default: bool) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if not value:
        return default
    if value in _YES or value in _NO:
        return value in _YES
    _warn_once(name, value, "one of 1, 0, true, false, yes, no, on, off")
    return default


def is_set(name: str) -> bool:
    """Whether a variable says anything, be it nonsense."""
    return bool(os.environ.get(name, "").strip())


def unknown_names() -> list[str]:
    """Variables that are set, begin nearly as ours do, and are read by nobody."""
    begins = (PREFIX, "LIGHTNINGOTEL", "LIGHTNING_OTLP", "LIGTHNING_OTEL", "LIGHTING_OTEL")
    return sorted(name for name in os.environ if name.startswith(begins) and name not in OURS)


def misunderstood() -> Iterator[tuple[str, str]]:
    """Each variable whose value is not understood, and what it should be."""
    for name in (
        ENABLED_ENV, DEBUG_ENV, "OTEL_SDK_DISABLED", EXPORT_CONTENT_ENV, RETOKENIZATION_FIX_ENV,
        TRAIN_ENV, COLLECT_ENV, APPLY_ENV,
    ):  # fmt: skip
        value = os.environ.get(name, "").strip().lower()
        if value and value not in _YES | _NO:
            yield name, "one of 1, 0, true, false, yes, no, on, off"
    size = os.environ.get(MAX_SIZE_ENV, "").strip()
    if size and not size_of(size):
        yield MAX_SIZE_ENV, "a size such as 10GB"
    content_name = os.environ.get(CONTENT_ENV, "").strip().lower()
    if content_name and content_name not in _CONTENT_OFF | _CONTENT_ON_SPANS:
        yield CONTENT_ENV, "NO_CONTENT, SPAN_ONLY, EVENT_ONLY or SPAN_AND_EVENT"
    if not all(":" in name for name in named_transforms()):
        yield TRANSFORMS_ENV, "functions, each module:function"


def is_enabled() -> bool:
    """Whether capture may run: ``LIGHTNING_OTEL=0`` and ``OTEL_SDK_DISABLED=true`` stop it."""
    return _flag(ENABLED_ENV, default=True) and not _flag("OTEL_SDK_DISABLED", default=False)


def store_path() -> str:
    """The store used where none is named: ``LIGHTNING_OTEL_STORE``, else ``.lightning/…``."""
    return os.environ.get(STORE_ENV) or DEFAULT_STORE


def state_place() -> str:
    """Where queue, resources and runs lie: ``LIGHTNING_OTEL_STATE``, else beside the store."""
    return os.environ.get(STATE_ENV) or store_path()


def is_retokenization_fix_enabled() -> bool:
    """Whether ``LIGHTNING_OTEL_RETOKENIZATION_FIX`` has servers asked for token ids; off unless."""
    return _flag(RETOKENIZATION_FIX_ENV, default=False)


def set_retokenization_fix() -> None:
    """Switch it on for this process, and for those that it starts."""
    os.environ[RETOKENIZATION_FIX_ENV] = "1"


def is_collect_enabled() -> bool:
    """Whether spans are kept: ``LIGHTNING_OTEL_COLLECT=0`` keeps none, whatever is recorded."""
    return _flag(COLLECT_ENV, default=True)


def is_debug_enabled() -> bool:
    """Whether ``LIGHTNING_OTEL_DEBUG`` has what is kept and what is not told; off unless."""
    return _flag(DEBUG_ENV, default=False)


def is_apply_enabled() -> bool:
    """Whether ``LIGHTNING_OTEL_APPLY`` has requests made with live resources; off unless."""
    return _flag(APPLY_ENV, default=False)


def endpoint_key() -> str:
    """``LIGHTNING_OTEL_ENDPOINT_KEY``, which endpoints of resources are asked with; else empty."""
    return os.environ.get(ENDPOINT_KEY_ENV, "").strip()


def named_state() -> str | None:
    """``LIGHTNING_OTEL_STATE``, if it is set."""
    return os.environ.get(STATE_ENV) or None


def is_training_enabled() -> bool:
    """Whether a training run that is asked for may begin: ``LIGHTNING_OTEL_TRAIN=0`` forbids it.

    Capture (``LIGHTNING_OTEL``), what it keeps and what agents are given are switched elsewhere:
    each of them works without the others.
    """
    return _flag(TRAIN_ENV, default=True)


def token() -> str:
    """What a store behind ``lightning-otel serve`` asks for before it answers; empty for none."""
    return os.environ.get(TOKEN_ENV, "").strip()


def size_of(text: str) -> int | None:
    """The bytes that ``10GB``, ``500 MB`` or ``1.5GiB`` names; None if it names none."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    number, unit, is_binary = found.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** _POWERS[unit.lower()])


def max_size_bytes() -> int | None:
    """What a store may take, from ``LIGHTNING_OTEL_MAX_SIZE``; None, the default, is no limit."""
    value = os.environ.get(MAX_SIZE_ENV, "").strip()
    size = size_of(value) if value else None
    if value and not size:
        _warn_once(MAX_SIZE_ENV, value, "a size such as 10GB")
    return size or None


def content() -> Content:
    """Where message content may go, from the GenAI conventions' variable and our own.

    Source: ``OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`` of the GenAI conventions. Unset,
    content is kept locally and not exported; set, it is obeyed in both places.
    """
    value = os.environ.get(CONTENT_ENV, "").strip().lower()
    exported = _flag(EXPORT_CONTENT_ENV, default=False)
    if value in _CONTENT_OFF:
        return Content(is_kept=False, is_exported=False)
    if value in _CONTENT_ON_SPANS:
        return Content(is_kept=True, is_exported=True)
    if value:
        _warn_once(CONTENT_ENV, value, "NO_CONTENT, SPAN_ONLY, EVENT_ONLY or SPAN_AND_EVENT")
    return Content(is_kept=True, is_exported=exported)


@dataclass(frozen=True, slots=True)
class ObjectStorage:
    """How to reach an object storage that speaks S3; what is empty was not said.

    Attributes:
        endpoint: URL of a storage that is not AWS's own.
    """

    key_id: str = field(repr=False)
    secret: str = field(repr=False)
    token: str = field(repr=False)
    region: str
    endpoint: str


def object_storage() -> ObjectStorage:
    """Keys, region and endpoint from AWS's own variables."""
    get = os.environ.get
    return ObjectStorage(
        key_id=get("AWS_ACCESS_KEY_ID", ""),
        secret=get("AWS_SECRET_ACCESS_KEY", ""),
        token=get("AWS_SESSION_TOKEN", ""),
        region=get("AWS_REGION") or get("AWS_DEFAULT_REGION") or "",
        endpoint=get("AWS_ENDPOINT_URL_S3") or get("AWS_ENDPOINT_URL") or "",
    )


def traces_exporters() -> tuple[str, ...]:
    """The exporters named in ``OTEL_TRACES_EXPORTER``, in order."""
    names = os.environ.get("OTEL_TRACES_EXPORTER", "").split(",")
    return tuple(name.strip() for name in names if name.strip())


def has_propagators() -> bool:
    """Whether the user named how ids of spans are handed on to others."""
    return is_set("OTEL_PROPAGATORS")


def has_otlp_endpoint() -> bool:
    """Whether the user named a place to send spans to by OTLP."""
    return any(
        os.environ.get(name)
        for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    )


def named_transforms() -> tuple[str, ...]:
    """Functions that spans pass through before they are written, each ``module:function``."""
    names = os.environ.get(TRANSFORMS_ENV, "").split(",")
    return tuple(name.strip() for name in names if name.strip())


def otlp_protocol() -> str:
    """``grpc``, ``http/protobuf`` or whatever the user wrote; OTLP's own default is HTTP."""
    return (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )


@dataclass(frozen=True, slots=True)
class OtlpEndpoint:
    """Where to send spans by OTLP, and how.

    Attributes:
        is_whole: Whether the URL has its path, and ``/v1/traces`` is not to be added.
        protocol: ``grpc`` or an HTTP one.
        is_insecure: Whether gRPC without a scheme goes without TLS.
    """

    url: str
    is_whole: bool
    protocol: str
    headers: Mapping[str, str]
    compression: str
    certificate: str
    client_key: str
    client_certificate: str
    timeout_s: float
    is_insecure: bool


def otlp_endpoint(url: str | None = None) -> OtlpEndpoint | None:
    """The endpoint for spans; None if no URL is given and the environment names none.

    Args:
        url: Where to send instead of where the environment says; the rest is taken from there.

    Source: OpenTelemetry Protocol Exporter specification; the timeout is in seconds, as in
    Python's SDK.
    """

    def setting(name: str) -> str:
        return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(
            f"OTEL_EXPORTER_OTLP_{name}", ""
        )

    whole = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    found = url or whole or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    is_wanted = found or "otlp" in traces_exporters()
    if not is_wanted:
        return None
    protocol = otlp_protocol()
    default = "http://localhost:4317" if protocol == "grpc" else "http://localhost:4318"
    timeout = setting("TIMEOUT")
    try:
        timeout_s = float(timeout or 10)
    except ValueError:
        _warn_once("OTEL_EXPORTER_OTLP_TIMEOUT", timeout, "a number of seconds")
        timeout_s = 10.0
    return OtlpEndpoint(
        url=found or default,
        is_whole=bool(whole) and not url,
        protocol=protocol,
        headers=_headers(setting("HEADERS")),
        compression=setting("COMPRESSION").strip().lower(),
        certificate=setting("CERTIFICATE"),
        client_key=setting("CLIENT_KEY"),
        client_certificate=setting("CLIENT_CERTIFICATE"),
        timeout_s=timeout_s if timeout_s > 0 else 10.0,
        is_insecure=setting("INSECURE").strip().lower() == "true",
    )


def _headers(text: str) -> dict[str, str]:
    """Headers as OpenTelemetry writes them: ``key=value`` with percent signs, between commas."""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {unquote(key).strip(): unquote(value).strip() for key, _, value in pairs}


def has_chosen_autogen_messaging() -> bool:
    """Whether the user said himself if AutoGen is to make spans of its messages."""
    return "AUTOGEN_DISABLE_RUNTIME_TRACING" in os.environ


def is_run_child() -> bool:
    """Whether this process runs under ``lightning-otel run``."""
    return _flag(RUN_ENV, default=False)


def inherited_rollout() -> tuple[str, str] | None:
    """Rollout and attempt id handed down by a parent process, if any."""
    rollout_id = os.environ.get(ROLLOUT_ENV)
    return (rollout_id, os.environ.get(ATTEMPT_ENV) or "1") if rollout_id else None


def inherited_agent() -> str | None:
    """Who acts where the program does not say, handed down by ``lightning-otel run``."""
    return os.environ.get(AGENT_ENV) or None


def inherited_trace_parent() -> str | None:
    """The W3C ``traceparent`` handed down by a parent process, if any."""
    return os.environ.get("TRACEPARENT")


def child_environment(
    *,
    store: str,
    rollout_id: str,
    attempt_id: str,
    trace_parent: str,
    startup: Path,
    agent: str | None = None,
    transforms: Sequence[str] = (),
    enable_retokenization_fix: bool = False,
    apply: bool = False,
    debug: bool = False,
) -> dict[str, str]:
    """The environment in which ``lightning-otel run`` starts its child.

    Args:
        store: Absolute path of the catalogue.
        rollout_id: The run's rollout.
        attempt_id: The run's attempt.
        trace_parent: W3C ``traceparent`` of the run's root span.
        startup: Folder whose ``sitecustomize`` switches tracing on.
        agent: Who acts where the program does not say; by default whom a run around this one named.
        transforms: Functions that spans pass through, besides those named already.
        enable_retokenization_fix: Whether servers are asked for token ids, whatever is set already.
        apply: Whether requests are made with live resources, whatever is set already.
        debug: Whether the child tells what it keeps, whatever is set already.
    """
    named = ",".join((*named_transforms(), *transforms))
    python_path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **({AGENT_ENV: agent} if agent else {}),
        **({TRANSFORMS_ENV: named} if named else {}),
        **({RETOKENIZATION_FIX_ENV: "1"} if enable_retokenization_fix else {}),
        **({APPLY_ENV: "1"} if apply else {}),
        **({DEBUG_ENV: "1"} if debug else {}),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(startup), python_path])),
        STORE_ENV: store,
        RUN_ENV: "1",
        ROLLOUT_ENV: rollout_id,
        ATTEMPT_ENV: attempt_id,
        "TRACEPARENT": trace_parent,
    }


def bare_environment() -> dict[str, str]:
    """What of the environment Python needs to start, and DuckDB to tell the time: no secrets."""
    names = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")
    return {name: os.environ[name] for name in names if name in os.environ}
