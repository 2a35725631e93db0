"""``auto_trace`` and ``context`` as users write them: forms, options, nesting, many at once."""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args, get_type_hints

import openai
import pytest
from opentelemetry import trace
from tests.tracing.conftest import root_of

from lightning_otel import Recording, Store, auto_trace, context, emit_message
from lightning_otel.demo.server import DemoServer
from lightning_otel.errors import ConfigError
from lightning_otel.types import conventions as c


def bodies(recording: Recording) -> list[str]:
    return [
        span.attributes[c.MESSAGE_BODY] for span in recording.spans() if span.name == c.SPAN_MESSAGE
    ]


def test_auto_trace_as_with_block_records_one_rollout_with_a_root(store: Store) -> None:
    """A ``with`` block is a rollout: a root span, and below it what happens inside."""
    with auto_trace(store=store, name="quiz", task={"q": "2+2"}) as recording:
        emit_message("thinking")

    root, message = recording.spans()
    assert root == root_of(recording)
    assert root.trace_id == recording.trace_id
    assert root.parent_span_id is None
    assert root.status == "UNSET"
    assert not root.is_incomplete
    assert root.attributes[c.OPERATION_NAME] == "quiz"
    assert root.attributes[c.TASK] == '{"q": "2+2"}'
    assert message.parent_span_id == root.span_id
    assert {span.rollout_id for span in (root, message)} == {recording.rollout_id}
    assert {span.attempt_id for span in (root, message)} == {"1"}


@pytest.mark.parametrize("is_bare", [True, False])
def test_auto_trace_as_decorator_records_each_call_by_itself(is_bare: bool) -> None:
    """Each call of a function is a rollout, named after the function or as the decorator says."""

    @(auto_trace if is_bare else auto_trace(name="doubling"))
    def solve(number: int) -> int:
        emit_message(f"solving {number}")
        return number * 2

    results = [solve(1), solve(2)]

    spans = Store().spans().rows()
    roots = [span for span in spans if span.name == c.SPAN_ROLLOUT]
    assert results == [2, 4]
    name = solve.__qualname__ if is_bare else "doubling"
    assert [root.attributes[c.OPERATION_NAME] for root in roots] == [name] * 2
    assert len({root.rollout_id for root in roots}) == 2
    assert len(spans) == 4


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda: auto_trace(rolout_id="r1"), "auto_trace.*'rolout_id'"),  # type: ignore[call-overload]
        (lambda: context(rolout_id="r1"), "context.*'rolout_id'"),  # type: ignore[call-arg]
        (lambda: auto_trace("planner"), "name="),  # type: ignore[type-var]
    ],
)
def test_what_is_no_option_is_refused_at_once(wrong: Callable[[], Any], match: str) -> None:
    """A misspelt option or a name by position is a TypeError that shows how to write it."""
    with pytest.raises(TypeError, match=match):
        wrong()


