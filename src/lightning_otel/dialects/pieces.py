"""Streamed pieces of an answer joined: tool calls by their places and ids, values as they are.

Source: OpenAI's API reference for streamed chat completions; how Gemini's, Ollama's and older
vLLM's servers number the calls of one answer.
"""

import itertools
from collections.abc import Container, Iterable, Sequence
from operator import itemgetter
from typing import Any, Final

import orjson

from lightning_otel.dialects.dialect import Json
from lightning_otel.messages import object_of

_CALLED: Final = frozenset({"function", "custom"})


def join_calls(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls of their pieces: each belongs to the call of its index, else id, else the last.

    Servers number parallel calls alike, give them one id, or none: a new id or name begins a call.
    """
    calls: list[tuple[int, list[dict[str, Any]]]] = []
    for piece in pieces:
        index, call_id = piece.get("index"), piece.get("id")
        if isinstance(index, int):
            matches = [call for place, call in calls if place == index]
        elif call_id:
            matches = [call for _, call in calls if call[0].get("id") == call_id]
        else:
            matches = [call for _, call in calls[-1:]]
        if not matches or _begins_call(matches[-1], piece):
            calls.append((index if isinstance(index, int) else len(calls), [piece]))
        else:
            matches[-1].append(_without_repeats(matches[-1], piece))
    return [join_pieces(call, _CALLED) for _, call in sorted(calls, key=itemgetter(0))]


def _begins_call(pieces: list[dict[str, Any]], piece: dict[str, Any]) -> bool:
    """Return whether a piece contradicts those of the call at its place."""
    call_id, known_id = piece.get("id"), _first_of(pieces, "id")
    if call_id and known_id and call_id != known_id:
        return True
    functions = [object_of(item.get("function")) for item in pieces]
    function, known_name = object_of(piece.get("function")), _first_of(functions, "name")
    name = function.get("name")
    if not name or not known_name:
        return False
    arguments = [item["arguments"] for item in functions if item.get("arguments")]
    if name != known_name:  # a name that comes in pieces does so before all else
        return bool(arguments or call_id)
    # Said again with each piece, or of the same tool once more.
    is_whole = bool(arguments) and str(arguments[-1]).rstrip().endswith("}")
    return is_whole and bool(function.get("arguments")) and _is_json("".join(map(str, arguments)))


def _without_repeats(pieces: list[dict[str, Any]], piece: dict[str, Any]) -> dict[str, Any]:
    """Return a piece without the name of its tool, where that is said again."""
    function = object_of(piece.get("function"))
    name = function.get("name")
    if not name or name != _first_of([object_of(item.get("function")) for item in pieces], "name"):
        return piece
    return {**piece, "function": {key: function[key] for key in function if key != "name"}}


def _first_of(objects: Iterable[Json], name: str) -> Any:
    return next((value for item in objects if (value := item.get(name))), None)


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except ValueError:
        return False
    return True


def join_pieces(pieces: Sequence[Json], growing: Container[str]) -> dict[str, Any]:
    """One object of its streamed pieces: named fields grow, of the others the last value counts."""
    whole = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(pieces)):
        values = [value for piece in pieces if (value := piece.get(name)) is not None]
        if values:
            whole[name] = _join(values) if name in growing else values[-1]
    return whole


def _join(values: list[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    kinds = set(map(type, values))
    if kinds == {str}:
        return "".join(values)
    if kinds == {list}:
        return list(itertools.chain.from_iterable(values))
    if kinds == {dict}:
        return join_pieces(values, frozenset(itertools.chain.from_iterable(values)))
    return values[-1]
