"""One request of the SDK to a model: opened here, filled and ended by the client that sends it.

Where no client says that the request is its own (a model that does not use ``openai``, or speaks
over a websocket) the call says what the SDK knows of it.
"""

from collections.abc import Mapping
from typing import Any, Final

from opentelemetry import context as otel_context
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from lightning_otel import call_slot, capture
from lightning_otel import conventions as c
from lightning_otel.instrumentors.doors import Run
from lightning_otel.instrumentors.openai_agents import items
from lightning_otel.instrumentors.openai_agents.items import Reading

_PARAMETERS: Final = (
    "system_instructions",
    "input",
    "model_settings",
    "tools",
    "output_schema",
    "handoffs",
)
"""Of ``get_response`` and ``stream_response``, in order."""
_FINAL: Final = ("response.completed", "response.incomplete", "response.failed")


class CallOperation(capture.Operation):
    """A call that a client may claim.

    Attributes:
        slot: Where the client finds it.
    """

    __slots__ = ("slot",)

    def __init__(
        self,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, AttributeValue],
        parent: otel_context.Context | None = None,
    ) -> None:
        super().__init__(capture.clean(name), kind, attributes, parent=parent)
        self.slot = call_slot.CallSlot(self)

    def take(self, reading: Reading | None) -> None:
        """Put what was read of the call on it."""
        attributes, content = reading or ({}, {})
        self.attributes.update(attributes)
        if capture.content_policy().is_kept:
            self.body.update(content)
        name = attributes.get(c.REQUEST_MODEL)
        if isinstance(name, str):
            self.span.update_name(capture.clean(f"{c.CHAT} {name}"))


def current_call() -> "ModelCall | None":
    """The call of the model that is running here."""
    slot = call_slot.open_slot()
    call = slot.owner if slot is not None else None
    return call if isinstance(call, ModelCall) and not call.is_over else None


class ModelCall(Run):
    """A model's ``get_response`` or ``stream_response`` under way.

    Attributes:
        context: The context the model runs in.
        data: What the SDK's span of the call knows, if there is one.
        is_over: Whether the model is done.
    """

    def __init__(
        self,
        request: Mapping[str, Any],
        name: str | None,
        conversation: str | None,
        parent: otel_context.Context,
    ) -> None:
        attributes: dict[str, AttributeValue] = {c.OPERATION: c.CHAT}
        if name is not None:
            attributes[c.REQUEST_MODEL] = name
        if conversation is not None:
            attributes[c.CONVERSATION_ID] = conversation
        title = f"{c.CHAT} {name}" if name is not None else c.CHAT
        self._operation = CallOperation(title, SpanKind.CLIENT, attributes, parent)
        self._operation.slot.owner = self
        self._request = request
        self._response: Any = None
        self._has_answered = False
        self.parent = parent
        self.context = self._operation.slot.within(self._operation.context)
        self.data: Any = None
        self.is_over = False

    @classmethod
    def begin(
        cls, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], conversation: str | None
    ) -> "ModelCall | None":
        """Begin the call; None where a model only hands on what was asked of it."""
        outer = current_call()
        if outer is not None and not outer.is_claimed:
            return None
        request = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
        name = getattr(model, "model", None)
        # A model that asks several others, one after the other, makes calls beside each other.
        parent = outer.parent if outer is not None else capture.parent_context()
        return cls(request, str(name) if isinstance(name, str) else None, conversation, parent)

    @property
    def is_claimed(self) -> bool:
        """True if a client is sending the request."""
        return self._operation.is_claimed

    def saw(self, item: Any) -> None:
        """Note an event of a stream: the closing one holds the whole answer."""
        if getattr(item, "type", None) in _FINAL:
            self._response = item.response
            self._has_answered = True

    def returned(self, result: Any) -> None:
        """End the call with its answer."""
        self._response = result
        self._end(None)

    def stop(self) -> None:
        """End the call of a stream that is over, or was left early."""
        if not self._has_answered and not self.is_claimed:
            self._operation.attributes[c.ABANDONED] = True
        self._end(None)

    def fail(self, exc: BaseException) -> None:
        """End the call with what the program is about to see, or as that of a stream left early."""
        if isinstance(exc, GeneratorExit):
            self.stop()
        else:
            self._end(exc)

    def _end(self, exc: BaseException | None) -> None:
        self.is_over = True
        operation = self._operation
        if not operation.is_claimed:
            operation.slot.operation = None
            operation.take(capture.guarded(items.of_request, self._request))
            operation.take(capture.guarded(items.of_span, self.data))
            operation.take(capture.guarded(items.of_response, self._response))
            if exc is None:
                operation.stop()
            else:
                operation.fail(exc)
        # The context and the slot hold this call: apart, all are freed at once.
        operation.slot = call_slot.CallSlot()
        self.context, self._request, self._response, self.data = self.parent, {}, None, None
