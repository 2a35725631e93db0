"""A server and the proxy before it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.proxy.origin import Origin, proxying

from lightning_otel import Store
from lightning_otel.types import Span
from lightning_otel.types import conventions as c


@pytest.fixture(scope="module")
def origin() -> Iterator[Origin]:
    server = Origin()
    yield server
    server.close()


class Proxied(NamedTuple):
    """A proxy before the server: its address, its process and the folder of its store."""

    address: str
    pid: int
    folder: Path

    def peak_mb(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def calls(self, session_id: str) -> list[Span]:
        return calls_of(self.folder, session_id)


def calls_of(folder: Path, rollout_id: str | None = None) -> list[Span]:
    rows = Store(folder / "t.duckdb").spans(rollout_id=rollout_id).rows()
    return [span for span in rows if span.attributes.get(c.OPERATION) in c.CALL_OPERATIONS]


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory, origin: Origin) -> Iterator[Proxied]:
    folder = tmp_path_factory.mktemp("proxied")
    with proxying(folder, origin.url) as address:
        yield Proxied(*address, folder)
