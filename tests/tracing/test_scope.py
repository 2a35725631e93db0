"""How a rollout ends, what judges it, and that nothing of ours ever stands in the program's way."""

import asyncio
import shutil
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_otel import Store, auto_trace, capture, context, emit_message, emit_reward
from lightning_otel import conventions as c
from lightning_otel.tracing import Recording
from lightning_otel.types import Span

RootOf = Callable[[Recording], Span]
Warnings = Callable[[], list[str]]


def raise_in(kind: str, exc: BaseException, options: Any) -> None:
    """Let an exception out of a traced block or function of the given kind."""

    @auto_trace(**options)
    def plain() -> None:
        raise exc

    @auto_trace(**options)
    async def coroutine() -> None:
        await asyncio.sleep(0)
        raise exc

    @auto_trace(**options)
    def generator() -> Iterator[int]:
        yield 1
        raise exc

    @auto_trace(**options)
    async def async_generator() -> AsyncIterator[int]:
        yield 1
        raise exc

    async def exhaust() -> None:
        async for _ in async_generator():
            pass

    async def within() -> None:
        async with auto_trace(**options):
            raise exc

    if kind == "with":
        with auto_trace(**options):
            raise exc
    elif kind == "plain":
        plain()
    elif kind == "generator":
        list(generator())
    else:
        asyncio.run({"coroutine": coroutine, "async with": within}.get(kind, exhaust)())


