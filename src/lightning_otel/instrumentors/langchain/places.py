"""Where a run takes place: the code of LangChain's around it, entered and left by us.

LangChain tells a handler that a run starts, and not always that it ended: a cancelled tool, a
retriever that was interrupted. And it runs tools, retrievers and streams in the context they were
called in. A place is around that code; the handler puts the run into it once it starts.
"""

import functools
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from lightning_otel import capture
from lightning_otel.instrumentors.generators import first_step
from lightning_otel.instrumentors.langchain import runs

_here: ContextVar["Place | None"] = ContextVar("lightning-otel-langchain-place", default=None)


def current_place() -> "Place | None":
    """The innermost place that the code at hand runs in."""
    return _here.get()


class Place:
    """Code around one run, in one block or, around a generator, in a block for each step.

    Attributes:
        run_id: The run that takes place here; None before it started.
        tool_call_id: The call that a tool was given, which older LangChain tells no handler.
    """

    __slots__ = ("_context", "_mark", "_token", "run_id", "tool_call_id")

    def __init__(self, tool_call_id: object = None) -> None:
        self.run_id: UUID | None = None
        self.tool_call_id = tool_call_id
        self._context: Context | None = None

    def take(self, run_id: UUID, context: Context) -> None:
        """Let a run take place here: what follows, in this block and later ones, is within it."""
        self.run_id, self._context = run_id, context
        # Undone with the block, which puts back what was current before it.
        otel_context.attach(context)

    def __enter__(self) -> None:
        self._mark = _here.set(self)
        self._token = otel_context.attach(self._context or otel_context.get_current())

    def __exit__(self, *exc: object) -> None:
        try:
            _here.reset(self._mark)
        except ValueError:  # left in another context than it was entered in: nothing to undo there
            return
        otel_context.detach(self._token)

    def over(self, exc: BaseException | None = None) -> None:
        """End the run that took place here, if nobody has said so yet."""
        run = runs.take(self.run_id)
        if run is None:
            return
        if exc is None:
            run.stop()
        else:
            run.fail(exc)


def around(original: Any) -> Any:
    """A plain method as a place."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        place = Place(kwargs.get("tool_call_id"))
        with place:
            try:
                result = original(self, *args, **kwargs)
            except BaseException as exc:
                capture.guarded(place.over, exc)
                raise
        capture.guarded(place.over)
        return result

    return method


def around_async(original: Any) -> Any:
    """A coroutine method as a place."""

    async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        place = Place(kwargs.get("tool_call_id"))
        with place:
            try:
                result = await original(self, *args, **kwargs)
            except BaseException as exc:
                capture.guarded(place.over, exc)
                raise
        capture.guarded(place.over)
        return result

    return method


PlaceOf = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Place]
"""The place of a generator method's run, of its object and its arguments."""


def steps(place_of: PlaceOf) -> Callable[[Any], Any]:
    """What makes each step of a generator method take place in one place."""

    def make(original: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            place = capture.guarded(place_of, self, args, kwargs) or Place()
            inner = original(self, *args, **kwargs)
            advance = functools.partial(next, inner)
            try:
                while True:
                    with place:
                        try:
                            item = advance()
                        except StopIteration as end:
                            return end.value
                    try:
                        sent = yield item
                    except GeneratorExit:
                        with place:
                            inner.close()
                        raise
                    except BaseException as exc:  # noqa: BLE001  # thrown in, for the generator
                        advance = functools.partial(inner.throw, exc)
                    else:
                        advance = functools.partial(inner.send, sent)
            except BaseException as exc:
                capture.guarded(place.over, exc)
                raise
            finally:
                capture.guarded(place.over)

        return method

    return make


def steps_async(place_of: PlaceOf) -> Callable[[Any], Any]:
    """What makes each step of an async generator method take place in one place."""

    def make(original: Any) -> Any:
        async def method(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            place = capture.guarded(place_of, self, args, kwargs) or Place()
            inner = original(self, *args, **kwargs)
            advance = first_step(inner)
            try:
                while True:
                    with place:
                        try:
                            item = await advance
                        except StopAsyncIteration:
                            return
                    try:
                        sent = yield item
                    except GeneratorExit:
                        with place:
                            await inner.aclose()
                        raise
                    except BaseException as exc:  # noqa: BLE001  # thrown in, for the generator
                        advance = inner.athrow(exc)
                    else:
                        advance = inner.asend(sent)
            except BaseException as exc:
                capture.guarded(place.over, exc)
                raise
            finally:
                capture.guarded(place.over)

        return method

    return make
