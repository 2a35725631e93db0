"""Every setting with its value, and where that comes from; what is secret is said to be set."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from lightning_otel import config

DEFAULT: Final = "default"
_PASSWORD: Final = re.compile(r"//[^/@]*@")
_SECRET: Final = "set; not shown"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as this process reads it.

    Attributes:
        name: Its variable.
        value: In words; a secret is never among them.
        source: The variable it was taken from, or ``default``.
        meaning: What it decides.
    """

    name: str
    value: str
    source: str
    meaning: str


def settings() -> list[Setting]:
    """Every setting, those of one subject together."""
    return [*_of_recording(), *_of_places(), *_of_learning(), *_of_sending()]


def _of_recording() -> Iterator[Setting]:
    content = config.content()
    yield _flag(config.ENABLED_ENV, config.is_enabled, "whether anything is captured",
                "OTEL_SDK_DISABLED")  # fmt: skip
    yield _flag(
        config.DEBUG_ENV, config.is_debug_enabled, "whether what is kept and what is not is told"
    )
    yield _flag(config.COLLECT_ENV, config.is_collect_enabled, "whether what is captured is kept")
    yield _setting(config.CONTENT_ENV, _yes(content.is_kept), "whether messages are kept in it")
    yield _setting(
        config.EXPORT_CONTENT_ENV, _yes(content.is_exported), "whether messages are sent out, too",
        config.CONTENT_ENV,
    )  # fmt: skip
    yield _setting(
        config.TRANSFORMS_ENV, ", ".join(config.named_transforms()) or "none",
        "functions that spans pass through before they are written",
    )  # fmt: skip
    yield _flag(
        config.RETOKENIZATION_FIX_ENV, config.is_retokenization_fix_enabled,
        "whether servers are asked for the token ids they work with",
    )  # fmt: skip


def _of_places() -> Iterator[Setting]:
    yield _setting(config.STORE_ENV, _shown(config.store_path()), "the store where none is named")
    yield _setting(
        config.STATE_ENV, _shown(config.state_place()), "where queue, resources and runs lie",
        config.STORE_ENV,
    )  # fmt: skip
    size = config.max_size_bytes()
    yield _setting(
        config.MAX_SIZE_ENV, f"{size:,} bytes" if size else "no limit", "what a store may take"
    )
    yield _secret(config.TOKEN_ENV, "token for a store behind lightning-otel serve")


def _of_learning() -> Iterator[Setting]:
    yield _flag(config.TRAIN_ENV, config.is_training_enabled, "whether a training run may begin")
    yield _flag(
        config.APPLY_ENV, config.is_apply_enabled, "whether requests are made with live resources"
    )
    yield _secret(config.ENDPOINT_KEY_ENV, "key for endpoints that resources name")


def _of_sending() -> Iterator[Setting]:
    endpoint = config.otlp_endpoint()
    yield _setting(
        "OTEL_EXPORTER_OTLP_ENDPOINT", _shown(endpoint.url) if endpoint else "nowhere",
        "where spans are sent by OTLP as well", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        "OTEL_TRACES_EXPORTER",
    )  # fmt: skip
    yield _setting(
        "OTEL_EXPORTER_OTLP_PROTOCOL", config.otlp_protocol(), "how",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    )  # fmt: skip
    yield _secret(
        "OTEL_EXPORTER_OTLP_HEADERS", "what is sent with them", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"
    )


def _setting(name: str, value: str, meaning: str, *others: str) -> Setting:
    return Setting(name, value, next(filter(config.is_set, (name, *others)), DEFAULT), meaning)


def _flag(name: str, read: Callable[[], bool], meaning: str, *others: str) -> Setting:
    return _setting(name, _yes(read()), meaning, *others)


def _secret(name: str, meaning: str, *others: str) -> Setting:
    is_set = any(map(config.is_set, (name, *others)))
    return _setting(name, _SECRET if is_set else "not set", meaning, *others)


def _yes(value: bool) -> str:  # noqa: FBT001  # a word for a boolean
    return "yes" if value else "no"


def _shown(place: str) -> str:
    """A path, or a URL without its password and query, which may hold another one."""
    return _PASSWORD.sub("//…@", place.partition("?")[0]) if "://" in place else place
