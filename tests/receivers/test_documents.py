"""Files of spans, of a Collector and of Agent Lightning 0.3; and inflation within limits."""

import gzip
import json
import os
import zlib
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest
from tests.faults.test_messages import draw
from tests.receivers.requests import json_of
from tests.receivers.test_spellings import SPELLINGS
from tests.serve.serving import request_of

from lightning_otel.adapter import TripletAdapter
from lightning_otel.errors import ReceiveError, TooLargeError
from lightning_otel.receivers import Rejected, RequestLimits, documents, inflated
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

RECORDED = Path(__file__).parent.parent / "data" / "spans" / "agentlightning.jsonl"


def stored_span(**fields: Any) -> dict[str, Any]:
    """A span as Agent Lightning 0.3's ``Span.model_dump(mode="json")`` gives it."""
    context = {"trace_id": "0" * 31 + "1", "span_id": "0" * 15 + "2", "is_remote": False,
               "trace_state": {}}  # fmt: skip
    return {
        "rollout_id": "ro-1",
        "attempt_id": "at-1",
        "sequence_id": 3,
        "trace_id": context["trace_id"],
        "span_id": context["span_id"],
        "parent_id": "0" * 15 + "1",
        "name": "openai.chat.completion",
        "status": {"status_code": "ERROR", "description": "no"},
        "attributes": {"gen_ai.request.model": "m", "prompt_token_ids": [1, 2]},
        "events": [{"name": "e", "attributes": {"a": 1}, "timestamp": 1760000000.25}],
        "links": [{"context": context, "attributes": None}],
        "start_time": 1760000000.5,
        "end_time": 1760000001.5,
        "context": context,
        "parent": None,
        "resource": {"attributes": {"service.name": "s"}, "schema_url": ""},
        "kind": "SpanKind.CLIENT",
        "instrumentation_scope": "InstrumentationScope(agentops, 1.0, , None)",
        **fields,
    }


def decode_spans(document: Any) -> list[Span | Rejected]:
    """The spans of a document; ``DEEP`` in it is nested as deep as a reader of JSON takes."""
    body = orjson.dumps(document).replace(b'"DEEP"', b"[" * 900 + b"]" * 900)
    return list(documents.decode_spans(body))


def test_agent_lightning_span_keeps_what_it_says() -> None:
    """Every field has its place; rollout and attempt stand where its own exporter puts them."""
    (found,) = decode_spans(stored_span())

    assert isinstance(found, Span)
    assert (found.start_ns, found.end_ns) == (1760000000500000000, 1760000001500000000)
    assert (found.kind, found.status, found.status_message) == ("CLIENT", "ERROR", "no")
    assert (found.scope, found.parent_span_id) == ("agentops", "0000000000000001")
    assert found.events[0].time_ns == 1760000000250000000
    assert found.links[0].span_id == "0000000000000002"
    assert found.attributes["prompt_token_ids"] == [1, 2]
    assert found.attributes[c.RECEIVED] == "import"
    assert found.otel_resource == {
        "service.name": "s", c.ROLLOUT_ID: "ro-1", c.ATTEMPT_ID: "at-1", c.SEQUENCE_ID: 3,
    }  # fmt: skip


def test_agent_lightning_spans_that_mongoexport_wrote_or_that_never_ended_are_kept() -> None:
    """MongoDB writes numbers of its own kinds as objects; an end is not made up."""
    (found,) = decode_spans(
        stored_span(
            _id={"$oid": "65f0"},
            partition_id="p",
            sequence_id={"$numberInt": "3"},
            start_time={"$numberDouble": "1760000000.5"},
            end_time=None,
            attributes={"n": {"$numberLong": "17"}, "ids": [{"$numberInt": "1"}]},
        )
    )

    assert isinstance(found, Span)
    assert (found.start_ns, found.is_incomplete) == (1760000000500000000, True)
    assert (found.attributes["n"], found.attributes["ids"]) == (17, [1])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"trace_id": "abc"}, "id is not hex"),
        ({"trace_id": 17}, "a text is none"),
        ({"span_id": "0" * 16}, "span id is all zeros"),
        ({"start_time": None, "end_time": None}, "start and end time are missing"),
        ({"start_time": "soon"}, "time is no number"),
        ({"start_time": {"$numberDouble": "x"}}, "$numberDouble is no number"),
        ({"attributes": 17}, "an object is none"),
        ({"name": 17}, "a text is none"),
        ({"attributes": {"k": "DEEP"}}, "attribute value is nested too deep"),
    ],
)
def test_agent_lightning_span_that_is_unfit_is_rejected(
    fields: dict[str, Any], reason: str
) -> None:
    """With its reason, and alone."""
    first, second = decode_spans([stored_span(**fields), stored_span()])

    assert (first, type(second)) == (Rejected(reason), Span)


def test_agent_lightning_spans_of_its_weave_tracer_keep_their_tree() -> None:
    """They have UUIDs for ids: a trace keeps all of its own, a span the random half."""
    trace_id, parent, child = (f"0199f3a2-7c1b-7e4d-8a90-00000000000{number}" for number in "123")
    (inner,) = decode_spans(stored_span(trace_id=trace_id, span_id=child, parent_id=parent))

    assert isinstance(inner, Span)
    assert inner.trace_id == trace_id.replace("-", "")
    assert (inner.parent_span_id, inner.span_id) == ("8a90000000000002", "8a90000000000003")


