"""Traces and rollouts of a store as rows, read without their content.

30,000 spans are rows in a second or two; messages are read only where the adapter must.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.adapter import Adaptation, readers
from lightning_otel.dataset import Store
from lightning_otel.errors import NotFoundError
from lightning_otel.store.lookup import find_rollout
from lightning_otel.store.schema import COLUMNS, NARROW_COLUMNS, build_span
from lightning_otel.store.selection import INDEX_COLUMNS, Selection, read_rollouts
from lightning_otel.store.source import SpanSource, at_moment
from lightning_otel.store.sql import ROLLOUT, attribute_sql, quote_text
from lightning_otel.store.table import Query
from lightning_otel.types import Report, Span, Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.transitions import fast_constructor
from lightning_otel.views.previews import read_title, sql_of
from lightning_otel.views.trace import Row, SpanKey, Trace, assemble
from lightning_otel.views.traces import REWARDS_SINCE

if TYPE_CHECKING:
    from lightning_otel.store.reader import Reader

_FACTS: Final = (
    c.ERROR_TYPE, c.OPERATION_NAME, c.MARK_NAME, c.TOOL_NAME, c.REWARD_NAME, c.SESSION,
    f"{c.LINK_PREFIX}.0.key_match", c.LINK_VALUE, c.ABANDONED,
    c.REWARD_RETRACTED, c.REWARD_VALUE, c.REWARD_AUTHOR,
)  # fmt: skip
"""Attributes of a row's span, read as text out of the JSON where it lies."""
_HOT: Final = {
    "operation": c.OPERATION, "agent": c.AGENT_NAME, "model": c.RESPONSE_MODEL,
    "response_id": c.RESPONSE_ID, "input_tokens": c.INPUT_TOKENS, "output_tokens": c.OUTPUT_TOKENS,
    "rollout_id": c.ROLLOUT_ID, "attempt_id": c.ATTEMPT_ID, "reward": c.REWARD_VALUE,
}  # fmt: skip
"""Columns that hold the other attributes of a row's span."""
_PLUMBING: Final = "|".join(key.replace(".", r"\.") for key in c.PLUMBING_KEYS)
_COLUMNS: Final = f"""trace_id, span_id, nullif(parent_span_id, ''), {{name}}, start_ns, end_ns,
  kind, status, coalesce({{status_message}}, ''), coalesce(scope, ''), coalesce(process, ''),
  sequence, end_sequence,
  CASE WHEN operation IS NULL AND reward IS NULL
    THEN regexp_extract(attributes::VARCHAR, {quote_text(f'"({_PLUMBING})":')}, 1) END,
  [{{fact}} for fact in json_extract_string(attributes,
    [{", ".join(quote_text(f'$."{key}"') for key in _FACTS)}])], {", ".join(_HOT)}"""
_NO_FACTS: Final = (None,) * len(_FACTS)
_AT_ONCE: Final = 2048
_LATER: Final = f"""
SELECT trace_id, span_id, start_ns FROM spans WHERE {REWARDS_SINCE} AND trace_id <> ?
  AND {ROLLOUT} IN (SELECT {ROLLOUT} FROM spans WHERE trace_id = ?)"""
_LINKED: Final = f"""
SELECT trace_id, span_id, start_ns FROM spans WHERE {REWARDS_SINCE} AND trace_id <> ?
  AND contains(attributes::VARCHAR, {quote_text(c.LINK_PREFIX)})
  AND {attribute_sql(c.LINK_VALUE)} IN (SELECT unnest(?))"""
_HOMES: Final = "SELECT DISTINCT rollout_id FROM rewards WHERE span_id IN (SELECT unnest(?))"
SPAN_COLUMNS: Final = (
    "trace_id", "span_id", "parent_span_id", "name", "kind", "start_ns", "end_ns", "status",
    "status_message", "scope", "process", "sequence", "end_sequence", "attributes",
)  # fmt: skip
"""What a span is made of without what was said in it, what happened in it, and its process."""
_WITH_FACTS: Final = (*NARROW_COLUMNS, "attributes")
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


def read_trace(store: Store, noun: str, whole_id: str, longest: int | None = None) -> Trace:
    """Read a trace or rollout of any size, or what lies below a span or response.

    ``longest`` is in characters of a name or message; None cuts nothing.

    Raises:
        NotFoundError: There is none.
    """
    store = at_moment(store)
    if noun == "trace":
        trace = _read_alone(store, whole_id, longest)
        is_there = any(row.kind != "reward" for row in trace.rows)
        return trace if is_there else _read_elsewhere(store, "trace_id", whole_id, longest, trace)
    if noun == "rollout":
        trace = _read_rollouts(store, [whole_id], longest)
        return trace if trace.rows else _read_elsewhere(store, ROLLOUT, whole_id, longest, trace)
    con = store.source.connect(("spans",), INDEX_COLUMNS)
    trace = _read_rollouts(store, [find_rollout(con, noun, whole_id)], longest)
    position = _find_position(trace, noun, whole_id)
    if position is None:
        trace = _read_elsewhere(store, "span_id", whole_id, longest, trace)
        position = _find_position(trace, noun, whole_id)
    return trace if position is None else trace.below(position)


def _read_alone(store: Store, trace_id: str, longest: int | None) -> Trace:
    source = store.source
    con = source.connect(("spans",), INDEX_COLUMNS)
    spans = _read_spans(source.fetch(_select(trace_ids=(trace_id,)), con), longest)
    if not spans:
        raise NotFoundError(f"there is no trace {trace_id!r}; see the list of traces")
    later_rewards = _read_later(source, con, trace_id, spans, longest)
    rollout_ids = list(dict.fromkeys(span.rollout_id for span in spans))
    trace = _read_made(store, [*spans, *later_rewards], rollout_ids)
    return trace._replace(trace_id=trace_id, words=read_title(sql_of(store, con), spans))


