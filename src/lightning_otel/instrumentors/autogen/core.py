"""Programs of ``autogen_core`` alone: messages carry their sender's context, agents have a span.

AutoGen's runtime delivers messages in the context it was once started in. Without this a call made
by an agent would belong to whoever started the runtime, or to no recording at all.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import ProxyTracerProvider

from lightning_otel import capture, config
from lightning_otel import conventions as c
from lightning_otel.instrumentors import doors
from lightning_otel.instrumentors.autogen import runs, said
from lightning_otel.instrumentors.reading import fields_of
from lightning_otel.messages.values import dump

_ENTRY_KEY = otel_context.create_key("lightning-otel-autogen-entry")
_CARRIED: Final = "_lightning_otel_carried"

_WITHOUT_SPAN: Final = frozenset({"SequentialRoutedAgent", "ToolAgent"})
"""Agents of the runtime that are none to a reader: a team's parts, and what runs tools."""


class Carried(NamedTuple):
    """The contexts that travel with a message.

    Attributes:
        sender: What its sender was doing, who waits for an answer to a message that is sent.
        entry: What the first sender was doing: a message that is published starts anew from there.
    """

    sender: Context
    entry: Context


class CoreRun(runs.Run):
    """An agent's handling of one message; what it returns is its answer."""

    def saw(self, item: Any) -> None:
        """Keep the answer."""
        if capture.content_policy().is_kept:
            self.operation.body[c.OUTPUT_MESSAGES] = _message_content(item, "assistant")


def metadata(is_wanted: runs.IsWanted) -> doors.Make:
    """Return the replacement of the function that makes a message's metadata."""

    def make(original: Any) -> Any:
        def get_telemetry_envelope_metadata() -> Any:
            made = original()
            if is_wanted():
                capture.guarded(setattr, made, _CARRIED, _carry_context())
            return made

        return get_telemetry_envelope_metadata

    return make


def skip_messaging(helper: Any, *_: Any, **__: Any) -> runs.SpanBlock | None:
    """Return what replaces AutoGen's own spans of messages between agents, about thirty a chat.

    They stand between the team and its agents; left out later, they would leave orphans behind.
    They are made where AutoGen's switch or a provider of the program's own asks for them.
    """
    provider = helper.tracer_provider
    is_global = provider is trace.get_tracer_provider()
    if config.has_chosen_autogen_messaging():
        return None
    return runs.no_span() if is_global or isinstance(provider, ProxyTracerProvider) else None


def _carry_context() -> Carried:
    sender = otel_context.get_current()
    entry = otel_context.get_value(_ENTRY_KEY, sender)
    return Carried(sender, entry if isinstance(entry, Context) else sender)


def begin_delivery(*, is_published: bool) -> doors.Begin:
    """Return what delivers a message in the context of its sender, who waits for the answer.

    A published one goes out in the context of the first sender.
    """

    def begin(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> doors.Within | None:
        envelope = doors.named(("message_envelope",), args, kwargs).get("message_envelope")
        held = getattr(getattr(envelope, "metadata", None), _CARRIED, None)
        if not isinstance(held, Carried):
            return None
        return doors.Within(held.entry if is_published else held.sender)

    return begin


def begin_message(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CoreRun | None:
    """Begin an agent's handling of a message, in ``RoutedAgent.on_message_impl``."""
    agent, message = args[0], doors.named(("message",), args, kwargs).get("message")
    if type(message) not in agent._handlers:
        return None
    if any(cls.__name__ in _WITHOUT_SPAN for cls in type(agent).__mro__):
        return None
    operation = runs.start(
        c.INVOKE_AGENT,
        agent.id.type,
        {
            c.AGENT_NAME: agent.id.type,
            c.AGENT_ID: str(agent.id),
            c.AGENT_DESCRIPTION: said.text_field(agent, "_description"),
        },
        lambda: {c.INPUT_MESSAGES: _message_content(message, "user")},
    )
    entry = _carry_context().entry
    context = otel_context.set_value(_ENTRY_KEY, entry, runs.inside(operation))
    return CoreRun(operation, context)


def _message_content(message: object, role: str) -> str:
    content = fields_of(message).get("content", message)
    return dump([{"role": role, "parts": said.parts(content)}])