KINDS = ["with", "async with", "plain", "coroutine", "generator", "async generator"]
CLEAN: list[BaseException] = [SystemExit(), SystemExit(0), GeneratorExit()]
FAILED: list[BaseException] = [
    KeyError("no such tool"),
    SystemExit(3),
    SystemExit("goodbye"),
    KeyboardInterrupt(),
    asyncio.CancelledError(),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exc", [*CLEAN, *FAILED], ids=repr)
def test_exception_passes_through_and_marks_the_root_as_failed(
    kind: str, exc: BaseException, store: Store, root_of: RootOf
) -> None:
    """The very exception comes out; unless it is a clean exit the rollout failed, and is judged."""
    if "generator" in kind and not isinstance(exc, KeyError):
        return  # Python itself changes what some of them are there
    recordings: list[Recording] = []

    def judge(recording: Recording) -> float:
        recordings.append(recording)
        return -1.0 if recording.error is exc else 1.0

    with pytest.raises(type(exc)) as caught:
        raise_in(kind, exc, {"store": store, "reward_evaluator": judge})

    (recording,) = recordings
    root = root_of(recording)
    assert caught.value is exc
    assert (exc.__cause__, exc.__context__) == (None, None)
    assert recording.error is (None if exc in CLEAN else exc)
    assert recording.spans()[-1].attributes[c.REWARD_VALUE] == (1.0 if exc in CLEAN else -1.0)
    assert root.status == ("UNSET" if exc in CLEAN else "ERROR")
    assert root.attributes.get(c.ERROR_TYPE) == (None if exc in CLEAN else capture.type_name(exc))
    assert not root.is_incomplete


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        (0.5, {"primary": 0.5}),
        (True, {"primary": 1.0}),
        (-3, {"primary": -3.0}),
        ({"ok": 1, "short": 0.4}, {"ok": 1.0, "short": 0.4}),
        ({"only": 0.25}, {"only": 0.25}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("function", [auto_trace, context])
def test_reward_evaluator_gives_the_rollout_a_reward(
    function: Any, reward: Any, named: dict[str, float], store: Store
) -> None:
    """A number is the primary reward; of named numbers the first is."""
    with function(store=store, reward_evaluator=lambda recording: reward) as recording:
        emit_message("worked")

    span = recording.spans()[-1]
    values = {
        span.attributes[f"{c.REWARD_PREFIX}.{i}.name"]: span.attributes[
            f"{c.REWARD_PREFIX}.{i}.value"
        ]
        for i in range(len(named))
    }
    assert list(values.items()) == list(named.items())
    assert span.parent_span_id == (recording.span_id or None)


def test_reward_evaluator_sees_what_was_recorded_and_the_result(store: Store) -> None:
    """The evaluator is applied once, to a recording with its spans, task and result."""
    seen: list[Any] = []

    def judge(recording: Recording) -> float:
        seen.append(
            (recording.task, recording.result, recording.error, len(recording.spans())),
        )
        return 1.0 if recording.result == recording.task else 0.0

    @auto_trace(store=store, task=4, reward_evaluator=judge)
    def answer() -> int:
        emit_message("thinking")
        return 4

    answer()

    assert seen == [(4, 4, None, 2)]
    assert [row["reward"] for row in store.rollouts()] == [1.0]


def fails(recording: Recording) -> float:
    """An evaluator that is broken."""
    raise ZeroDivisionError("in the evaluator")


@pytest.mark.parametrize(
    "evaluator",
    [fails]
    + [lambda _, given=given: given for given in ("good", {}, {"a": "b"}, ["a"], float("nan"))],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_reward_evaluator_that_fails_or_gives_rubbish_costs_only_its_reward(
    evaluator: Any,
    is_async: bool,
    store: Store,
    warnings_in: Warnings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each such rollout is named, with the evaluator's own exception; the program goes on."""

    @auto_trace(store=store, reward_evaluator=evaluator)
    def plain() -> str:
        return "answer"

    @auto_trace(store=store, reward_evaluator=evaluator)
    async def coroutine() -> str:
        return "answer"

    results = [asyncio.run(coroutine()) if is_async else plain() for _ in range(2)]

    roots = store.spans().rows()
    assert results == ["answer", "answer"]
    assert [root.is_incomplete for root in roots] == [False, False]
    assert all(root.rollout_id in said for root, said in zip(roots, warnings_in(), strict=True))
    assert evaluator is not fails or "in the evaluator" in caplog.text


def test_reward_evaluator_that_ends_the_program_still_ends_the_root(
    store: Store, root_of: RootOf
) -> None:
    """An interrupt inside the evaluator goes its way, past a root span that has ended."""

    def judge(recording: Recording) -> float:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        auto_trace(store=store, reward_evaluator=judge) as recording,
    ):
        pass

    assert not root_of(recording).is_incomplete


async def judge_later(recording: Recording) -> float:
    """An async evaluator that takes its time and emits a message of its own."""
    await asyncio.sleep(0)
    emit_message("judging")
    return 0.75


def test_async_reward_evaluator_is_awaited_for_async_functions_and_blocks(store: Store) -> None:
    """Where something can await it, be a stream left early, it is awaited inside the rollout."""
    traced = auto_trace(store=store, reward_evaluator=judge_later)

    @traced
    async def coroutine() -> None:
        pass

    @traced
    async def stream() -> AsyncGenerator[int, None]:
        yield 1
        yield 2

    async def main() -> None:
        await coroutine()
        async with traced:
            pass
        async for _ in stream():
            pass
        left = stream()
        await anext(left)
        await left.aclose()

    asyncio.run(main())

    rows = [(row["reward"], row["spans"], row["status"]) for row in store.rollouts()]
    assert rows == [(0.75, 3, "succeeded")] * 4


@pytest.mark.parametrize("kind", ["with", "plain", "generator"])
def test_async_reward_evaluator_is_refused_where_nothing_can_await(
    kind: str, store: Store, warnings_in: Warnings
) -> None:
    """A plain function cannot await its evaluator: one clear warning, no reward, no leftover."""

    def answers() -> Iterator[int]:
        yield 1

    traced = auto_trace(store=store, reward_evaluator=judge_later)

    if kind == "with":
        with traced:
            pass
    elif kind == "plain":
        traced(len)("four")
    else:
        list(traced(answers)())

    (warning,) = warnings_in()
    assert "async" in warning
    assert len(store.spans().rows()) == 1


def test_closed_coroutine_does_not_await_its_reward_evaluator(
    store: Store, warnings_in: Warnings
) -> None:
    """A coroutine that is closed while it waits ends at once: Python lets it await no more."""

    class Forever:
        def __await__(self) -> Generator[None, None, None]:
            yield

    @auto_trace(store=store, reward_evaluator=judge_later)
    async def wait() -> None:
        await Forever()

    coroutine = wait()
    coroutine.send(None)
    coroutine.close()

    (root,) = store.spans().rows()
    assert root.status == "UNSET"
    assert not root.is_incomplete
    assert len(warnings_in()) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("LIGHTNING_OTEL", "0"), ("LIGHTNING_OTEL", "off"), ("OTEL_SDK_DISABLED", "true")],
)
def test_switched_off_records_nothing_and_makes_no_store(
    name: str,
    value: str,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings_in: Warnings,
) -> None:
    """With the switch off the program runs as if we were not there, without a word."""
    monkeypatch.setenv(name, value)
    judged: list[Recording] = []

    @auto_trace(store=store, reward_evaluator=judged.append)
    def double(number: int) -> int:
        emit_message("inside")
        return number * 2

    result = double(21)
    with auto_trace(store=store) as recording, context(store=store):
        emit_reward(1.0)
        emit_reward(1.0, rollout_id="later")

    assert result == 42
    assert recording.spans() == []
    assert recording.trajectories() == []
    assert recording.report().spans == 0
    assert recording.rollout_id == ""
    assert repr(recording) == "<Recording of nothing>"
    assert (judged, warnings_in(), list(tmp_path.iterdir())) == ([], [], [])


def test_unwritable_store_costs_one_warning_and_nothing_else(
    tmp_path: Path, store: Store, warnings_in: Warnings
) -> None:
    """Functions run, the first says why nothing is kept; an outer recording keeps what it can."""
    (tmp_path / "file").write_text("in the way")

    @auto_trace(store=tmp_path / "file" / "store")
    def double(number: int) -> int:
        emit_message("said")
        return number * 2

    results = [double(n) for n in range(2)]
    with auto_trace(store=store) as outer:
        results.append(double(2))

    (warning,) = warnings_in()
    assert results == [0, 2, 4]
    assert "nothing is recorded" in warning
    assert str(tmp_path / "file") in warning
    assert [span.name for span in outer.spans()] == [c.SPAN_ROLLOUT, c.SPAN_MESSAGE]


def test_lost_spans_are_counted_and_named_where_the_block_ends(
    store: Store, warnings_in: Warnings
) -> None:
    """A store that breaks while it records costs spans, and says at the end how many."""
    megabyte = "x" * (1 << 20)

    with auto_trace(store=store):
        assert store.layout is not None
        store.writer().seal()
        shutil.rmtree(store.layout.root)
        store.layout.root.touch()
        with auto_trace():
            for _ in range(10):
                emit_message(megabyte)

    refused, named = warnings_in()
    assert "refuses" in refused
    assert named.endswith(f"spans lost: {store.name} refused them")
    assert int(named.split()[0]) == store.writer().lost > 0


def test_fault_of_ours_never_reaches_the_program(
    store: Store, monkeypatch: pytest.MonkeyPatch, warnings_in: Warnings
) -> None:
    """If setting up fails in a way nobody thought of, the program runs on with one warning.

    Mocked: no real input is known to break it here.
    """

    def broken() -> None:
        raise RuntimeError("unthought of")

    monkeypatch.setattr("lightning_otel.provider.ensure_provider", broken)

    with auto_trace(store=store) as recording:
        result = sys.getsizeof("still running")
    with auto_trace(store=store):
        pass

    assert result > 0
    assert recording.spans() == []
    assert len(warnings_in()) == 1
