"""Example programs with all other projects' instrumentors switched on beside ours at once.

The environment that holds them all is ``foreign`` of ``tests/environments.py``; single ones, in
each order, are in ``tests/instrumentors/foreign``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.examples.programs import EXAMPLES

from lightning_otel import Store, TripletAdapter
from lightning_otel.demo.server import DemoServer

FOREIGN = (
    "opentelemetry.instrumentation.genai.openai",
    "openinference.instrumentation.openai",
    "opentelemetry.instrumentation.openai",
    "openinference.instrumentation.langchain",
    "opentelemetry.instrumentation.langchain",
)


@pytest.mark.parametrize("program", ["openai_tools", "langchain_agent", "autogen_roundrobin"])
def test_requests_are_calls_are_transitions_beside_all(
    program: str, server: DemoServer, tmp_path: Path
) -> None:
    """All of them on at once under ``opentelemetry-instrument``; some open traces of their own."""
    for foreign in FOREIGN:
        pytest.importorskip(foreign)
    store = Store(tmp_path / "traces.duckdb")
    command = Path(sys.executable).with_name("opentelemetry-instrument")

    subprocess.run(
        [command, "--traces_exporter", "duckdb", sys.executable, EXAMPLES / f"{program}.py"],
        env={
            **os.environ,
            "LIGHTNING_OTEL_STORE": store.name,
            "OPENAI_BASE_URL": server.base_url,
            "OPENAI_API_KEY": "k",
        },
        timeout=100,
        check=True,
    )

    found = TripletAdapter().explain(store.spans())
    steps = {id(step) for path in found.trajectories for step in path.transitions}
    (rollout,) = store.sql("SELECT calls, traces FROM rollouts")
    assert len(steps) == rollout["calls"] == len(server.log) >= 5
    assert rollout["traces"] > 1
    scopes = {span.scope for span in store.spans()}
    assert scopes >= {"openinference.instrumentation.openai"}
