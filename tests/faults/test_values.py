"""Values that hurt (rows V2 to V7 and V10): each damages itself at most, and hurts nobody.

What one value becomes is in ``tests/store/test_line.py``; here a whole program meets them.
"""

import json
from pathlib import Path

import pytest
from tests.faults.harness import Counts, Host, note

from lightning_otel.types import conventions as c

KEEP = """
import lightning_otel as lo
from lightning_otel.types import Span
kept = []
def keep(value):
    kept.append(value)
    number = len(kept)
    if "TRACEPARENT" in os.environ:
        lo.Store().add([Span("1" * 32, f"{number:016x}", None, "kept", number, number + 1,
                             attributes={"v": value})])
    acknowledge()
"""


def values(host: Host) -> list[object]:
    """What became of each value, in order."""
    return [span.attributes["v"] for span in host.store.spans() if span.name == "kept"]


def test_names_and_keys_of_any_kind_are_stored(tmp_path: Path) -> None:
    """V2: surrogates, numbers, bytes and nothing as span name, event name, key and value."""
    host = Host(
        tmp_path,
        """
        import logging
        logging.disable()  # the SDK warns of each key
        for name in ("a\\ud83d", 7, b"bytes", None, "", "\\x00", "x" * 10_000):
            span = tracer.start_span(name)
            span.set_attribute("text", "b\\ud83d")
            for key in ("k\\ud83d", 5, b"k", None):
                try:
                    span.set_attribute(key, 1)
                except Exception:
                    pass
            span.add_event("event")
            span.add_event(name, {"k": "c\\ud83d"})
            span.end()
            acknowledge()
        """,
    )

    host.check(row="V2")

    rows = host.store.spans().rows()
    assert [span.name for span in rows] == ["a?", "7", "Ynl0ZXM=", "", "", "\x00", "x" * 10_000]
    assert {span.attributes["text"] for span in rows} == {"b?"}
    assert all(len(span.events) == 2 for span in rows)


def test_numbers_and_scalars_of_any_kind_are_stored(tmp_path: Path) -> None:
    """V3: exact, or in the form the documentation names."""
    pytest.importorskip("numpy")
    host = Host(
        tmp_path,
        KEEP,
        """
        import datetime, decimal, numpy
        for value in (
            2**80, -(2**63) - 1, float("nan"), float("inf"), float("-inf"), -0.0,
            decimal.Decimal("1.10"), datetime.datetime(2026, 11, 21), numpy.float32(0.5),
            numpy.int64(7), numpy.array([1, 2]),
        ):
            keep(value)
        """,
    )

    host.check(row="V3")

    assert values(host) == [
        str(2**80), str(-(2**63) - 1), "NaN", "Infinity", "-Infinity", -0.0,
        "1.10", "2026-11-21T00:00:00", 0.5, 7, [1, 2],
    ]  # fmt: skip