def test_agent_lightning_rollout_becomes_the_same_transitions() -> None:
    """Rollouts that 0.3 really recorded, in its own form: the same transitions and rewards."""
    recorded = [orjson.loads(line) for line in RECORDED.read_bytes().splitlines()]
    direct = [Span(**{**each, "events": (), "links": ()}) for each in recorded]
    stored = [
        stored_span(
            **{key: each[key] for key in ("trace_id", "span_id", "name", "attributes")},
            rollout_id=each["otel_resource"].get(c.ROLLOUT_ID, ""),
            attempt_id=each["otel_resource"].get(c.ATTEMPT_ID, ""),
            sequence_id=each["otel_resource"].get(c.SEQUENCE_ID, 0),
            parent_id=each["parent_span_id"],
            start_time=each["start_ns"] / 1e9,
            end_time=each["end_ns"] / 1e9,
            resource={"attributes": each["otel_resource"], "schema_url": ""},
            status={"status_code": each["status"], "description": None},
            instrumentation_scope=f"InstrumentationScope({each['scope']}, , , None)",
            events=[],
            links=[],
        )
        for each in recorded
    ]
    imported = [each for each in decode_spans(stored) if isinstance(each, Span)]

    def steps(spans: list[Span]) -> list[tuple[Any, ...]]:
        return [
            (path.rollout_id, step.step, step.action, step.reward)
            for path in TripletAdapter().adapt(spans)
            for step in path.transitions
        ]

    assert len(imported) == len(recorded)
    assert steps(direct)
    assert steps(imported) == steps(direct)


def test_otlp_lines_are_read_beside_others() -> None:
    """A trace request, in a list or a page of Agent Lightning's, beside what is none."""
    request = orjson.loads(json_of(request_of(2)))
    mixed = [request, {"resourceMetrics": []}, 17, stored_span()]

    for document in (mixed, {"items": mixed, "limit": 100, "offset": 0, "total": 4}):
        found = [type(each) for each in decode_spans(document)]
        assert found == [Span, Span, Rejected, Rejected, Span]


@pytest.mark.parametrize(
    "text", [b"", b"17", b'{"a": 1}', b'{"resourceMetrics":[]}', b"{", b"\xff"]
)
def test_documents_of_no_known_form_are_refused(text: bytes) -> None:
    """A line that holds no spans is an error, with what it should have been."""
    with pytest.raises(ReceiveError):
        documents.decode_spans(text)


_LIMIT = 1 << 20
_DRAWN = [Random(0).randbytes(size) for size in range(0, 10_000, 10)]  # some look like members


def test_inflated_gives_back_what_was_compressed() -> None:
    """Up to the limit itself, in members of every length, padded; one member more is refused."""
    members = b"".join(gzip.compress(part, 1) for part in _DRAWN)

    assert inflated(members + bytes(100)) == b"".join(_DRAWN)
    for each in (b"", os.urandom(_LIMIT), bytes(_LIMIT)):
        assert inflated(gzip.compress(each), RequestLimits(body_bytes=_LIMIT)) == each
        assert inflated(zlib.compress(each), RequestLimits(body_bytes=_LIMIT)) == each
    with pytest.raises(TooLargeError):
        inflated(members + gzip.compress(b""))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", ReceiveError),
        (b"no gzip", ReceiveError),
        (gzip.compress(b"abc")[:-1], ReceiveError),
        (gzip.compress(os.urandom(_LIMIT))[:-100_000], ReceiveError),
        (gzip.compress(b"abc") + b"more", ReceiveError),
        (gzip.compress(b"abc")[:-5] + b"\0\0\0\0\0", ReceiveError),
        (gzip.compress(bytes(_LIMIT + 1)), TooLargeError),
        (gzip.compress(bytes(_LIMIT)) + gzip.compress(b"x"), TooLargeError),
    ],
    ids=["empty", "other", "cut", "cut-long", "more", "wrong-sum", "large", "large-in-two"],
)
def test_inflated_refuses(body: bytes, error: type[Exception]) -> None:
    """Cut off, not a gzip, something behind it, a wrong checksum, one byte too much."""
    with pytest.raises(error):
        inflated(body, RequestLimits(body_bytes=_LIMIT))


def test_each_drawn_record_is_taken_or_named() -> None:
    """However odd the messages of a trace are, its record is a span, or a line says why not."""
    rng, lines = Random(11), []
    for number in range(400):
        given, offer = rng.choice(list(SPELLINGS.values()))
        record = {"id": f"o{number}", "traceId": "t1", "type": "GENERATION", "name": "m"}
        times = '"startTime": "2026-11-01T12:00:01Z", "endTime": "2026-11-01T12:00:02Z"'
        body = f'"input": {draw(given, rng)}, "output": {draw(given[-1:], rng)}, {times}'
        offers = draw(offer, rng) if offer else "null"
        lines.append(f'{json.dumps(record)[:-1]}, {body}, "tools": {offers}}}')
    spans = 0
    for line in lines:
        with suppress(ReceiveError):  # deeper than JSON may be
            (found,) = documents.decode_spans(line.encode())
            spans += isinstance(found, Span)

    assert spans > len(lines) / 2
