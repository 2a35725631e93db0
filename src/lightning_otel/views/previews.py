"""Previews: the words that name a trace, and one line of what was said in a span."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from lightning_otel.adapter import readers
from lightning_otel.adapter.rewards import reward_words
from lightning_otel.messages import parse_messages, plain_text
from lightning_otel.messages.media import to_text
from lightning_otel.store.schema import build_span
from lightning_otel.store.sql import attribute_sql, quote_text
from lightning_otel.store.table import Query
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.types.text import one_line
from lightning_otel.types.values import parse_json
from lightning_otel.views.messages import word_messages

if TYPE_CHECKING:
    from lightning_otel.dataset import Store
    from lightning_otel.store.reader import Reader
    from lightning_otel.views.trace import Row, SpanKey

_WORDS: Final = 300
_FIRST_CALLS: Final = 4
"""Calls in which a user's words are looked for; an orchestrator's own have instructions alone."""
_AROUND: Final = 60
"""Characters around a text that was searched for."""
_BEFORE: Final = 24
_LONGEST: Final = 64 << 10
"""Characters of a message in which its first words are looked for."""
_SIDE: Final = 4_000
"""Characters that are read of a message; of one that is longer the first text is shown."""
LIGHT: Final = 20_000
"""Characters of attributes or events that a page reads: other conventions keep messages there."""
HEAVY: Final = 500_000
"""Likewise, of a terminal."""
_TEXT: Final = re.compile(r'"(?:content|text|response)":\s*"((?:[^"\\]|\\.)*)')
_USER_TEXT: Final = re.compile(r'"role":\s*"user".*?' + _TEXT.pattern, re.DOTALL)
_QUOTE: Final = re.compile(r'(?<!\\)"')
_SAYING: Final = ("call", "tool", "mark", "agent", "reward", "work")
"""Kinds of rows in which something is said."""
_TASK_FIELDS: Final = (
    "question", "prompt", "instruction", "query", "problem", "problem_statement", "input",
    "messages", "task", "goal", "text", "content",
)  # fmt: skip
"""Fields of tasks that say what is asked, by data sets' usage."""
_MARKED: Final = (c.MESSAGE_BODY, c.OBJECT_LITERAL, c.OBJECT_JSON)
_SHORT_KEYS: Final = (c.TOOL_ARGUMENTS, c.TOOL_RESULT, *_MARKED)

_SEARCHED: Final = (
    "output_messages", "input_messages", "system_instructions", "attributes::VARCHAR",
    "status_message", "name",
)  # fmt: skip
_FOUND: Final = f"""
SELECT span_id, substr(held, greatest(1, instr(lower(held), $1) - {_AROUND}), {2 * _AROUND})
FROM (SELECT span_id, CASE {
    " ".join(f"WHEN contains(lower({column}), $1) THEN {column}" for column in _SEARCHED)
} END AS held FROM spans WHERE trace_id = $2 AND start_ns BETWEEN $3 AND $4)
WHERE held IS NOT NULL"""


def _message_at(column: str, place: str) -> str:
    at = f"left(json_extract({column}, '$[{place}]')::VARCHAR, {_SIDE})"
    return f"CASE WHEN json_valid({column}) THEN {at} END"


def _light(column: str) -> str:
    return f"CASE WHEN strlen({column}::VARCHAR) < ? THEN {column}::VARCHAR END"


