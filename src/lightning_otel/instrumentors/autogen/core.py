"""Programs of ``autogen_core`` alone: messages carry their sender's context, agents have a span.

AutoGen's runtime delivers messages in the context it was once started in. Without this a call made
by an agent would belong to whoever started the runtime, or to no recording at all.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.autogen import runs, said
from lightning_otel.instrumentors.autogen.agents import IsWanted
from lightning_otel.instrumentors.doors import Within, named
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


def metadata(is_wanted: IsWanted) -> Callable[[Any], Any]:
    """Return the replacement of the function that makes a message's metadata."""

    def make(original: Any) -> Any:
        def get_telemetry_envelope_metadata() -> Any:
            made = original()
            if is_wanted():
                capture.guarded(setattr, made, _CARRIED, _carry_context())
            return made

        return get_telemetry_envelope_metadata

    return make


def _carry_context() -> Carried:
    sender = otel_context.get_current()
    entry = otel_context.get_value(_ENTRY_KEY, sender)
    return Carried(sender, entry if isinstance(entry, Context) else sender)


def begin_sent(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Within | None:
    """Deliver a message that was sent in the context of its sender, who waits for the answer."""
    held = _find_carried(named(("message_envelope",), args, kwargs).get("message_envelope"))
    return None if held is None else Within(held.sender)


def begin_published(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Within | None:
    """Deliver a message that was published in the context of the first sender."""
    held = _find_carried(named(("message_envelope",), args, kwargs).get("message_envelope"))
    return None if held is None else Within(held.entry)


def _find_carried(envelope: object) -> Carried | None:
    held = getattr(getattr(envelope, "metadata", None), _CARRIED, None)
    return held if isinstance(held, Carried) else None


def begin_message(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CoreRun | None:
    """Begin an agent's handling of a message, in ``RoutedAgent.on_message_impl``."""
    agent, message = args[0], named(("message",), args, kwargs).get("message")
    if type(message) not in agent._handlers:
        return None
    if any(cls.__name__ in _WITHOUT_SPAN for cls in type(agent).__mro__):
        return None
    name = agent.id.type
    operation = runs.start(
        f"{c.INVOKE_AGENT} {name}",
        {
            c.OPERATION: c.INVOKE_AGENT,
            c.AGENT_NAME: name,
            c.AGENT_ID: str(agent.id),
            c.AGENT_DESCRIPTION: said.text_field(agent, "_description"),
        },
        {c.INPUT_MESSAGES: _message_content(message, "user")}
        if capture.content_policy().is_kept
        else {},
    )
    entry = _carry_context().entry
    context = otel_context.set_value(_ENTRY_KEY, entry, runs.inside(operation))
    return CoreRun(operation, context)


def _message_content(message: object, role: str) -> str:
    content = fields_of(message).get("content", message)
    return dump([{"role": role, "parts": said.parts(content)}])
