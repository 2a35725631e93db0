"""The API while others write: eight agents record, people give feedback, a trainer reads."""

import json
import subprocess
import sys
import time
from pathlib import Path

from tests.serve.api.conftest import Client
from tests.serve.serving import JSON, Serving

AGENTS, ROLLOUTS = 8, 2
AGENT = """
import sys, time
import lightning_otel as lo
store = lo.Store(sys.argv[1])
for index in range(int(sys.argv[3])):
    with lo.auto_trace(store=store, rollout_id=f"a{sys.argv[2]}-{index}"):
        lo.emit_action("say", "hi")
    time.sleep(0.05)
"""


def test_api_works_while_eight_agents_write(tmp_path: Path) -> None:
    """Feedback for what is there and for what is to come; every piece is given once."""
    with Serving(tmp_path / "s.duckdb", "--port", "0") as running:
        client = Client(running)
        agents = [
            subprocess.Popen(
                [sys.executable, "-c", AGENT, str(running.store), str(number), str(ROLLOUTS)]
            )
            for number in range(AGENTS)
        ]
        names = [f"a{number}-{index}" for index in range(ROLLOUTS) for number in range(AGENTS)]
        statuses: list[int] = []
        for place, name in enumerate(names):
            body = json.dumps({"rollout_id": name, "reward": 1, "feedback_id": name}).encode()
            statuses.append(running.ask("POST", "/v1/feedback", body, content_type=JSON).status)
            if place % 8 == 0:
                statuses.append(client.ask("GET", "/v1/transitions?limit=10").status)
                statuses.append(client.ask("GET", "/v1/status").status)
        assert [agent.wait(40) for agent in agents] == [0] * AGENTS
        until = time.monotonic() + 20
        while client.get("/v1/status")["pending_feedback"]["count"] and time.monotonic() < until:
            time.sleep(0.3)
        found = {step.rollout_id: step.rewards for step in client.store.transitions(bodies=False)}

    assert set(statuses) <= {200, 202}
    assert found == {name: {"feedback": 1.0} for name in names}
