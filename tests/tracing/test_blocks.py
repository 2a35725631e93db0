"""Blocks and decorated functions of every kind stay what they were, and leave no context behind."""

import asyncio
import contextlib
import contextvars
import functools
import gc
import inspect
import json
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import context as otel_context
from opentelemetry import trace
from tests.tracing.conftest import KINDS, run_in

from lightning_otel import Recording, Store, auto_trace, emit_message, emit_reward, operation
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

Steps = list[tuple[str, Any]]

MEMORY = Store(":memory:")


def plain(first: int, *rest: str, flag: bool = False) -> str:
    return f"{first}{rest}{flag}"


async def coroutine(first: int, *rest: str, flag: bool = False) -> str:
    return f"{first}{rest}{flag}"


def generator(first: int, *rest: str, flag: bool = False) -> Generator[int, str, str]:
    yield first
    return f"{rest}{flag}"


async def async_generator(first: int, *rest: str, flag: bool = False) -> AsyncGenerator[int, str]:
    yield first


FUNCTIONS = [plain, coroutine, generator, async_generator]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("decorate", [auto_trace, auto_trace(store=MEMORY), operation])
def test_decorated_function_looks_like_itself(function: Any, decorate: Any) -> None:
    """Name, documentation, signature and kind are its own, and so is the error of a wrong call."""
    traced = decorate(function)

    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        assert getattr(traced, name) == getattr(function, name)
    assert traced.__wrapped__ is function
    assert inspect.signature(traced) == inspect.signature(function)
    for is_kind in (
        inspect.iscoroutinefunction,
        asyncio.iscoroutinefunction,
        inspect.isgeneratorfunction,
        inspect.isasyncgenfunction,
    ):
        assert is_kind(traced) == is_kind(function)
    with pytest.raises(TypeError, match=f"{function.__name__}\\(\\) missing 1 required"):
        asyncio.run(transcript_of_call(traced))


async def transcript_of_call(function: Any) -> None:
    """Call a function of any kind without arguments, and run what it gives."""
    found = function()
    if inspect.iscoroutine(found):
        await found
    await anext(found) if inspect.isasyncgen(found) else next(found)


def test_methods_of_every_kind_are_bound_as_before() -> None:
    """Methods get their object, class methods their class, static methods neither."""
    decorate = auto_trace(store=MEMORY)

    class Agent:
        name = "calc"

        @decorate
        def plain(self, number: int) -> tuple[str, int]:
            return self.name, number

        @decorate
        async def coroutine(self, number: int) -> tuple[str, int]:
            return self.name, number

        @decorate
        def generator(self, number: int) -> Generator[tuple[str, int], None, None]:
            yield self.name, number

        @decorate
        @staticmethod
        def static(number: int) -> tuple[str, int]:
            return "static", number

        @decorate
        @classmethod
        def of_class(cls, number: int) -> tuple[str, int]:
            return cls.__name__, number

        @staticmethod
        @decorate
        def static_inside(number: int) -> tuple[str, int]:
            return "static", number

    agent = Agent()

    assert [agent.plain(1), asyncio.run(agent.coroutine(2)), *agent.generator(3)] == [
        ("calc", 1), ("calc", 2), ("calc", 3),
    ]  # fmt: skip
    assert agent.static(5) == Agent.static(5) == ("static", 5)
    assert agent.of_class(6) == Agent.of_class(6) == ("Agent", 6)
    assert agent.static_inside(7) == ("static", 7)


async def double(number: int) -> int:
    await asyncio.sleep(0)
    emit_message("inside")
    return number * 2


def test_coroutine_function_in_disguise_is_recorded_until_it_is_done(store: Store) -> None:
    """What gives a coroutine, such as a partial function, is recorded while that runs."""
    function: Any = functools.partial(lambda number: double(number))

    result = asyncio.run(auto_trace(function, store=store, name="disguised")(21))

    root, message = store.spans().rows()
    assert result == 42
    assert message.parent_span_id == root.span_id
    assert (root.end_ns or 0) > (message.end_ns or 0) > 0


class StubbornError(Exception):
    """Caught by the generator below."""


def conversation(ending: str) -> Generator[str, str, str]:
    """Answers what is sent, catches what it can, and closes in one of several ways."""
    said = yield "hello"
    while True:
        try:
            if said == "return":
                return "goodbye"
            if said == "fail":
                raise LookupError("inside")
            said = yield f"you said {said}"
        except StubbornError as exc:
            said = yield f"caught {exc}"
        except GeneratorExit:
            if ending == "ignore":
                yield "still here"
            if ending == "return":
                return "closed"
            if ending == "fail":
                raise RuntimeError("while closing") from None
            raise


