"""OTLP of both encodings as spans: what went out comes in, and what is unfit is said."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from tests.receivers.requests import json_of, request_of
from tests.serve.serving import deep_value, field

from lightning_otel.errors import ReceiveError, TooLargeError
from lightning_otel.receivers import Rejected, RequestLimits, otlp, protobuf
from lightning_otel.types import Event, Link, Span
from lightning_otel.types import conventions as c

CAME = "otlp:127.0.0.1"
START_NS = 1_760_000_000_000_000_000
Read = Callable[[ExportTraceServiceRequest], list[Span | Rejected]]


def from_protobuf(request: ExportTraceServiceRequest) -> list[Span | Rejected]:
    return list(protobuf.decode_spans(request.SerializeToString(), CAME))


def from_json(request: ExportTraceServiceRequest) -> list[Span | Rejected]:
    return list(otlp.decode_spans(json_of(request), CAME))


BOTH = pytest.mark.parametrize("read", [from_protobuf, from_json])

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
integers = st.integers(-(1 << 63), (1 << 63) - 1)
floats = st.floats(allow_nan=False)
values = st.recursive(
    st.one_of(texts, st.booleans(), integers, floats),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
# Keys that the receiver itself writes are its own.
keys = texts.filter(lambda key: key not in (c.RECEIVED, c.CUT))
attributes = st.dictionaries(keys, values, max_size=4)
times = st.integers(1, (1 << 62) - 1)
trace_ids = st.integers(1, (1 << 128) - 1).map("{:032x}".format)
span_ids = st.integers(1, (1 << 64) - 1).map("{:016x}".format)
events = st.builds(Event, texts, times, attributes)
links = st.builds(Link, trace_ids, span_ids, attributes)
statuses = st.one_of(
    st.tuples(st.just("ERROR"), texts), st.tuples(st.sampled_from(["UNSET", "OK"]), st.just(""))
)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    """Any span that OTLP can carry."""
    status, message = draw(statuses)
    start_ns, end_ns = sorted((draw(times), draw(times)))
    return Span(
        trace_id=draw(trace_ids),
        span_id=draw(span_ids),
        parent_span_id=draw(st.none() | span_ids),
        name=draw(texts),
        start_ns=start_ns,
        end_ns=end_ns,
        kind=draw(st.sampled_from(["INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER"])),
        status=status,
        status_message=message,
        attributes=draw(attributes),
        events=tuple(draw(st.lists(events, max_size=2))),
        links=tuple(draw(st.lists(links, max_size=2))),
        otel_resource={"service.name": draw(texts)},
        scope=draw(texts),
    )


def received(span: Span) -> Span:
    return replace(span, attributes={**span.attributes, c.RECEIVED: CAME})


@BOTH
@settings(max_examples=60, deadline=None)
@given(found=st.lists(spans(), max_size=3))
def test_otlp_is_the_inverse_of_the_exporter(read: Read, found: list[Span]) -> None:
    """Spans that the SDK's encoder wrote come back as they were, and say how they came."""
    got = read(request_of(found))

    assert sorted(map(repr, got)) == sorted(repr(received(span)) for span in found)


def one(**fields: Any) -> ExportTraceServiceRequest:
    """A request of three spans, of which the middle one has these fields."""
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for index in range(3):
        span = scope.spans.add(
            trace_id=os.urandom(16), span_id=os.urandom(8), name=f"span {index}",
            start_time_unix_nano=START_NS, end_time_unix_nano=START_NS + 1,
        )  # fmt: skip
        if index == 1:
            span.MergeFrom(OtlpSpan(**{name: v for name, v in fields.items() if v is not None}))
            for name in (name for name, value in fields.items() if value is None):
                span.ClearField(name)
    return request


MANY_ATTRIBUTES = [{"key": f"k{index}", "value": {"int_value": index}} for index in range(10_001)]


