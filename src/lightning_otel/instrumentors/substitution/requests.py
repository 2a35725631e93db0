"""A request made with the resources that are live, instead of what the agent wrote.

Only where ``apply`` was asked for. The agent's own objects stay as they are; what is recorded is
what is sent; and a fault of ours, or a resource that does not fit, leaves the request as it was.
"""

import copy
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from opentelemetry import trace

from lightning_otel import capture, config
from lightning_otel.adapter.agent_patterns import resources_of, resources_text
from lightning_otel.capture import operations
from lightning_otel.dialects import Dialect
from lightning_otel.errors import ConfigError, warn_once
from lightning_otel.instrumentors.substitution import ENDPOINT, SUBSTITUTED, SYSTEM_PROMPT
from lightning_otel.types import Resource
from lightning_otel.types import conventions as c

_PLAIN_HEADERS: Final = ("accept", "content-type", "idempotency-key", "user-agent", "x-stainless-")
"""Beginnings of headers that hold no secret, and go to any server."""


class Substituted(NamedTuple):
    """A request to be made.

    Attributes:
        options: The client's options of it.
        stamp: The versions it is made with, as spans say it.
    """

    options: Any
    stamp: str


def substitute_resources(
    assigner: capture.ResourceAssigner, client: Any, options: Any, dialect: Dialect
) -> Substituted | None:
    """The request with what it is given; None where nothing is, and it is sent as it is.

    Args:
        assigner: Gives it.
        client: The client that sends it.
        options: The client's options of it, which stay as they are.
        dialect: The reader of the request.
    """
    is_embedding = dialect.operation == c.EMBEDDINGS
    if is_embedding or options.files or not isinstance(options.json_data, Mapping):
        return None
    frame = capture.current_frame()
    stamps: Mapping[str, Any] = frame.stamps if frame is not None else {}
    agent = _acting_agent(stamps)
    pinned, foreign = _find_pins(resources_of(agent or "", stamps.get(c.RESOURCES)), agent)
    found = assigner.assign(_canary_key(stamps), agent, pinned)
    substitutes = {name: given for name, given in found.items() if name not in foreign}
    prompt = _of_kind("prompt", substitutes.get(SYSTEM_PROMPT))
    endpoint = _of_kind("endpoint", substitutes.get(ENDPOINT))
    if prompt is None and endpoint is None:
        return None
    try:
        task = getattr(getattr(frame, "recording", None), "task", None)
        made, used = _make_options(prompt, endpoint, client, options, dialect, task)
    except ConfigError as exc:
        warn_once(f"a request is sent as the agent wrote it: {exc}")
        return None
    if not used:
        return None
    versions = {resource.name: str(resource.version) for resource in used}
    return Substituted(made, resources_text({"*": versions}, stamps.get(c.RESOURCES)))


def _of_kind(kind: str, resource: Resource | None) -> Resource | None:
    return resource if resource is not None and resource.kind == kind else None


def _acting_agent(stamps: Mapping[str, Any]) -> str | None:
    """Return the acting agent: of the framework or the recording, else of the nearest span."""
    context, nearest = operations.parent_context(), operations.unclaimed_call()
    if nearest is None:
        span = trace.get_current_span(operations.inner_context(context))
        named = stamps.get(c.AGENT_NAME, _agent_on(span))
        nearest = operations.operation_of(context)
    else:
        named = _agent_on(nearest.span)
    while not isinstance(named, str) and nearest is not None:
        named, nearest = _agent_on(nearest.span), nearest.outer
    return named if isinstance(named, str) else None


def _agent_on(span: Any) -> str | None:
    named = (getattr(span, "attributes", None) or {}).get(c.AGENT_NAME)
    return named if isinstance(named, str) else None


def _canary_key(stamps: Mapping[str, Any]) -> str:
    """Return the key of a canary's choice: the rollout, else the trace."""
    rollout_id = stamps.get(c.ROLLOUT_ID)
    if rollout_id is not None:
        return str(rollout_id)
    return format(trace.get_current_span().get_span_context().trace_id, "032x")


def _find_pins(
    named: Mapping[str, str], agent: str | None
) -> tuple[dict[str, int], frozenset[str]]:
    """Return the pinned versions, and names whose version is no number: the agent has its own."""
    own = {f"{agent}/{name}" for name in SUBSTITUTED} if agent else set()
    held = {name: text for name, text in named.items() if name in own.union(SUBSTITUTED)}
    numbers = {name: int(text) for name, text in held.items() if text.isdecimal()}
    return numbers, frozenset(name.rpartition("/")[2] for name in held.keys() - numbers.keys())


def _make_options(
    prompt: Resource | None,
    endpoint: Resource | None,
    client: Any,
    options: Any,
    dialect: Dialect,
    task: object,
) -> tuple[Any, list[Resource]]:
    """Return the options of the request, and what of the given they were made with."""
    body = {**options.json_data, **(options.extra_json or {})}
    changes: dict[str, Any] = {}
    used: list[Resource] = []
    made = copy.copy(options)
    if prompt is not None and (instructed := dialect.instruct(body, prompt.prompt, task)):
        changes.update(instructed)
        used.append(prompt)
    if endpoint is not None:
        changes.update(dialect.sample(body, endpoint.body))
        url = endpoint.body.get("base_url")
        if isinstance(url, str):
            _change_server(made, client, url)
        used.append(endpoint)
    made.json_data = {**options.json_data, **changes}
    if options.extra_json:
        # What stands there goes before the rest of the body.
        extra = options.extra_json
        made.extra_json = {name: changes.get(name, extra[name]) for name in extra}
    return made, used


def _change_server(options: Any, client: Any, base_url: str) -> None:
    """Send to another server, which is not told the secrets that the client has for its own."""
    url = str(options.url)
    if urlsplit(url).netloc or any(
        cls.__name__ == "BaseAzureClient" for cls in type(client).__mro__
    ):
        raise ConfigError("its client writes whole addresses; leave base_url out of the endpoint")
    options.url = f"{base_url.rstrip('/')}/{url.lstrip('/')}"
    if _origin_of(base_url) == _origin_of(str(client.base_url)):
        return
    # The class that leaves a header out, of the client's own library, which is not imported here.
    omit = getattr(sys.modules.get("openai"), "Omit", str)
    own = options.headers if isinstance(options.headers, Mapping) else {}
    options.headers = {
        **{
            name: value if name.lower().startswith(_PLAIN_HEADERS) else omit()
            for name, value in {**client.default_headers, **own}.items()
            if name in own or not name.lower().startswith(_PLAIN_HEADERS)
        },
        "Authorization": f"Bearer {config.ENDPOINT_KEY.read() or 'none'}",
    }


def _origin_of(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, port
