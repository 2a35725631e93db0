"""Spans and rewards to a running Agent Lightning 0.3 store and back, each once."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, NamedTuple, Unpack, get_args

from lightning_otel import config
from lightning_otel.adapter import readers
from lightning_otel.adapter.attempts import AttemptKey, sort_attempts
from lightning_otel.adapter.selection import SelectionKeywords, StepSelection
from lightning_otel.algorithms.exchange.calls import to_agentlightning
from lightning_otel.algorithms.exchange.client import OUR_ATTEMPT, OUR_ROLLOUT, Client, Found
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, StoreError
from lightning_otel.receivers import Rejected
from lightning_otel.receivers.documents import span_of
from lightning_otel.rewards.feedback import write_spans
from lightning_otel.store.engines.otlp import UnsendableError, encode_span
from lightning_otel.store.selection import read_batches
from lightning_otel.types import Mode, Span
from lightning_otel.types import conventions as c
from lightning_otel.types.rollouts import FINAL
from lightning_otel.types.values import parse_json

_CAME: Final = "agentlightning"
UNENDED: Final = "it never ended"
_BATCH_BYTES: Final = 4 << 20
_SPAN_BYTES: Final = 600
"""About what a span takes beside its texts."""


@dataclass(slots=True)
class HandOverCounts:
    """Counts of the attempts and spans handed over."""

    url: str
    with_content: bool  # messages, tokens and tasks went along
    rollouts: int = 0
    attempts: int = 0
    running: int = 0  # attempts that have not ended, and wait for the next time
    spans: int = 0
    rewards: int = 0  # among the spans
    held: int = 0  # spans that were there already
    left_out: Counter[str] = field(default_factory=Counter)  # spans that cannot be sent, by reason


class _StepKey(NamedTuple):
    rollout_id: str
    attempt_id: str
    is_new: bool = False
    is_final: bool = False


def hand_over(
    store: Store | str,
    url: str,
    *,
    content: bool | None = None,
    timeout_s: float = 30.0,
    **keywords: Unpack[SelectionKeywords],
) -> HandOverCounts:
    """Hand spans and rewards of ended attempts over to a running Agent Lightning 0.3 store.

    A rollout that it ran keeps its ids; any other is begun there, with its id here in its metadata.
    Repetition sends only what is new.

    Args:
        store: The store of the spans.
        url: Its address, such as ``http://127.0.0.1:4747`` (``agl store --port 4747``).
        content: Send messages, tokens and tasks, which training needs. By default
            ``LIGHTNING_OTEL_EXPORT_CONTENT``, which is off.
        timeout_s: Limit of one answer, seconds.
        **keywords: Selected rollouts: ``rollout_id``, ``since``, ``until``, ``received``.

    Raises:
        ConfigError: The URL or a keyword cannot be used.
        StoreMissingError: There is no store.
        StoreError: It does not answer or take them; what it took is not sent twice.
    """
    opened = store if isinstance(store, Store) else Store(store)
    selection = StepSelection.of(keywords)
    client = Client(url, timeout_s=timeout_s)
    client.check()
    with_content = config.content().is_exported if content is None else content
    rows = opened.sql("SELECT rollout_id, attempt_id, status FROM rollouts")
    status = {(row["rollout_id"], row["attempt_id"]): row["status"] for row in rows}
    counts = HandOverCounts(client.url, with_content)
    ran_there, rollout_ids = set[str](), dict[str, str]()
    for rollout in client.rollouts():
        our_id = _read_metadata(rollout).get(OUR_ROLLOUT)
        if our_id is None:
            ran_there.add(rollout["rollout_id"])
        else:
            rollout_ids.setdefault(our_id, rollout["rollout_id"])
    for spans in read_batches(opened.source, selection):
        for key, members in sort_attempts(readers.read(selection.spans(spans))).members.items():
            counts.attempts += 1
            ended = status.get(key, "running")
            if ended == "running":
                counts.running += 1
                continue
            if key.rollout_id in ran_there:
                place = _find_theirs(client, key)
            elif key.rollout_id in rollout_ids:
                place = _find_ours(client, key, rollout_ids[key.rollout_id])
            else:
                place = _start_place(client, key, members, counts)
                rollout_ids[key.rollout_id] = place.rollout_id
            _send_attempt(client, place, members, counts)
            if not place.is_final:
                their_status = "succeeded" if ended == "succeeded" else "failed"
                client.finish(place.rollout_id, place.attempt_id, their_status, key.attempt_id)
    return counts


def _find_theirs(client: Client, key: AttemptKey) -> _StepKey:
    for attempt in client.attempts(key.rollout_id):
        if key.attempt_id in (attempt["attempt_id"], str(attempt["sequence_id"])):
            return _StepKey(key.rollout_id, attempt["attempt_id"], is_final=True)
    raise StoreError(
        f"rollout {key.rollout_id} has no attempt {key.attempt_id!r} at {client.url}; record it "
        "with auto_trace(attempt_id=…) of the attempt there"
    )


def _find_ours(client: Client, key: AttemptKey, rollout_id: str) -> _StepKey:
    free = None
    for attempt in client.attempts(rollout_id):
        our_id = _read_metadata(attempt).get(OUR_ATTEMPT)
        if our_id == key.attempt_id:
            return _StepKey(rollout_id, attempt["attempt_id"], is_final=attempt["status"] in FINAL)
        if our_id is None and free is None:
            free = attempt["attempt_id"]
    if free is not None:  # what was cut off before it could be said whose it is
        return _StepKey(rollout_id, free)
    start = client.start_attempt(rollout_id)
    return _StepKey(rollout_id, start["attempt"]["attempt_id"], is_new=True)


def _start_place(
    client: Client, key: AttemptKey, spans: Iterable[Span], counts: HandOverCounts
) -> _StepKey:
    facts = [span.attributes for span in spans]
    task = next((fact[c.TASK] for fact in facts if c.TASK in fact), None)
    mode = next((fact[c.MODE] for fact in facts if c.MODE in fact), None)
    rollout = client.start(
        parse_json(task) if counts.with_content else None,
        mode if mode in get_args(Mode) else None,
        key.rollout_id,
    )
    counts.rollouts += 1
    return _StepKey(rollout["rollout_id"], rollout["attempt"]["attempt_id"], is_new=True)


def _send_attempt(
    client: Client, place: _StepKey, spans: list[Span], counts: HandOverCounts
) -> None:
    remote_spans = () if place.is_new else client.spans(place.rollout_id, place.attempt_id)
    span_ids = {span["span_id"] for span in remote_spans}
    fresh = [span for span in spans if span.span_id not in span_ids]
    counts.held += len(spans) - len(fresh)
    batch: list[Span] = []
    size_bytes = 0
    for span in chain(_make_spans(fresh, place, counts), [None]):
        if span is not None:
            batch.append(span)
            texts = (value for value in span.attributes.values() if isinstance(value, str))
            size_bytes += _SPAN_BYTES + sum(map(len, texts))
        if batch and (span is None or size_bytes >= _BATCH_BYTES):
            client.send(batch, with_content=counts.with_content)
            counts.spans += len(batch)
            counts.rewards += sum(c.REWARD_VALUE in span.attributes for span in batch)
            batch, size_bytes = [], 0


def _make_spans(spans: Iterable[Span], place: _StepKey, counts: HandOverCounts) -> Iterator[Span]:
    stamps = {c.ROLLOUT_ID: place.rollout_id, c.ATTEMPT_ID: place.attempt_id}
    for span in sorted(spans, key=lambda span: (span.start_ns, span.sequence)):
        if span.is_incomplete:
            counts.left_out[UNENDED] += 1
            continue
        copy = to_agentlightning(span, with_content=counts.with_content)
        attributes = {**_drop_number(copy.attributes), **stamps}
        copy = replace(copy, attributes=attributes, otel_resource=_drop_number(copy.otel_resource))
        try:
            encode_span(copy, with_content=False)
        except UnsendableError as exc:
            counts.left_out[str(exc)] += 1
            continue
        yield copy


def _drop_number(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if key != c.SEQUENCE_ID}


@dataclass(slots=True)
class ReadBackCounts:
    """Counts of the rollouts and spans read back."""

    url: str
    rollouts: int = 0
    running: int = 0  # rollouts that have not ended, and wait for the next time
    spans: int = 0  # that are new here
    held: int = 0  # spans that were here already
    rejected: Counter[str] = field(default_factory=Counter)  # spans not to be stored, by reason


def read_back(
    store: Store | str,
    url: str,
    *,
    rollout_id: str | Iterable[str] | None = None,
    timeout_s: float = 30.0,
) -> ReadBackCounts:
    """Read the spans of a running Agent Lightning 0.3 store into a store of ours.

    A rollout that was handed over gets its id here back. Repetition reads only what is new.

    Args:
        store: The store the spans go to; created if missing.
        url: Its address, such as ``http://127.0.0.1:4747``.
        rollout_id: Only these, by their ids there or here.
        timeout_s: Limit of one answer, seconds.

    Raises:
        ConfigError: The URL cannot be used, or the store is not on this machine's disk.
        StoreError: It does not answer, or the store cannot be written.
    """
    opened = store if isinstance(store, Store) else Store(store)
    if opened.layout is None:
        raise ConfigError(f"{opened.name} is no store on disk; name one such as traces.duckdb")
    opened.writer()
    client = Client(url, timeout_s=timeout_s)
    client.check()
    selected_ids = None
    if rollout_id is not None:
        selected_ids = {rollout_id} if isinstance(rollout_id, str) else set(rollout_id)
    counts = ReadBackCounts(client.url)
    for rollout in client.rollouts():
        ids = {rollout["rollout_id"], _read_metadata(rollout).get(OUR_ROLLOUT)}
        if selected_ids is not None and not ids & selected_ids:
            continue
        counts.rollouts += 1
        if rollout["status"] not in FINAL:
            counts.running += 1
            continue
        new_spans = list(_read_spans(client, rollout, counts))
        rows = opened.sql(
            "SELECT trace_id, span_id FROM spans WHERE span_id IN (SELECT unnest(?::VARCHAR[]))",
            [[span.span_id for span in new_spans]],
        )
        span_ids = {(row["trace_id"], row["span_id"]) for row in rows}
        fresh = [span for span in new_spans if (span.trace_id, span.span_id) not in span_ids]
        write_spans(opened, fresh)
        counts.spans += len(fresh)
        counts.held += len(new_spans) - len(fresh)
    opened.writer().seal()
    return counts


def _read_spans(client: Client, rollout: Found, counts: ReadBackCounts) -> Iterator[Span]:
    their_id = rollout["rollout_id"]
    our_id = _read_metadata(rollout).get(OUR_ROLLOUT)
    attempts = client.attempts(their_id)
    names = {
        attempt["attempt_id"]: _read_metadata(attempt).get(OUR_ATTEMPT) or attempt["attempt_id"]
        for attempt in attempts
    }
    if our_id is None:
        yield from (_rollout_span(rollout, attempt) for attempt in attempts)
    for document in client.spans(their_id):
        span = span_of(document, f"{_CAME}:{client.peer}")
        if isinstance(span, Rejected):
            counts.rejected[span.reason] += 1
            continue
        stamps = {
            c.ROLLOUT_ID: our_id or their_id,
            c.ATTEMPT_ID: names.get(document["attempt_id"], document["attempt_id"]),
        }
        yield replace(span, attributes={**span.attributes, **stamps})


def _rollout_span(rollout: Found, attempt: Found) -> Span:
    identity = f"{rollout['rollout_id']} {attempt['attempt_id']}"
    digest = hashlib.sha256(identity.encode()).hexdigest()
    end = attempt.get("end_time") or rollout.get("end_time") or attempt["start_time"]
    attributes: dict[str, Any] = {
        c.ROLLOUT_ID: rollout["rollout_id"],
        c.ATTEMPT_ID: attempt["attempt_id"],
        c.TASK: json.dumps(rollout.get("input"), ensure_ascii=False),
        c.RECEIVED: _CAME,
    }
    if rollout.get("mode"):
        attributes[c.MODE] = rollout["mode"]
    return Span(
        trace_id=digest[:32],
        span_id=digest[32:48],
        parent_span_id=None,
        name=c.SPAN_ROLLOUT,
        start_ns=round(attempt["start_time"] * 1e9),
        end_ns=round(end * 1e9),
        status="OK" if attempt.get("status") == "succeeded" else "ERROR",
        attributes=attributes,
    )


def _read_metadata(record: Found) -> Mapping[str, Any]:
    return record.get("metadata") or {}
