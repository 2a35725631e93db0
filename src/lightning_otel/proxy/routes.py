"""Addresses: those that a program is given in place of its servers' own, and where each leads.

Source: the documentation of Claude Code, Codex, Gemini CLI and LiteLLM, and of the SDKs of openai,
anthropic and google-genai, for the names of their variables.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final, NamedTuple
from urllib.parse import urlsplit

_PORTS: Final = {"http": 80, "https": 443}
_VERSION: Final = re.compile(r"/v\d")
_OPENAI: Final = ("https://api.openai.com", "/v1", "/v1")
_ANTHROPIC: Final = ("https://api.anthropic.com", "", "/v1")
_GEMINI: Final = ("https://generativelanguage.googleapis.com", "", "/v1beta")
VARIABLES: Final[Mapping[str, tuple[str, str, str]]] = {
    "ANTHROPIC_BASE_URL": _ANTHROPIC,
    "ANTHROPIC_API_BASE": _ANTHROPIC,
    "OPENAI_BASE_URL": _OPENAI,
    "OPENAI_API_BASE": _OPENAI,
    "GOOGLE_GEMINI_BASE_URL": _GEMINI,
    "GEMINI_API_BASE": _GEMINI,
    "GOOGLE_VERTEX_BASE_URL": ("", "", ""),
    "GROQ_BASE_URL": ("https://api.groq.com", "", ""),
    "TOGETHER_BASE_URL": ("https://api.together.xyz", "/v1", "/v1"),
}
"""By variable: the provider's own server ("" where it depends on the user), the path that the
variable's value ends with, and the version that stands before a path without one."""
SETTINGS_FILES: Final = (
    "~/.claude/settings.json (env), ~/.codex/config.toml, ~/.gemini/settings.json, opencode.json"
)
_FIRST_PARTY: Final = "_CLAUDE_CODE_ASSUME_FIRST_PARTY_BASE_URL"
_LOOPBACK: Final = "127.0.0.1,localhost"


class Destination(NamedTuple):
    """The place of one request; its ``host`` is what the header says, with the port."""

    origin: tuple[str, str, int]
    host: str
    target: bytes
    url: str


class Upstream(NamedTuple):
    """A server that requests go on to; ``version`` stands before a path that names none."""

    url: str
    version: str = ""


def server_address(upstream: Upstream, path: str = "") -> Destination:
    """Return the place that a path below a server's address means."""
    version = "" if _VERSION.match(path) else upstream.version
    url = f"{upstream.url.rstrip('/')}{version}{path}" if path else upstream.url
    parts = urlsplit(url)
    origin = (parts.scheme, parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 80))
    host = parts.netloc.rpartition("@")[2]
    target = url.partition("://")[2][len(parts.netloc) :] or "/"
    return Destination(origin, host, target.encode("latin-1"), url)


def make_addresses(
    port: int, environment: Mapping[str, str]
) -> tuple[dict[str, Upstream], dict[str, str]]:
    """Return the servers behind a proxy's port, by secret segment, and the program's variables.

    What the user set counts as the server, else the provider's own. Either way a program adds to
    its address the very path that it would add to the server's.
    """
    upstreams: dict[str, Upstream] = {}
    variables: dict[str, str] = {}
    for name, (default, end, version) in VARIABLES.items():
        value = environment.get(name, "").strip()
        parts = urlsplit(value or f"{default}{end}")
        if parts.scheme not in _PORTS or not parts.hostname:
            continue
        segment = secrets.token_urlsafe(16)
        user, mark, host = parts.netloc.rpartition("@")
        upstreams[segment] = Upstream(f"{parts.scheme}://{host}", "" if value else version)
        variables[name] = f"http://{user}{mark}127.0.0.1:{port}/{segment}{parts.path}"
        variables[name] += f"?{parts.query}" if parts.query else ""
    if not environment.get("ANTHROPIC_BASE_URL", "").strip():
        variables[_FIRST_PARTY] = "1"
    for name in ("NO_PROXY", "no_proxy"):
        if name == "NO_PROXY" or name in environment:
            variables[name] = ",".join(filter(None, (environment.get(name, ""), _LOOPBACK)))
    return upstreams, variables


def add_recipe(program: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Return a command line with what a program is told beside the variables."""
    name, *rest = program
    if PurePath(name).name == "codex":  # it reads no variable for its server
        return [name, "-c", f'openai_base_url="{variables["OPENAI_BASE_URL"]}"', *rest]
    return [*program]
