"""A store of many small files and segments reads the same, and a page of it reads no bodies."""

import os
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from tests.adapter.forest import draw

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.store import snapshot
from lightning_otel.store import spans as spans_module
from lightning_otel.store.quarantine import read_notes
from lightning_otel.store.schema import BODY_COLUMNS
from lightning_otel.types import Span
from lightning_otel.views.listing import list_newest

MakeSpan = Callable[..., Span]
Write = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("at_once")


def test_spans_of_a_trace_are_found_in_files_and_segments(
    store: Store, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    """Only what holds the trace is read, and nothing of it is missing or doubled."""
    wanted = [make_span(trace_id="a" * 32, attributes={"n": n}) for n in range(6)]
    write([wanted[0], make_span(), wanted[1]])
    store.settle()
    write([make_span()])
    store.settle()
    write([wanted[2], make_span()])
    store.settle()
    # Once more what is settled, as a sender does that heard no answer.
    path = write([wanted[2], wanted[3]])
    path.write_bytes(path.read_bytes() + b"damaged\n")
    write([make_span(), wanted[4], wanted[5]])

    found = store.spans(trace_id="a" * 32).rows()
    other = store.spans(trace_id="b" * 32).rows()

    assert found == wanted
    assert other == []
    assert [span for span in store.spans() if span.trace_id == "a" * 32] == wanted


def test_many_small_segments_read_like_few_large_ones(
    store: Store, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    """They are read in another way, which gives every value alike and steps over damage alike."""
    spans = [
        make_span(
            name="name 🚀 \"quoted\" \\ \n",
            end_ns=None if number == 3 else 2**40,
            status="ERROR",
            attributes={
                "gen_ai.input.messages": '[{"role": "user"}]',
                "gen_ai.usage.input_tokens": 2**53 + 1,
                "agentlightning.reward.0.value": 0.1,
                "text": "ä\u2028" * 100,
                "list": [1, 2.5, "x"],
            },
        )
        for number in range(8)
    ]  # fmt: skip
    for span in spans:
        path = write([span])
    path.write_bytes(b'{"torn\n[]\n{"record": "span"}\n' + path.read_bytes() + b'{"record": "sp')
    query = "SELECT * EXCLUDE (process) FROM spans ORDER BY span_id"
    usual = list(store.sql(query))
    monkeypatch.setattr(spans_module, "_MANY", 1)

    other = list(store.sql(query))

    assert other == usual
    assert len(usual) == 8
    assert [row["name"] for row in usual] == [span.name for span in spans]


@pytest.fixture
def damaged_bodies(store: Store, monkeypatch: pytest.MonkeyPatch, write: Write) -> Store:
    """A store in whose data file no body can be read any more."""
    monkeypatch.setattr(snapshot, "_SMALL_BYTES", 0)  # of a small store all is read at once
    calls = (f"#trace={n % 5 + 1},rollout=,attempt= planner{n}@as=c{n}" for n in range(50))
    write(draw(" ".join(f"{call}@{c.AGENT_NAME}=planner" for call in calls)).spans)
    store.settle()
    assert store.layout is not None
    (file,) = store.layout.read_manifest().files
    path = store.layout.data / file.name
    assert len(store.spans().rows()) == 50  # a file is verified when it is first read
    chunks = duckdb.sql(
        "SELECT coalesce(nullif(dictionary_page_offset, 0), data_page_offset) AS first, "
        f"total_compressed_size FROM parquet_metadata('{path}') "
        f"WHERE path_in_schema IN {tuple(BODY_COLUMNS)}"
    ).fetchall()
    content, before = bytearray(path.read_bytes()), path.stat()
    for first, size in chunks:
        content[first : first + size] = b"\xff" * size
    path.chmod(0o600)
    path.write_bytes(content)
    # As if the disk had lost them: a file that was changed is verified anew.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return store


@pytest.mark.skipif(
    duckdb.__version__.startswith("1."),
    reason="DuckDB 1.5 reads every column for a mere count(*) of the spans view",
)
def test_a_page_reads_no_bodies(damaged_bodies: Store) -> None:
    """Lists, counts and narrow columns come from a file whose bodies cannot even be read."""
    store = damaged_bodies

    rollouts = list_newest(store, "rollouts", 3)
    traces = list_newest(store, "traces", 3, with_texts=False)
    calls = list(store.sql("SELECT trace_id, agent, model, duration_ms FROM calls"))
    (count,) = store.sql("SELECT count(*) AS n, count(DISTINCT agent) AS agents FROM spans")
    rewards = list(store.sql("SELECT * FROM rewards"))
    found = store.find("3" * 32)

    assert (len(traces.rows), traces.total) == (3, 5)
    assert [row["calls"] for row in traces.rows] == [10, 10, 10]
    assert (len(rollouts.rows), rollouts.total) == (3, 5)
    assert len(calls) == 50
    assert count == {"n": 50, "agents": 1}
    assert rewards == []
    assert found == ("rollout", "3" * 32)
    assert store.layout is not None
    assert read_notes(store.layout) == []
    list(store.sql("SELECT max(input_messages) FROM calls"))
    assert len(read_notes(store.layout)) == 1  # who looks at a body finds the damage