@BOTH
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"trace_id": b"abc"}, "trace id is not 16 bytes long"),
        ({"trace_id": b"\1" * 1000}, "trace id is not 16 bytes long"),
        ({"trace_id": bytes(16)}, "trace id is all zeros"),
        ({"trace_id": None}, "trace id is not 16 bytes long"),
        ({"span_id": b"abc"}, "span id is not 8 bytes long"),
        ({"span_id": b"\1" * 1000}, "span id is not 8 bytes long"),
        ({"span_id": bytes(8)}, "span id is all zeros"),
        ({"span_id": None}, "span id is not 8 bytes long"),
        ({"parent_span_id": b"abc"}, "parent span id is not 8 bytes long"),
        (
            {"start_time_unix_nano": None, "end_time_unix_nano": None},
            "start and end time are missing",
        ),
        ({"attributes": MANY_ATTRIBUTES}, "more than 10000 attributes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_otlp_rejects_only_the_unfit_span(read: Read, fields: dict[str, Any], reason: str) -> None:
    """An impossible span, or one without ids or times, is rejected alone with its reason."""
    first, middle, last = read(one(**fields))

    assert (type(first), middle, type(last)) == (Span, Rejected(reason), Span)


LAST_NS = (1 << 62) - 1


@BOTH
@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ((START_NS, START_NS), None),
        ((START_NS, START_NS - 7), (START_NS, START_NS)),
        ((0, START_NS), (START_NS, START_NS)),
        ((START_NS, (1 << 64) - 1), (START_NS, START_NS)),
        ((1 << 62, START_NS), (START_NS, START_NS)),
        ((1 << 62, 0), (LAST_NS, LAST_NS)),
    ],
)
def test_otlp_keeps_a_span_whose_times_cannot_be(
    read: Read, sent: tuple[int, int], kept: tuple[int, int] | None
) -> None:
    """They are brought into range and order, and the span says what was sent."""
    found = read(one(start_time_unix_nano=sent[0] or None, end_time_unix_nano=sent[1] or None))[1]

    assert isinstance(found, Span)
    assert (found.start_ns, found.end_ns) == (kept or sent)
    assert found.attributes.get(c.SENT_TIMES) == (f"[{sent[0]}, {sent[1]}]" if kept else None)


@BOTH
def test_otlp_keeps_what_it_can_of_a_span(read: Read) -> None:
    """A parent of zeros is none; what the sender or we left out is noted; no origin is forged."""
    request = one(
        parent_span_id=bytes(8),
        dropped_attributes_count=7,
        dropped_events_count=2,
        links=[OtlpSpan.Link(trace_id=b"abc", span_id=b"d")],
        attributes=[{"key": c.RECEIVED, "value": {"string_value": "import"}}],
    )
    resource = request.resource_spans[0].resource
    resource.attributes.add(key="host.name").value.string_value = "box"
    resource.attributes.add(key="process.pid").value.int_value = 17

    found = read(request)[1]

    assert isinstance(found, Span)
    assert (found.parent_span_id, found.links, found.process) == (None, (), "box-17")
    assert found.attributes[c.RECEIVED] == CAME
    assert orjson.loads(found.attributes[c.CUT]) == {
        "attributes": {"length": 8, "kept": 1},
        "events": {"length": 2, "kept": 0},
        "links": {"length": 1, "kept": 0},
    }


@BOTH
def test_otlp_believes_no_mark_of_a_sender(read: Read) -> None:
    """What a store says of its spans stays under another name; of a cut, what agrees with it."""
    part = "kept part"
    digest = hashlib.sha256(part.encode()).hexdigest()
    true = {"text": {"length": 99, "kept": 9, "sha256": digest},
            "events": {"length": 5, "kept": 2}}  # fmt: skip
    forged = {
        "text": {"length": 99, "kept": 9, "sha256": "sk-live-1234"}, "nothing": {"length": 2},
        "events": "sk-live-1234", "links": {"length": 1, "kept": 1},
    }  # fmt: skip

    def of(cut: object, **more: str) -> Mapping[str, Any]:
        sent = {"text": part, c.CUT: json.dumps(cut), **more}
        request = one(
            attributes=[{"key": k, "value": {"string_value": v}} for k, v in sent.items()]
        )
        span = read(request)[1]
        assert isinstance(span, Span)
        assert span.attributes[c.RECEIVED] == CAME
        return {key: value for key, value in span.attributes.items() if key != c.RECEIVED}

    marks = dict.fromkeys((c.REDACTED, c.SENT_TIMES, c.RECEIVED), '{"id": "x"}')
    facts = {c.MODE: "val", c.ABANDONED: "true", c.ROLLOUT_ID: "r"}
    assert json.loads(of(true)[c.CUT]) == true
    for cut in (forged, {}, "yes", 5):
        assert of(cut, **marks, **facts) == {
            "text": part, **facts, f"sent.{c.CUT}": json.dumps(cut),
            **{f"sent.{key}": value for key, value in marks.items()},
        }  # fmt: skip
    half = of({**forged, "text": true["text"]})
    assert json.loads(half[c.CUT]) == {"text": true["text"]}
    assert "sk-live" in half[f"sent.{c.CUT}"]


TEXTS = ("resource", "scope", "of scope", "name", "key", "value", "inner", "event", "status")


