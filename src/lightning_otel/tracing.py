"""``auto_trace`` and ``context``: where a rollout begins and ends, and what is known of it after.

Whatever goes wrong in here, the traced program runs on as it would without.
"""

import contextlib
import functools
import inspect
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar, overload

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture, config, provider
from lightning_otel import conventions as c
from lightning_otel.adapter import Adaptation, TripletAdapter
from lightning_otel.emitters import emit_reward
from lightning_otel.errors import LightningOtelError
from lightning_otel.store import Store
from lightning_otel.store.schema import span_of
from lightning_otel.types import Credit, Report, Span, Trajectory

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
RewardEvaluator = Callable[["Recording"], Any]
"""Judges a finished rollout: gives a number, named numbers (the first is the primary), or None."""


class Recording:
    """One rollout: its ids, and its spans as far as they were recorded.

    Attributes:
        store: Where its spans are.
        rollout_id: The rollout.
        attempt_id: The attempt.
        trace_id: The trace of its root span; empty if it has none.
        span_id: Its root span; empty if it has none.
        task: The rollout's task, if one was given.
        result: What the traced function gave back; None for a ``with`` block.
        error: The exception that ended it, if one did.
    """

    def __init__(
        self, store: Store, rollout_id: str, attempt_id: str = "1", task: object = None
    ) -> None:
        self.store = store
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.trace_id = ""
        self.span_id = ""
        self.task = task
        self.result: object = None
        self.error: BaseException | None = None
        self._is_part = False
        self._since: tuple[int, int] | None = None

    def span_processes(self) -> None:
        """Read the spans of every process from the store, not only those recorded here."""
        self._since = None

    def __repr__(self) -> str:
        return f"<Recording of {self.rollout_id} in {self.store.name}>"

    def _begin(
        self, root: capture.Operation | None, since: tuple[int, int], *, is_part: bool
    ) -> None:
        self._since = since
        self._is_part = is_part
        if root is not None:
            context = root.span.get_span_context()
            self.trace_id = format(context.trace_id, "032x")
            self.span_id = format(context.span_id, "016x")

    def spans(self) -> list[Span]:
        """The rollout's spans so far, in order of their start; of a nested recording its own part.

        What this process recorded is read without DuckDB; ``store.spans(rollout_id=…)`` also has
        what other processes recorded for the same rollout.
        """
        found = self._own_spans()
        if found is None:
            found = self.store.spans(rollout_id=self.rollout_id).rows()
        found = [span for span in found if span.attempt_id == self.attempt_id]
        return _subtree(found, self.span_id) if self._is_part else found

    def _own_spans(self) -> list[Span] | None:
        if self._since is None:
            return None
        records = self.store.writer().records(self._since, self.rollout_id)
        if records is None:
            return None
        latest: dict[tuple[str, str], Span] = {}
        for record in records:
            span = span_of(record)
            latest[span.trace_id, span.span_id] = span  # an end comes after its start
        found = [span for span in latest.values() if span.rollout_id == self.rollout_id]
        return sorted(found, key=lambda span: span.sequence)

    def trajectories(self, *, credit: Credit = "next", gamma: float = 0.99) -> list[Trajectory]:
        """The rollout's trajectories so far."""
        return self._adapt(credit, gamma).trajectories

    def report(self, *, credit: Credit = "next", gamma: float = 0.99) -> Report:
        """What became of the rollout's calls and rewards, with a reason for each left behind."""
        return self._adapt(credit, gamma).report

    def _adapt(self, credit: Credit, gamma: float) -> Adaptation:
        return TripletAdapter(credit, gamma).explain(self.spans())


class _Unrecorded(Recording):
    """Stands in where nothing could be or should be recorded, so that the program runs on."""

    def __init__(self) -> None:
        super().__init__(Store(":memory:"), "")

    def spans(self) -> list[Span]:
        """None were recorded."""
        return []


def _subtree(spans: list[Span], root_id: str) -> list[Span]:
    inside = {root_id}
    found = []
    for span in spans:  # in order of their start, so parents come first
        if span.span_id == root_id or span.parent_span_id in inside:
            inside.add(span.span_id)
            found.append(span)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What ``auto_trace`` and ``context`` were given."""

    name: str | None = None
    store: "Store | str | None" = None
    rollout_id: str | None = None
    attempt_id: str | None = None
    task: object = None
    agent: str | None = None
    track_only: Iterable[str] | None = None
    resource_version: str | None = None
    conversation_id: str | None = None
    reward_evaluator: RewardEvaluator | None = None
    has_root: bool = True

    def stamps(self) -> dict[str, AttributeValue]:
        """Attributes that every span within gets."""
        found: dict[str, AttributeValue] = {}
        if self.track_only is not None:
            given = self.track_only
            found[c.TRACK_ONLY] = [given] if isinstance(given, str) else list(given)
        for key, value in (
            (c.AGENT_NAME, self.agent),
            (c.RESOURCE_VERSION, self.resource_version),
            (c.CONVERSATION_ID, self.conversation_id),
            (c.ATTEMPT_ID, self.attempt_id),
        ):
            if value is not None:
                found[key] = value
        return found

    def destination(self, frame: capture.Frame | None) -> Store:
        """The store named here, else the enclosing recording's, else the default one."""
        if isinstance(self.store, Store):
            return self.store
        if self.store is None and frame is not None and isinstance(frame.recording, Recording):
            return frame.recording.store
        return Store(self.store)