_TITLE: Final = f"""
SELECT span_id, CASE WHEN name = {quote_text(c.SPAN_ROLLOUT)}
    THEN left({attribute_sql(c.TASK)}, {_LONGEST}) END AS task,
  left(coalesce(input_messages, {attribute_sql("input.value")}, ''), {_LONGEST}) AS input
FROM spans WHERE start_ns BETWEEN ? AND ? AND trace_id = {{trace}} AND span_id IN ({{ids}})"""
"""Texts that name a trace: of its root and of its first calls."""
_TEXTS: Final = """
SELECT {key} AS id,
  arg_min(input_messages, start_ns) FILTER (contains(input_messages, '"user"')) AS asked,
  arg_max(output_messages, start_ns) AS answered
FROM calls WHERE {key} IN (SELECT unnest(?)) AND start_ns BETWEEN ? AND ? GROUP BY 1"""
_SAID: Final = f"""
SELECT trace_id, span_id, parent_span_id, name, kind, start_ns, end_ns, status, status_message,
  scope, process, sequence, end_sequence, {_message_at("input_messages", "#-1")} AS asked,
  {_message_at("output_messages", "0")} AS answered,
  {_light("attributes")} AS attributes, {_light("events")} AS events,
  [{", ".join(f"left({attribute_sql(key)}, {_SIDE})" for key in _SHORT_KEYS)}] AS texts
FROM spans WHERE trace_id IN (SELECT unnest(?)) AND start_ns BETWEEN ? AND ?
  AND span_id IN (SELECT unnest(?))"""


Sql: TypeAlias = Callable[[str, Sequence[object]], Iterable[Mapping[str, Any]]]
"""Reads the rows of a query."""


def sql_of(store: "Store", con: "Reader") -> Sql:
    """Return what reads content: the connection itself, unless it has none of a store elsewhere."""
    if store.source.layout is None:
        return store.sql
    return lambda query, parameters: Query(con, query, parameters).dicts()


def read_texts(
    sql: Sql,
    rows: Sequence[Mapping[str, Any]],
    key: str,
    ends: Sequence[tuple[str, str]],
) -> list[tuple[str, str]]:
    """Return what a user asked first and a model answered last in each row of a list.

    A query of its own: a list reads no content, and texts are read of its page alone. ``key`` is
    ``trace_id`` or ``rollout_id``; ``ends`` are the ids of each row's first part and of its last.
    """
    bounds = min(row["start_ns"] for row in rows), max(row["end_ns"] for row in rows)
    ids = [name for names in ends for name in names]
    texts = {row["id"]: row for row in sql(_TEXTS.format(key=key), [ids, *bounds])}
    pairs = []
    for first, last in ends:
        messages = parse_messages(texts.get(first, {}).get("asked")) or ()
        answered = parse_messages(texts.get(last, {}).get("answered")) or ()
        users = [message for message in messages if message.get("role") == "user"]
        pairs.append((plain_text(users[:1]), plain_text(answered[:1])))
    return pairs


def read_title(sql: Sql, spans: Sequence[Span]) -> str:
    """Return the words that name a trace; empty if nothing was asked in it."""
    root = next((span for span in spans if span.name == c.SPAN_ROLLOUT), None)
    calls = (span for span in spans if span.operation in c.GENERATIVE_OPERATIONS)
    heads = [*([] if root is None else [root]), *islice(calls, _FIRST_CALLS)]
    if not heads:
        return ""
    times, ids = [span.start_ns for span in heads], [quote_text(span.span_id) for span in heads]
    query = _TITLE.format(trace=quote_text(heads[0].trace_id), ids=", ".join(ids))
    texts = {row["span_id"]: row for row in sql(query, [min(times), max(times)])}
    records = [texts.get(span.span_id, {}) for span in heads]
    words = (task_words(row.get("task")) or _asked_words(row.get("input")) for row in records)
    return next(filter(None, words), "")[:_WORDS]


def read_previews(
    store: "Store", rows: "Sequence[Row]", cells: int | None = None, most: int = HEAVY
) -> "dict[SpanKey, str]":
    """Return one line of what was said in each of some rows of a trace.

    Each side takes so many ``cells``, None for all; ``most`` characters of attributes are read.
    """
    spans = [row.span for row in rows if row.kind in _SAYING]
    if not spans:
        return {}
    times, ids = [span.start_ns for span in spans], [span.span_id for span in spans]
    trace_ids = list({span.trace_id for span in spans})
    records = store.sql(_SAID, [most, most, trace_ids, min(times), max(times), ids]).rows()
    return preview_spans(map(_make_span, records), cells)


def preview_spans(spans: Iterable[Span], cells: int | None = None) -> "dict[SpanKey, str]":
    """Return one line of what was said in each of some spans, where anything was."""
    lines = {
        (span.trace_id, span.span_id): reward_words(span) or preview_of(span.attributes, cells)
        for span in readers.read(spans)
    }
    return {key: text.removesuffix(" → ") for key, text in lines.items() if text}


