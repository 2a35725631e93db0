"""Request token ids of a vLLM-like server in the agent's own request, where that was asked for.

A server that refuses the fields gets the original request, and is not asked again.

Source: vLLM's OpenAI-compatible server: ``return_token_ids``; ``logprobs`` give the sampled tokens'
only with ``top_logprobs``, 0 of them will do.
"""

import logging
from typing import Any, Final
from urllib.parse import urlsplit

from lightning_otel.dialects import Dialect
from lightning_otel.dialects.dialect import Json

log = logging.getLogger(__name__)

_REFUSALS: Final = (400, 422)
_ELSEWHERE: Final = (
    ".openai.com",
    ".openai.azure.com",
    ".cognitiveservices.azure.com",
    ".services.ai.azure.com",
)
"""Host suffixes of OpenAI and Azure, which refuse the field: a refused request costs time."""

_refusing: set[str] = set()


def find_wanted(endpoint: Dialect, body: Json, server: str) -> dict[str, Any]:
    """Return the fields that ask a server for ids; none where it may not know them."""
    host = urlsplit(server).hostname or ""
    if server in _refusing or f".{host}".endswith(_ELSEWHERE):
        return {}
    return {name: value for name, value in endpoint.wanted_ids(body).items() if name not in body}


def is_refusal(status: object) -> bool:
    """Return whether an answer's status says that the server refused the request."""
    return status in _REFUSALS


def note_refusal(server: str) -> None:
    """Ask this server no more: it took the agent's own request, and not what was asked besides."""
    if server not in _refusing:
        _refusing.add(server)
        log.warning(
            "%s refuses to be asked for token ids, and is asked no more: its calls stay text",
            urlsplit(server).hostname,
        )
