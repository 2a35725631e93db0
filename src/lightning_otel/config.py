"""Every setting in one table, and the one reader of the environment.

Nonsense in a variable never stops a program: the default is taken and one warning is logged.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar
from urllib.parse import unquote

from lightning_otel.errors import warn_once
from lightning_otel.types.text import parse_size

T = TypeVar("T")

PREFIX: Final = "LIGHTNING_OTEL"
DEFAULT_STORE: Final = ".lightning/traces.duckdb"

_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"0", "false", "no", "off"})
_CONTENT_ON_SPANS: Final = frozenset({"span_only", "span_and_event"}) | _YES
_CONTENT_OFF: Final = frozenset({"no_content", "event_only"}) | _NO
_PASSWORD: Final = re.compile(r"//[^/@]*@")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A variable of the environment, and its value where it is empty or not understood.

    Attributes:
        parse: Returns the value of a text; None for one that is not understood.
        help: Its meaning; empty for what ``lightning-otel run`` sets in its child.
        wanted: Texts that are understood, in words.
        others: Variables that decide, too.
        show: Returns the value that counts, where others decide, too.
        is_secret: Whether the value is never shown.
    """

    name: str
    default: T
    parse: Callable[[str], T | None]
    help: str = ""
    wanted: str = ""
    others: tuple[str, ...] = ()
    show: Callable[[], object] | None = None
    is_secret: bool = False

    def read(self) -> T:
        """Return the value; the default, with one warning, where it is not understood."""
        if not (text := _read(self.name).strip()):
            return self.default
        value = self.parse(text)
        if value is None:
            warn_once(f"{self.name}={text!r} is not {self.wanted}; taking the default")
            return self.default
        return value


_own: MutableMapping[str, str] = os.environ
"""What ``run`` set for this process, in its environment or, if not for all it starts, elsewhere."""


def take_settings(settings: MutableMapping[str, str]) -> None:
    """Read these settings before the environment's."""
    global _own
    _own = settings


def handed_settings() -> Mapping[str, str]:
    """Return what ``run`` set for this process elsewhere than in its environment."""
    return {} if _own is os.environ else _own


def _read(name: str) -> str:
    return _own.get(name) or os.environ.get(name, "")


@dataclass(frozen=True, slots=True)
class Content:
    """The places where message content may go.

    Attributes:
        is_kept: Into the local store. On unless the user's own setting says otherwise.
        is_exported: Onto spans that other processors and exporters see. Off unless asked for.
    """

    is_kept: bool
    is_exported: bool


def _parse_flag(text: str) -> bool | None:
    return True if text.lower() in _YES else False if text.lower() in _NO else None


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _parse_content(text: str) -> Content | None:
    is_on = text.lower() in _CONTENT_ON_SPANS
    return Content(is_on, is_on) if is_on or text.lower() in _CONTENT_OFF else None


def _flag(name: str, default: bool, help: str = "", **more: Any) -> Setting[bool]:  # noqa: FBT001
    text = "one of 1, 0, true, false, yes, no, on, off"
    return Setting(name, default, _parse_flag, help, text, **more)


def _text(name: str, default: str = "", help: str = "", **more: Any) -> Setting[str]:
    return Setting(name, default, str, help, **more)


# fmt: off
SDK_DISABLED: Final = _flag("OTEL_SDK_DISABLED", False)
DISABLED: Final = Setting[tuple[str, ...]](
    "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", (), _parse_names)
RUN: Final = _flag("LIGHTNING_OTEL_RUN", False)
RUN_AGENT: Final = _text("LIGHTNING_OTEL_RUN_AGENT")
RUN_IS_NAMED: Final = _flag("LIGHTNING_OTEL_RUN_IS_NAMED", False)
ROLLOUT: Final = _text("LIGHTNING_OTEL_ROLLOUT_ID")
ATTEMPT: Final = _text("LIGHTNING_OTEL_ATTEMPT_ID", "1")
PROCESS: Final = _text("LIGHTNING_OTEL_PROCESS")
HANDED: Final = _text("LIGHTNING_OTEL_RUN_SETTINGS")
PROXY: Final = _text("LIGHTNING_OTEL_PROXY")
TRACE_PARENT: Final = _text("TRACEPARENT")
"""The W3C ``traceparent`` handed down by a parent process."""

