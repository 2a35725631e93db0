"""A request made with the resources that are live, instead of what the agent wrote.

Only where ``apply`` was asked for. The agent's own objects stay as they are; what is recorded is
what is sent; and a fault of ours, or a resource that does not fit, leaves the request as it was.

Source: OpenAI's API reference: which parameters chat completions, responses and completions take.
"""

import copy
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from opentelemetry import trace

from lightning_otel import capture, config
from lightning_otel.adapter.agent_patterns import resources_of, resources_text
from lightning_otel.capture import operations
from lightning_otel.errors import ConfigError, warn_once
from lightning_otel.instrumentors.substitution import ENDPOINT, SUBSTITUTED, SYSTEM_PROMPT
from lightning_otel.messages import content_parts
from lightning_otel.types import Prompt, Resource
from lightning_otel.types import conventions as c
from lightning_otel.types.values import dump

CHAT: Final = "/chat/completions"
RESPONSES: Final = "/responses"
_SYSTEM: Final = ("system", "developer")
_LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_NOT_RESPONSES: Final = frozenset(
    {"stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias"}
)
"""What the Responses API refuses."""
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
    assigner: capture.ResourceAssigner, client: Any, options: Any
) -> Substituted | None:
    """The request with what it is given; None where nothing is, and it is sent as it is.

    Args:
        assigner: Gives it.
        client: The client that sends it.
        options: The client's options of it, which stay as they are.
    """
    path = f"/{urlsplit(str(options.url)).path.strip('/')}"
    is_embedding = path.endswith("/embeddings")
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
        made, used = _make_options(prompt, endpoint, client, options, path, task)
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
        named = stamps.get(c.AGENT_NAME, _agent_on(trace.get_current_span(context)))
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
    path: str,
    task: object,
) -> tuple[Any, list[Resource]]:
    """Return the options of the request, and what of the given they were made with."""
    is_responses = path.endswith(RESPONSES)
    body = {**options.json_data, **(options.extra_json or {})}
    changes: dict[str, Any] = {}
    used: list[Resource] = []
    made = copy.copy(options)
    if prompt is not None and (is_responses or path.endswith(CHAT)):
        instruct = _instructed_responses if is_responses else _instructed_chat
        changes.update(instruct(prompt.prompt, body, task))
        used.append(prompt)
    if endpoint is not None:
        changes.update(_sampling_of(endpoint.body, body, path))
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


def _prompt_text(prompt: Prompt, own: object, task: object) -> str:
    """The prompt's text; ``{system_prompt}`` in it is the agent's own, ``{task}`` the task."""
    values: dict[str, Any] = {}
    if task is not None:
        values["task"] = task if isinstance(task, str) else dump(task)
    if "system_prompt" in prompt.placeholders:
        parts = content_parts(own)
        values["system_prompt"] = "\n".join(str(part.get("content", "")) for part in parts)
    return prompt.format(**values)


def _instructed_chat(prompt: Prompt, body: Mapping[str, Any], task: object) -> dict[str, Any]:
    """The messages with this system prompt and its examples, which come before the conversation."""
    given = body.get("messages")
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f"its messages are {type(given).__name__}; substitution wants a list")
    return {"messages": _replace_prompt(prompt, given, task, list(prompt.examples), is_needed=True)}


def _instructed_responses(prompt: Prompt, body: Mapping[str, Any], task: object) -> dict[str, Any]:
    """The instructions, or what stands for them in the input, and the examples in the input."""
    given = body.get("input")
    # What the server remembers begins with the examples already.
    is_bare = given is None or bool(body.get("previous_response_id") or body.get("conversation"))
    examples = [] if is_bare else [_input_message(each) for each in prompt.examples]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise ConfigError(f"its input is {type(given).__name__}; substitution wants text or a list")
    own = body.get("instructions")
    is_in_input = own is None and bool(items) and _role_of(items[0]) in _SYSTEM
    found: dict[str, Any] = {}
    if not is_in_input:
        found["instructions"] = _prompt_text(prompt, own, task)
    if is_in_input or examples:
        found["input"] = _replace_prompt(prompt, items, task, examples, is_needed=is_in_input)
    return found


def _replace_prompt(
    prompt: Prompt, items: Sequence[Any], task: object, examples: list[Any], *, is_needed: bool
) -> list[Any]:
    """Messages with another system message and examples after what leads.

    Args:
        prompt: The prompt.
        items: The agent's messages.
        task: The rollout's task, for the prompt.
        examples: What comes before the conversation.
        is_needed: Whether the prompt stands among the messages.
    """
    lead = next((i for i, each in enumerate(items) if _role_of(each) not in _SYSTEM), len(items))
    leading: list[Any] = list(items[:lead])
    if is_needed and leading:
        own = leading[0]
        leading[0] = {**own, "content": _prompt_text(prompt, own.get("content"), task)}
    elif is_needed:
        leading = [{"role": "system", "content": _prompt_text(prompt, None, task)}]
    return [*leading, *copy.deepcopy(examples), *items[lead:]]


def _role_of(message: object) -> object:
    return message.get("role") if isinstance(message, Mapping) else None


def _input_message(example: Mapping[str, Any]) -> dict[str, Any]:
    """An example as the Responses API takes it."""
    role, content = example.get("role"), example.get("content")
    if role not in ("user", "assistant") or not isinstance(content, str) or len(example) > 2:
        raise ConfigError(
            "its examples hold tools or media, which the Responses API writes otherwise; "
            "publish examples of text"
        )
    return {"role": role, "content": content}


def _sampling_of(endpoint: Mapping[str, Any], body: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Model and sampling, by the names that the request's API has for them."""
    is_responses, is_chat = path.endswith(RESPONSES), path.endswith(CHAT)
    found: dict[str, Any] = {}
    for name, value in endpoint.get("sampling", {}).items():
        if name in _LIMITS:
            name = "max_output_tokens" if is_responses else _limit_name(name, body, is_chat=is_chat)
        elif name == "reasoning_effort" and not is_chat:
            if is_responses:
                found["reasoning"] = {**(body.get("reasoning") or {}), "effort": value}
            continue
        elif is_responses and name in _NOT_RESPONSES:
            continue
        found[name] = copy.deepcopy(value)
    if endpoint.get("model"):
        found["model"] = endpoint["model"]
    return found


def _limit_name(name: str, body: Mapping[str, Any], *, is_chat: bool) -> str:
    """Return the agent's own name for the token limit, since two are refused."""
    if not is_chat:
        return "max_tokens"
    said = next((known for known in _LIMITS[:2] if known in body), None)
    return said or (name if name in _LIMITS[:2] else _LIMITS[0])


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
