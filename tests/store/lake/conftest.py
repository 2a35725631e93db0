"""What the lake's tests share: servers for the session, and a lake of one's own for each test."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.store.lake import servers

from lightning_otel.store.lake import LakeAddress, lake_address
from lightning_otel.types import Span

_numbers = itertools.count(1)
SPANS = 3
"""Of each rollout."""


def spans_of(machine: str, rollout: int) -> list[Span]:
    """An agent, its chat and its reward."""
    trace = f"{ord(machine):02x}{rollout:030x}"
    start_ns = 1_000_000_000 * (rollout + 1)
    marks = {"agentlightning.rollout_id": f"{machine}-{rollout}", "gen_ai.agent.name": "planner"}
    message = '[{"role":"%s","parts":[{"type":"text","content":"%s"}]}]'
    chat = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "toy",
        "gen_ai.response.id": f"r-{machine}-{rollout}",
        "gen_ai.input.messages": message % ("user", f"{rollout} " * 100),
        "gen_ai.output.messages": message % ("assistant", "ho"),
    }
    kinds = (
        ("invoke_agent planner", {"gen_ai.operation.name": "invoke_agent"}),
        ("chat toy", chat),
        ("reward", {"agentlightning.reward.0.value": rollout % 2}),
    )
    return [
        Span(
            trace_id=trace,
            span_id=f"{ord(machine):02x}{SPANS * rollout + step:014x}",
            parent_span_id=f"{ord(machine):02x}{SPANS * rollout:014x}" if step else None,
            name=name,
            start_ns=start_ns + step,
            end_ns=start_ns + 1_000 - step,
            attributes={**marks, **attributes},
        )
        for step, (name, attributes) in enumerate(kinds)
    ]


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
    return lake_address(lake)


@pytest.fixture
def make_spans() -> Callable[..., list[Span]]:
    """A function that makes so many spans of rollouts with a chat and a reward each."""

    def make(count: int, *, machine: str = "a", **changes: Any) -> list[Span]:
        spans = (span for number in range(count) for span in spans_of(machine, number))
        return [replace(span, **changes) for span in itertools.islice(spans, count)]

    return make
