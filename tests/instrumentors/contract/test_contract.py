"""What holds for every library alike: one request is one span, and the program is undisturbed."""

import asyncio
import contextvars
import copy
import gc
import importlib.util
import inspect
import multiprocessing
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.facts import sent
from tests.instrumentors.conftest import broken
from tests.instrumentors.contract.drivers import ASKED, DRIVERS, SUM, Driver, count_pieces
from tests.instrumentors.outline import assert_each_call_once, calls_of, named, outline

from lightning_otel import (
    Recording,
    Resources,
    State,
    Store,
    auto_trace,
    instrument,
    operation,
    uninstrument,
)
from lightning_otel.capture import operations
from lightning_otel.demo.server import DemoServer
from lightning_otel.instrumentors.wrappers import WrappedRun
from lightning_otel.messages import parse_messages, plain_text
from lightning_otel.types import conventions as c

pytestmark = pytest.mark.filterwarnings("ignore")
_SIDES = (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES)


@pytest.fixture(params=DRIVERS, ids=lambda driver: driver.name)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    found: Driver = request.param
    if importlib.util.find_spec(found.needs) is None:
        pytest.skip(f"{found.name} has another environment")
    yield found
    if found.name.startswith(("ag2", "crewai")):  # which leave their clients open
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def _thawed() -> Iterator[None]:
    """What no collection walked is walked again once these tests are over."""
    yield
    gc.collect()
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _frozen(_thawed: None) -> None:
    """A collection walks what a test makes, and not a million objects of libraries."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing is logged of contexts that could not be detached."""
    yield
    assert "detach" not in caplog.text


def within(outer: str, outline: str) -> str:
    return "\n  ".join([outer, *outline.splitlines()])


def since(server: DemoServer, count: int) -> Any:
    return SimpleNamespace(log=server.log[count:])


def outcome(work: Callable[[], object]) -> object:
    """What some work gives, or the exception that it ends in."""
    try:
        return work()
    except Exception as exc:  # noqa: BLE001  # each library has its own
        return type(exc), re.sub(r"req_\w+", "ID", str(exc))  # which a server draws anew


def drain(driver: Driver, way: str, base_url: str, model: str = "toy") -> int:
    """Read a stream to its end; gives how many pieces there were."""
    return count_pieces(driver.way(way)(base_url, model))


def between() -> None:
    trace.get_tracer("program").start_span("between").end()


def leave(stream: Any, how: str) -> None:
    next(stream)
    between()
    if how == "raise":
        with pytest.raises(KeyError):
            stream.throw(KeyError("mine"))
    elif how == "elsewhere":
        thread = threading.Thread(target=contextvars.Context().run, args=(stream.close,))
        thread.start()
        thread.join()
    elif how == "close":
        stream.close()


async def leave_async(stream: Any, how: str) -> None:
    await anext(stream)
    between()
    if how == "raise":
        with pytest.raises(KeyError):
            await stream.athrow(KeyError("mine"))
    elif how == "elsewhere":
        await asyncio.create_task(stream.aclose())
    elif how == "close":
        await stream.aclose()
    del stream
    gc.collect()
    await asyncio.sleep(0.05)


WAYS = pytest.mark.parametrize("way", ["ask", "ask_async"])
STREAMS = pytest.mark.parametrize("way", ["stream", "stream_async"])


@WAYS
def test_call_is_one_span_and_gives_what_it_gave(
    driver: Driver, way: str, server: DemoServer, store: Store, facts: Any
) -> None:
    """Every fact is there, under what the library puts around it; the request is as without us."""
    call = driver.way(way)

    def ask() -> Any:
        found = call(server.base_url, "toy")
        return asyncio.run(found) if inspect.iscoroutine(found) else found

    untraced = ask()
    plain = list(map(sent, server.log))
    with auto_trace(store=store) as recording:
        assert ask() == untraced

    assert outline(recording) == driver.outline
    assert list(map(sent, server.log[len(plain) :])) == plain
    assert_each_call_once(recording, since(server, len(plain)), facts, provider=driver.provider)


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
@pytest.mark.parametrize("how", ["close", "drop", "raise", "elsewhere"])
def test_stream_left_early_ends_every_span(
    driver: Driver, way: str, how: str, server: DemoServer, store: Store
) -> None:
    """However and wherever it is left nothing stays open, and no context stays behind."""
    with auto_trace(store=store) as recording:
        before = otel_context.get_current()
        stream = driver.way(way)(server.base_url, "legion")
        if hasattr(stream, "__aiter__"):
            asyncio.run(leave_async(stream, how))
        else:
            leave(stream, how)
        del stream
        gc.collect()
        assert otel_context.get_current() is before

    outline(recording)
    assert named(recording, "between").parent_span_id == recording.span_id


