"""A record is one line of bounded length, whatever stands in it."""

import hashlib
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from lightning_otel import conventions as c
from lightning_otel.store import lines as lines_module
from lightning_otel.store.lines import MAX_RECORD_BYTES, control_line, line_of, parsed
from lightning_otel.store.schema import record_of_span, span_of
from lightning_otel.types import Event, Link, Span

MIB = 1 << 20


def _written(span: Span) -> Span:
    """The span as it comes back, after a look at the line's length."""
    line = line_of(record_of_span(span))
    assert len(line) <= MAX_RECORD_BYTES
    return span_of(orjson.loads(line))


def _note(span: Span) -> dict[str, Any]:
    found = orjson.loads(span.attributes[c.CUT])
    assert isinstance(found, dict)
    return found


def test_line_repairs_lone_surrogates_everywhere(make_span: Callable[..., Span]) -> None:
    """Half a character in any name, text or key becomes a question mark and loses nothing else."""
    bad = "a\ud800b"
    span = make_span(
        name=bad,
        status_message=bad,
        scope=bad,
        attributes={bad: bad, "list": [bad], "nested": {bad: bad}, c.INPUT_MESSAGES: bad},
        events=(Event(bad, 1, {bad: bad}),),
        links=(Link("0" * 32, "1" * 16, {"k": bad}),),
        otel_resource={"service.name": bad},
    )

    found = _written(span)

    good = "a?b"
    assert (found.name, found.status_message, found.scope) == (good, good, good)
    assert found.attributes == {
        good: good, "list": [good], "nested": {good: good}, c.INPUT_MESSAGES: good,
    }  # fmt: skip
    assert found.events == (Event(good, 1, {good: good}),)
    assert found.links[0].attributes == {"k": good}
    assert found.otel_resource == {"service.name": good}


def test_line_gives_odd_values_their_text_form_in_events_and_links_too(
    make_span: Callable[..., Span],
) -> None:
    """NaN is no null, and bytes stop nothing, wherever they stand."""
    odd = {"nan": float("nan"), "raw": b"x", "huge": 1 << 80, "other": object()}
    plain = {"nan": "NaN", "raw": "eA==", "huge": str(1 << 80), "other": "<object>"}

    found = _written(
        make_span(
            attributes=odd,
            events=(Event("e", 1, odd),),
            links=(Link("0" * 32, "1" * 16, odd),),
        )
    )

    assert found.attributes == plain
    assert found.events[0].attributes == plain
    assert found.links[0].attributes == plain


def test_line_holds_three_hundred_attributes_and_events(make_span: Callable[..., Span]) -> None:
    """Many small things are all kept."""
    attributes = {f"key.{number}": number for number in range(300)}
    events = tuple(Event(f"event {number}", number, {"n": number}) for number in range(300))

    found = _written(make_span(attributes=attributes, events=events))

    assert found.attributes == attributes
    assert found.events == events


@pytest.mark.parametrize("key", ["text", c.INPUT_MESSAGES])
def test_line_cuts_a_text_of_100_megabytes(make_span: Callable[..., Span], key: str) -> None:
    """What does not fit is cut; how long it was and what is left of it are noted."""
    text = "0123456789" * 10_000_000

    found = _written(make_span(attributes={key: text, "small": "whole"}))

    assert found.attributes[key] == text[:MIB]
    assert found.attributes["small"] == "whole"
    assert _note(found) == {
        key: {
            "length": 100_000_000,
            "kept": MIB,
            "sha256": hashlib.sha256(text[:MIB].encode()).hexdigest(),
        }
    }


def test_line_keeps_what_just_fits(make_span: Callable[..., Span]) -> None:
    """Several texts that together fit are not cut."""
    attributes = {str(number): "x" * MIB for number in range(7)}

    found = _written(make_span(attributes=attributes))

    assert found.attributes == attributes


