"""Threads and pools go on in the rollout of whoever started them, and are left as they were."""

import asyncio
import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import wrapt
from opentelemetry import context as otel_context
from tests.instrumentors.conftest import broken

from lightning_otel import instrument, uninstrument

KEY = "test-threads-key"
PATCHED: list[tuple[Any, str]] = [(threading.Thread, "start"), (ThreadPoolExecutor, "submit")]

Seen = list[object]


def look(seen: Seen) -> None:
    seen.append(otel_context.get_value(KEY))


@contextlib.contextmanager
def in_context(value: object) -> Iterator[None]:
    token = otel_context.attach(otel_context.set_value(KEY, value))
    yield
    otel_context.detach(token)


@pytest.fixture(autouse=True)
def carried() -> Iterator[None]:
    """Contexts are carried during the test, and no longer after it."""
    uninstrument()
    instrument([])
    yield
    uninstrument()


class Looking(threading.Thread):
    """A subclass with a run of its own."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def run(self) -> None:
        look(self.seen)


def joined(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


def submitted(seen: Seen) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(look, seen).result()


def mapped(seen: Seen) -> None:
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(look, [seen]))


async def executed(seen: Seen) -> None:
    await asyncio.get_running_loop().run_in_executor(None, look, seen)


def by_target(seen: Seen) -> None:
    joined(threading.Thread(target=look, args=(seen,)))


WAYS: dict[str, Callable[[Seen], object]] = {
    "target": by_target,
    "subclass": lambda seen: joined(Looking(seen)),
    "timer": lambda seen: joined(threading.Timer(0, look, (seen,))),
    "thread of a thread": lambda seen: joined(threading.Thread(target=by_target, args=(seen,))),
    "submit": submitted,
    "map": mapped,
    "to_thread": lambda seen: asyncio.run(asyncio.to_thread(look, seen)),
    "run_in_executor": lambda seen: asyncio.run(executed(seen)),
}


@pytest.mark.parametrize("way", WAYS)
def test_context_is_carried(way: str) -> None:
    """What runs elsewhere sees the context it was started in; outside any there is none."""
    seen: Seen = []

    with in_context("here"):
        WAYS[way](seen)
    WAYS[way](seen)

    assert seen == ["here", None]


def test_thread_is_left_as_it_was() -> None:
    """After its start nothing of ours stays on the thread, and it is freed as soon as it was."""
    with in_context("here"):
        thread = threading.Thread(target=list)
        thread.start()
        with pytest.raises(RuntimeError, match="threads can only be started once"):
            thread.start()
    thread.join()
    left = vars(thread).keys() - vars(threading.Thread()).keys()
    alive = weakref.ref(thread)

    gc.disable()
    del thread
    is_freed = alive() is None
    gc.enable()

    assert left == set()
    assert is_freed


@pytest.mark.parametrize("how", ["bare", "function", "wrapt"])
@pytest.mark.parametrize(("owner", "name"), PATCHED)
def test_methods_are_put_back(
    owner: type, name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very functions stand there again; a wrapper that came after ours stays, and works on."""
    instrument([])  # twice on is once
    ours = owner.__dict__[name]
    used: list[str] = []

    @functools.wraps(ours)
    def plain(*args: Any, **kwargs: Any) -> Any:
        used.append(name)
        return ours(*args, **kwargs)

    def noted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        used.append(name)
        return wrapped(*args, **kwargs)

    theirs = {"function": plain, "wrapt": wrapt.FunctionWrapper(ours, noted)}.get(how)
    if theirs is not None:
        monkeypatch.setattr(owner, name, theirs)

    for _ in range(2):
        uninstrument()
        submitted([])
        by_target([])

    assert owner.__dict__[name] is (theirs or ours.__wrapped__)
    assert (name in used) is (theirs is not None)
    assert not hasattr(ours.__wrapped__, "__wrapped__")
    monkeypatch.undo()


def test_fault_of_ours_does_not_keep_a_thread_from_starting(
    faults_allowed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread whose context cannot be carried runs without it."""
    seen: Seen = []

    monkeypatch.setattr("lightning_otel.instrumentors.threads._run_within", broken)

    with in_context("here"):
        by_target(seen)

    assert seen == [None]
