"""Programs of ``autogen_core`` alone: messages carry their sender's context, agents have a span.

AutoGen's runtime delivers messages in the context it was once started in. Without this a call made
by an agent would belong to whoever started the runtime, or to no recording at all.
"""

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from lightning_otel import capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.autogen import runs, said
from lightning_otel.instrumentors.autogen.agents import IsWanted

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
            self.operation.body[c.OUTPUT_MESSAGES] = _content(item, "assistant")


def metadata(is_wanted: IsWanted) -> Callable[[Any], Any]:
    """What stands in for the function that makes the metadata of a message."""

    def make(original: Any) -> Any:
        def get_telemetry_envelope_metadata() -> Any:
            made = original()
            if is_wanted():
                capture.guarded(setattr, made, _CARRIED, _carried())
            return made

        return get_telemetry_envelope_metadata

    return make


def _carried() -> Carried:
    sender = otel_context.get_current()
    entry = otel_context.get_value(_ENTRY_KEY, sender)
    return Carried(sender, entry if isinstance(entry, Context) else sender)


def process(is_active: IsWanted, *, is_published: bool) -> Callable[[Any], Any]:
    """What stands in for the runtime's methods that deliver a message."""

    def make(original: Any) -> Any:
        async def process(self: Any, message_envelope: Any) -> Any:
            held = getattr(getattr(message_envelope, "metadata", None), _CARRIED, None)
            if not isinstance(held, Carried) or not is_active():
                return await original(self, message_envelope)
            with capture.attached(held.entry if is_published else held.sender):
                return await original(self, message_envelope)

        return process

    return make


def on_message(is_wanted: IsWanted) -> Callable[[Any], Any]:
    """What stands in for ``RoutedAgent.on_message_impl``."""

    def make(original: Any) -> Any:
        async def on_message_impl(self: Any, message: Any, ctx: Any) -> Any:
            begin = functools.partial(_begin, is_wanted, self, message)
            return await runs.call(begin, original, self, message, ctx)

        return on_message_impl

    return make


def _begin(is_wanted: IsWanted, agent: Any, message: Any) -> CoreRun | None:
    if not is_wanted() or type(message) not in agent._handlers:
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
        {c.INPUT_MESSAGES: _content(message, "user")} if capture.content_policy().is_kept else {},
    )
    entry = _carried().entry
    context = otel_context.set_value(_ENTRY_KEY, entry, runs.inside(operation))
    return CoreRun(operation, context)


def _content(message: object, role: str) -> str:
    content = said.fields_of(message).get("content", message)
    return said.dumped([{"role": role, "parts": said.parts(content)}])
