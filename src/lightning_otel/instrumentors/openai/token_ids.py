"""Asking a vLLM-like server for the token ids it works with, in the agent's own request.

Only where that was told, and only for what the agent left unsaid. A server that refuses the fields
gets the request as the agent wrote it, and is not asked again; the agent sees nothing of it.

Source: vLLM's OpenAI-compatible server: ``return_token_ids``; ``logprobs`` give the sampled tokens'
only with ``top_logprobs``, 0 of them will do.
"""

import copy
import logging
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from lightning_otel.dialects import Dialect

log = logging.getLogger(__name__)

_REFUSALS: Final = (400, 422)
"""What servers answer to a field they do not know."""
_ELSEWHERE: Final = (
    ".openai.com",
    ".openai.azure.com",
    ".cognitiveservices.azure.com",
    ".services.ai.azure.com",
)
"""Ends of the hosts of OpenAI and of Azure's OpenAI, which give no token ids and refuse the field.

By name, since asking them would cost a refused request; others that refuse say so themselves.
"""

_refusing: set[str] = set()
"""Servers that refused in this process."""


def add_requests(endpoint: Dialect, client: Any, options: Any) -> Any | None:
    """Return a copy of the options that also asks for ids; None where they are sent as they are."""
    body, extra = options.json_data, options.extra_json or {}
    if not isinstance(body, Mapping) or options.files or not _may_know(client, options):
        return None
    said = {**body, **extra}
    wanted = {name: value for name, value in endpoint.wanted_ids(said).items() if name not in said}
    if not wanted:
        return None
    asked = copy.copy(options)
    asked.extra_json = {**extra, **wanted}
    return asked


def _may_know(client: Any, options: Any) -> bool:
    """Return whether the server may know the fields: it is not known to lack or refuse them."""
    # By name, not isinstance: the Azure class is known only to a module we do not import.
    if any(cls.__name__ == "BaseAzureClient" for cls in type(client).__mro__):
        return False
    server = server_of(client, options)
    host = urlsplit(server).hostname or ""
    return server not in _refusing and not f".{host}".endswith(_ELSEWHERE)


def server_of(client: Any, options: Any) -> str:
    """The server a request goes to: the client's base URL, unless the request names a whole URL."""
    url = str(options.url)
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}" if parts.netloc else str(client.base_url)


def is_refusal(exc: BaseException) -> bool:
    """Return whether an exception says that the server refused the request."""
    return getattr(exc, "status_code", None) in _REFUSALS


def note_refusal(client: Any, options: Any) -> None:
    """Ask this server no more: it took the agent's own request, and not what was asked besides."""
    server = server_of(client, options)
    if server not in _refusing:
        _refusing.add(server)
        log.warning(
            "%s refuses to be asked for token ids, and is asked no more: its calls stay text",
            urlsplit(server).hostname,
        )