@STREAMS
def test_span_between_two_pieces_is_no_child_of_the_stream(
    driver: Driver, way: str, server: DemoServer, store: Store
) -> None:
    """The program's own context is what it was, whichever task takes the next step."""

    async def read(stream: Any) -> None:
        while await asyncio.create_task(anext(stream, None)) is not None:
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


@STREAMS
def test_stream_that_breaks_fails_as_it_would(
    driver: Driver, way: str, server: DemoServer, store: Store
) -> None:
    """Cut by the server it raises what it raises without us, and its call has failed."""
    untraced = outcome(lambda: drain(driver, way, server.base_url, "cut"))
    with auto_trace(store=store) as recording:
        assert outcome(lambda: drain(driver, way, server.base_url, "cut")) == untraced

    outline(recording)
    assert {span.status for span in calls_of(recording)} == {"ERROR"}


@pytest.mark.parametrize("model", ["fail-400", "fail-500", "html"])
def test_failure_reaches_the_program_as_it_is(
    driver: Driver, model: str, server: DemoServer, store: Store
) -> None:
    """The same exception with the same words; its call has failed, and all that stands around."""
    untraced = outcome(lambda: driver.ask_somehow(server.base_url, model))
    with auto_trace(store=store) as recording:
        assert outcome(lambda: driver.ask_somehow(server.base_url, model)) == untraced

    outline(recording)
    if model != "html":  # for which each library has another word
        assert {span.status for span in calls_of(recording)} == {"ERROR"}
        assert all(span.attributes[c.ERROR_TYPE] for span in calls_of(recording))
        if driver.is_sent_by_openai:
            assert all("refuses" in str(span.status_message) for span in calls_of(recording))


def test_cancelled_call_ends_every_span(driver: Driver, silent: Any, store: Store) -> None:
    """A task that is cancelled before its answer leaves failed spans, and none open."""
    ask = driver.way("ask_async")
    if not driver.can_be_cancelled:
        pytest.skip(f"{driver.name} goes on in its thread")

    async def leave() -> None:
        task = asyncio.create_task(ask(silent.base_url, "toy"))
        await silent.asked(1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    with auto_trace(store=store) as recording:
        asyncio.run(leave())

    assert outline(recording) == driver.outline
    for span in calls_of(recording):
        assert (span.status, span.attributes[c.ERROR_TYPE]) == (
            "ERROR", "asyncio.exceptions.CancelledError",
        )  # fmt: skip


def test_tool_is_a_span_with_what_it_was_given_and_gave(
    driver: Driver, server: DemoServer, store: Store, facts: Any
) -> None:
    """Under its agent, between the two calls that ask for it and read it."""
    untraced = driver.way("tool")(server.base_url, "toy")
    count = len(server.log)
    with auto_trace(store=store) as recording:
        assert driver.way("tool")(server.base_url, "toy") == untraced

    assert outline(recording) == driver.tool_outline
    assert_each_call_once(recording, since(server, count), facts)
    asked = (server.log[count].response or {})["choices"][0]["message"]["tool_calls"][0]
    found = named(recording, "execute_tool calculator").attributes
    assert (found[c.TOOL_CALL_ID], found[c.TOOL_RESULT]) == (asked["id"], "391")
    arguments = asked["function"]["arguments"].replace('": "', '":"')
    assert str(found[c.TOOL_ARGUMENTS]).replace('": "', '":"') == arguments == SUM
    assert {path.agent for path in recording.trajectories()} == {"ann"}

    first, *_, last = sorted(calls_of(recording), key=lambda call: call.start_ns)
    agents = [span for span in recording.spans() if span.attributes.get(c.AGENT_NAME) == "ann"]
    for agent in (span.attributes for span in agents if span.name == "invoke_agent ann"):
        assert (agent[c.PROVIDER], agent[c.REQUEST_MODEL]) == ("openai", "toy")
        # Some frameworks say themselves what an agent is told and says, else the calls do.
        told = [plain_text(parse_messages(agent[key])[-1:]) for key in _SIDES]
        assert told[0] in plain_text(parse_messages(first.attributes[c.INPUT_MESSAGES]))
        assert told[1] == plain_text(parse_messages(last.attributes[c.OUTPUT_MESSAGES]))


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


@pytest.mark.pain(4)
def test_calls_in_threads_belong_to_their_recording(
    driver: Driver, server: DemoServer, store: Store
) -> None:
    """Workers that two recordings share stand each time in what handed them the work."""
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            with auto_trace(store=store) as recording, operation("pool"):
                found = list(pool.map(driver.ask_somehow, [server.base_url] * 2))

            assert len(set(found)) == 1
            top, _, _ = driver.outline.partition("\n")
            above = [span.parent_span_id for span in recording.spans() if span.name == top]
            assert above == [named(recording, c.SPAN_OPERATION).span_id] * 2
            assert {span.rollout_id for span in recording.spans()} == {recording.rollout_id}


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
    """The spans are there, and no word of what was asked or answered."""
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "NO_CONTENT")
    with auto_trace(store=store) as recording:
        answer = driver.ask_somehow(server.base_url)
        if driver.tool is not None:
            driver.tool(server.base_url, "toy")

    spans = recording.spans()
    assert len(calls_of(recording)) == len(server.log)
    assert not any(c.CONTENT_KEYS & span.attributes.keys() for span in spans)
    kept = str([span.attributes for span in spans])
    assert not [text for text in (ASKED, answer, "17*23") if text in kept]


