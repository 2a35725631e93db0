"""What counts is the same however it is read, and a page of it reads no bodies."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import duckdb
import pytest
from tests.adapter.forest import draw
from tests.store.conftest import MakeSpan, Write

from lightning_otel import Store
from lightning_otel.store import snapshot
from lightning_otel.store.quarantine import read_notes
from lightning_otel.store.schema import BODY_COLUMNS, NARROW_COLUMNS
from lightning_otel.types import Span
from lightning_otel.types import conventions as c
from lightning_otel.views.nouns import ATTEMPTS
from lightning_otel.views.traces import TRACES

pytestmark = pytest.mark.usefixtures("at_once")

OTHER = "opentelemetry.instrumentation.langchain"
QUERIES = (
    "SELECT * FROM rollouts ORDER BY ALL",
    "SELECT * FROM rewards ORDER BY ALL",
    f"SELECT {', '.join(NARROW_COLUMNS)}, attributes FROM spans ORDER BY ALL",
    "SELECT count(*) AS n FROM rollouts WHERE status <> 'succeeded'",
)

WATCHED = """
import sys
from lightning_otel.cli import main

root, *sys.argv[1:] = sys.argv[1:]
looks = []
sys.addaudithook(lambda name, values: name == "os.scandir" and looks.append(str(values[0])))
try:
    main()
finally:
    print(looks.count(root), file=sys.stderr)
"""
"""Runs a command; tells how often it looked through a folder."""


def recorded(number: int) -> Iterator[Span]:
    """Random rollouts, several tries and makers each; rewards of all kinds for any of them."""
    chance = random.Random(number)
    clock = iter(range(1_000, 1_000_000_000, 7))
    for rank in range(12):
        rollout, attempts = f"r{chance.randint(0, 7)}", chance.choice([("",), ("1",), ("1", "2")])
        for attempt in attempts:
            own: dict[str, Any] = {c.ROLLOUT_ID: rollout if chance.random() < 0.8 else ""}
            if attempt:
                own[c.ATTEMPT_ID] = attempt
            trace = f"{chance.randint(1, 20):032x}"
            for index in range(chance.randint(1, 5)):
                start = next(clock)
                given, scope = _kind(chance, rank, index)
                end = None if chance.random() < 0.05 else start + chance.randint(1, 90)
                yield Span(
                    trace, f"{number:04x}{rank:04x}{next(clock):08x}", None,
                    c.SPAN_ROLLOUT if c.TASK in given else "work", start, end,
                    attributes={**own, **given}, scope=scope, process="p",
                    status=chance.choice(["UNSET", "ERROR"]),
                )  # fmt: skip


def _kind(chance: random.Random, rank: int, index: int) -> tuple[dict[str, Any], str]:
    scope = chance.choice([c.SCOPE, OTHER])
    reward = {c.REWARD_VALUE: chance.random(), c.REWARD_NAME: "primary"}
    link = {
        f"{c.LINK_PREFIX}.0.key_match": c.RESPONSE_ID,
        f"{c.LINK_PREFIX}.0.value_match": f"a{chance.randint(0, 11)}-{chance.randint(0, 2)}",
    }
    call = {c.OPERATION: c.CHAT, c.INPUT_TOKENS: 3, c.RESPONSE_ID: f"a{rank}-{index // 2}"}
    kinds = ({c.TASK: f'"{rank}"'}, {c.AGENT_NAME: "calc"}, reward, {**reward, **link}, call, call)
    return chance.choice(kinds), scope


def agree(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query has the same rows of a small store, of a large one, and where SQL decides."""
    con = store.connect()
    for query in QUERIES:
        expected = con.execute(query).fetchall()
        found = [tuple(row.values()) for row in store.sql(query)]
        with monkeypatch.context() as patched:
            patched.setattr(snapshot, "_SMALL_BYTES", 0)
            large = [tuple(row.values()) for row in store.sql(query)]
        assert found == expected
        assert large == expected


@pytest.mark.parametrize("number", range(2))
def test_every_way_to_read_gives_the_same_rows(
    store: Store, number: int, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    """Settled, waiting, sent again and packed anew; with rewards that belong elsewhere."""
    spans = list(recorded(number))
    third = len(spans) // 3

    write(spans[:third])
    store.settle()
    write(spans[third : 2 * third])
    store.settle()
    write(spans[third - 5 : third + 5])  # once more, as by a sender that heard no answer
    store.add(spans[2 * third :])
    agree(store, monkeypatch)
    store.compact()
    agree(store, monkeypatch)

    assert store.sql("SELECT count(*) AS n FROM spans").rows() == [{"n": len(spans)}]


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
    monkeypatch.setattr(snapshot, "_MANY", 1)

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
    assert store.report().calls == 50  # and adapted
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

    rollouts = ATTEMPTS.read(store, limit=3)
    traces = replace(TRACES, add=None).read(store, limit=3)
    calls = list(store.sql("SELECT trace_id, agent, model, duration_ms FROM calls"))
    (count,) = store.sql("SELECT count(*) AS n, count(DISTINCT agent) AS agents FROM spans")
    rewards = list(store.sql("SELECT * FROM rewards"))
    found = store.find("3" * 32)

    assert (len(traces.rows), traces.total) == (3, 5)
    assert [row["spans"] for row in traces.rows] == [10, 10, 10]
    assert (len(rollouts.rows), rollouts.total) == (3, 5)
    assert len(calls) == 50
    assert count == {"n": 50, "agents": 1}
    assert rewards == []
    assert found == ("rollout", "3" * 32)
    assert store.layout is not None
    assert read_notes(store.layout) == []
    list(store.sql("SELECT max(input_messages) FROM calls"))
    assert len(read_notes(store.layout)) == 1  # who looks at a body finds the damage


@pytest.mark.parametrize(
    ("command", "looks"), [("ls", 3), ("plot", 3), ("export triplets -", 6), ("stats", 6)]
)
def test_store_is_prepared_once_for_a_question(store: Store, command: str, looks: int) -> None:
    """Twice for links, once for the manifest; ``stats`` also measures what lies there."""
    store.add(recorded(0))
    assert store.layout is not None
    arguments = [str(store.layout.root), *command.split(), "--store", store.name]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *arguments], capture_output=True, text=True
    )

    assert done.stderr.splitlines()[-1] == str(looks)