class Scope:
    """One entering: begins a rollout, or a part of the enclosing one, and ends it once."""

    def __init__(self, options: Options, name: str) -> None:
        self._options = options
        self._root: capture.Operation | None = None
        self._context: Context | None = None
        self._is_over = False
        self.recording: Recording = _Unrecorded()
        if config.is_enabled():
            capture.guarded(self._begin, name)

    def _begin(self, name: str) -> None:
        options = self._options
        outer = capture.current_frame()
        store = options.destination(outer)
        writer = store.writer()
        provider.ensure_provider()
        provider.instrument()
        stamps = dict(outer.stamps) if outer is not None else {}
        is_part = options.rollout_id is None and c.ROLLOUT_ID in stamps
        if not is_part:
            stamps[c.ROLLOUT_ID] = options.rollout_id or f"rollout-{secrets.token_hex(8)}"
            stamps[c.ATTEMPT_ID] = "1"
        stamps.update(options.stamps())
        recording = Recording(
            store, str(stamps[c.ROLLOUT_ID]), str(stamps[c.ATTEMPT_ID]), options.task
        )
        frame = capture.Frame(writer, stamps, outer.parent if outer else None, recording)
        context = capture.in_frame(frame, capture.parent_context())
        since = writer.position()
        if options.has_root:
            with capture.attached(context):
                self._root = _root_operation(name, options.task)
            context = self._root.context
        recording._begin(self._root, since, is_part=is_part and options.has_root)
        self._context = context
        self.recording = recording

    def attached(self) -> AbstractContextManager[None]:
        """Makes the rollout's context current for a block."""
        if self._context is None:
            return contextlib.nullcontext()
        return capture.attached(self._context)

    def end(self, exc: BaseException | None = None, result: object = None) -> None:
        """Apply the reward evaluator and end the root span; later calls do nothing."""
        if self._is_over or self._context is None:
            return
        self._is_over = True
        self.recording.error, self.recording.result = exc, result
        if self._options.reward_evaluator is not None:
            with self.attached():
                apply_evaluator(self._options.reward_evaluator, self.recording)
        if self._root is not None:
            if exc is None or _is_clean(exc):
                capture.guarded(self._root.stop)
            else:
                capture.guarded(self._root.fail, exc)


def _is_clean(exc: BaseException) -> bool:
    """Whether an exception is a way of leaving, not a failure."""
    return isinstance(exc, GeneratorExit) or (isinstance(exc, SystemExit) and not exc.code)


def _root_operation(name: str, task: object) -> capture.Operation:
    body = {}
    if task is not None:
        body[c.TASK] = json.dumps(task, default=repr, ensure_ascii=False)
    return capture.Operation(c.SPAN_ROLLOUT, SpanKind.INTERNAL, {c.OPERATION_NAME: name}, body)


def apply_evaluator(evaluator: RewardEvaluator, recording: Recording) -> None:
    """Emit what an evaluator makes of a finished rollout; one that raises costs only its reward."""
    reward = capture.guarded(evaluator, recording)
    if reward is None:
        return
    try:
        if isinstance(reward, Mapping):
            emit_reward(reward, primary=next(iter(reward), None))
        else:
            emit_reward(reward)
    except LightningOtelError as exc:
        log.warning("the reward evaluator's answer was not kept: %s", exc)