def test_asked_for_token_ids_its_calls_are_exact(
    driver: Driver, server: DemoServer, store: Store
) -> None:
    """The program gets what it got, and each token of the answer has its id and its logprob."""
    if not driver.is_sent_by_openai:
        pytest.skip(f"{driver.name} sends its own requests")
    untraced = driver.ask_somehow(server.base_url)
    with auto_trace(store=store, enable_retokenization_fix=True) as recording:
        assert driver.ask_somehow(server.base_url) == untraced
        if driver.stream_async is not None:
            drain(driver, "stream_async", server.base_url)

    steps = [step for path in recording.trajectories() for step in path.transitions]
    assert len(steps) == len(server.log) - 1
    for step in steps:
        assert (step.capture, len(step.logprobs)) == ("exact", len(step.response_ids))


def test_its_requests_are_made_with_what_is_live_for_its_agent(
    driver: Driver, server: DemoServer, store: Store
) -> None:
    """The call says with which version, and holds what was sent."""
    if not driver.is_sent_by_openai:
        pytest.skip(f"{driver.name} sends its own requests")
    resources = Resources(State(store.name))
    resources.publish("system_prompt", "for all")
    resources.publish("ann/system_prompt", "for ann")
    agent = "ann" if "invoke_agent ann" in driver.outline else ""
    with auto_trace(store=store, apply=True):
        driver.ask_somehow(server.base_url)

    (step,) = store.transitions().rows()
    prompt = "for ann" if agent else "for all"
    assert (server.log[0].request or {})["messages"][0]["content"] == prompt
    assert step.observation[0]["parts"][0]["content"] == prompt
    assert step.agent == agent
    assert step.resource_version == f"{'ann/' if agent else ''}system_prompt@1"


def test_recording_goes_on_where_telemetry_is_suppressed(
    driver: Driver, server: DemoServer, store: Store, exported: InMemorySpanExporter
) -> None:
    """The recording that was asked for is whole; other exporters see nothing of it."""
    with auto_trace(store=store) as recording, suppress_instrumentation():
        driver.ask_somehow(server.base_url)
    assert len(calls_of(recording)) == len(server.log)
    assert [span.name for span in exported.get_finished_spans()] == [c.SPAN_ROLLOUT]


def test_nothing_is_recorded_outside_a_recording(
    driver: Driver, server: DemoServer, store: Store
) -> None:
    """A call beside recordings leaves no span."""
    with auto_trace(store=store):
        driver.ask_somehow(server.base_url)
    count = len(store.spans().rows())
    driver.ask_somehow(server.base_url)
    assert len(store.spans().rows()) == count


def test_switched_on_everywhere_each_run_is_a_trace_without_content(
    driver: Driver, server: DemoServer, exported: InMemorySpanExporter
) -> None:
    """As OpenTelemetry's users do it: by the entry points, for another exporter, without us."""
    for entry in entry_points(group="opentelemetry_instrumentor"):
        if entry.name.startswith("lightning-"):
            entry.load()().instrument(skip_dep_check=True)
    driver.ask_somehow(server.base_url)

    spans = exported.get_finished_spans()
    names = [line.strip() for line in driver.outline.splitlines()]
    # The making of an agent would be a trace of its own, of a span that says nothing.
    assert sorted(span.name for span in spans) == sorted(
        name for name in names if not name.startswith("create_agent")
    )
    assert len({span.context.trace_id for span in spans}) == 1
    assert {span.instrumentation_scope.name for span in spans} == {c.SCOPE}
    assert not any(c.CONTENT_KEYS & (span.attributes or {}).keys() for span in spans)


