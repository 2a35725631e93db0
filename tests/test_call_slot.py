"""One request is one call, whoever opens it and whoever sends it."""

from collections.abc import Iterator

import pytest
from opentelemetry.trace import SpanKind

from lightning_otel import Recording, auto_trace, call_slot, capture
from lightning_otel import conventions as c


@pytest.fixture
def recording() -> Iterator[Recording]:
    """What is kept of the test, in memory."""
    with auto_trace(store=":memory:") as found:
        yield found


def opened() -> capture.Operation:
    """A framework's call."""
    return capture.Operation("their name", SpanKind.CLIENT, {c.AGENT_NAME: "planner"})


def test_call_is_claimed_once(recording: Recording) -> None:
    """The first request is the framework's call; a second one is a call of its own."""
    slot = call_slot.CallSlot()

    with capture.attached(slot.within()):
        before = call_slot.claim_call()
        slot.operation = opened()
        claimed = [call_slot.claim_call(), call_slot.claim_call()]

    assert before is None
    assert claimed[0] is not None
    assert claimed[0].is_claimed
    assert claimed[1] is None
    assert call_slot.open_slot() is None


def test_call_that_is_over_is_not_claimed(recording: Recording) -> None:
    """What ended takes no more payload."""
    call = opened()
    call.stop()

    with capture.attached(call_slot.CallSlot(call).within()):
        assert call_slot.claim_call() is None


def test_started_call_is_the_frameworks_with_what_the_client_knows(recording: Recording) -> None:
    """Structure from the one, name and payload from the other, in one span."""
    call = opened()

    with capture.attached(call_slot.CallSlot(call).within()):
        started = call_slot.start_call("chat m", {c.REQUEST_MODEL: "m"}, {c.INPUT_MESSAGES: "[]"})
        beside = call_slot.start_call("chat m", {c.REQUEST_MODEL: "m"})
    started.stop()
    beside.stop()

    assert started is call
    assert beside is not call
    first, second = (span for span in recording.spans() if not span.is_incomplete)
    assert (first.name, second.name) == ("chat m", "chat m")
    assert (first.attributes[c.AGENT_NAME], first.attributes[c.REQUEST_MODEL]) == ("planner", "m")
    assert first.attributes[c.INPUT_MESSAGES] == "[]"
    assert c.AGENT_NAME not in second.attributes