def test_line_counts_bytes_and_not_characters(make_span: Callable[..., Span]) -> None:
    """Text of wide characters is cut by what it takes in the file."""
    found = _written(make_span(attributes={str(number): "😀" * MIB for number in range(3)}))

    assert len(_note(found)) == 3
    assert all(set(found.attributes[str(number)]) == {"😀"} for number in range(3))


def test_line_cuts_many_texts_evenly(make_span: Callable[..., Span]) -> None:
    """512 texts of 64 KB are each cut, none is dropped."""
    found = _written(make_span(attributes={str(n): "y" * 65_536 for n in range(512)}))

    assert len(found.attributes) == 513
    assert {entry["length"] for entry in _note(found).values()} == {65_536}
    assert {len(found.attributes[str(n)]) for n in range(512)} == {4096}


def test_line_cuts_large_lists_as_their_json(make_span: Callable[..., Span]) -> None:
    """A long list of texts is kept as the beginning of its JSON."""
    found = _written(make_span(attributes={"list": ["z" * MIB] * 9, "short": [1, 2]}))

    assert found.attributes["list"] == '["' + "z" * (MIB - 2)
    assert found.attributes["short"] == [1, 2]
    assert _note(found)["list"]["length"] == 9 * (MIB + 3) + 1


def test_line_cuts_events_and_names(make_span: Callable[..., Span]) -> None:
    """Long texts are cut wherever they stand, and the note says where."""
    long = "e" * (9 * MIB)

    found = _written(
        make_span(name=long, status_message=long, events=(Event("e", 1, {"stack": long}),))
    )

    assert len(found.name) == MIB
    assert found.events[0].attributes == {"stack": long[:MIB]}
    assert set(_note(found)) == {"name", "status_message", "events.0.stack"}


def test_line_cuts_a_long_agent_name_in_both_its_places(make_span: Callable[..., Span]) -> None:
    """The hot column of a cut attribute is cut as well."""
    record = record_of_span(make_span(attributes={c.AGENT_NAME: "a" * (10 * MIB)}))

    found = orjson.loads(line_of(record))

    assert found["agent"] == found["attributes"][c.AGENT_NAME] == "a" * MIB


def test_line_of_too_many_attributes_says_how_many_there_were(
    make_span: Callable[..., Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A span that no cutting makes fit keeps its ids, times and name, and a count of the rest.

    The limit is lowered by a patch, because 150,000 attributes take a second.
    """
    monkeypatch.setattr(lines_module, "MAX_RECORD_BYTES", 80_000)
    many = {f"{number:06d}": "v" * 100 for number in range(1_500)}

    found = _written(make_span(attributes=many, otel_resource={"big": "r" * 100_000}))

    assert found.name == "work"
    assert found.end_ns is not None
    assert _note(found)["attributes"] == {"length": 1_500, "kept": 0}


def test_line_of_a_copied_span_keeps_the_first_length(make_span: Callable[..., Span]) -> None:
    """A text cut once and again says how long it was at first."""
    once = _written(make_span(attributes={str(n): "q" * (2 * MIB) for n in range(6)}))
    more = {**once.attributes, **{f"more {n}": "m" * MIB for n in range(9)}}

    again = _written(make_span(attributes=more))

    assert _note(again)["0"]["length"] == 2 * MIB
    assert _note(again)["0"]["kept"] == 65_536
    kept = again.attributes["0"].encode()
    assert _note(again)["0"]["sha256"] == hashlib.sha256(kept).hexdigest()


@pytest.mark.parametrize("note", ["no json", "[1]", 5])
def test_line_survives_a_foreign_note(make_span: Callable[..., Span], note: object) -> None:
    """An attribute that only has the note's name does not stop the cutting."""
    found = _written(make_span(attributes={c.CUT: note, "big": "b" * (9 * MIB)}))

    assert set(_note(found)) == {"big"}


def test_control_line_is_no_span() -> None:
    """A seal carries no ids, so that no reader takes it for a span."""
    line = control_line("seal", rotated=True)

    assert line.startswith(b'{"record":"seal","rotated":true,"crc":"')
    assert parsed(line) == {"record": "seal", "rotated": True}