ENABLED: Final = _flag(
    "LIGHTNING_OTEL", True, "record model calls, tools and agents",
    others=(SDK_DISABLED.name, "LIGHTNING_OTEL_COLLECT"),
    show=lambda: is_enabled())
DEBUG: Final = _flag(
    "LIGHTNING_OTEL_DEBUG", False, "log what is recorded and what is left out")
CONTENT: Final = Setting[Content | None](
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", None, _parse_content,
    "store message content", "NO_CONTENT, SPAN_ONLY, EVENT_ONLY or SPAN_AND_EVENT",
    show=lambda: content().is_kept)
EXPORT_CONTENT: Final = _flag(
    "LIGHTNING_OTEL_EXPORT_CONTENT", False, "send message content by OTLP, too",
    others=(CONTENT.name,), show=lambda: content().is_exported)
TRANSFORMS: Final = Setting[tuple[str, ...]](
    "LIGHTNING_OTEL_TRANSFORMS", (), _parse_names,
    "functions that change or drop spans before storage", "functions, each module:function")
CHILDREN: Final = Setting[str](
    "LIGHTNING_OTEL_CHILDREN", "all", lambda text: text if text in ("all", "own", "none") else None,
    "record processes that a recorded one starts", "all, own or none")
RETOKENIZATION_FIX: Final = _flag(
    "LIGHTNING_OTEL_RETOKENIZATION_FIX", False,
    "ask model servers for the token ids of prompt and answer")
STORE: Final = _text("LIGHTNING_OTEL_STORE", DEFAULT_STORE, "the default store")
STATE: Final = _text(
    "LIGHTNING_OTEL_STATE", "", "where queue, resources and runs are kept", others=(STORE.name,),
    show=lambda: state_place())
MAX_SIZE: Final = Setting[int | None](
    "LIGHTNING_OTEL_MAX_SIZE", None, lambda text: parse_size(text) or None,
    "size limit of a store", "a size such as 10GB")
TOKEN: Final = _text(
    "LIGHTNING_OTEL_TOKEN", "", "access token of a served store", is_secret=True)
APPLY: Final = _flag(
    "LIGHTNING_OTEL_APPLY", False, "apply live resources to requests")
ENDPOINT_KEY: Final = _text(
    "LIGHTNING_OTEL_ENDPOINT_KEY", "", "API key for endpoints of resources", is_secret=True)
PRICES: Final = _text(
    "LIGHTNING_OTEL_PRICES", "", "CSV file of model prices (model,input,output per million tokens)")
SETTINGS: Final[tuple[Setting[Any], ...]] = (
    ENABLED, DEBUG, CONTENT, EXPORT_CONTENT, TRANSFORMS, CHILDREN, RETOKENIZATION_FIX,
    STORE, STATE, MAX_SIZE, TOKEN, APPLY, ENDPOINT_KEY, PRICES,
    _text("OTEL_EXPORTER_OTLP_ENDPOINT", "", "also send spans to this OTLP endpoint",
          others=("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER"),
          show=lambda: endpoint.url if (endpoint := otlp_endpoint()) else "not set"),
    _text("OTEL_EXPORTER_OTLP_PROTOCOL", "", "OTLP protocol",
          others=("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",),
          show=lambda: otlp_setting("PROTOCOL") or "http/protobuf"),
    _text("OTEL_EXPORTER_OTLP_HEADERS", "", "OTLP headers", is_secret=True,
          others=("OTEL_EXPORTER_OTLP_TRACES_HEADERS",)),
)
# fmt: on
_INNER: Final = (RUN, RUN_AGENT, RUN_IS_NAMED, ROLLOUT, ATTEMPT, PROCESS, HANDED, PROXY)
OURS: Final = frozenset(
    setting.name for setting in (*SETTINGS, *_INNER) if setting.name.startswith(PREFIX)
)
FORMER: Final = {
    "LIGHTNING_OTEL_COLLECT": "0 counts as LIGHTNING_OTEL=0; set that instead",
    "LIGHTNING_OTEL_TRAIN": "nothing trains unasked; LIGHTNING_OTEL=0 switches recording off",
}
"""Switches that are gone, and what takes their place."""