def test_imported_later_it_is_watched_and_before_that_left_alone(
    driver: Driver, server: DemoServer, store: Store, run_python: Callable[..., str]
) -> None:
    """Switching on imports nothing and starts nothing."""
    found = run_python(
        f"""
        import logging, sys, threading, warnings
        import lightning_otel
        lightning_otel.instrument()
        assert {driver.needs!r} not in sys.modules, "imported"
        assert threading.active_count() == 1
        warnings.simplefilter("ignore")
        from tests.instrumentors.contract.drivers import DRIVERS
        from tests.instrumentors.outline import outline
        logging.disable()
        (driver,) = [each for each in DRIVERS if each.name == {driver.name!r}]
        with lightning_otel.auto_trace(store={store.name!r}) as recording:
            driver.ask_somehow({server.base_url!r})
        print(outline(recording))
        """,
        timeout_s=110,
    )

    assert driver.outline in found  # a library may print more as it ends


@pytest.mark.parametrize("name", ["__init__", "stop", "fail"])
def test_fault_of_ours_stays_with_us(
    driver: Driver,
    name: str,
    server: DemoServer,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    faults_allowed: None,
) -> None:
    """If our operations cannot be begun or ended, the program gets what it gets without us."""

    def ask() -> list[object]:
        models = ("toy", "fail-400")
        return [outcome(lambda m=m: driver.ask_somehow(server.base_url, m)) for m in models]  # type: ignore[misc]  # bound at once

    untraced = ask()
    with auto_trace(store=store), monkeypatch.context() as patch:
        patch.setattr(operations.Operation, name, broken)
        assert ask() == untraced


def test_nothing_is_kept_once_it_is_over(driver: Driver, server: DemoServer, store: Store) -> None:
    """No run of ours outlives the library's, whether it ended well or not."""

    def held() -> int:
        gc.collect()
        kinds = (WrappedRun, operations.Operation)
        return sum(issubclass(type(each), kinds) for each in gc.get_objects())

    driver.ask_somehow(server.base_url)
    before = held()
    with auto_trace(store=store):
        for model in ("toy", "fail-400"):
            outcome(lambda model=model: driver.ask_somehow(server.base_url, model))  # type: ignore[misc]  # bound at once
    limit_s = time.monotonic() + 20
    while held() > before and time.monotonic() < limit_s:
        time.sleep(0.1)  # CrewAI's threads still read its events
    assert held() <= before


def replaced() -> list[tuple[Any, str]]:
    """Every method of a class that is replaced at the moment, of whichever library."""
    entries = entry_points(group="opentelemetry_instrumentor")
    ours = [entry.load()() for entry in entries if entry.name.startswith("lightning-")]
    return [place for each in ours for place in each._wrapped if isinstance(place[0], type)]


def shown(owner: Any, name: str) -> list[object]:
    """What a program may see of a method; of what it cannot do, the kind of exception."""
    method = getattr(owner, name)
    tests: list[Callable[[Any], object]] = [
        inspect.iscoroutinefunction,
        inspect.isgeneratorfunction,
        inspect.signature,
        lambda each: pickle.loads(pickle.dumps(each)) is each,
        lambda each: copy.deepcopy(each) is each,
    ]
    found = [outcome(lambda test=test: test(method)) for test in tests]  # type: ignore[misc]  # bound at once
    named = ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__")
    seen = [getattr(method, each, None) for each in named]
    return [*seen, *(each[0] if isinstance(each, tuple) else each for each in found)]


def test_switched_off_it_is_as_it_was(driver: Driver, server: DemoServer, store: Store) -> None:
    """Each method is put back, records nothing, and can be replaced again."""
    with auto_trace(store=store):
        driver.ask_somehow(server.base_url)
        places = replaced()

    def methods() -> list[Any]:
        return [vars(owner)[name] for owner, name in places]

    uninstrument()
    places = [(owner, name) for owner, name in places if inspect.isfunction(vars(owner)[name])]
    before = methods()
    assert places
    for _ in range(2):
        seen = [shown(*place) for place in places]
        with auto_trace(store=store) as recording:
            instrument()  # once more, which changes nothing
            driver.ask_somehow(server.base_url)
        assert not any(now is then for now, then in zip(methods(), before, strict=True))
        assert [shown(*place) for place in places] == seen
        assert outline(recording) == driver.outline
        uninstrument()
        assert all(now is then for now, then in zip(methods(), before, strict=True))
    with auto_trace(store=store) as recording:
        uninstrument()
        driver.ask_somehow(server.base_url)
    assert not calls_of(recording)
