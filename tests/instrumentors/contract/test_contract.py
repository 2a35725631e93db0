"""What holds for every library alike: one request is one span, and the program is undisturbed."""

import asyncio
import gc
import importlib.util
import inspect
import multiprocessing
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.instrumentation.utils import suppress_instrumentation
from tests.instrumentors.contract.drivers import ASKED, DRIVERS, Driver
from tests.instrumentors.outline import assert_each_call_once, calls_of, outline

from lightning_otel import Store, auto_trace, operation, provider
from lightning_otel import conventions as c
from lightning_otel.demo.server import DemoServer
from lightning_otel.tracing import Recording

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=DRIVERS, ids=lambda driver: driver.name)
def driver(request: pytest.FixtureRequest) -> Driver:
    """One library."""
    found: Driver = request.param
    if importlib.util.find_spec(found.needs) is None:
        pytest.skip(f"{found.name} has another environment")
    return found


def within(outer: str, outline: str) -> str:
    """The outline of what stands in a span."""
    return "\n  ".join([outer, *outline.splitlines()])


def since(server: DemoServer, count: int) -> Any:
    """The server's log without its first requests."""
    return SimpleNamespace(log=server.log[count:])


def failure(work: Callable[[], object]) -> tuple[type, str]:
    """The exception that some work ends in."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  # each library has its own
        work()
    return type(caught.value), str(caught.value)


def drain(driver: Driver, name: str, base_url: str, count: int = sys.maxsize) -> int:
    """Read a stream, or its first pieces before it is closed; gives how many there were."""
    stream = driver.way(name)(base_url, "toy")

    async def read() -> int:
        found = 0
        async with aclosing(stream):
            async for _ in stream:
                found += 1
                if found == count:
                    break
        return found

    if hasattr(stream, "__aiter__"):
        return asyncio.run(read())
    with closing(stream):
        return sum(1 for _ in zip(range(count), stream, strict=False))


WAYS = pytest.mark.parametrize("way", ["ask", "ask_async"])
STREAMS = pytest.mark.parametrize("way", ["stream", "stream_async"])


@WAYS
def test_call_is_one_span_and_gives_what_it_gave(
    driver: Driver, way: str, server: DemoServer, store: Store, facts: Any
) -> None:
    """Every fact of the request and the answer is there, under what the library puts around it."""
    call = driver.way(way)

    def ask() -> Any:
        found = call(server.base_url, "toy")
        return asyncio.run(found) if inspect.iscoroutine(found) else found

    untraced = ask()
    count = len(server.log)
    with auto_trace(store=store) as recording:
        assert ask() == untraced

    assert outline(recording) == driver.outline
    assert_each_call_once(recording, since(server, count), facts, provider=driver.provider)


@STREAMS
def test_stream_is_one_span_and_whole(
    driver: Driver, way: str, server: DemoServer, store: Store, facts: Any
) -> None:
    """As many pieces as without us; what they add up to is the call's answer."""
    untraced = drain(driver, way, server.base_url)
    count = len(server.log)
    with auto_trace(store=store) as recording:
        assert drain(driver, way, server.base_url) == untraced

    assert outline(recording) == driver.outline
    assert_each_call_once(recording, since(server, count), facts, provider=driver.provider)


@STREAMS
def test_stream_left_early_ends_every_span(
    driver: Driver, way: str, server: DemoServer, store: Store
) -> None:
    """Closed after its first piece, and collected: nothing stays open."""
    with auto_trace(store=store) as recording:
        assert drain(driver, way, server.base_url, 1) == 1
        gc.collect()

    outline(recording)


@STREAMS
def test_span_between_two_pieces_is_no_child_of_the_stream(
    driver: Driver, way: str, server: DemoServer, store: Store
) -> None:
    """The program's own context is what it was between two steps."""

    def between() -> None:
        trace.get_tracer("program").start_span("between").end()

    async def read(stream: Any) -> None:
        async for _ in stream:
            between()

    with auto_trace(store=store) as recording:
        stream = driver.way(way)(server.base_url, "toy")
        if hasattr(stream, "__aiter__"):
            asyncio.run(read(stream))
        else:
            for _ in stream:
                between()

    found = [span for span in recording.spans() if span.name == "between"]
    assert found
    assert {span.parent_span_id for span in found} == {recording.span_id}


def test_failure_reaches_the_program_as_it_is(
    driver: Driver, server: DemoServer, store: Store
) -> None:
    """The same exception with the same words; its call has failed, and all that stands around."""
    untraced = failure(lambda: driver.ask_somehow(server.base_url, "fail-400"))
    with auto_trace(store=store) as recording:
        assert failure(lambda: driver.ask_somehow(server.base_url, "fail-400")) == untraced

    outline(recording)
    assert {span.status for span in calls_of(recording)} == {"ERROR"}
    assert all(span.attributes[c.ERROR_TYPE] for span in calls_of(recording))