def list_settings() -> list[dict[str, str]]:
    """Return every setting: its name, its value in words, the value's source and its meaning."""
    return [
        {
            "name": setting.name,
            "value": _value_of(setting),
            "source": next(filter(is_set, (setting.name, *setting.others)), "default"),
            "meaning": setting.help,
        }
        for setting in SETTINGS
    ]


def _value_of(setting: Setting[Any]) -> str:
    if setting.is_secret:
        return "set; not shown" if any(map(is_set, (setting.name, *setting.others))) else "not set"
    value = setting.show() if setting.show is not None else setting.read()
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if isinstance(value, int):
        return f"{value:,} bytes"
    text = "no limit" if value is None else str(value)
    # A URL's password, and its query, which may hold another one, stay here.
    return _PASSWORD.sub("//…@", text.partition("?")[0]) if "://" in text else text or "not set"


def is_set(name: str) -> bool:
    """Return whether a variable has a value."""
    return bool(_read(name).strip())


def unknown_variables() -> list[str]:
    """Return variables that are set, begin nearly as ours do, and are read by nobody."""
    begins = (PREFIX, "LIGHTNINGOTEL", "LIGHTNING_OTLP", "LIGTHNING_OTEL", "LIGHTING_OTEL")
    return sorted(name for name in os.environ if name.startswith(begins) and name not in OURS)


def invalid_values() -> Iterator[tuple[str, str]]:
    """Yield each variable whose value is not understood, and what it should be."""
    for setting in (*SETTINGS, SDK_DISABLED):
        text = _read(setting.name).strip()
        if text and setting.parse(text) is None:
            yield setting.name, setting.wanted
    if not all(":" in name for name in TRANSFORMS.read()):
        yield TRANSFORMS.name, TRANSFORMS.wanted


def is_enabled() -> bool:
    """Return whether capture may run: no switch is off, ours, a former one or OpenTelemetry's."""
    is_on = ENABLED.read() and not SDK_DISABLED.read()
    return is_on and not warn_of_former("LIGHTNING_OTEL_COLLECT")


def warn_of_former(name: str) -> bool:
    """Warn once where one of ``FORMER`` is off, naming what takes its place; return if it is."""
    is_off = _parse_flag(_read(name).strip()) is False
    if is_off:
        warn_once(f"{name} is gone: {FORMER[name]}")
    return is_off


def set_retokenization_fix() -> None:
    """Switch it on for this process, and for those that it starts."""
    os.environ[RETOKENIZATION_FIX.name] = "1"


def state_place() -> str:
    """Return where queue, resources and runs lie: as named, else beside the store."""
    return STATE.read() or STORE.read()


def content() -> Content:
    """Return where message content may go, by the GenAI conventions' variable and our own.

    Source: ``OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`` of the GenAI conventions. Unset,
    content is kept locally and not exported; set, it is obeyed in both places.
    """
    return CONTENT.read() or Content(is_kept=True, is_exported=EXPORT_CONTENT.read())


@dataclass(frozen=True, slots=True)
class ObjectStorage:
    """Keys, region and endpoint of a storage that speaks S3; empty what was not named."""

    key_id: str = field(repr=False)
    secret: str = field(repr=False)
    token: str = field(repr=False)
    region: str
    endpoint: str


