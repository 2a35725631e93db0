"""What counts is the same however it is read."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.store import snapshot
from lightning_otel.store.schema import NARROW_COLUMNS
from lightning_otel.types import Span

MakeSpan = Callable[..., Span]
Write = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("at_once")

OTHER = "opentelemetry.instrumentation.langchain"
QUERIES = (
    "SELECT * FROM rollouts ORDER BY ALL",
    "SELECT * FROM rewards ORDER BY ALL",
    f"SELECT {', '.join(NARROW_COLUMNS)}, attributes FROM spans ORDER BY ALL",
    "SELECT count(*) AS n FROM rollouts WHERE status <> 'succeeded'",
)


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


@pytest.mark.parametrize("query", ["SELECT count(*) AS n, sum(start_ns) FROM spans", "FROM calls"])
@pytest.mark.parametrize("is_seen", [True, False])
def test_damaged_file_is_left_out(
    store: Store, make_span: MakeSpan, is_seen: bool, query: str, write: Write
) -> None:
    """The rest is read, be the damage seen at a glance or only by who reads the file."""
    for _ in range(2):
        write([make_span(attributes={c.OPERATION: c.CHAT}) for _ in range(50)])
        store.settle()
    assert store.layout is not None
    for segment in store.layout.segments():  # else its spans are read from there
        segment.unlink()
    path = store.layout.data / store.layout.read_manifest().live_files[0].name
    status, content = path.stat(), path.read_bytes()
    path.write_bytes(content[:60] if is_seen else b"PAR1" + bytes(len(content) - 4))
    if not is_seen:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    found = store.sql(query).rows()

    assert found[0].get("n", len(found)) == 50
