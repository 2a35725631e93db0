"""Valid bodies of resources; anything else is refused at publication."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args
from urllib.parse import urlsplit

from lightning_otel.errors import ConfigError
from lightning_otel.instrumentors.substitution import CANARY, LIVE
from lightning_otel.redact import scrub
from lightning_otel.types import Prompt, Resource, ResourceKind
from lightning_otel.types.values import check_finite

MAX_BYTES: Final = 1 << 20
_ROLES: Final = ("user", "assistant", "tool")
_KEYS: Final = {
    "prompt": ("template", "examples"),
    "endpoint": ("base_url", "model", "sampling"),
    "weights": ("uri", "base_model"),
}
_REDACTED: Final = re.compile(r"\[redacted:(\w+)\]")
_ALIAS: Final = re.compile(r"[^\W\d][\w.-]*")
_NAME: Final = re.compile(r"[^@,\s\x00-\x1f\x7f]([^@,\x00-\x1f\x7f]*[^@,\s\x00-\x1f\x7f])?")
_LONGEST_NAME: Final = 200


def check_name(name: object) -> str:
    """The name, which versions are written after with ``@`` and listed with ``,``."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"no resource can be named {name!r}; write a word such as system_prompt, or "
            "planner/system_prompt for the agent planner alone"
        )
    if not all(name.split("/")):
        raise ConfigError(f"the resource's name {name!r} has an empty part; write agent/name")
    return name


def check_alias(alias: str, weight: float | None) -> None:
    """Refuse an alias that is no word, and a weight that is no share or not a canary's."""
    if not _ALIAS.fullmatch(alias):
        raise ConfigError(f"no alias can be {alias!r}; write a word such as {LIVE} or {CANARY}")
    if weight is not None and alias != CANARY:
        raise ConfigError(f"{alias} has no weight; only {CANARY} is given to a share")
    if weight is not None and not 0 <= check_finite("weight", weight) <= 1:
        raise ConfigError(f"the weight of a canary is {weight}; it is a share from 0 to 1")


