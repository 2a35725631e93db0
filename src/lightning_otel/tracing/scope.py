"""One rollout from its beginning to its end: ids, stamps, root span, reward evaluator."""

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypedDict

from opentelemetry import trace
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from lightning_otel import capture, config, debugging, provider
from lightning_otel.adapter.agent_patterns import Resources, resources_text
from lightning_otel.capture import operations
from lightning_otel.dataset import Store
from lightning_otel.errors import LightningOtelError, warn_once
from lightning_otel.messages import parse_messages, plain_text
from lightning_otel.store.layout import working_folder
from lightning_otel.store.transforms import Transform
from lightning_otel.tracing.blocks import OpenBlock, end_span, is_clean
from lightning_otel.tracing.emitters import emit_reward, json_of, silence_warning
from lightning_otel.tracing.recording import Recording
from lightning_otel.types import conventions as c
from lightning_otel.types.text import count_noun

log = logging.getLogger(__name__)

RewardEvaluator = Callable[[Recording], Any]
"""Judges a finished rollout: a number, named numbers (primary first) or None; maybe async."""

STAMPS = {
    "rollout_id": c.ROLLOUT_ID,
    "attempt_id": c.ATTEMPT_ID,
    "agent": c.AGENT_NAME,
    "resource_version": c.RESOURCE_VERSION,
    "mode": c.MODE,
    "conversation_id": c.CONVERSATION_ID,
}


class Options(TypedDict, total=False):
    """The keywords of ``auto_trace`` and ``context``; ``auto_trace`` says what they mean."""

    name: str | None
    store: Store | str | os.PathLike[str] | None
    rollout_id: str | None
    attempt_id: str | None
    task: object
    agent: str | None
    track_only: str | Iterable[str] | None
    resource_version: str | None
    mode: str | None
    resources: Resources | None
    conversation_id: str | None
    reward_evaluator: RewardEvaluator | None
    transforms: Iterable[Transform] | None
    enable_retokenization_fix: bool | None
    apply: bool | Literal["published"] | None
    debug: bool | None


class Scope(OpenBlock[Recording]):
    """One entering: begins a rollout, or a part of the enclosing one, and ends it once."""

    def __init__(self, options: Options, name: str, *, has_root: bool = True) -> None:
        self._options = options
        self._root: operations.Operation | None = None
        self._frame: capture.Frame | None = None
        self._is_over = False
        self._lost_before: int | None = None
        self.opened = Recording()
        debugging.take_setting()
        debugging.begin(options.get("debug"))
        if config.is_enabled() and not provider.is_broken():
            capture.guard_call(self._begin, name, has_root)
            if self.context is None:
                silence_warning()
        if debugging.is_on:
            capture.guard_call(self._tell_begin)

    def _begin(self, name: str, has_root: bool) -> None:  # noqa: FBT001
        options, outside = self._options, capture.current_frame()
        outer = outside or capture.Frame(None)
        try:
            store = _find_store(options.get("store"), outer)
            is_task = outer.has_tasks and has_root and options.get("task") is not None
            stamps, is_part = _make_stamps(options, outer.stamps, is_task=is_task)
            assigner = _find_assigner(store, outside, choice=options.get("apply"), is_part=is_part)
            sink = store.writer()
            self._lost_before = None if is_part else sink.lost
            provider.ensure_provider()
        except LightningOtelError as exc:
            warn_once(f"nothing is recorded: {exc}")
            return
        capture.guard_call(provider.switch_on)
        recording = Recording(
            store,
            str(stamps[c.ROLLOUT_ID]), str(stamps[c.ATTEMPT_ID]), options.get("task"),
        )  # fmt: skip
        asks = options.get("enable_retokenization_fix")
        asks_for_ids = capture.asks_for_ids(outside) if asks is None else bool(asks)
        frame = capture.Frame(
            sink, stamps, outer.parent, recording, asks_for_ids, assigner,
            transforms=(*outer.transforms, *(options.get("transforms") or ())),
        )  # fmt: skip
        self._frame, inside = frame, capture.set_frame(frame, operations.parent_context())
        span_context = root = trace.get_current_span(inside).get_span_context()
        if has_root:
            body = {c.TASK: json_of(recording.task)} if recording.task is not None else {}
            with capture.attach_context(inside):
                self._root = operations.Operation(
                    c.SPAN_ROLLOUT, SpanKind.INTERNAL, {c.OPERATION_NAME: name}, body
                )
            root = self._root.span.get_span_context()
            recording.root_is(root, is_part=is_part)
            inside = self._root.context
        capture.open_frame(frame, span_context, root)
        self.context = inside
        self.opened = recording

    def _tell_begin(self) -> None:
        recording = self.opened
        if not recording.rollout_id:
            debugging.log("missed  nothing is recorded here; see: lightning-otel doctor")
            return
        debugging.log(f"on      {recording.rollout_id} → {recording.store.name}")
        provider.log_instrumentors()

    async def finish(
        self, exc: BaseException | None = None, result: object = None, *, is_async: bool = True
    ) -> None:
        """Judge and end the rollout; a judge's model gets no resources. Later calls do nothing."""
        recording = self.opened
        recording.error = None if is_clean(exc) else exc
        recording.result = result
        if self._is_over:
            return
        self._is_over = True
        if self._root is not None:
            capture.guard_call(_keep_output, self._root, result)
        try:
            evaluator = self._options.get("reward_evaluator")
            if evaluator is not None and self.context is not None:
                inside = self.context
                frame = capture.current_frame(inside)
                if frame is not None and frame.assigner is not None:
                    inside = capture.set_frame(replace(frame, assigner=None), inside)
                with capture.attach_context(inside):
                    await _judge(recording, evaluator, is_async=is_async)
        except Exception:
            log.warning(
                "the reward evaluator failed, so %s has no reward from it",
                recording.rollout_id,
                exc_info=True,
            )
        finally:
            try:
                self._end_root(exc)
            finally:
                if self._frame is not None:
                    capture.close_frame(self._frame)
                debugging.end(self._options.get("debug"))

    def _end_root(self, exc: BaseException | None) -> None:
        recording = self.opened
        if self._lost_before is not None and self.context is not None:
            lost = recording.store.writer().lost - self._lost_before
            if lost > 0:
                lost_spans = count_noun(lost, "span")
                log.warning("%s lost: %s refused them", lost_spans, recording.store.name)
        if self._root is None:
            return
        end_span(self._root, exc)
        if debugging.is_on and not recording.is_part:
            capture.guard_call(
                lambda: debugging.log_report(recording.rollout_id, recording.report())
            )


