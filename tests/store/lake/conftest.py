"""What the lake's tests share: servers for the session, and a lake of one's own for each test."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.store.lake import servers

from lightning_otel.store.lake import LakeAddress, lake_address
from lightning_otel.types import Span

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[servers.Postgres]:
    """A cluster for all tests; it skips them where the extensions or the server are missing."""
    pytest.importorskip("duckdb_extension_ducklake")
    with servers.postgres() as server:
        yield server


@pytest.fixture(scope="session")
def storage() -> Iterator[str]:
    """The URL of an S3 for all tests."""
    with servers.storage() as url:
        yield url


@pytest.fixture
def database(postgres: servers.Postgres) -> str:
    """The name of an empty database."""
    name = f"lake{next(_numbers)}"
    postgres.run(f"CREATE DATABASE {name}")
    return name


@pytest.fixture
def lake(postgres: servers.Postgres, database: str, tmp_path: Path) -> str:
    """The URL of a lake that is not there yet, with its files in a folder."""
    return postgres.url(database, tmp_path / "lake", tmp_path / "local")


@pytest.fixture
def remote_lake(
    postgres: servers.Postgres,
    database: str,
    storage: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """The URL of a lake that is not there yet, with its files on S3."""
    for name, value in {**servers.KEYS, "AWS_ENDPOINT_URL": storage}.items():
        monkeypatch.setenv(name, value)
    servers.make_bucket(storage, database)
    return postgres.url(database, f"s3://{database}/prefix", tmp_path / "local")


@pytest.fixture
def address(lake: str) -> LakeAddress:
    """The lake's address."""
    return lake_address(lake)


@pytest.fixture
def make_spans() -> Callable[..., list[Span]]:
    """A function that makes so many spans of rollouts with a chat and a reward each."""

    def make(count: int, *, machine: str = "a", **changes: Any) -> list[Span]:
        return [_span(machine, number, changes) for number in range(count)]

    return make


def _span(machine: str, number: int, changes: dict[str, Any]) -> Span:
    rollout, step = divmod(number, 3)
    trace = f"{ord(machine):02x}{rollout:030x}"
    kinds: list[dict[str, Any]] = [
        {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "planner"},
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "toy",
            "gen_ai.agent.name": "planner",
            "gen_ai.response.id": f"r-{machine}-{rollout}",
            "gen_ai.input.messages": '[{"role":"user","parts":[{"type":"text","content":"hi"}]}]',
            "gen_ai.output.messages": (
                '[{"role":"assistant","parts":[{"type":"text","content":"ho"}]}]'
            ),
        },
        {"agentlightning.reward.0.name": "reward", "agentlightning.reward.0.value": 0.5},
    ]
    start_ns = 1_000_000_000 * (rollout + 1) + 1_000 * step
    fields: dict[str, Any] = {
        "trace_id": trace,
        "span_id": f"{ord(machine):02x}{number:014x}",
        "parent_span_id": None if step == 0 else f"{ord(machine):02x}{3 * rollout:014x}",
        "name": ("invoke_agent planner", "chat toy", "reward")[step],
        "start_ns": start_ns,
        "end_ns": start_ns + (5_000 if step == 0 else 500),
        "attributes": {"agentlightning.rollout_id": f"{machine}-{rollout}", **kinds[step]},
    }
    return Span(**{**fields, **changes})
