"""Spans of a running Agent Lightning 0.3 store read back into a store of ours, each once."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from lightning_otel import conventions as c
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError
from lightning_otel.microsoft.client import OUR_ATTEMPT, OUR_ROLLOUT, Client, Found
from lightning_otel.microsoft.handing import FINAL
from lightning_otel.receivers import Rejected
from lightning_otel.receivers.documents import span_of
from lightning_otel.rewarding.feedback import add_surely
from lightning_otel.types import Span

_CAME: Final = "agentlightning"


@dataclass(slots=True)
class ReadBack:
    """Counts of the rollouts and spans read back.

    Attributes:
        url: Where from.
        rollouts: Rollouts that were looked at.
        running: Those that have not ended yet, and wait for the next time.
        spans: Spans that are new here.
        held: Spans that were here already, such as those that were handed over.
        rejected: Spans that cannot be kept, by reason.
    """

    url: str
    rollouts: int = 0
    running: int = 0
    spans: int = 0
    held: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


def read_back(
    store: Store | str,
    url: str,
    *,
    rollout_id: str | Iterable[str] | None = None,
    timeout_s: float = 30.0,
) -> ReadBack:
    """Read the spans of a running Agent Lightning 0.3 store into a store of ours.

    A rollout that was handed over from here is told by its id here, so that rewards it got there
    come home; any other by its id there, with its task and how it ended. To do it again reads what
    came since.

    Args:
        store: Where the spans go; it is made if it is not there.
        url: Its address, such as ``http://127.0.0.1:4747``.
        rollout_id: Only these, by their ids there or here.
        timeout_s: How long it may take to answer once.

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
    wanted = (
        None
        if rollout_id is None
        else {rollout_id}
        if isinstance(rollout_id, str)
        else set(rollout_id)
    )
    done = ReadBack(client.url)
    for rollout in client.rollouts():
        ids = {rollout["rollout_id"], _read_metadata(rollout).get(OUR_ROLLOUT)}
        if wanted is not None and not ids & wanted:
            continue
        done.rollouts += 1
        if rollout["status"] not in FINAL:
            done.running += 1
            continue
        made = list(_read_spans(client, rollout, done))
        held = _find_held(opened, made)
        fresh = [span for span in made if (span.trace_id, span.span_id) not in held]
        add_surely(opened, fresh)
        done.spans += len(fresh)
        done.held += len(made) - len(fresh)
    opened.writer().seal()
    return done


def _read_spans(client: Client, rollout: Found, done: ReadBack) -> Iterator[Span]:
    """The spans of a rollout, named as here."""
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
        found = span_of(document, f"{_CAME}:{client.peer}")
        if isinstance(found, Rejected):
            done.rejected[found.reason] += 1
            continue
        stamps = {
            c.ROLLOUT_ID: our_id or their_id,
            c.ATTEMPT_ID: names.get(document["attempt_id"], document["attempt_id"]),
        }
        yield replace(found, attributes={**found.attributes, **stamps})


def _rollout_span(rollout: Found, attempt: Found) -> Span:
    """Make the span of an attempt: its task and its end."""
    told = f"{rollout['rollout_id']} {attempt['attempt_id']}"
    digest = hashlib.sha256(told.encode()).hexdigest()
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


def _find_held(store: Store, spans: Iterable[Span]) -> set[tuple[str, str]]:
    """Return the ids of spans that the store has already."""
    rows = store.sql(
        "SELECT trace_id, span_id FROM spans WHERE span_id IN (SELECT unnest(?::VARCHAR[]))",
        [[span.span_id for span in spans]],
    )
    return {(row["trace_id"], row["span_id"]) for row in rows}


def _read_metadata(found: Found) -> Mapping[str, Any]:
    return found.get("metadata") or {}
