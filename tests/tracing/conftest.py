"""What the tests of ``tracing`` share: ways to be traced and reading a recording."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from lightning_otel import Recording
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

KINDS = ["with", "async with", "plain", "coroutine", "generator", "async generator"]


def run_in(kind: str, traced: Any, body: Callable[[], Any]) -> None:
    """Run a body in a traced block, or as a traced function of a kind, to its end."""

    async def coroutine() -> Any:
        await asyncio.sleep(0)
        return body()

    def generator() -> Iterator[int]:
        yield 1
        return body()

    async def async_generator() -> AsyncIterator[int]:
        yield 1
        body()

    async def exhaust() -> None:
        async for _ in traced(async_generator)():
            pass

    async def within() -> None:
        async with traced:
            body()

    if kind == "with":
        with traced:
            body()
    elif kind == "plain":
        traced(body)()
    elif kind == "generator":
        list(traced(generator)())
    else:
        ways = {"coroutine": lambda: traced(coroutine)(), "async with": within}
        asyncio.run(ways.get(kind, exhaust)())


def root_of(recording: Recording) -> Span:
    """The one root span of a recording."""
    (root,) = [span for span in recording.spans() if span.span_id == recording.span_id]
    assert root.name == c.SPAN_ROLLOUT
    return root