@pytest.mark.parametrize("function", [auto_trace, context])
def test_signature_spells_out_every_option(function: Any) -> None:
    """``help()``, notebooks and editors see each option as a keyword."""
    parameters = inspect.signature(function).parameters

    keywords = [p.name for p in parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    (options,) = get_args(get_type_hints(auto_trace)["options"])
    assert keywords == list(options.__annotations__)
    assert "rollout_id" in keywords
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ({"rollout_id": "r1"}, c.ROLLOUT_ID, "r1"),
        ({"rollout_id": 7}, c.ROLLOUT_ID, "7"),
        ({"rollout_id": 'a "quoted"\n\\ id, ünïcode'}, c.ROLLOUT_ID, 'a "quoted"\n\\ id, ünïcode'),
        ({"rollout_id": "half \ud800 a pair"}, c.ROLLOUT_ID, "half ? a pair"),
        ({"attempt_id": "2"}, c.ATTEMPT_ID, "2"),
        ({"attempt_id": 3}, c.ATTEMPT_ID, "3"),
        ({"agent": "planner"}, c.AGENT_NAME, "planner"),
        ({"track_only": ["planner", "critic*"]}, c.TRACK_ONLY, ["planner", "critic*"]),
        ({"track_only": "planner"}, c.TRACK_ONLY, ["planner"]),
        ({"track_only": ["re:^exec", "a"]}, c.TRACK_ONLY, ["re:^exec", "a"]),
        ({"resource_version": "prompt@3"}, c.RESOURCE_VERSION, "prompt@3"),
        ({"resources": {"a*": {"prompt": "v3"}}}, c.RESOURCES, '{"a*":{"prompt":"v3"}}'),
        ({"conversation_id": "c1"}, c.CONVERSATION_ID, "c1"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("function", [auto_trace, context])
def test_options_stamp_every_span_within(
    function: Any, options: dict[str, Any], key: str, value: Any, store: Store
) -> None:
    """What is named is on every span made inside, by us or by anybody."""
    with function(store=store, **options) as recording:
        emit_message("ours")
        with trace.get_tracer("somebody").start_as_current_span("theirs"):
            pass

    spans = recording.spans()
    assert [span.attributes.get(key) for span in spans] == [value] * len(spans)
    assert {"theirs", c.SPAN_MESSAGE} <= {span.name for span in spans}


def test_context_records_without_a_root_and_names_what_is_inside(store: Store) -> None:
    """``context(store=…)`` is enough to record; what is not named stays as it is outside."""
    with context(store=store, conversation_id="c1", agent="lead") as recording:
        with context(agent="helper"):
            emit_message("inner")
        emit_message("outer")

    inner, outer = recording.spans()
    assert (recording.trace_id, recording.span_id) == ("", "")
    assert {inner.rollout_id, outer.rollout_id} == {recording.rollout_id}
    assert (inner.parent_span_id, outer.parent_span_id) == (None, None)
    assert [span.attributes[c.AGENT_NAME] for span in (inner, outer)] == ["helper", "lead"]
    assert {span.attributes[c.CONVERSATION_ID] for span in (inner, outer)} == {"c1"}


@pytest.mark.parametrize("function", [auto_trace, context])
@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"track_only": ["planner", "re:[a"]}, "track_only names 're:[a'"),
        ({"track_only": "re:("}, "track_only names 're:('"),
        ({"track_only": ["planner", 3]}, "track_only names 3"),
        ({"resources": {"re:*": {"prompt": "v3"}}}, "resources names 're:*'"),
        ({"resources": {"planner": "v3"}}, "resources of 'planner' are 'v3'"),
        ({"resources": {"planner": {"prompt": object()}}}, "resources cannot be written"),
        ({"resources": "prompt"}, "resources is 'prompt'"),
    ],
)
def test_options_that_mean_nothing_are_refused_at_once(
    function: Any, options: dict[str, Any], wrong: str
) -> None:
    """Where they are written, by name; nothing has begun by then."""
    with pytest.raises(ConfigError) as raised:
        function(**options)

    assert str(raised.value).startswith(wrong)


def test_track_only_and_resources_reach_the_transitions(store: Store, server: DemoServer) -> None:
    """By pattern; what is named inside goes before what is named outside, resource by resource."""
    everyone = {"*": {"model": "m", "prompt": "v1"}}
    planner = {"planner": {"prompt": "v3", "sampling": {"temperature": 0.5}}}

    with (
        openai.OpenAI(base_url=server.base_url, api_key="none") as client,
        auto_trace(store=store, resources=everyone, track_only=["plan*", "critic"]) as recording,
    ):
        for agent in ("planner", "critic", "other"):
            with context(agent=agent, resources=planner):
                client.chat.completions.create(
                    model="toy", messages=[{"role": "user", "content": agent}]
                )

    found = {path.agent: path.transitions[0] for path in recording.trajectories()}
    assert recording.report().calls == 3
    assert {agent: step.resources for agent, step in found.items()} == {
        "planner": {"model": "m", "prompt": "v3", "sampling": '{"temperature":0.5}'},
        "critic": {"model": "m", "prompt": "v1"},
    }
    (row,) = store.transitions(agents="critic").dicts()
    assert row["resource_version"] == "model@m,prompt@v1"
    assert json.loads(row["resources"]) == {"model": "m", "prompt": "v1"}