def test_cancelled_call_ends_every_span(driver: Driver, silent: Any, store: Store) -> None:
    """A task that is cancelled before its answer leaves failed spans, and none open."""
    ask = driver.way("ask_async")

    async def leave() -> None:
        task = asyncio.create_task(ask(silent.base_url, "toy"))
        await silent.asked(1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    with auto_trace(store=store) as recording:
        asyncio.run(leave())

    assert outline(recording) == driver.outline
    assert {span.status for span in calls_of(recording)} == {"ERROR"}


def test_calls_at_once_keep_to_their_own_recordings(
    driver: Driver, server: DemoServer, store: Store
) -> None:
    """Of several recordings in one event loop each has its own call, under its own span."""
    ask = driver.way("ask_async")

    async def record(name: str) -> Recording:
        with auto_trace(store=store, name=name) as recording, operation(name):
            await ask(server.base_url, "toy")
        return recording

    async def both() -> list[Recording]:
        return list(await asyncio.gather(record("a"), record("b")))

    for recording in asyncio.run(both()):
        assert outline(recording) == within(c.SPAN_OPERATION, driver.outline)


def test_calls_in_threads_belong_to_their_recording(
    driver: Driver, server: DemoServer, store: Store
) -> None:
    """A pool's workers stand in what handed them the work."""
    with auto_trace(store=store) as recording, operation("pool"), ThreadPoolExecutor(2) as pool:
        found = list(pool.map(driver.ask_somehow, [server.base_url] * 2))

    assert len(set(found)) == 1
    spans = recording.spans()
    (pooled,) = [span for span in spans if span.name == c.SPAN_OPERATION]
    top, _, _ = driver.outline.partition("\n")
    above = [span.parent_span_id for span in spans if span.name == top]
    assert above == [pooled.span_id] * 2


def _ask_in_child(name: str, base_url: str) -> None:
    (driver,) = [driver for driver in DRIVERS if driver.name == name]
    driver.ask_somehow(base_url)


def test_calls_of_a_forked_child_belong_to_the_recording(
    driver: Driver, server: DemoServer, store: Store
) -> None:
    """A child that was forked within a recording goes on in it."""
    if not driver.can_fork:
        pytest.skip(f"{driver.name} hangs in a forked child by itself")
    driver.ask_somehow(server.base_url)  # what a library imports, it imports here
    with auto_trace(store=store) as recording:
        child = multiprocessing.get_context("fork").Process(
            target=_ask_in_child, args=(driver.name, server.base_url)
        )
        child.start()
        child.join(60)
        assert child.exitcode == 0

    assert outline(recording) == driver.outline


def test_content_stays_out_where_the_user_says_so(
    driver: Driver, server: DemoServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The span is there, and no word of what was asked or answered."""
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "NO_CONTENT")
    with auto_trace(store=store) as recording:
        answer = driver.ask_somehow(server.base_url)

    (call,) = calls_of(recording)
    assert not c.CONTENT_KEYS & call.attributes.keys()
    kept = str([span.attributes for span in recording.spans()])
    assert ASKED not in kept
    assert answer not in kept


def test_nothing_is_recorded_where_nothing_is_to_be(
    driver: Driver, server: DemoServer, store: Store
) -> None:
    """Not where OpenTelemetry's instrumentation is suppressed, nor outside a recording."""
    with auto_trace(store=store) as recording, suppress_instrumentation():
        driver.ask_somehow(server.base_url)
    assert not calls_of(recording)
    count = len(store.spans().rows())
    driver.ask_somehow(server.base_url)
    assert len(store.spans().rows()) == count


def test_switched_off_it_is_as_it_was(driver: Driver, server: DemoServer, store: Store) -> None:
    """Each method is put back, records nothing, and can be replaced again."""
    driver.ask_somehow(server.base_url)

    def methods() -> list[Any]:
        return [vars(getattr(sys.modules[at], of))[name] for at, of, name in driver.methods]

    provider.uninstrument()
    before = methods()
    for _ in range(2):
        with auto_trace(store=store) as recording:
            driver.ask_somehow(server.base_url)
        for bare, ours in zip(before, methods(), strict=True):
            assert ours is not bare
            assert inspect.signature(ours) == inspect.signature(bare)
            for is_kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction):
                assert is_kind(ours) == is_kind(bare)
            assert pickle.loads(pickle.dumps(ours)) is ours
        assert outline(recording) == driver.outline
        provider.uninstrument()
        assert methods() == before
    with auto_trace(store=store) as recording:
        provider.uninstrument()
        driver.ask_somehow(server.base_url)
    assert not calls_of(recording)
