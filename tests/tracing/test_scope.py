"""How a rollout ends, what judges it, and that nothing of ours ever stands in the program's way."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from tests.tracing.conftest import KINDS, root_of, run_in

from lightning_otel import Recording, Store, auto_trace, context, emit_message, emit_reward
from lightning_otel.types import conventions as c

Warnings = Callable[[], list[str]]

CLEAN: list[BaseException] = [SystemExit(), SystemExit(0), GeneratorExit()]
FAILED: list[BaseException] = [
    KeyError("no such tool"), SystemExit(3), SystemExit("goodbye"), KeyboardInterrupt(),
    asyncio.CancelledError(),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exc", [*CLEAN, *FAILED], ids=repr)
def test_exception_passes_through_and_marks_the_root_as_failed(
    kind: str, exc: BaseException, store: Store
) -> None:
    """The very exception comes out; unless it is a clean exit the rollout failed, and is judged."""
    if "generator" in kind and not isinstance(exc, KeyError):
        return  # Python itself changes what some of them are there
    recordings: list[Recording] = []

    def judge(recording: Recording) -> float:
        recordings.append(recording)
        return -1.0 if recording.error is exc else 1.0

    def fail() -> None:
        raise exc

    with pytest.raises(type(exc)) as caught:
        run_in(kind, auto_trace(store=store, reward_evaluator=judge), fail)

    (recording,) = recordings
    root = root_of(recording)
    assert caught.value is exc
    assert (exc.__cause__, exc.__context__) == (None, None)
    assert recording.error is (None if exc in CLEAN else exc)
    assert recording.spans()[-1].attributes[c.REWARD_VALUE] == (1.0 if exc in CLEAN else -1.0)
    assert root.status == ("UNSET" if exc in CLEAN else "ERROR")
    module, name = type(exc).__module__, type(exc).__qualname__
    named = name if module == "builtins" else f"{module}.{name}"
    assert root.attributes.get(c.ERROR_TYPE) == (None if exc in CLEAN else named)
    assert not root.is_incomplete


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        (True, {"primary": 1.0}),
        (-3, {"primary": -3.0}),
        ({"ok": 1, "short": 0.4}, {"ok": 1.0, "short": 0.4}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("function", [auto_trace, context])
def test_reward_evaluator_gives_the_rollout_a_reward(
    function: Any, reward: Any, named: dict[str, float], store: Store
) -> None:
    """It sees all that was recorded; a number is the primary reward, of named numbers the first."""
    seen: list[Any] = []

    def judge(recording: Recording) -> Any:
        seen.append((recording.task, recording.result, recording.error))
        seen.append(recording.spans()[-1].attributes[c.MESSAGE_BODY])
        return reward

    @function(store=store, task=4, reward_evaluator=judge)
    def answer() -> int:
        emit_message("worked")
        return 4

    answer()

    span = store.spans().rows()[-1]
    told = (span.attributes.get(f"{c.REWARD_PREFIX}.{n // 2}.{('name', 'value')[n % 2]}")
            for n in range(2 * len(named)))  # fmt: skip
    held = list(zip(told, told, strict=True))
    assert seen == [(4, 4, None), "worked"]
    assert held == list(named.items())
    assert (span.parent_span_id is None) == (function is context)


def fails(recording: Recording) -> float:
    raise ZeroDivisionError("in the evaluator")


@pytest.mark.parametrize(
    "evaluator",
    [fails]
    + [lambda _, given=given: given for given in ("good", {}, {"a": "b"}, ["a"], float("nan"))],
)
@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_reward_evaluator_that_fails_or_gives_rubbish_costs_only_its_reward(
    evaluator: Any, kind: str, store: Store, warnings_in: Warnings, caplog: Any
) -> None:
    """Each such rollout is named, with the evaluator's own exception; the program goes on."""
    results: list[str] = []

    for _ in range(2):
        traced = auto_trace(store=store, reward_evaluator=evaluator)
        run_in(kind, traced, lambda: results.append("ran"))

    roots = store.spans().rows()
    assert results == ["ran", "ran"]
    assert [root.is_incomplete for root in roots] == [False, False]
    assert all(root.rollout_id in said for root, said in zip(roots, warnings_in(), strict=True))
    assert evaluator is not fails or "in the evaluator" in caplog.text


def test_reward_evaluator_that_ends_the_program_still_ends_the_root(store: Store) -> None:
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


@pytest.mark.parametrize("kind", KINDS)
def test_async_reward_evaluator_is_awaited_where_something_can_await(
    kind: str, store: Store, warnings_in: Warnings
) -> None:
    """Inside the rollout; where nothing can, there is one clear warning and no reward."""
    run_in(kind, auto_trace(store=store, reward_evaluator=judge_later), lambda: None)

    (row,) = store.rollouts()
    if kind in ("with", "plain", "generator"):
        (warning,) = warnings_in()
        assert "is async" in warning
        assert (row["reward"], row["spans"]) == (None, 1)
    else:
        assert (row["reward"], row["spans"], row["status"]) == (0.75, 3, "succeeded")


def test_async_reward_evaluator_of_what_is_left_early(store: Store, warnings_in: Warnings) -> None:
    """A stream awaits it as it is closed; a coroutine that is closed may await no more."""
    traced = auto_trace(store=store, reward_evaluator=judge_later)

    class Forever:
        def __await__(self) -> Generator[None, None, None]:
            yield

    @traced
    async def stream() -> AsyncGenerator[int, None]:
        yield 1
        yield 2

    @traced
    async def wait() -> None:
        await Forever()

    async def leave() -> None:
        left = stream()
        await anext(left)
        await left.aclose()

    asyncio.run(leave())
    coroutine = wait()
    coroutine.send(None)
    coroutine.close()

    rows = [(row["reward"], row["status"]) for row in store.rollouts()]
    assert sorted(rows, key=str) == [(0.75, "succeeded"), (None, "succeeded")]
    assert len(warnings_in()) == 1


@pytest.mark.parametrize(
    ("name", "value"), [("LIGHTNING_OTEL", "off"), ("OTEL_SDK_DISABLED", "true")]
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
    assert recording.spans() == recording.trajectories() == []
    assert (recording.report().spans, recording.rollout_id) == (0, "")
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

    for _ in range(2):
        with auto_trace(store=store) as recording:
            pass

    assert recording.spans() == []
    assert len(warnings_in()) == 1