async def async_conversation(ending: str) -> AsyncGenerator[str, str]:
    """As above, without a return value, and awaiting now and then.

    One that ignores being closed cannot be closed again: Python takes it for closed.
    """
    said = yield "hello"
    while True:
        await asyncio.sleep(0)
        try:
            if said == "return":
                return
            if said == "fail":
                raise LookupError("inside")
            said = yield f"you said {said}"
        except StubbornError as exc:
            said = yield f"caught {exc}"
        except GeneratorExit:
            await asyncio.sleep(0)
            if ending == "return":
                return
            if ending == "fail":
                raise RuntimeError("while closing") from None
            raise


ACTIONS = st.lists(
    st.one_of(
        st.sampled_from(["next", "close"]).map(lambda action: (action, None)),
        st.sampled_from(["hi", "return", "fail"]).map(lambda text: ("send", text)),
        st.sampled_from([StubbornError, KeyError, StopIteration, GeneratorExit]).map(
            lambda kind: ("throw", kind)
        ),
    ),
    max_size=6,
)
ENDINGS = ["raise", "return", "fail"]


async def transcript(talk: Any, steps: Steps) -> list[Any]:
    """What a generator of either kind answers to each step."""
    prefix = "a" if inspect.isasyncgen(talk) else ""
    heard: list[Any] = []
    for action, value in steps:
        try:
            if action == "next":
                answer = getattr(talk, f"__{prefix}next__")()
            elif action == "close":
                answer = getattr(talk, f"{prefix}close")()
            elif action == "send":
                answer = getattr(talk, f"{prefix}send")(value)
            else:
                answer = getattr(talk, f"{prefix}throw")(value("thrown"))
            heard.append(await answer if prefix else answer)
        except StopIteration as stop:
            heard.append(("return", stop.value))
        except BaseException as exc:  # noqa: BLE001  # any is an answer
            heard.append((type(exc), exc.args))
    return heard


@pytest.mark.parametrize("function", [conversation, async_conversation])
@settings(max_examples=80, deadline=None)
@given(steps=ACTIONS, ending=st.sampled_from([*ENDINGS, "ignore"]))
def test_generator_answers_send_throw_and_close_as_undecorated(
    function: Any, steps: Steps, ending: str
) -> None:
    """Whatever is sent to, thrown into or asked of it, a decorated generator answers the same."""
    if function is async_conversation and ending == "ignore":
        ending = "raise"

    async def both() -> list[list[Any]]:
        talks = [function(ending), auto_trace(function, store=MEMORY)(ending)]
        found = [await transcript(talk, steps) for talk in talks]
        for left in talks * 2:  # it ignores being closed once
            await transcript(left, [("close", None)])
        return found

    expected, heard = asyncio.run(both())

    assert heard == expected


def test_generator_begins_its_rollout_with_its_first_step(store: Store) -> None:
    """A generator that nobody iterates is no rollout."""
    traced = auto_trace(generator, store=store)

    unused = traced(1)

    del unused
    assert store.layout is not None
    assert not store.layout.exists()


def produce() -> Generator[int, None, None]:
    for number in range(2):
        emit_message(f"made {number}")
        yield number


async def produce_async() -> AsyncGenerator[int, None]:
    """The same, awaiting now and then."""
    for number in range(2):
        await asyncio.sleep(0)
        emit_message(f"made {number}")
        yield number


@pytest.mark.parametrize("decorate", [auto_trace, operation])
@pytest.mark.parametrize("function", [produce, produce_async])
def test_nothing_is_attached_across_a_yield(function: Any, decorate: Any, store: Store) -> None:
    """What the consumer does between two steps is no child of the generator's span."""
    tracer = trace.get_tracer("consumer")

    async def consume() -> Recording:
        async with auto_trace(store=store) as recording:
            before = otel_context.get_current()
            made = decorate(function)()
            for _ in range(2):
                await anext(made) if function is produce_async else next(made)
                assert otel_context.get_current() is before
                tracer.start_span("used").end()
            await transcript(made, [("close", None)])
        return recording

    recording = asyncio.run(consume())

    assert parents(recording, "used") == [recording.span_id] * 2
    made = parents(recording, c.SPAN_MESSAGE)
    assert len(made) == 2
    assert recording.span_id not in made