def find_text(store: "Store", rows: "Sequence[Row]", text: str) -> dict[str, Sequence[str]]:
    """Find a text in a trace; return the match with its context, per span."""
    needle, times = json_needle(text), [row.span.start_ns for row in rows]
    values = [needle, rows[0].span.trace_id, min(times), max(times)]
    matches = (row.values() for row in store.sql(_FOUND, values).rows())
    return {
        span_id: _split_excerpt(text, max(0, text.lower().find(needle)), len(needle))
        for span_id, text in matches
    }


def _split_excerpt(text: str, at: int, length: int) -> list[str]:
    """Split a part of JSON around a text in it, as far as the JSON's own text reaches."""
    before, after = _QUOTE.split(text[:at])[-1], _QUOTE.split(text[at + length :])[0]
    pieces = (one_line(_unescape(piece)) for piece in (before, text[at : at + length], after))
    before, *tail = pieces
    return [f"…{before[-_BEFORE:]}" if len(before) > _BEFORE else before, *tail]


def json_needle(text: str) -> str:
    """A text as it stands in JSON, in small letters."""
    return json.dumps(text, ensure_ascii=False)[1:-1].lower()


def preview_of(attributes: Mapping[str, Any], cells: int | None = None) -> str:
    """Return one line: a call's last message and answer, a tool's input and result, or a mark.

    Each side takes so many ``cells``, None for all.
    """
    get = attributes.get
    sides = [parse_messages(get(key)) or () for key in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES)]
    if any(sides):
        texts = [word_messages(side) for side in (sides[0][-1:], sides[1][:1])]
    elif get(c.TOOL_ARGUMENTS) is not None or get(c.TOOL_RESULT) is not None:
        texts = [to_text(get(key)) for key in (c.TOOL_ARGUMENTS, c.TOOL_RESULT)]
    else:
        texts = [to_text(next((get(key) for key in _MARKED if get(key)), None))]
    return " → ".join(one_line(" ".join(text.split()), cells) for text in texts)


def _make_span(row: Mapping[str, Any]) -> Span:
    span = build_span(row)
    attributes = dict(span.attributes)
    short = zip(_SHORT_KEYS, row["texts"], strict=True)
    attributes |= {key: text for key, text in short if text is not None}
    sides = ((c.INPUT_MESSAGES, row["asked"]), (c.OUTPUT_MESSAGES, row["answered"]))
    attributes |= {key: _whole_message(text) for key, text in sides if text}
    return replace(span, attributes=attributes)


def _whole_message(text: str) -> str:
    """Return a list of one message, whose JSON may be cut."""
    if len(text) < _SIDE:
        return f"[{text}]"
    parts = [{"type": "text", "content": f"{_first_text(_TEXT, text)}…"}]
    return json.dumps([{"role": "user", "parts": parts}])


def task_words(task: str | None) -> str:
    """Return the words of a task that was recorded as JSON; empty of none."""
    return (word_task(parse_json(task)) or task) if task else ""


def word_task(value: object) -> str:
    """Return what a task asks: a text itself, of an object its question, else its longest text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):  # of messages
        people = (each for each in value if isinstance(each, dict) and each.get("role") == "user")
        value = next(people, None)
    if not isinstance(value, dict):
        return ""
    asked = (word_task(value[name]) for name in _TASK_FIELDS if name in value)
    texts = [text for text in value.values() if isinstance(text, str)]
    return next(filter(None, asked), "") or max(texts, key=len, default="")


def _asked_words(text: str | None) -> str:
    messages = parse_messages(text)
    if messages is None:
        return _first_text(_USER_TEXT, text or "")
    return plain_text([message for message in messages if message.get("role") == "user"][:1])


def _first_text(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    if match is None:
        return ""
    return _unescape(match[1])


def _unescape(text: str) -> str:
    """Return a part of a JSON text as it was written; as it is, where it is cut within a sign."""
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return text
