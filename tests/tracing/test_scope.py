"""How a rollout ends, what judges it, and that nothing of ours ever stands in the program's way."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_otel import Store, auto_trace, context, emit_message, emit_reward
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


@pytest.mark.parametrize("kind", KINDS)
def test_exception_passes_through_and_marks_the_root_as_failed(
    kind: str, store: Store, root_of: RootOf
) -> None:
    """The very exception comes out, the root span ends as an error, the recording knows it."""
    recordings: list[Recording] = []
    options = {"store": store, "reward_evaluator": recordings.append}
    exc = KeyError("no such tool")

    with pytest.raises(KeyError) as caught:
        raise_in(kind, exc, options)

    (recording,) = recordings
    assert caught.value is exc is recording.error
    assert exc.__cause__ is None
    assert exc.__context__ is None
    root = root_of(recording)
    assert root.status == "ERROR"
    assert root.status_message == "'no such tool'"
    assert root.attributes[c.ERROR_TYPE] == "KeyError"
    assert not root.is_incomplete


@pytest.mark.parametrize("kind", ["with", "async with", "plain", "coroutine"])
@pytest.mark.parametrize(
    ("exc", "status"),
    [
        (SystemExit(), "UNSET"),
        (SystemExit(0), "UNSET"),
        (SystemExit(3), "ERROR"),
        (SystemExit("goodbye"), "ERROR"),
        (GeneratorExit(), "UNSET"),
        (KeyboardInterrupt(), "ERROR"),
        (asyncio.CancelledError(), "ERROR"),
    ],
    ids=repr,
)
def test_leaving_is_no_failure_but_interrupts_are(
    kind: str, exc: BaseException, status: str, store: Store
) -> None:
    """A clean exit ends the root span without an error, and is not the recording's error."""
    recordings: list[Recording] = []

    with pytest.raises(type(exc)):
        raise_in(kind, exc, {"store": store, "reward_evaluator": recordings.append})

    (root,) = recordings[0].spans()
    assert root.status == status
    assert recordings[0].error is (exc if status == "ERROR" else None)


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


@pytest.mark.parametrize("kind", KINDS)
def test_reward_evaluator_judges_failures_too(kind: str, store: Store) -> None:
    """A rollout that failed is judged like any other, whatever it ran in."""
    recordings: list[Recording] = []

    def judge(recording: Recording) -> float:
        recordings.append(recording)
        return -1.0 if isinstance(recording.error, ValueError) else 1.0

    with pytest.raises(ValueError, match="broken"):
        raise_in(kind, ValueError("broken"), {"store": store, "reward_evaluator": judge})

    (recording,) = recordings
    assert recording.spans()[-1].attributes[c.REWARD_VALUE] == -1.0


@pytest.mark.parametrize("rubbish", ["good", {}, {"a": "b"}, ["a"], float("nan"), object()])
def test_reward_evaluator_that_gives_rubbish_costs_only_its_reward(
    rubbish: Any, store: Store, root_of: RootOf, warnings_in: Warnings
) -> None:
    """What is no reward is left out with a warning; the program and the rollout go on."""
    with auto_trace(store=store, reward_evaluator=lambda recording: rubbish) as recording:
        pass

    assert len(recording.spans()) == 1
    assert not root_of(recording).is_incomplete
    (warning,) = warnings_in()
    assert recording.rollout_id in warning


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_reward_evaluator_that_raises_costs_only_its_reward(
    kind: str, store: Store, warnings_in: Warnings, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rollout whose evaluator raises is named, with the evaluator's own exception."""

    def judge(recording: Recording) -> float:
        raise ZeroDivisionError("in the evaluator")

    @auto_trace(store=store, reward_evaluator=judge)
    def plain() -> str:
        return "answer"

    @auto_trace(store=store, reward_evaluator=judge)
    async def coroutine() -> str:
        return "answer"

    results = [plain() if kind == "plain" else asyncio.run(coroutine()) for _ in range(2)]

    assert results == ["answer", "answer"]
    assert len(warnings_in()) == 2
    assert "in the evaluator" in caplog.text
    assert all(not span.is_incomplete for span in store.spans())


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
    """Where something can await it, an async evaluator is awaited, inside the rollout."""

    @auto_trace(store=store, reward_evaluator=judge_later)
    async def coroutine() -> None:
        pass

    @auto_trace(store=store, reward_evaluator=judge_later)
    async def async_generator() -> AsyncIterator[int]:
        yield 1

    async def main() -> None:
        await coroutine()
        async with auto_trace(store=store, reward_evaluator=judge_later):
            pass
        async for _ in async_generator():
            pass

    asyncio.run(main())

    assert [row["reward"] for row in store.rollouts()] == [0.75] * 3
    assert [row["spans"] for row in store.rollouts()] == [3] * 3


def test_async_reward_evaluator_is_awaited_when_an_async_generator_is_left_early(
    store: Store,
) -> None:
    """A consumer that leaves early does not cost the rollout its reward."""

    @auto_trace(store=store, reward_evaluator=judge_later)
    async def stream() -> AsyncIterator[int]:
        yield 1
        yield 2

    async def main() -> None:
        chunks = stream()
        await anext(chunks)
        await chunks.aclose()  # type: ignore[attr-defined]  # an async generator, typed as iterator

    asyncio.run(main())

    (row,) = store.rollouts()
    assert (row["reward"], row["status"]) == (0.75, "succeeded")


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
    tmp_path: Path, warnings_in: Warnings
) -> None:
    """Where no store can be made, functions run, and the first of them says why nothing is kept."""
    (tmp_path / "file").write_text("in the way")

    @auto_trace(store=tmp_path / "file" / "store")
    def double(number: int) -> int:
        return number * 2

    results = [double(n) for n in range(3)]

    (warning,) = warnings_in()
    assert results == [0, 2, 4]
    assert "nothing is recorded" in warning
    assert str(tmp_path / "file") in warning


def test_unwritable_inner_store_leaves_the_outer_recording_alone(
    tmp_path: Path, store: Store, warnings_in: Warnings
) -> None:
    """What a nested block cannot record apart stays with the outer one."""
    (tmp_path / "file").write_text("in the way")

    with auto_trace(store=store) as outer, auto_trace(store=tmp_path / "file" / "x") as inner:
        emit_message("said")

    assert [span.name for span in outer.spans()] == [c.SPAN_ROLLOUT, c.SPAN_MESSAGE]
    assert inner.spans() == []
    assert len(warnings_in()) == 1


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