def test_values_of_any_size_are_cut_and_quick(tmp_path: Path) -> None:
    """V4: 100 MB in one value, and 512 values of 64 KB; what was there is said."""
    host = Host(
        tmp_path,
        """
        import json
        large, many = "x" * 100_000_000, {f"k{n}": "y" * 65_536 for n in range(512)}
        stalls = []
        for attributes in ({"text": large}, {}):
            span = tracer.start_span("work")
            span.set_attributes(attributes or many)
            began = time.monotonic()
            span.end()
            stalls.append(time.monotonic() - began)
            acknowledge()
        with open("stalls-" + os.environ["LIGHTNING_OTEL"], "w") as file:
            json.dump(stalls, file)
        """,
    )

    host.check(
        extra={"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "1000", "LIGHTNING_OTEL": "1"},
        row="V4",
        is_compared=False,
    )

    one, many = host.store.spans().rows()
    cut = json.loads(str(one.attributes[c.CUT]))["text"]
    assert cut["length"] == 100_000_000
    assert len(str(one.attributes["text"])) == cut["kept"]
    assert len(json.loads(str(many.attributes[c.CUT]))) == 512
    # Of the machine's worst moment, not of the code's cost; that is in benchmarks.
    stalls = json.loads((tmp_path / "stalls-1").read_text())
    assert max(stalls) < 1, stalls


def test_many_attributes_and_events_are_not_dropped_in_silence(tmp_path: Path) -> None:
    """V5: what the SDK's own limits took away is said on the span."""
    host = Host(
        tmp_path,
        """
        import logging
        logging.disable()  # the SDK warns of each
        span = tracer.start_span("work")
        for number in range(300):
            span.set_attribute(f"k{number}", number)
            span.add_event(f"e{number}")
        span.end()
        acknowledge()
        """,
    )

    host.check(row="V5")

    (span,) = host.store.spans()
    cut = json.loads(str(span.attributes[c.CUT]))
    assert cut["attributes"] == {"length": 300, "kept": 128}  # ours take no place of theirs
    assert cut["events"]["length"] == 300


def test_shapes_of_any_kind_become_placeholders(tmp_path: Path) -> None:
    """V6: what contains itself, is nested two thousand deep or ten megabytes of bytes."""
    host = Host(
        tmp_path,
        KEEP,
        """
        circle = {}
        circle["self"] = circle
        deep = []
        for _ in range(2000):
            deep = [deep]
        for value in (circle, deep, bytearray(b"a") * 10_000_000):
            keep(value)
        print("done")
        """,
    )

    host.check(row="V6")

    circle, deep, large = values(host)
    assert circle == {"self": "<dict inside itself>"}
    assert "nested too deep" in json.dumps(deep)
    assert str(large).startswith("YWFh")
    assert len(str(large)) == 1 << 20


def test_objects_that_misbehave_are_not_asked(tmp_path: Path) -> None:
    """V7: text that raises, sleeps, touches the current span, or is a mock."""
    host = Host(
        tmp_path,
        KEEP,
        """
        import unittest.mock
        class Raises:
            def __str__(self): raise ValueError("mine")
            __repr__ = __str__
        class Sleeps:
            def __str__(self): time.sleep(10); return ""
            __repr__ = __str__
        class Touches:
            def __str__(self):
                trace.get_current_span().set_attribute("a", object())
                return ""
            __repr__ = __str__
        with tracer.start_as_current_span("around"):
            for value in (Raises(), Sleeps(), Touches(), unittest.mock.MagicMock()):
                keep(value)
            try:
                with lo.operation("failing"):
                    raise KeyError(Raises())
            except KeyError:
                print("the program's own")
        acknowledge(2)
        """,
    )

    host.check(limit_s=30, row="V7")

    assert values(host) == ["<Raises>", "<Sleeps>", "<Touches>", "<MagicMock>"]


def test_ids_that_are_taken_or_none_are_counted(tmp_path: Path) -> None:
    """V10: of two spans with one id the first wins; zeros and endless ids are rejected."""
    host = Host(
        tmp_path,
        """
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        class Same(RandomIdGenerator):
            trace_id, span_id = 7, 9
            def generate_trace_id(self): return self.trace_id
            def generate_span_id(self): return self.span_id
        from opentelemetry.sdk.trace import TracerProvider
        if "TRACEPARENT" in os.environ:
            tracer.start_span("warm").end()
            trace.set_tracer_provider(TracerProvider(id_generator=Same()))
            same = trace.get_tracer("same")
            for name in ("first", "first again", "second"):
                same.start_span(name, context=trace.set_span_in_context(trace.INVALID_SPAN)).end()
            Same.span_id = 0
            same.start_span("none").end()
            from lightning_otel import Store
            from lightning_otel.types import Span
            for ids in (("", "1"), ("1" * 32, ""), ("1" * 1000, "1" * 16)):
                Store().add([Span(*ids, None, "bad", 1, 2)])
        """,
    )

    done = host.run()
    found = host.accounted()
    host.store.settle()

    assert (done.code, done.output, done.errors) == (0, "", "")
    assert host.accounted() == found
    assert (found.ended, found.stored) == (8, 2)
    assert found.rejected == {"conflict": 2, "invalid_id": 4}
    refused = sum(found.rejected.values())
    note("V10", Counts(found.ended, found.stored, refused, 0), 4, counted=refused)
