"""Selections as JSON, for a store on another machine; what comes in is checked before use."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

import orjson

from lightning_otel.errors import QueryError
from lightning_otel.store.schema import COLUMNS
from lightning_otel.store.source import REWARD_ATTRIBUTES, Selection

MAX_IDS: Final = 200_000
"""Ids in one selection; a batch of the adapter names 2,000 at most."""
MAX_ID_CHARACTERS: Final = 1024
_FIELDS: Final = frozenset(each.name for each in fields(Selection)) - {"also"}
_COLUMNS: Final = frozenset({*COLUMNS, REWARD_ATTRIBUTES})
_TIMES: Final = range(-(1 << 63), 1 << 63)


def text_of_selection(selection: Selection) -> str:
    """The selection, which has no ``also``, as a JSON object of what it sets."""
    plain = Selection()
    found = {name: getattr(selection, name) for name in sorted(_FIELDS)}
    found = {name: value for name, value in found.items() if value != getattr(plain, name)}
    if "columns" in found:
        found["columns"] = list(selection.columns)
    for name in ("rollout_ids", "trace_ids", "only", "without"):
        if name in found:
            found[name] = list(found[name])
    return orjson.dumps(found).decode()


def selection_of(text: bytes) -> Selection:
    """The selection that a JSON object describes.

    Raises:
        QueryError: It describes none.
    """
    try:
        given = orjson.loads(text)
    except orjson.JSONDecodeError as exc:
        raise QueryError(f"a selection is a JSON object, this is not JSON: {exc}") from exc
    if not isinstance(given, dict):
        raise QueryError("a selection is a JSON object; send {} for all spans")
    unknown = sorted(set(given) - _FIELDS)
    if unknown:
        known = ", ".join(sorted(_FIELDS))
        raise QueryError(f"a selection has no {', '.join(unknown)}; it has {known}")
    columns = _texts(given, "columns") if "columns" in given else tuple(COLUMNS)
    if not columns or not set(columns) <= _COLUMNS:
        strange = ", ".join(sorted(set(columns) - _COLUMNS)) or "nothing"
        raise QueryError(f"columns names {strange}; name columns of the view spans")
    is_ordered = given.get("is_ordered", False)
    if not isinstance(is_ordered, bool):
        raise QueryError("is_ordered is true or false")
    return Selection(
        rollout_ids=_texts(given, "rollout_ids"),
        trace_ids=_texts(given, "trace_ids"),
        since_ns=_time(given, "since_ns"),
        until_ns=_time(given, "until_ns"),
        only=_pairs(given, "only"),
        without=_pairs(given, "without"),
        is_ordered=is_ordered,
        columns=columns,
    )


def _list(given: dict[str, Any], name: str) -> Sequence[Any]:
    found = given.get(name, [])
    if not isinstance(found, list) or len(found) > MAX_IDS:
        raise QueryError(f"{name} is a list of at most {MAX_IDS} ids")
    return found


def _texts(given: dict[str, Any], name: str) -> tuple[str, ...]:
    found = _list(given, name)
    if not all(_is_id(each) for each in found):
        raise QueryError(f"{name} is a list of texts of at most {MAX_ID_CHARACTERS} characters")
    return tuple(found)


def _pairs(given: dict[str, Any], name: str) -> tuple[tuple[str, str], ...]:
    found = _list(given, name)
    for each in found:
        if not (isinstance(each, list) and len(each) == 2 and all(map(_is_id, each))):
            raise QueryError(f"{name} is a list of pairs of trace id and span id")
    return tuple((trace_id, span_id) for trace_id, span_id in found)


def _time(given: dict[str, Any], name: str) -> int | None:
    found = given.get(name)
    if found is not None and not (type(found) is int and found in _TIMES):
        raise QueryError(f"{name} is a time in Unix nanoseconds")
    return found


def _is_id(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_ID_CHARACTERS
