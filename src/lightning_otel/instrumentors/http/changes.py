"""Requested changes to a request: live resources and token ids; each attempt is changed alike."""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import orjson

from lightning_otel import capture, config
from lightning_otel.dialects import Dialect
from lightning_otel.dialects.dialect import Json
from lightning_otel.errors import ConfigError
from lightning_otel.instrumentors import token_ids

_ROUTE: Final = re.compile(
    r"(?:/v\d\w*)?/(?:chat/completions|completions|responses|embeddings|messages|models/[^/:]+:\w+)$"
)
"""The part of a path that is the API's; what stands before it is the server's."""


class Changes(NamedTuple):
    """Requested changes to a request.

    Attributes:
        url: The whole address of another server; None for the program's own.
        stamp: The versions that it is made with, as spans say it.
    """

    fields: Mapping[str, Any]
    url: str | None
    stamp: str | None
    wanted: Mapping[str, Any]

    def write(self, content: Json, *, with_ids: bool) -> bytes:
        """Return the body to send in place of the program's."""
        return orjson.dumps({**content, **self.fields, **(self.wanted if with_ids else {})})


def find_changes(endpoint: Dialect, url: str, body: Json, *, can_move: bool) -> Changes | None:
    """Return the changes to a request for a whole URL; None for none."""
    frame = capture.current_frame()
    if not body:
        return None
    fields: Mapping[str, Any] = {}
    address = stamp = None
    if frame is not None and frame.assigner is not None:
        # Only where it was asked for.
        from lightning_otel.instrumentors.substitution import requests as substitution

        try:
            replacement = substitution.find_substitution(frame.assigner, body, endpoint)
            if replacement is not None:
                address = _move(url, replacement.base_url, can_move=can_move)
                fields, stamp = replacement.changes, replacement.stamp
        except ConfigError as exc:
            substitution.note_unfit(exc)
    id_fields: Mapping[str, Any] = {}
    if capture.asks_for_ids(frame):
        id_fields = token_ids.find_wanted(endpoint, {**body, **fields}, server_of(address or url))
    return Changes(fields, address, stamp, id_fields) if stamp or id_fields else None


def _move(url: str, base_url: str | None, *, can_move: bool) -> str | None:
    if base_url is None:
        return None
    route = _ROUTE.search(urlsplit(url).path)
    if route is None or not can_move:
        raise ConfigError("its client is bound to its server; leave base_url out of the endpoint")
    base, path = base_url.rstrip("/"), route[0]
    version = path.split("/")[1]
    if base.endswith(f"/{version}"):  # some clients write the version, others leave it to the user
        path = path.removeprefix(f"/{version}")
    query = urlsplit(url).query
    return f"{base}{path}" + (f"?{query}" if query else "")


def server_of(url: str) -> str:
    """Return the server of an address."""
    parts = urlsplit(config.upstream_of(url))
    return f"{parts.scheme}://{parts.netloc}"


def moved_headers(headers: Mapping[str, str], url: str, moved: str | None) -> dict[str, str]:
    """Return the headers without body-dependent ones; without secrets for another server."""
    from lightning_otel.instrumentors.substitution import requests as substitution

    allowed = {
        name: text
        for name, text in headers.items()
        if name.lower() not in ("content-length", "transfer-encoding", "content-encoding")
    }
    if moved is None:
        return allowed
    allowed = {name: text for name, text in allowed.items() if name.lower() != "host"}
    is_same = substitution.origin_of(moved) == substitution.origin_of(url)
    return allowed if is_same else substitution.foreign_headers(allowed)
