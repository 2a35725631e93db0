"""The slot that makes one call of a framework's and a client's view of a request.

The framework knows which agent asks, and opens the call; the client knows what goes over the wire,
and fills it. Neither knows the other: between them stands a slot, in the context.
"""

from collections.abc import Mapping

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture

_SLOT_KEY = otel_context.create_key("lightning-otel-call-slot")


class CallSlot:
    """A framework's call, while its model's client may be sending the request.

    The framework puts it into the context it runs the model in. A client's instrumentor claims the
    call instead of starting a second span: structure from the framework, payload from the client.
    Whoever claimed it ends it; what the framework says of its end later does nothing.

    Attributes:
        operation: The call; None before it started and once it was claimed.
        owner: The framework's own object of it.
    """

    __slots__ = ("operation", "owner")

    def __init__(self, operation: capture.Operation | None = None) -> None:
        self.operation = operation
        self.owner: object = None

    def within(self, context: Context | None = None) -> Context:
        """A context in which the call can be claimed."""
        return otel_context.set_value(_SLOT_KEY, self, context)


def open_slot() -> CallSlot | None:
    """The slot of the current context, for the framework to fill once its call starts."""
    slot = otel_context.get_current().get(_SLOT_KEY)
    return slot if isinstance(slot, CallSlot) else None


def claim_call() -> capture.Operation | None:
    """The framework's call that is now being requested, given away once; None if there is none."""
    slot = open_slot()
    if slot is None or slot.operation is None or slot.operation.is_over:
        return None
    operation, slot.operation = slot.operation, None
    operation.is_claimed = True
    return operation


def start_call(
    name: str,
    attributes: Mapping[str, AttributeValue],
    body: dict[str, str] | None = None,
    parent: Context | None = None,
) -> capture.Operation:
    """The call of the request about to be sent: the framework's that waits for it, or a new one.

    The arguments are those of an ``Operation``; a claimed call keeps its own place.
    """
    operation = claim_call()
    if operation is None:
        return capture.Operation(
            capture.clean(name), SpanKind.CLIENT, attributes, body, parent=parent
        )
    operation.span.update_name(capture.clean(name))
    operation.attributes.update(attributes)
    operation.body.update(body or {})
    return operation