def parents(recording: Recording, name: str) -> list[str | None]:
    return [span.parent_span_id for span in recording.spans() if span.name == name]


async def stream_with_block() -> AsyncGenerator[int, None]:
    """A stream that opens the block itself, and so leaves it open across its yields."""
    with auto_trace(store=MEMORY):
        async for number in produce_async():
            yield number


async def stream_with_async_block() -> AsyncGenerator[int, None]:
    async with auto_trace(store=MEMORY):
        async for number in produce_async():
            yield number


STREAMS = [auto_trace(produce_async, store=MEMORY), stream_with_block, stream_with_async_block]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("how", ["by a child", "by a stranger", "by the collector"])
@pytest.mark.pain(4)
def test_async_generator_closed_by_another_task_leaves_no_trace(
    stream: Any, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Closed elsewhere or forgotten, it ends, says nothing, and leaves that context as it was."""

    async def begin(chunks: Any) -> None:
        await anext(chunks)

    async def close(chunks: Any) -> None:
        before = otel_context.get_current()
        await chunks.aclose()
        assert otel_context.get_current() is before

    async def main() -> None:
        chunks = stream()
        if how == "by a child":  # the closing task is a copy of the one that opened the block
            await begin(chunks)
        else:
            await asyncio.create_task(begin(chunks))
        if how != "by the collector":
            await asyncio.create_task(close(chunks))
        del chunks
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(main())

    assert caplog.records == []
    assert [span for span in MEMORY.spans() if span.is_incomplete] == []


class PayloadError(Exception):
    """Counts how many of its kind are alive."""

    alive = 0

    def __init__(self) -> None:
        PayloadError.alive += 1

    def __del__(self) -> None:
        PayloadError.alive -= 1


def fail(_: int) -> None:
    raise PayloadError


async def fail_async(_: int) -> None:
    raise PayloadError


@pytest.mark.parametrize("function", [fail, fail_async, generator, async_generator])
def test_an_exception_is_freed_as_soon_as_without_us(function: Any) -> None:
    """No circle of ours keeps an exception, and all that its traceback holds, alive."""

    def run() -> None:
        running: Any = auto_trace(function, store=MEMORY)(1)
        if function is fail_async:
            running.send(None)
        elif function is generator:
            next(running)
            running.throw(PayloadError())
        else:
            with contextlib.suppress(StopIteration):
                anext(running).__await__().send(None)
            running.athrow(PayloadError()).__await__().send(None)

    gc.disable()
    try:
        with contextlib.suppress(PayloadError):
            run()
        alive = PayloadError.alive
    finally:
        gc.enable()

    assert alive == 0


@operation
async def numbers() -> AsyncGenerator[int, None]:
    for number in range(3):
        trace.get_tracer("the program").start_span("inside").end()
        await asyncio.sleep(0)
        yield number


@pytest.mark.pain(4)
def test_async_generator_stepped_by_many_tasks_keeps_its_place(store: Store) -> None:
    """Each item asked for by a task of its own, with a context of its own."""

    async def work() -> None:
        running: Any = numbers()
        for _ in range(3):
            await asyncio.create_task(anext(running))
        async with contextlib.aclosing(running):
            trace.get_tracer("the program").start_span("between").end()

    with auto_trace(store=store) as recording:
        asyncio.run(work())

    assert parents(recording, "inside") == [recording.spans()[1].span_id] * 3
    assert parents(recording, "between") == [recording.span_id]


def halves() -> Generator[str, None, None]:
    """A generator whose own ``with`` block is open while it waits."""
    with operation("block") as block:
        yield "first"
        block.output = "done"
        yield "second"


def test_yield_within_an_operation_block_ends_clean(store: Store) -> None:
    """A block that is open over a ``yield`` ends once and quietly, wherever it is left."""

    def consume() -> None:
        before = otel_context.get_current()
        assert list(halves()) == ["first", "second"]
        assert otel_context.get_current() is before
        left = halves()
        next(left)
        contextvars.Context().run(left.close)

    with auto_trace(store=store) as recording:
        contextvars.copy_context().run(consume)
        trace.get_tracer("the program").start_span("between").end()

    first, second = [span for span in recording.spans() if span.name == c.SPAN_OPERATION]
    assert first.attributes[c.OPERATION_OUTPUT] == '"done"'
    assert second.end_ns is not None
    assert parents(recording, "between") == [recording.span_id]


def operations(recording: Recording) -> list[Span]:
    return [span for span in recording.spans() if span.name == c.SPAN_OPERATION]


def test_operation_block_keeps_inputs_and_output(store: Store) -> None:
    """A block is one span with Agent Lightning's keys, the parent of what happens inside."""
    with auto_trace(store=store) as recording:
        with operation("retrieve", top_k=5) as found:
            emit_message("searching")
            found.output = ["a", "b"]
        emit_reward(0.5, span_id=found.span_id)

    (span,) = operations(recording)
    message, reward = recording.spans()[2:]
    assert span.name == "agentlightning.operation"
    assert span.attributes["agentlightning.operation.name"] == "retrieve"
    assert span.attributes["agentlightning.operation.input"] == '{"top_k": 5}'
    assert span.attributes["agentlightning.operation.output"] == '["a", "b"]'
    assert (span.status, span.is_incomplete) == ("UNSET", False)
    assert message.parent_span_id == span.span_id == found.span_id
    assert reward.attributes[f"{c.LINK_PREFIX}.0.value_match"] == span.span_id


class Tool:
    """Has methods."""

    @operation
    def use(self, text: str) -> str:
        return text

    @operation
    @classmethod
    def make(cls, size: int) -> int:
        return size


class Awkward:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no text for this")


@operation
def same(value: Any, *rest: str, **options: int) -> Any:
    return value


@operation
def count(to: int) -> Generator[int, None, str]:
    yield from range(to)
    return "counted"


DECORATED: list[tuple[Callable[[], Any], str, Any, Any]] = [
    (lambda: same("a", "b", size=3), "same",
     {"value": "a", "rest": ["b"], "options": {"size": 3}}, "a"),
    (lambda: asyncio.run(operation("search", engine="toy")(double)(2)), "search",
     {"engine": "toy", "number": 2}, 4),
    (lambda: list(count(2)), "count", {"to": 2}, "counted"),
    (lambda: Tool().use("x"), "Tool.use", {"text": "x"}, "x"),
    (lambda: Tool.make(3), "Tool.make", {"size": 3}, 3),
    (lambda: operation("largest")(max)(3, 4), "largest", {"args": [3, 4]}, 4),
    *[(lambda empty=empty: same(empty), "same", {"value": empty}, empty)
      for empty in (0, "", False, [], {}, 0.0)],
    (lambda: same(Awkward()), "same", "<dict>", "<Awkward>"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "name", "inputs", "output"), DECORATED)
def test_decorated_function_keeps_arguments_and_result(
    call: Callable[[], Any], name: str, inputs: Any, output: Any, store: Store
) -> None:
    """By name; ``self`` and ``cls`` are no inputs, and what JSON cannot hold costs only itself."""
    with auto_trace(store=store) as recording:
        call()

    (span,) = operations(recording)
    assert span.attributes[c.OPERATION_NAME] == name
    assert json.loads(span.attributes[c.OPERATION_INPUT]) == inputs
    assert json.loads(span.attributes[c.OPERATION_OUTPUT]) == output


@pytest.mark.parametrize("kind", KINDS)
def test_operation_records_an_exception_once_and_lets_it_through(kind: str, store: Store) -> None:
    """The span fails with the exception's name and text; the very exception goes on."""
    exc = LookupError("nothing found")

    def fail() -> None:
        raise exc

    with auto_trace(store=store) as recording, pytest.raises(LookupError) as caught:
        run_in(kind, operation("find"), fail)

    (span,) = operations(recording)
    assert caught.value is exc
    assert (span.status, span.status_message) == ("ERROR", "nothing found")
    assert span.attributes[c.ERROR_TYPE] == "LookupError"
    (raised,) = span.events
    assert (raised.name, raised.attributes[c.EXCEPTION_TYPE]) == ("exception", "LookupError")
    assert raised.attributes[c.EXCEPTION_STACKTRACE].endswith("LookupError: nothing found\n")
    assert recording.spans()[0].status == "UNSET"


def test_operation_outside_a_recording_only_runs(caplog: pytest.LogCaptureFixture) -> None:
    """Without a recording blocks and functions run as they are, and nothing is said."""
    with operation("free") as free:
        free.output = same(4)

    assert (free.output, free.span_id, caplog.records) == (4, None, [])
    assert not Store().layout.exists()  # type: ignore[union-attr]  # the default store is local
