"""What becomes of spans when the store or the server cannot take them, and when nothing comes."""

import asyncio
import resource
import threading
from pathlib import Path

import pytest
from tests.serve.serving import Serving, body_of

from lightning_otel import Store
from lightning_otel.serve import ingest, maintenance
from lightning_otel.serve.ingest import Ingester
from lightning_otel.serve.responses import PROTOBUF, RefusalError
from lightning_otel.store.maintenance import Maintainer


def take(ingester: Ingester, body: bytes) -> None:
    """Have one body taken."""
    asyncio.run(ingester.take(body, PROTOBUF, is_compressed=False, came="otlp:x"))


def test_full_disk_is_said_and_loses_nothing(tmp_path: Path) -> None:
    """Where a write fails the sender gets 503 and when to come again, and then all is stored."""
    bodies = [body_of(50) for _ in range(10)]
    with Serving(tmp_path / "s.duckdb", "--port", "0") as running:
        pid = running.process.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, hard))
        answers = [running.post(body) for body in bodies]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        pairs = zip(bodies, answers, strict=True)
        again = [running.post(body).status for body, answer in pairs if answer.status != 200]
        running.end()

    assert {answer.status for answer in answers} == {200, 503}
    assert {answer.headers.get("retry-after") for answer in answers} == {None, "5"}
    assert set(again) == {200}
    assert len(Store(tmp_path / "s.duckdb").spans().rows()) == 500


def test_intake_sends_away_whom_it_has_no_room_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond so many bodies that wait, a sender is told when to come again; others are served."""
    monkeypatch.setattr(ingest, "_MOST_WAITING", 3)
    ingester = Ingester(store)
    gate = threading.Event()
    ingester._turn.submit(gate.wait)

    async def send() -> list[object]:
        bodies = (
            ingester.take(body_of(1), PROTOBUF, is_compressed=False, came="otlp:x")
            for _ in range(5)
        )
        sent = [asyncio.create_task(body) for body in bodies]
        await asyncio.sleep(0.05)
        gate.set()
        return await asyncio.gather(*sent, return_exceptions=True)

    found = asyncio.run(send())
    ingester.close()

    refused = [each for each in found if isinstance(each, RefusalError)]
    assert [(each.status, each.headers) for each in refused] == [(503, {"Retry-After": "1"})] * 2
    assert len(store.spans().rows()) == 3


@pytest.mark.parametrize("is_idle", [False, True])
def test_upkeep_seals_when_idle_and_settles_what_is_worth_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, is_idle: bool
) -> None:
    """An idle server leaves no open segment, and many become a file; a busy one writes one."""
    if is_idle:
        monkeypatch.setattr(maintenance, "IDLE_S", 0.0)
    ingester = Ingester(store)
    assert store.layout is not None
    maintainer = Maintainer(store.layout)

    for _ in range(64):
        take(ingester, body_of(2))
        maintenance._settle_store(maintainer, ingester)
    ingester.close()

    assert bool(list(store.layout.data.glob("spans-*.parquet"))) == is_idle
    assert is_idle or len(store.layout.segments()) == 1
    assert len(store.spans().rows()) == 128
