"""A framework's methods as operations: begun, ended once, and otherwise exactly as they were."""

import asyncio
from typing import Any

import pytest
from opentelemetry import context as otel_context
from tests.instrumentors.outline import outline

from lightning_otel import Store, auto_trace, capture, operations
from lightning_otel import conventions as c
from lightning_otel.instrumentors.doors import around
from lightning_otel.instrumentors.steps import (
    Arguments,
    Step,
    agent_step,
    answered,
    steps,
    tool_step,
)


class Host:
    """A framework's agent, whose ways of working call each other."""

    name = "ann"

    def work(self, asked: str, *, times: int = 1) -> str:
        """Work again and again, by itself."""
        if times > 1:
            return self.work(asked, times=times - 1)
        if asked == "fail":
            raise LookupError(asked)
        return asked.upper()

    def ask(self, other: "Host") -> str:
        """Let another one work."""
        return other.work("b")

    async def wait(self, asked: str) -> str:
        """Work in a coroutine."""
        await asyncio.sleep(10 if asked == "long" else 0)
        return asked.upper()


def begin(owner: Any, arguments: Arguments) -> Step | None:
    """An agent's step."""
    return agent_step(owner, owner.name, str(arguments["asked"]))


def ended(operation: operations.Operation, result: Any) -> None:
    """Its result."""
    operation.body.update(answered(result))


def wrap(function: Any, *hooks: Any) -> Any:
    """Make each wanted call of a function a step."""
    start = steps(*hooks)
    return around(lambda *call: start(*call) if capture.is_wanted() else None)(function)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> type[Host]:
    """The framework, wrapped."""
    for name in ("work", "wait"):
        monkeypatch.setattr(Host, name, wrap(getattr(Host, name), ("asked",), begin, ended))
    return Host


def test_step_holds_what_was_asked_and_answered(host: type[Host], store: Store) -> None:
    """By position or by name; and afterwards the context is what it was."""
    with auto_trace(store=store) as recording:
        before = otel_context.get_current()
        assert [host().work("a"), host().work(asked="a")] == ["A", "A"]
        assert otel_context.get_current() is before

    assert outline(recording) == "invoke_agent ann\ninvoke_agent ann"
    for span in recording.spans()[1:]:
        assert '"content":"a"' in str(span.attributes[c.INPUT_MESSAGES])
        assert '"content":"A"' in str(span.attributes[c.OUTPUT_MESSAGES])


def test_step_of_the_same_owner_below_another_is_one_of_its_own(
    host: type[Host], store: Store
) -> None:
    """As where an agent's tool asks that agent."""
    ann = host()
    tool = lambda *_: tool_step(object(), "t", {}, call_id=None, agent=None)  # noqa: E731
    use = wrap(lambda owner: owner.work("b"), (), tool, lambda *_: None)

    with auto_trace(store=store) as recording:
        wrap(use, (), lambda owner, _: agent_step(owner, "ann", None), ended)(ann)

    assert outline(recording) == "invoke_agent ann\n  execute_tool t\n    invoke_agent ann"


def test_cancelled_step_has_failed(host: type[Host], store: Store) -> None:
    """A coroutine that is cancelled, or never goes on, ends its span once."""

    async def leave() -> None:
        task = asyncio.create_task(host().wait("long"))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    with auto_trace(store=store) as recording:
        asyncio.run(leave())
        left = host().wait("a")
        left.send(None)
        left.close()

    kinds = [span.attributes[c.ERROR_TYPE] for span in recording.spans()[1:]]
    assert kinds == ["asyncio.exceptions.CancelledError", "GeneratorExit"]
