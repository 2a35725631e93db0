"""Requests with the live resources, where ``apply`` asks for them; faults leave them unchanged."""

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

_PLAIN_HEADERS: Final = (
    "accept", "anthropic-", "content-type", "idempotency-key", "user-agent", "x-stainless-",
)  # fmt: skip
"""Beginnings of headers that hold no secret, and go to any server."""


class Substitution(NamedTuple):
    """The substituted parts of a request.

    Attributes:
        changes: Fields of its body.
        base_url: The server to send it to; None for the agent's own.
        stamp: The versions it is made with, as spans say it.
    """

    changes: dict[str, Any]
    base_url: str | None
    stamp: str


def find_substitution(
    assigner: capture.ResourceAssigner, body: Mapping[str, Any], dialect: Dialect
) -> Substitution | None:
    """Return the substitution for a request; None for none.

    Raises:
        ConfigError: The request cannot take a resource.
    """
    if dialect.operation == c.EMBEDDINGS:
        return None
    frame = capture.current_frame()
    stamps: Mapping[str, Any] = frame.stamps if frame is not None else {}
    agent = _acting_agent(stamps)
    pinned, foreign = _find_pins(resources_of(agent or "", stamps.get(c.RESOURCES)), agent)
    picks = assigner.assign(_canary_key(stamps), agent, pinned)
    substitutes = {name: version for name, version in picks.items() if name not in foreign}
    prompt = _of_kind("prompt", substitutes.get(SYSTEM_PROMPT))
    endpoint = _of_kind("endpoint", substitutes.get(ENDPOINT))
    task = getattr(getattr(frame, "recording", None), "task", None)
    changes: dict[str, Any] = {}
    applied: list[Resource] = []
    url = None
    if prompt is not None and (instructed := dialect.instruct(body, prompt.prompt, task)):
        changes.update(instructed)
        applied.append(prompt)
    if endpoint is not None:
        changes.update(dialect.sample(body, endpoint.body))
        url = endpoint.body.get("base_url")
        applied.append(endpoint)
    if not applied:
        return None
    versions = {resource.name: str(resource.version) for resource in applied}
    stamp = resources_text({"*": versions}, stamps.get(c.RESOURCES))
    return Substitution(changes, url if isinstance(url, str) else None, stamp)


def _of_kind(kind: str, resource: Resource | None) -> Resource | None:
    return resource if resource is not None and resource.kind == kind else None


def _acting_agent(stamps: Mapping[str, Any]) -> str | None:
    """Return the acting agent: of the framework or the recording, else of the nearest span."""
    context, nearest = operations.parent_context(), operations.unclaimed_call()
    if nearest is None:
        span = trace.get_current_span(operations.inner_context(context))
        agent = stamps.get(c.AGENT_NAME, _agent_on(span))
        nearest = operations.operation_of(context)
    else:
        agent = _agent_on(nearest.span)
    while not isinstance(agent, str) and nearest is not None:
        agent, nearest = _agent_on(nearest.span), nearest.outer
    return agent if isinstance(agent, str) else None


def _agent_on(span: Any) -> str | None:
    agent = (getattr(span, "attributes", None) or {}).get(c.AGENT_NAME)
    return agent if isinstance(agent, str) else None


def _canary_key(stamps: Mapping[str, Any]) -> str:
    rollout_id = stamps.get(c.ROLLOUT_ID)
    if rollout_id is not None:
        return str(rollout_id)
    return format(trace.get_current_span().get_span_context().trace_id, "032x")


def _find_pins(
    table: Mapping[str, str], agent: str | None
) -> tuple[dict[str, int], frozenset[str]]:
    """Return the pinned versions, and names whose version is no number: the agent has its own."""
    names = {f"{agent}/{name}" for name in SUBSTITUTED} if agent else set()
    pins = {name: text for name, text in table.items() if name in names.union(SUBSTITUTED)}
    numbers = {name: int(text) for name, text in pins.items() if text.isdecimal()}
    return numbers, frozenset(name.rpartition("/")[2] for name in pins.keys() - numbers.keys())


def foreign_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers for another server, which is told no secret of the agent's own."""
    key = config.ENDPOINT_KEY.read() or "none"
    plain = {name: headers[name] for name in headers if is_plain(name)}
    return {**plain, "Authorization": f"Bearer {key}"}


def is_plain(name: str) -> bool:
    """Return whether a header holds no secret, by its name."""
    return name.lower().startswith(_PLAIN_HEADERS)


def origin_of(url: str) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port of an address."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, port


def note_unfit(exc: ConfigError) -> None:
    """Say once that a request cannot take what it is given."""
    warn_once(f"a request is sent as the agent wrote it: {exc}")
