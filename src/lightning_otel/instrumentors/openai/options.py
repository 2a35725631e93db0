"""The client's options of a request, as a copy with the live resources."""

import copy
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from lightning_otel import capture
from lightning_otel.dialects import Dialect
from lightning_otel.errors import ConfigError
from lightning_otel.instrumentors.substitution import requests as substitution


class Substituted(NamedTuple):
    """A request's options with the ``stamp`` of its versions, as spans say it."""

    options: Any
    stamp: str


def substitute_resources(
    assigner: capture.ResourceAssigner, client: Any, options: Any, dialect: Dialect
) -> Substituted | None:
    """Return a copy of the options with the resources; None where there are none."""
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
    return Substituted(variant, replacement.stamp)


def _change_server(options: Any, client: Any, base_url: str) -> None:
    url = str(options.url)
    if urlsplit(url).netloc or any(
        cls.__name__ == "BaseAzureClient" for cls in type(client).__mro__
    ):
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
