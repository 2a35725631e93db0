"""A framework's and a client's view of one request as one call.

The framework knows which agent asks, and opens the call; the client knows what goes over the wire,
takes the call over instead of starting a second span, and ends it. Neither knows the other: the
call travels in the context in which the framework runs its model.
"""

from collections.abc import Mapping

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from lightning_otel import operations

_CALL_KEY = otel_context.create_key("lightning-otel-call")


def offer_call(operation: operations.Operation | None, context: Context | None = None) -> Context:
    """Return a context in which a framework's call can be claimed, or none with None.

    Whoever claimed a call may offer it again to a client of its own.
    """
    if operation is not None:
        operation.is_claimed = False
    return otel_context.set_value(_CALL_KEY, operation, context)


def context_within(operation: operations.Operation) -> Context:
    """Return the context within a step of a framework.

    A call that waits outside to be claimed cannot be from in there.
    """
    context = operation.context
    return context if context.get(_CALL_KEY) is None else offer_call(None, context)


def current_call() -> operations.Operation | None:
    """Return the framework's innermost call, claimed or not; None if there is none."""
    found = otel_context.get_current().get(_CALL_KEY)
    return found if isinstance(found, operations.Operation) else None


def unclaimed_call() -> operations.Operation | None:
    """Return the framework's innermost call if it still waits for its client."""
    call = current_call()
    return None if call is None or call.is_claimed or call.is_over else call


def start_call(
    name: str,
    attributes: Mapping[str, AttributeValue],
    body: dict[str, str] | None = None,
    parent: Context | None = None,
) -> operations.Operation:
    """The call of the request about to be sent: the framework's that waits for it, or a new one.

    The arguments are those of an ``Operation``; a claimed call keeps its own place.
    """
    name, operation = operations.clean(name), unclaimed_call()
    if operation is None:
        return operations.Operation(name, SpanKind.CLIENT, attributes, body, parent=parent)
    operation.is_claimed = True
    operation.span.update_name(name)
    operation.attributes.update(attributes)
    operation.body.update(body or {})
    return operation
