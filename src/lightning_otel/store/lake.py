"""Addresses of lakes: one string with the PostgreSQL, the data path and the local store.

The traced process parses it to find the local store: no DuckDB, no connection.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from lightning_otel.errors import ConfigError

SCHEME: Final = "ducklake:"
EXAMPLE: Final = "ducklake:postgres://user@host:5432/db?data=s3://bucket/prefix"
_WORD: Final = re.compile(r"\s*(\w+)\s*=\s*(?:'((?:[^'\\]|\\.)*)'|((?:[^\s'\\]|\\.)*))(?=\s|$)")
_ESCAPED: Final = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class LakeAddress:
    """The address of a lake.

    Attributes:
        parameters: libpq's keywords and values, without the password.
        password: PostgreSQL's; empty where libpq is to find it (``PGPASSWORD``, ``~/.pgpass``).
        data: Its files: ``s3://bucket/prefix`` or a folder; empty for what its catalogue says.
        local: The store on this machine that recordings go to; empty for the default one.
    """

    parameters: Mapping[str, str]
    password: str = field(default="", repr=False)
    data: str = ""
    local: str = ""

    @property
    def conninfo(self) -> str:
        """The connection string for libpq, without the password."""
        return " ".join(f"{key}={_quote_value(value)}" for key, value in self.parameters.items())

    @property
    def name(self) -> str:
        """The address as one string, without the password."""
        values = dict(self.parameters)
        user = f"{quote(values.pop('user'), safe='')}@" if "user" in values else ""
        port = f":{values.pop('port')}" if values.get("host") and "port" in values else ""
        host = quote(values.pop("host", ""), safe="[]:,")
        place = f"postgres://{user}{host}{port}/{quote(values.pop('dbname', ''), safe='')}"
        if self.data:
            values["data"] = self.data
        if self.local:
            values["local"] = self.local
        return f"{SCHEME}{place}{'?' if values else ''}{urlencode(values, safe='/:')}"


def is_lake(address: str) -> bool:
    """Return whether a store's name is that of a lake."""
    return address.startswith(SCHEME)


def lake_address(address: str, data: str | None = None) -> LakeAddress:
    """Return the lake of a string; ``data`` is where its files lie, if that does not say.

    ``ducklake:postgres://user@host:port/db?data=…&local=…`` with libpq's parameters beside ours, or
    ``ducklake:postgres:dbname=… host=… data=… local=…``.
    Source: PostgreSQL's manual, 34.1.1, "Connection Strings".
    """
    kind, _, body = address.removeprefix(SCHEME).partition(":")
    if not is_lake(address) or kind not in ("postgres", "postgresql"):
        raise ConfigError(
            "a lake's catalogue is in PostgreSQL, where several machines can write; "
            f"name it as in {EXAMPLE}"
        )
    values = _of_url(body) if body.startswith("//") else _of_words(body)
    place = data or values.get("data", "")
    if "://" in place and not place.startswith("s3://"):
        scheme = place.partition("://")[0]
        raise ConfigError(
            f"a lake's files cannot lie in {scheme}://; name an s3:// URL or a folder"
        )
    ours = {name: values.pop(name, "") for name in ("password", "data", "local")}
    return LakeAddress(values, **{**ours, "data": place})


def _of_url(body: str) -> dict[str, str]:
    try:
        parts = urlsplit(f"postgres:{body}")
        login, _, hosts = parts.netloc.rpartition("@")
        user, _, password = login.partition(":")
        values = {"dbname": unquote(parts.path.lstrip("/")), "user": unquote(user)}
        values["password"] = unquote(password)
        pairs = [_host_and_port(part) for part in hosts.split(",")]
        values["host"] = ",".join(host for host, _ in pairs)
        values["port"] = ",".join(port for _, port in pairs) if any(p for _, p in pairs) else ""
        values |= dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True)
                      if parts.query else ())  # fmt: skip
    except ValueError:
        raise ConfigError(f"the lake's URL cannot be read; write it as in {EXAMPLE}") from None
    return {key: value for key, value in values.items() if value}


def _host_and_port(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        return host, port.lstrip(":")
    host, _, port = text.partition(":")
    return unquote(host), port


def _of_words(body: str) -> dict[str, str]:
    values: dict[str, str] = {}
    at = 0
    text = body.strip()
    while at < len(text):
        word = _WORD.match(text, at)
        if word is None:
            raise ConfigError(
                "the lake's connection words cannot be read; write them as in "
                "ducklake:postgres:dbname=lake host=db user=me data=s3://bucket/prefix"
            )
        key, quoted, plain = word.groups()
        values[key] = _ESCAPED.sub(r"\1", plain if quoted is None else quoted)
        at = word.end()
    return {key: value for key, value in values.items() if value}


def _quote_value(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