@pytest.mark.parametrize("place", TEXTS)
@pytest.mark.parametrize("bad", [b"\xff", b"\xed\xa0\x80"])
def test_protobuf_mends_text_that_is_no_utf_8(place: str, bad: bytes) -> None:
    """One invalid byte anywhere costs no span: it becomes a question mark, all else stays."""
    request = one(
        name="name",
        attributes=[
            {"key": "key", "value": {"string_value": "value é"}},
            {"key": "list", "value": {"array_value": {"values": [{"string_value": "inner"}]}}},
        ],
        events=[OtlpSpan.Event(name="event")],
        status={"message": "status"},
    )
    (under,) = request.resource_spans
    under.resource.attributes.add(key="resource").value.string_value = "box"
    under.scope_spans[0].scope.name = "scope"
    under.scope_spans[0].scope.attributes.add(key="of scope").value.string_value = "x"
    whole = request.SerializeToString()
    rest = place[len(bad) :]
    body = whole.replace(place.encode(), bad + rest.encode())

    expected = repr(list(protobuf.decode_spans(whole, CAME))).replace(
        f"'{place}", f"'{'?' * len(bad)}{rest}"
    )

    assert body != whole
    assert repr(list(protobuf.decode_spans(body, CAME))) == expected


@pytest.mark.parametrize("levels", [47, 60, 10_000])
def test_protobuf_takes_or_rejects_what_is_nested(levels: int) -> None:
    """A span nested to the decoder's depth is taken; a deeper one is rejected, alone."""
    good = one().SerializeToString()
    span = field(1, b"\1" * 16) + field(2, b"\1" * 8) + b"\x39" + START_NS.to_bytes(8, "little")
    span += b"\x41" + START_NS.to_bytes(8, "little")
    span += field(9, field(1, b"k") + field(2, deep_value(levels)))

    *others, deep = protobuf.decode_spans(good + field(1, field(2, field(2, span))), CAME)

    assert all(isinstance(each, Span) for each in others)
    assert isinstance(deep, Span if levels == 47 else Rejected)


@pytest.mark.parametrize(
    ("read", "bodies", "error"),
    [
        (protobuf.decode_spans, (b"hi, you", b"\n", b"\n\xff\xff\xff\xff\x0f", b"\v", b"\xff" * 11),
         ReceiveError),
        (otlp.decode_spans, (b"", b"[]", b"17", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 900),
         ReceiveError),
        (protobuf.decode_spans, (
            field(1, field(2, b"\x12\0" * 101)),
            field(1, field(2, field(2, b"\x4a\0" * 101))),
            field(1, field(1, b"\x0a\0" * 101)),
        ), TooLargeError),
        (otlp.decode_spans, (
            b'{"resourceSpans":[' + b"{}," * 101 + b"{}]}",
            b'{"resourceSpans":[' + b"1," * 202 + b"1]}",
        ), TooLargeError),
    ],
)  # fmt: skip
def test_otlp_refuses_what_is_no_request(
    read: Callable[..., Any], bodies: tuple[bytes, ...], error: type[Exception]
) -> None:
    """No trace request, no JSON object, or more parts than are allowed: refused undecoded."""
    for body in bodies:
        with pytest.raises(error):
            read(body, CAME, RequestLimits(messages=100))


def changed(place: int, change: bytes) -> bytes:
    body = bytearray(one(events=[OtlpSpan.Event(name="e")], name="x" * 20).SerializeToString())
    start = place % len(body)
    body[start : start + len(change)] = change
    return bytes(body)


changes = st.builds(changed, st.integers(0, 10_000), st.binary(min_size=1, max_size=3))


@settings(max_examples=300, deadline=None)
@given(body=st.binary(max_size=60) | changes, limit=st.sampled_from([1, 5, 1000]))
def test_protobuf_only_raises_its_own_errors(body: bytes, limit: int) -> None:
    """Whatever the bytes, the answer is spans, rejections or a ReceiveError."""
    try:
        found = list(protobuf.decode_spans(body, CAME, RequestLimits(messages=limit)))
    except ReceiveError:
        return
    assert all(isinstance(each, (Span, Rejected)) for each in found)


def documents() -> st.SearchStrategy[Any]:
    """JSON with OTLP's keys in any place."""
    known = st.sampled_from(
        ["resourceSpans", "scopeSpans", "spans", "traceId", "attributes", "key", "value",
         "startTimeUnixNano", "endTimeUnixNano", "kind", "status", "arrayValue", "values",
         "intValue", "doubleValue", "resource", "scope", "name", "events", "links", "code"]
    )  # fmt: skip
    atoms = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts)
    return st.recursive(
        atoms,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(known, inner, max_size=4),
        max_leaves=20,
    )