class _Traced:
    """A context manager, sync and async, and a decorator; entered any number of times at once."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._entered: list[tuple[Scope, AbstractContextManager[None]]] = []

    def __enter__(self) -> Recording:
        """Begin; gives the recording."""
        scope = Scope(self._options, self._options.name or "rollout")
        manager = scope.attached()
        manager.__enter__()
        self._entered.append((scope, manager))
        return scope.recording

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End; the exception goes on its way."""
        scope, manager = self._entered.pop()
        manager.__exit__(None, None, None)
        scope.end(exc)

    async def __aenter__(self) -> Recording:
        """Begin; gives the recording."""
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End; the exception goes on its way."""
        self.__exit__(kind, exc, trace)

    def __call__(self, function: F) -> F:
        """The function, each call of it recorded; generators are recorded while they run."""
        name = self._options.name or str(getattr(function, "__qualname__", "rollout"))
        wrapper: Any = functools.wraps(function)(_wrapper(function, self._options, name))
        return wrapper  # type: ignore[no-any-return]  # the same kind of function


def _wrapper(function: Callable[..., Any], options: Options, name: str) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(function):
        return _async_generator(function, options, name)
    if inspect.isgeneratorfunction(function):
        return _generator(function, options, name)
    if inspect.iscoroutinefunction(function):
        return _coroutine(function, options, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        scope = Scope(options, name)
        try:
            with scope.attached():
                result = function(*args, **kwargs)
        except BaseException as exc:
            scope.end(exc)
            raise
        scope.end(result=result)
        return result

    return call


def _coroutine(function: Callable[..., Any], options: Options, name: str) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        scope = Scope(options, name)
        try:
            with scope.attached():
                result = await function(*args, **kwargs)
        except BaseException as exc:
            scope.end(exc)
            raise
        scope.end(result=result)
        return result

    return call


def _generator(function: Callable[..., Any], options: Options, name: str) -> Callable[..., Any]:
    """The context is current only while the generator's own code runs, never across a yield."""

    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        scope = Scope(options, name)
        inner = function(*args, **kwargs)
        step, sent = inner.send, None
        try:
            while True:
                try:
                    with scope.attached():
                        item = step(sent)
                except StopIteration as stop:
                    scope.end(result=stop.value)
                    return stop.value
                try:
                    sent = yield item
                    step = inner.send
                except GeneratorExit:
                    with scope.attached():
                        inner.close()
                    raise
                except BaseException as exc:  # noqa: BLE001  # handed to the generator, not swallowed
                    step, sent = inner.throw, exc
        except BaseException as exc:
            scope.end(exc)
            raise

    return call


def _async_generator(
    function: Callable[..., Any], options: Options, name: str
) -> Callable[..., Any]:
    """As for generators: nothing stays attached across a yield, whichever task goes on."""

    async def call(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        scope = Scope(options, name)
        inner = function(*args, **kwargs)
        step, sent = inner.asend, None
        try:
            while True:
                try:
                    with scope.attached():
                        item = await step(sent)
                except StopAsyncIteration:
                    scope.end()
                    return
                try:
                    sent = yield item
                    step = inner.asend
                except GeneratorExit:
                    with scope.attached():
                        await inner.aclose()
                    raise
                except BaseException as exc:  # noqa: BLE001  # handed to the generator, not swallowed
                    step, sent = inner.athrow, exc
        except BaseException as exc:
            scope.end(exc)
            raise

    return call


@overload
def auto_trace(function: F, /) -> F: ...


@overload
def auto_trace(
    function: None = None,
    /,
    *,
    name: str | None = None,
    store: Store | str | None = None,
    rollout_id: str | None = None,
    attempt_id: str | None = None,
    task: object = None,
    agent: str | None = None,
    track_only: Iterable[str] | None = None,
    resource_version: str | None = None,
    conversation_id: str | None = None,
    reward_evaluator: RewardEvaluator | None = None,
) -> _Traced: ...


def auto_trace(function: Any = None, /, **options: Any) -> Any:
    """Record a rollout, as a context manager or a decorator, bare or with arguments.

    Model calls, agents, tools and what is emitted inside become spans under one root span, kept in
    the store as they end. Several at once, in threads or tasks, are rollouts of their own; one
    inside another is a part of the outer rollout, unless it names a rollout of its own.

    Args:
        function: The function to record, where this stands as a bare decorator.
        **options: ``name`` of the rollout's operation; ``store`` (a :class:`Store` or a path);
            ``rollout_id`` and ``attempt_id``; ``task``, any JSON value; ``agent``, who acts where
            the code does not say; ``track_only``, names or globs of agents whose calls become
            training data; ``resource_version`` of the prompt, model or weights at work;
            ``conversation_id``; ``reward_evaluator``, applied to the finished recording.

    Returns:
        A context manager and decorator; or the decorated function.
    """
    traced = _Traced(Options(**options))
    return traced if function is None else traced(function)


def context(**options: Any) -> _Traced:
    """Name what is going on in a block, such as its rollout or agent, without a root span of its own.

    Args:
        **options: As for :func:`auto_trace`. What is not named stays as it is outside.

    Returns:
        A context manager, sync and async, and decorator.
    """
    return _Traced(Options(**options, has_root=False))
