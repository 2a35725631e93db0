"""The client's options of a request, as a copy with the live resources."""

import copy
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from lightning_otel import capture
from lightning_otel.dialects import Dialect
from lightning_otel.errors import ConfigError
from lightning_otel.instrumentors.openai.stored import is_azure
from lightning_otel.instrumentors.substitution import requests as substitution


def substitute_resources(
    assigner: capture.ResourceAssigner, client: Any, options: Any, dialect: Dialect
) -> tuple[Any, str] | None:
    """Return a copy of the options with the resources, and the stamp of their versions."""
    if options.files or not isinstance(options.json_data, Mapping):
        return None
    body = {**options.json_data, **(options.extra_json or {})}
    variant = copy.copy(options)
    try:
        replacement = substitution.find_substitution(assigner, body, dialect)
        if replacement is None:
            return None
        if replacement.base_url is not None:
            _change_server(variant, client, replacement.base_url)
    except ConfigError as exc:
        substitution.note_unfit(exc)
        return None
    changes = replacement.changes
    variant.json_data = {**options.json_data, **changes}
    if options.extra_json:
        # What stands there goes before the rest of the body.
        extra = options.extra_json
        variant.extra_json = {name: changes.get(name, extra[name]) for name in extra}
    return variant, replacement.stamp


def _change_server(options: Any, client: Any, base_url: str) -> None:
    url = str(options.url)
    if urlsplit(url).netloc or is_azure(type(client)):  # type: ignore[arg-type]  # a class has a hash
        raise ConfigError("its client writes whole addresses; leave base_url out of the endpoint")
    options.url = f"{base_url.rstrip('/')}/{url.lstrip('/')}"
    if substitution.origin_of(base_url) == substitution.origin_of(str(client.base_url)):
        return
    # The class that leaves a header out, of the client's own library, which is not imported here.
    omit = getattr(sys.modules.get("openai"), "Omit", str)
    request_headers = options.headers if isinstance(options.headers, Mapping) else {}
    all_headers = {**client.default_headers, **request_headers}
    secret = {name: omit() for name in all_headers if not substitution.is_plain(name)}
    options.headers = {
        **secret,
        **{name: all_headers[name] for name in request_headers if substitution.is_plain(name)},
        "Authorization": substitution.foreign_headers({})["Authorization"],
    }