def _keep_output(root: operations.Operation, result: object) -> None:
    """Keep what the function returned, else the last answer, before a judge's model answers."""
    if result is None and root.answer:
        result = plain_text((parse_messages(root.answer) or ())[:1])
    if result is not None:
        root.body[c.OPERATION_OUTPUT] = json_of(result)


async def _judge(recording: Recording, evaluator: RewardEvaluator, *, is_async: bool) -> None:
    reward = evaluator(recording)
    if inspect.isawaitable(reward) and not is_async:
        if inspect.iscoroutine(reward):
            reward.close()
        log.warning(
            "the reward evaluator is async, but what it judges is not, so it was not "
            "applied; make it a plain function, or trace an async function or block"
        )
        return
    value = await reward if inspect.isawaitable(reward) else reward
    if isinstance(value, Mapping):
        emit_reward(value, primary=next(iter(value), None))
    elif value is not None:
        emit_reward(value)


def _find_assigner(
    store: Store,
    outer: capture.Frame | None,
    *,
    choice: bool | Literal["published"] | None,
    is_part: bool,
) -> capture.ResourceAssigner | None:
    """Return the source of resources if this block or an outer one asks, one version a rollout."""
    parent = outer.assigner if outer is not None else None
    if choice == "published":
        is_decided = parent is not None or (outer is not None and outer.recording is not None)
        if is_decided or config.is_set(config.APPLY.name):
            choice = None
        else:
            watch = capture.guard_call(provider.assigner_of, store, is_asked=False)
            return watch.for_rollout() if watch is not None else None
    is_wanted = config.APPLY.read() if outer is None else parent is not None
    if not (is_wanted if choice is None else choice):
        return None
    if is_part and parent is not None:
        return parent
    source = capture.guard_call(provider.assigner_of, store) if choice or outer is None else parent
    return source.for_rollout() if source is not None else None


def _find_store(store: Store | str | os.PathLike[str] | None, outer: capture.Frame) -> Store:
    if isinstance(store, Store):
        return store
    if store is None and isinstance(outer.recording, Recording):
        return outer.recording.store
    path = config.STORE.read() if store is None else os.fspath(store)
    if path[:1] == "~" or ":" in path:  # a URL, a lake, or ":memory:", anew each time
        return Store(path)
    return _store_at(path, str(working_folder()) if path[:1] != "/" else "")


@functools.lru_cache(maxsize=16)  # a store takes as long as three spans
def _store_at(path: str, folder: str) -> Store:
    return Store(os.path.join(folder, path))


def _make_stamps(
    options: Options, outer: Mapping[str, AttributeValue], *, is_task: bool
) -> tuple[dict[str, AttributeValue], bool]:
    """Return the attributes of every span within, and whether this is a part of a rollout."""
    stamps: dict[str, AttributeValue] = {
        key: operations.clean_text(str(value))
        for option, key in STAMPS.items()
        if (value := options.get(option)) is not None
    }
    tracked, resources = options.get("track_only"), options.get("resources")
    if tracked is not None:
        stamps[c.TRACK_ONLY] = [tracked] if isinstance(tracked, str) else list(tracked)
    if resources is not None:
        stamps[c.RESOURCES] = resources_text(resources, outer.get(c.RESOURCES))
    rollout_id = outer.get(c.ROLLOUT_ID)
    default = None if is_task else rollout_id
    if rollout_id is not None and stamps.get(c.ROLLOUT_ID, default) == rollout_id:
        return {**outer, **stamps}, True
    return {**outer, **capture.begin_rollout(), **stamps}, False