def object_storage() -> ObjectStorage:
    """Return keys, region and endpoint from AWS's own variables."""
    return ObjectStorage(
        _first_of("AWS_ACCESS_KEY_ID"),
        _first_of("AWS_SECRET_ACCESS_KEY"),
        _first_of("AWS_SESSION_TOKEN"),
        _first_of("AWS_REGION", "AWS_DEFAULT_REGION"),
        _first_of("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    )


def _first_of(*names: str) -> str:
    return next(filter(None, map(_read, names)), "")


def exporters(signal: str = "TRACES") -> tuple[str, ...]:
    """Return the exporters named in ``OTEL_TRACES_EXPORTER``, or of another signal, in order."""
    return _parse_names(os.environ.get(f"OTEL_{signal}_EXPORTER", ""))


def otlp_setting(name: str, signal: str = "TRACES") -> str:
    """Return OpenTelemetry's setting for a signal, else the one for all signals."""
    return _first_of(f"OTEL_EXPORTER_OTLP_{signal}_{name}", f"OTEL_EXPORTER_OTLP_{name}")


@dataclass(frozen=True, slots=True)
class OtlpEndpoint:
    """A place to send spans to by OTLP.

    Attributes:
        is_whole: Whether the URL has its path, and ``/v1/traces`` is not to be added.
        protocol: ``grpc`` or an HTTP one.
        is_insecure: Whether gRPC without a scheme goes without TLS.
    """

    url: str
    is_whole: bool = False
    protocol: str = "http/protobuf"
    headers: Mapping[str, str] = field(default_factory=dict)
    compression: str = ""
    certificate: str = ""
    client_key: str = ""
    client_certificate: str = ""
    timeout_s: float = 10.0
    is_insecure: bool = False


def wants_otlp() -> bool:
    """Return whether the environment asks for spans to be sent by OTLP."""
    names = exporters()
    return "none" not in names and ("otlp" in names or bool(otlp_setting("ENDPOINT")))


def otlp_endpoint(url: str | None = None) -> OtlpEndpoint | None:
    """Return the endpoint for spans, at ``url`` or the environment's; None without either.

    Source: OpenTelemetry Protocol Exporter specification; timeout in seconds, as in Python's SDK.
    """
    endpoint = url or otlp_setting("ENDPOINT")
    if not endpoint and "otlp" not in exporters():
        return None
    protocol = otlp_setting("PROTOCOL") or "http/protobuf"
    default = "http://localhost:4317" if protocol == "grpc" else "http://localhost:4318"
    try:
        timeout_s = float(otlp_setting("TIMEOUT") or 10)
    except ValueError:
        warn_once(f"OTEL_EXPORTER_OTLP_TIMEOUT={otlp_setting('TIMEOUT')!r} is no number; taking 10")
        timeout_s = 10.0
    # "key=value" between commas, with percent signs, as OpenTelemetry writes it.
    pairs = (part.partition("=") for part in otlp_setting("HEADERS").split(",") if "=" in part)
    return OtlpEndpoint(
        url=endpoint or default,
        is_whole=not url and is_set("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
        protocol=protocol,
        headers={unquote(key).strip(): unquote(value).strip() for key, _, value in pairs},
        compression=otlp_setting("COMPRESSION").strip().lower(),
        certificate=otlp_setting("CERTIFICATE"),
        client_key=otlp_setting("CLIENT_KEY"),
        client_certificate=otlp_setting("CLIENT_CERTIFICATE"),
        timeout_s=timeout_s if timeout_s > 0 else 10.0,
        is_insecure=otlp_setting("INSECURE").strip().lower() == "true",
    )


def inherited_rollout() -> tuple[str, str] | None:
    """Return the rollout and attempt id handed down by a parent process, if any."""
    return (rollout_id, ATTEMPT.read()) if (rollout_id := ROLLOUT.read()) else None


def upstream_of(url: str) -> str:
    """Return the address that a request to the proxy of ``run`` goes on to; another as it is."""
    for pair in PROXY.read().split():
        address, _, upstream = pair.partition("=")
        if url.startswith(address):
            return upstream + url[len(address) :]
    return url


def enter_process(*, is_worker: bool) -> str:
    """Return the id of the executed program that this process is of; empty for the first one's."""
    parent, _, program_id = PROCESS.read().partition(":")
    if parent not in ("", str(os.getpid())) and not is_worker:
        program_id = os.urandom(6).hex()
    _own[PROCESS.name] = f"{os.getpid()}:{program_id}"
    return program_id


def read_environment(*prefixes: str) -> dict[str, str]:
    """Return the variables whose names begin so, as they stand for what this process starts."""
    return {name: text for name, text in os.environ.items() if name.startswith(prefixes)}