def check_body(name: str, content: object, kind: ResourceKind | None) -> tuple[ResourceKind, str]:
    """The kind and canonical JSON of what is published."""
    body = _check_mapping(name, content)
    form = kind or _check_kind(name, body)
    if form not in get_args(ResourceKind):
        raise ConfigError(f"no kind {form!r}; there are {', '.join(get_args(ResourceKind))}")
    for key in body.keys() - set(_KEYS[form]):
        raise ConfigError(
            f"{name} has {key!r}, which {form} does not have; it has {', '.join(_KEYS[form])}"
            + ("; keys of a server stay with the agent" if "key" in str(key).lower() else "")
        )
    whole = {"prompt": _check_prompt, "endpoint": _check_endpoint, "weights": _check_weights}[form](
        name, body
    )
    try:
        text = json.dumps(
            whole, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
        )
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{name} cannot be written as JSON ({exc}); give plain values") from exc
    if size > MAX_BYTES:
        raise ConfigError(
            f"{name} has {size} bytes; a resource holds up to {MAX_BYTES}, files go by their uri"
        )
    clean = scrub(text)
    if clean != text:
        kinds = sorted(set(_REDACTED.findall(clean)) - set(_REDACTED.findall(text)))
        raise ConfigError(
            f"{name} holds a secret ({', '.join(kinds) or 'masked'}), which every agent and page "
            "would be given; take it out, and let the program read it from its environment"
        )
    return form, text


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Finite numbers by name."""
    return {str(name): check_finite(f"the metric {name}", value) for name, value in metrics.items()}


def _check_mapping(name: str, content: object) -> dict[str, Any]:
    if isinstance(content, Prompt):
        return {"template": content.template, "examples": list(content.examples)}
    if isinstance(content, str):
        return {"template": content}
    if isinstance(content, Mapping):
        return dict(content)
    if isinstance(content, Sequence) and not isinstance(content, bytes) and content:
        first, *examples = content
        if isinstance(first, Mapping) and first.get("role") in ("system", "developer"):
            return {"template": first.get("content"), "examples": examples}
    raise ConfigError(
        f"{name} is {type(content).__name__}; publish text, a Prompt, chat messages that begin "
        "with the system's, or an object such as {'model': …, 'sampling': {…}}"
    )


def _check_kind(name: str, body: Mapping[str, Any]) -> ResourceKind:
    for kind, keys in _KEYS.items():
        if body.keys() & set(keys):
            return kind  # type: ignore[return-value]  # a key of the table is a kind
    kinds = "; ".join(f"{kind}: {', '.join(keys)}" for kind, keys in _KEYS.items())
    raise ConfigError(f"{name} has none of a resource's keys; there are {kinds}")


def _check_prompt(name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    template, examples = body.get("template"), body.get("examples") or []
    if not isinstance(template, str) or not template.strip():
        raise ConfigError(f"the prompt {name} has no text; publish some")
    if not isinstance(examples, Sequence) or isinstance(examples, str):
        raise ConfigError(f"the examples of {name} are no list; write a list of chat messages")
    return {"template": template, "examples": [_check_example(name, item) for item in examples]}


def _check_example(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise ConfigError(
            f"an example of {name} is no message of {', '.join(_ROLES)}: {str(message)[:80]!r}; "
            "write {'role': 'user', 'content': …} and {'role': 'assistant', 'content': …}"
        )
    content = message.get("content")
    if not isinstance(content, (str, list)) and not message.get("tool_calls"):
        raise ConfigError(f"an example of {name} says nothing; give its message a content")
    return dict(message)


def _check_endpoint(name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    url, model = body.get("base_url"), body.get("model")
    sampling = body.get("sampling") or {}
    if not (url or model or sampling):
        raise ConfigError(f"the endpoint {name} says nothing; give a base_url, model or sampling")
    if url is not None and not _is_web(url):
        raise ConfigError(f"the base_url of {name} is {url!r}; write one like http://host:8000/v1")
    if model is not None and (not isinstance(model, str) or not model.strip()):
        raise ConfigError(f"the model of {name} is {model!r}; write the name its server knows")
    if not isinstance(sampling, Mapping):
        raise ConfigError(f"the sampling of {name} is {sampling!r}; write {{'temperature': …}}")
    endpoint = {"base_url": url, "model": model, "sampling": _check_sampling(name, sampling)}
    return {key: value for key, value in endpoint.items() if value}


_RANGES: Final = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, math.inf),
    "max_tokens": (1, math.inf),
    "max_completion_tokens": (1, math.inf),
    "max_output_tokens": (1, math.inf),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, math.inf),
    "seed": (-math.inf, math.inf),
}
_OTHERS: Final = ("stop", "reasoning_effort", "logit_bias")


def _check_sampling(name: str, sampling: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in sampling.items():
        if key in _OTHERS:
            continue
        if key not in _RANGES:
            names = ", ".join((*_RANGES, *_OTHERS))
            raise ConfigError(f"the sampling of {name} has {key!r}; there are {names}")
        low, high = _RANGES[key]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise ConfigError(f"{key} of {name} is {value!r}; it lies between {low} and {high}")
    return dict(sampling)


def _is_web(url: object) -> bool:
    if not isinstance(url, str):
        return False
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    is_plain = parts.username is None and not parts.query and not parts.fragment
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and is_plain


def _check_weights(name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    uri, base = body.get("uri"), body.get("base_model")
    if not isinstance(uri, str) or not uri.strip():
        raise ConfigError(f"the weights {name} have the uri {uri!r}; write a path or an address")
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"the base_model of {name} is {base!r}; write its name")
    return {"uri": uri, **({"base_model": base} if base else {})}


def format_lines(resource: Resource) -> list[str]:
    """A body as lines for people: a prompt's text, then all else as JSON."""
    body = dict(resource.body)
    template = str(body.pop("template", ""))
    fields = {name: value for name, value in body.items() if value}
    text = json.dumps(fields, ensure_ascii=False, indent=2, sort_keys=True) if fields else ""
    return [*template.splitlines(), *text.splitlines()]
