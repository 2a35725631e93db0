"""Readers of what goes over a wire, one for each dialect: JSON in, messages and attributes out."""

import re
from functools import lru_cache
from typing import Final

from lightning_otel.dialects.anthropic import Anthropic
from lightning_otel.dialects.chat import Chat
from lightning_otel.dialects.completions import Completions, Embeddings
from lightning_otel.dialects.dialect import Answer, Dialect
from lightning_otel.dialects.gemini import Gemini
from lightning_otel.dialects.responses import Responses

__all__ = ["Answer", "Dialect", "find_dialect", "may_ask_model", "register_dialect"]

_GOOGLE: Final = r"/[^/:]+:(generateContent|streamGenerateContent)"
_routes: Final[list[tuple[re.Pattern[str], Dialect]]] = [
    (re.compile(rf"(?:{end})$"), dialect)
    for end, dialect in (
        (r"/chat/completions", Chat()),
        (r"/responses", Responses()),
        (r"/completions", Completions()),
        (r"/embeddings", Embeddings()),
        (r"/v1/messages", Anthropic()),
        (rf"/projects/.+{_GOOGLE}", Gemini("gcp.vertex_ai")),
        (_GOOGLE, Gemini()),
    )
]
"""By the end of a path its dialect; the first that matches counts, after a program's own."""
_ENDS: Final = ("completions", "responses", "embeddings", "messages", "enerateContent")
"""How all paths end whose dialect is known here: most requests of a program end otherwise."""
_own_routes: Final[list[tuple[re.Pattern[str], Dialect]]] = []
_OTHER_ENDS: Final = ("chat", "generate", "complete", "converse", "invoke", "rerank", "embed")
"""How last segments begin that may ask a model in no dialect that is known."""
_LOCAL: Final = re.compile(
    r"http://(?:localhost|127\.[\d.]+|\[::1\])(?::\d+)?/v\d/(?!.*count_?tokens)"
    r"(?!(?:traces|logs|metrics|models|files|batches|moderations|tokenize|detokenize)\b)",
    re.IGNORECASE,
)
"""Addresses of a server on this machine that may be a model's."""


def register_dialect(path: str, dialect: Dialect) -> None:
    """Read requests to a path in a dialect of your own; it goes before those that are known.

    Args:
        path: A regular expression that matches the end of the path, such as ``/v2/chat``.
        dialect: Its reader.
    """
    _own_routes.insert(0, (re.compile(rf"(?:{path})$"), dialect))
    _find_route.cache_clear()


def find_dialect(method: str, path: str) -> Dialect | None:
    """Return the dialect of a request; None if it is not to a model endpoint.

    Args:
        method: The HTTP method.
        path: The path, whatever a gateway puts before it, or the whole URL.
    """
    return _find_route(path) if method.upper() == "POST" else None


@lru_cache(256)
def _find_route(path: str) -> Dialect | None:
    bare = path.partition("?")[0].partition("#")[0].strip("/")
    routes = [*_own_routes, *_routes] if bare.endswith(_ENDS) else _own_routes
    return next((dialect for route, dialect in routes if route.search(f"/{bare}")), None)


@lru_cache(256)
def may_ask_model(url: str) -> bool:
    """Return whether a POST to an address that is in no dialect looks as if it asked a model."""
    bare = url.partition("?")[0].rstrip("/")
    last = bare[bare.rfind("/") + 1 :].lower()
    return (
        last.startswith(_OTHER_ENDS)
        or last.endswith("predict")
        or "//bedrock-runtime." in bare
        or (bare.startswith("http://") and _LOCAL.match(bare) is not None)
    )