def test_track_only_from_an_iterator_lasts_for_every_entering(store: Store) -> None:
    """An iterator of names is read once and used each time."""
    traced = auto_trace(store=store, track_only=iter(["planner"]))

    with traced:
        pass
    with traced:
        pass

    tracked = [span.attributes[c.TRACK_ONLY] for span in store.spans()]
    assert tracked == [["planner"], ["planner"]]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_twenty_at_once_are_twenty_rollouts(store: Store, kind: str, is_shared: bool) -> None:
    """Blocks open at once know nothing of each other, even if they share the object."""
    shared = auto_trace(store=store)

    def work(number: int) -> Recording:
        with shared if is_shared else auto_trace(store=store) as recording:
            everyone_is_in.wait(timeout=30)
            emit_message(str(number))
        return recording

    async def work_async(number: int, everyone_is_in: asyncio.Barrier) -> Recording:
        async with shared if is_shared else auto_trace(store=store) as recording:
            await everyone_is_in.wait()
            emit_message(str(number))
            await everyone_is_in.wait()
        return recording

    async def gather() -> list[Recording]:
        barrier = asyncio.Barrier(20)
        return await asyncio.gather(*(work_async(number, barrier) for number in range(20)))

    if kind == "threads":
        everyone_is_in = threading.Barrier(20)
        with ThreadPoolExecutor(20) as pool:
            recordings = list(pool.map(work, range(20)))
    else:
        recordings = asyncio.run(gather())

    assert len({recording.rollout_id for recording in recordings}) == 20
    assert [bodies(recording) for recording in recordings] == [[str(n)] for n in range(20)]
    spans = store.spans().rows()
    assert len(spans) == 40
    assert all(not span.is_incomplete for span in spans)


def test_auto_trace_inside_another_is_a_part_of_it(store: Store) -> None:
    """A nested rollout is a child span of the same rollout, and its recording only that part."""
    with auto_trace(store=store) as outer:
        emit_message("before")
        with auto_trace(name="step") as inner:
            emit_message("within")
            with trace.get_tracer("somebody").start_as_current_span("deep"):
                emit_message("deeper")
        emit_message("after")

    assert inner.rollout_id == outer.rollout_id
    assert root_of(inner).parent_span_id == outer.span_id
    assert bodies(inner) == ["within", "deeper"]
    assert len(inner.spans()) == 4
    assert bodies(outer) == ["before", "within", "deeper", "after"]


@pytest.mark.parametrize("function", [auto_trace, context])
def test_nested_with_a_rollout_id_is_a_rollout_of_its_own(function: Any, store: Store) -> None:
    """A nested block that names another rollout is a rollout of its own, from attempt 1 on."""
    with auto_trace(store=store, attempt_id="4", conversation_id="c1") as outer:
        with function(rollout_id="other") as inner:
            emit_message("elsewhere")
        emit_message("here")

    assert inner.rollout_id == "other"
    assert inner.attempt_id == "1"
    assert bodies(inner) == ["elsewhere"]
    assert bodies(outer) == ["here"]
    assert {span.attributes[c.CONVERSATION_ID] for span in inner.spans()} == {"c1"}


def test_several_stores_at_once_each_get_their_own_spans(tmp_path: Any) -> None:
    """Named by path or object, nested or not; a block that names none has that around it."""
    first, second = Store(tmp_path / "first"), Store(tmp_path / "second.duckdb")

    def work(store: Store, text: str) -> None:
        with auto_trace(store=store.name):
            emit_message(text)

    with auto_trace(store=first) as outer, ThreadPoolExecutor(2) as pool:
        emit_message("outer")
        with (
            auto_trace(store=second, rollout_id="inner"),
            auto_trace(rollout_id="nested") as nested,
        ):
            emit_message("inner")
        pool.submit(work, first, "one").result()
        pool.submit(work, second, "two").result()

    def kept(store: Store) -> set[str]:
        messages = (span for span in store.spans() if span.name == c.SPAN_MESSAGE)
        return {str(span.attributes[c.MESSAGE_BODY]) for span in messages}

    assert nested.store is second
    assert (kept(first), kept(second)) == ({"outer", "one"}, {"inner", "two"})
    assert bodies(outer) == ["outer", "one"]
    assert not Store().layout.exists()  # type: ignore[union-attr]  # the default store is local


def test_memory_store_by_name_records_in_this_process_only(tmp_path: Any) -> None:
    """``store=":memory:"`` makes no file; each block that names it has a store of its own."""
    with auto_trace(store=":memory:") as first:
        emit_message("one")
    with auto_trace(store=":memory:") as second:
        emit_message("two")

    assert (bodies(first), bodies(second)) == (["one"], ["two"])
    assert len(first.store.spans().rows()) == 2
    assert list(tmp_path.iterdir()) == []
