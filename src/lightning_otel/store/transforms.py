"""Transforms of spans before they are written: drop, rename, redact.

A transform is a function from a span, a started one too, to a span, or None to drop it. It runs in
the thread that ended the span, before it touches a disk. One that raises loses no span and lets
nothing out: all that may be content is replaced by a fixed text.
"""

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Final

import orjson

from lightning_otel.errors import ConfigError, warn_once
from lightning_otel.store.schema import BODY_COLUMNS, Record, build_record, build_span
from lightning_otel.types import Event, Span
from lightning_otel.types import conventions as c
from lightning_otel.types.values import make_attributes_plain

log = logging.getLogger(__name__)

Transform = Callable[[Span], Span | None]
"""Gives the span to be kept instead, or None to keep none."""

FAILED: Final = "[transform failed]"
DROPPED: Final = "drop"
"""A line that takes back the start of a span whose end was dropped."""

_KEPT: Final = frozenset(
    {
        c.ROLLOUT_ID, c.ATTEMPT_ID, c.OPERATION, c.PROVIDER, c.REQUEST_MODEL, c.RESPONSE_MODEL,
        c.RESPONSE_ID, c.INPUT_TOKENS, c.OUTPUT_TOKENS, c.REWARD_VALUE,
    }
)  # fmt: skip
"""What no content stands in."""
_OUR_NAMES: Final = frozenset(
    {
        c.SPAN_ROLLOUT, c.SPAN_ANNOTATION, c.SPAN_OPERATION, c.SPAN_MESSAGE, c.SPAN_OBJECT,
        c.SPAN_EXCEPTION, c.SPAN_ACTION, c.SPAN_OBSERVATION, c.SPAN_STATE,
    }
)  # fmt: skip

global_transforms: list[Transform] = []
"""Those that apply to every span this process writes, wherever it does."""
_named: set[str] = set()
_within = threading.local()


def load_transform(name: str) -> Transform:
    """Import a function, by ``module:function``."""
    # A program's own folder may not be on the path of a console script.
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        value = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(
            f"cannot load the transform {name!r}: {exc}; write it as module:function"
        ) from exc
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
    return check_transforms([value])[0]


def load_transform_lazily(name: str) -> Transform:
    """Return a transform that is imported when it is used: the program may not be loaded before."""
    load = functools.cache(load_transform)

    def transform(span: Span) -> Span | None:
        return load(name)(span)

    transform.__module__, _, transform.__qualname__ = name.partition(":")
    return transform


def add_transform(function: Transform) -> Transform:
    """Let every span this process records from now on pass through a function, after those before.

    It gets each span, as it starts (with an empty ``end_ns``) and as it ends, and gives the span to
    keep, or None. It is returned, so that this can stand as a decorator.

    Raises:
        ConfigError: It cannot be called.
    """
    check_transforms([function])
    global_transforms.append(function)
    return function


def remove_transform(function: Transform) -> None:
    """Take a function back that :func:`add_transform` was given; harmless if it was not."""
    with contextlib.suppress(ValueError):
        global_transforms.remove(function)


def check_transforms(functions: Sequence[Transform]) -> tuple[Transform, ...]:
    """Return the functions, if each can be called."""
    for function in functions:
        if not callable(function):
            raise ConfigError(f"{function!r} is no transform; give a function of a span")
    return tuple(functions)


def add_named_transforms(names: Sequence[str]) -> None:
    """Add transforms by name, each once."""
    for name in names:
        if name not in _named:
            _named.add(name)
            global_transforms.append(load_transform_lazily(name))


def name_transform(function: Transform) -> str:
    """The name under which another process may find a function; it fails there if it cannot."""
    where = getattr(function, "__module__", None)
    return f"{where}:{getattr(function, '__qualname__', repr(function))}"


def apply_transforms(record: Record, transforms: Sequence[Transform]) -> tuple[Record | None, bool]:
    """Apply transforms to a record, which is consumed; its ids and its place stay as they are.

    Return what is kept, None if the span was dropped; and whether a transform raised.
    """
    make_attributes_plain(record["attributes"])
    for item in (*record.get("events", ()), *record.get("links", ())):
        make_attributes_plain(item["attributes"])
    # The resource of a process is kept as ready JSON.
    record["otel_resource"] = orjson.loads(orjson.dumps(record["otel_resource"]))
    before = build_span({"status_message": "", **dict.fromkeys(BODY_COLUMNS), **record})
    result = None
    # What a transform itself records is not let out.
    if not getattr(_within, "is_entered", False):
        _within.is_entered = True
        try:
            after = before
            for transform in (*global_transforms, *transforms):
                span = transform(after)
                if span is None:
                    return None, False
                if type(span) is not Span:
                    raise TypeError(f"a transform gives a Span or None, not {type(span).__name__}")
                after = span
            result = _make_record(before, after, record)
        except Exception as exc:  # noqa: BLE001  # a user's function may raise anything
            # Its message may hold what was to be redacted.
            why = exc if isinstance(exc, ConfigError) else type(exc).__name__
            warn_once(
                f"a transform failed ({why}): what it was given is kept without its content; "
                "further failures are only counted",
                key="transform",
            )
            log.debug("a transform failed: %s", type(exc).__name__)
        finally:
            _within.is_entered = False
    return result or _make_record(before, _empty_span(before), record), result is None


def _make_record(before: Span, after: Span, record: Record) -> Record:
    """Return the record of a span after its transforms: what it is stays as it was before."""
    span = replace(
        after,
        trace_id=before.trace_id,
        span_id=before.span_id,
        process=before.process,
        sequence=before.sequence,
        end_sequence=before.end_sequence,
        end_ns=None if before.end_ns is None else after.end_ns or before.end_ns,
    )
    return {**build_record(span), "record": record["record"]}


def _empty_span(span: Span) -> Span:
    return replace(
        span,
        name=span.name if span.name in _OUR_NAMES else FAILED,
        status_message=FAILED if span.status_message else "",
        attributes={key: v if key in _KEPT else FAILED for key, v in span.attributes.items()},
        events=tuple(
            Event(FAILED, event.time_ns, dict.fromkeys(event.attributes, FAILED))
            for event in span.events
        ),
        links=tuple(
            replace(link, attributes=dict.fromkeys(link.attributes, FAILED)) for link in span.links
        ),
        otel_resource={},
    )


def build_drop_record(record: Record) -> Record:
    """Make the record that takes a dropped span's start back: its ids and place only."""
    columns = ("trace_id", "span_id", "start_ns", "rollout_id", "process", "sequence")
    return {
        "record": DROPPED,
        **{column: record.get(column) for column in columns},
        "end_sequence": record.get("end_sequence", -1),
    }


def remove_dropped(records: list[Record]) -> list[Record]:
    """The records without those that take a start back, and without these starts."""
    gone = {(row["trace_id"], row["span_id"]) for row in records if row["record"] == DROPPED}
    return [
        row
        for row in records
        if row["record"] == "span" or (row["trace_id"], row["span_id"]) not in gone
    ]