def _find_position(trace: Trace, noun: str, whole_id: str) -> int | None:
    if noun == "span":
        return trace.find(whole_id)
    ids = (row.span.attributes.get(c.RESPONSE_ID) for row in trace.rows)
    return next((position for position, candidate in enumerate(ids) if candidate == whole_id), None)


def _read_elsewhere(
    store: Store, column: str, whole_id: str, longest: int | None, otherwise: Trace
) -> Trace:
    """Read rewards that judge another rollout than their own, with the steps they were given to."""
    con = store.source.connect(("spans", "rewards"), INDEX_COLUMNS)
    members = f"SELECT trace_id, span_id FROM spans WHERE {column} = ?"
    names = set(con.execute(members, [whole_id]).fetchall())
    homes = con.execute(_HOMES, [[span_id for _, span_id in names]]).fetchall()
    if not homes:
        return otherwise
    trace = _read_rollouts(store, [home for (home,) in homes], longest)
    positions = {position for position, row in enumerate(trace.rows) if row.key in names}
    positions.update([target for position in positions for target in trace.rows[position].credited])
    part = trace.part([position in positions for position in range(len(trace.rows))])
    return part._replace(trace_id=otherwise.trace_id) if part.rows else otherwise


def _read_rollouts(store: Store, rollout_ids: Sequence[str], longest: int | None) -> Trace:
    query = read_rollouts(store.source, _select(rollout_ids=rollout_ids))
    return _read_made(store, _read_spans(query, longest), rollout_ids)


def _read_made(store: Store, spans: Sequence[Span], rollout_ids: Sequence[str]) -> Trace:
    adaptations = list(store.adapt(rollout_id=list(rollout_ids), bodies=False))
    adaptation = Adaptation(
        [path for adaptation in adaptations for path in adaptation.trajectories],
        Report.total(adaptation.report for adaptation in adaptations),
        [credited for adaptation in adaptations for credited in adaptation.credited],
    )
    return assemble(spans, adaptation)


def _read_later(
    source: SpanSource, con: "Reader", trace_id: str, spans: Sequence[Span], longest: int | None
) -> list[Span]:
    """Read the rewards that were given to a trace in traces of their own."""
    low = min(span.start_ns for span in spans)
    names = con.execute(_LATER, [low, trace_id, trace_id]).fetchall()
    responses = (span.attributes.get(c.RESPONSE_ID) for span in spans)
    ids = [*(span.span_id for span in spans), *filter(None, responses)]
    names += con.execute(_LINKED, [low, trace_id, ids]).fetchall()
    if not names:
        return []
    times = [start_ns for _, _, start_ns in names]
    only = list({(trace, span): None for trace, span, _ in names})
    selection = _select(only=only, since_ns=min(times), until_ns=max(times))
    return _read_spans(source.fetch(selection, con), longest)


def _select(**fields: Any) -> Selection:
    return Selection(**fields, columns=_WITH_FACTS, is_ordered=True)


def _read_spans(result: Query, longest: int | None) -> list[Span]:
    short = {name: f"left({name}, {longest})" if longest else name for name in (
        "name", "status_message", "fact")}  # fmt: skip
    query = result.select(_COLUMNS.format(**short))
    make = fast_constructor(Span)
    # DuckDB makes an object of every value; most of them say what another row said already.
    cache: dict[Any, Any] = {}
    spans: list[Span] = []
    for rows in query.batches(_AT_ONCE)[1]:
        for row in rows:
            key = row[13], *(row[14] or _NO_FACTS), *row[15:]
            if key not in cache:
                cache[key] = _make_attributes(key)
            trace_id, span_id, parent_id, name, start_ns, end_ns, kind, *fields = (
                cache.setdefault(one, one) if type(one) is str else one for one in row[:13]
            )
            status, message, scope, process, start, end = fields
            spans.append(
                make(
                    trace_id, span_id, parent_id, name, start_ns, end_ns, kind, status, message,
                    cache[key], (), (), _NOTHING, scope, process, start, end,
                )
            )  # fmt: skip
    return spans


def _make_attributes(values: Sequence[object]) -> dict[str, object]:
    plumbing, *others = values
    pairs = zip((*_FACTS, *_HOT.values()), others, strict=True)
    attributes = {key: value for key, value in pairs if value is not None and value != ""}
    return {**attributes, str(plumbing): True} if plumbing else attributes


def read_spans(
    store: Store, places: Sequence[Span | Transition], columns: Sequence[str]
) -> dict[SpanKey, Span]:
    """Read some columns of some spans, in today's conventions; one that is gone is left out."""

    def fetch(some: Sequence[Span | Transition]) -> Iterator[Mapping[str, Any]]:
        times = [place.start_ns for place in some]
        selection = Selection(
            trace_ids=sorted({place.trace_id for place in some}),
            only=[(place.trace_id, place.span_id) for place in some],
            since_ns=min(times),
            until_ns=max(times),
            columns=columns,
        )
        return store.source.fetch(selection).dicts()

    parts = (places[at : at + _AT_ONCE] for at in range(0, len(places), _AT_ONCE))
    spans = readers.read(map(build_span, chain.from_iterable(map(fetch, parts))))
    return {(span.trace_id, span.span_id): span for span in spans}


def load_spans(store: Store, rows: Sequence[Row]) -> None:
    """Read the spans of some rows whole."""
    spans = read_spans(store, [row.span for row in rows], tuple(COLUMNS))
    for row in rows:
        row.span = spans.get(row.key, row.span)