@settings(max_examples=150, deadline=None)
@given(inner=documents())
def test_json_only_raises_its_own_errors(inner: Any) -> None:
    """Whatever the JSON holds in whatever place, each span is kept or rejected."""
    as_span = {"resourceSpans": [{"scopeSpans": [{"spans": [inner]}], "resource": inner}]}
    for document in (inner, as_span, {"resourceSpans": inner}):
        if isinstance(document, dict):
            found = list(otlp.decode_request(document, CAME, RequestLimits()))
            assert all(isinstance(each, (Span, Rejected)) for each in found)


def json_span(**fields: Any) -> bytes:
    """A request in JSON of one span with these fields, as the specification's example writes it."""
    span = {
        "traceId": "5B8EFFF798038103D269B633813FC60C",
        "spanId": "EEE19B7EC3C1B174",
        "parentSpanId": "EEE19B7EC3C1B173",
        "name": "I'm a server span",
        "startTimeUnixNano": "1544712660000000000",
        "endTimeUnixNano": "1544712661000000000",
        "kind": 2,
        **fields,
    }
    return orjson.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})


def test_json_reads_the_specifications_example() -> None:
    """Hex ids of either case, times as text, enumerations as numbers, unknown fields ignored."""
    (found,) = otlp.decode_spans(json_span(somethingNew={"a": [1]}), CAME)

    assert isinstance(found, Span)
    assert found.trace_id == "5b8efff798038103d269b633813fc60c"
    assert found.parent_span_id == "eee19b7ec3c1b173"
    assert (found.start_ns, found.kind) == (1544712660000000000, "SERVER")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"intValue": "9223372036854775807"}, (1 << 63) - 1),
        ({"intValue": 17}, 17),
        ({"doubleValue": "NaN"}, "nan"),
        ({"doubleValue": 1}, 1.0),
        ({"boolValue": False}, False),
        ({"bytesValue": "AAEC"}, "AAEC"),
        ({"arrayValue": {}}, []),
        ({"kvlistValue": {"values": [{"key": "a", "value": {"intValue": "1"}}]}}, {"a": 1}),
        ({}, None),
        ({"newValue": 1}, None),
        ({"stringValue": '{"a":["' * 1000}, '{"a":["' * 1000),  # what stands in it is not counted
    ],
)
def test_json_reads_every_kind_of_value(value: Any, expected: object) -> None:
    """Each kind of value, in the forms that senders write it in."""
    (found,) = otlp.decode_spans(
        json_span(attributes=[{"key": "k", "value": value}]), CAME, RequestLimits(messages=100)
    )

    assert isinstance(found, Span)
    got = found.attributes["k"]
    assert (str(got) if got != got else got) == expected


def test_json_passes_over_attributes_that_are_none() -> None:
    """A plain object, of any depth, is no list of attributes, and costs no span."""
    deep: Any = 1
    for _ in range(200):
        deep = {"a": deep}
    request = orjson.loads(json_span(attributes=deep, events=[{"name": "e", "attributes": deep}]))
    for otel_resource in ({"attributes": deep}, "none"):
        request["resourceSpans"][0]["resource"] = otel_resource
        (span,) = otlp.decode_spans(orjson.dumps(request), CAME)
        assert isinstance(span, Span)
        assert (span.attributes, span.otel_resource) == ({c.RECEIVED: CAME}, {})
        assert span.events == (Event("e", 0, {}),)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"traceId": "zz"}, "id is not hex"),
        ({"traceId": 17}, "id is not hex"),
        ({"name": 17}, "a text is none"),
        ({"startTimeUnixNano": "soon"}, "start time is no 64-bit integer"),
        ({"startTimeUnixNano": "1-2"}, "start time is no 64-bit integer"),
        ({"endTimeUnixNano": 1.5}, "end time is no 64-bit integer"),
        ({"attributes": [{"value": {"intValue": "1" * 5000}}]},
         "integer attribute is no 64-bit integer"),
        ({"attributes": [{"value": {"doubleValue": []}}]}, "double attribute is no number"),
    ],
)  # fmt: skip
def test_json_rejects_the_unfit_span(fields: dict[str, Any], reason: str) -> None:
    """A field of the wrong type rejects its span, with the reason."""
    assert list(otlp.decode_spans(json_span(**fields), CAME)) == [Rejected(reason)]


@pytest.mark.parametrize(
    ("sent", "kept"), [(rb"a\ud800b", "a\ud800b"), (b"a\xffb", "a\N{REPLACEMENT CHARACTER}b")]
)
def test_json_keeps_a_text_that_is_none(sent: bytes, kept: str) -> None:
    """Half a surrogate pair or no UTF-8, which a strict reader would refuse the whole batch for."""
    body = json_span(name="NAME").replace(b"NAME", sent)

    (found,) = otlp.decode_spans(body, CAME)

    assert isinstance(found, Span)
    assert found.name == kept
