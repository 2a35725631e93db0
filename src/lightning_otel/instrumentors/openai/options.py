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
    made = copy.copy(options)
    try:
        given = substitution.find_substitution(assigner, body, dialect)
        if given is None:
            return None
        if given.base_url is not None:
            _change_server(made, client, given.base_url)
    except ConfigError as exc:
        substitution.note_unfit(exc)
        return None
    changes = given.changes
    made.json_data = {**options.json_data, **changes}
    if options.extra_json:
        # What stands there goes before the rest of the body.
        extra = options.extra_json
        made.extra_json = {name: changes.get(name, extra[name]) for name in extra}
    return Substituted(made, given.stamp)


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
    own = options.headers if isinstance(options.headers, Mapping) else {}
    every = {**client.default_headers, **own}
    secret = {name: omit() for name in every if not substitution.is_plain(name)}
    options.headers = {
        **secret,
        **{name: every[name] for name in own if substitution.is_plain(name)},
        "Authorization": substitution.foreign_headers({})["Authorization"],
    }
