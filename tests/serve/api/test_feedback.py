"""Feedback by HTTP: kept once, for what it judges alone, now or when that comes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.acting import act
from tests.command import invoke
from tests.serve.api.conftest import Client
from tests.serve.serving import JSON, Serving, request_of
from tests.viewer.client import AskingOf
from tests.waiting import wait_until

from lightning_otel import Store
from lightning_otel.types import conventions as c


def test_feedback_is_given_to_what_it_judges(client: Client) -> None:
    """Without the key, by either address, once; the answer says where it went."""
    client.act("kept")
    body = {"rollout_id": "kept", "rating": 5, "satisfied": True, "feedback_id": "kept-1"}

    told = [client.post(path, body, authorization="") for path in ("/v1/feedback", "/feedback")]

    assert [each["status"] for each in told] == ["kept", "kept"]
    assert [each["is_new"] for each in told] == [True, False]
    assert {each["reward"] for each in told} == {1.0}
    assert {each["rollout_id"] for each in told} == {"kept"}
    (step,) = client.store.transitions(rollout_id="kept")
    assert step.rewards == {"feedback": 1.0}
    assert client.store.transitions(rollout_id="kept", received=False).rows()[0].reward is None


def test_feedback_is_retracted_with_the_key(client: Client) -> None:
    """Once, by its span; who has no key gives feedback and takes none back."""
    client.act("regret", reward=0.5)
    told = client.post("/v1/feedback", {"rollout_id": "regret", "rating": 0}, authorization="")
    body = {"span_id": told["span_id"]}

    client.post("/v1/feedback/retract", body, status=401, authorization="")
    client.post("/v1/feedback/retract", body, status=403, origin="http://evil.example")
    done = client.post("/v1/feedback/retract", body)

    assert done == {**body, "rollout_id": "regret", "name": "feedback", "value": -1.0}
    (step,) = client.store.transitions(rollout_id="regret")
    assert step.rewards == {"primary": 0.5}
    for again in (body, {"span_id": "ab" * 8}):
        told = client.post("/v1/feedback/retract", again, status=404)
        assert "list those that count" in told["message"]
    (step,) = client.store.transitions(rollout_id="regret", received=False)
    assert step.rewards == {"primary": 0.5}


def test_feedback_of_the_seeds_is_understood(client: Client) -> None:
    """A task, a span, a reward, a text and what they rated: all of it is kept."""
    client.act("seeds")
    (span,) = [
        each for each in client.store.spans(rollout_id="seeds") if each.name == c.SPAN_ACTION
    ]

    told = client.post(
        "/feedback",
        {
            "task_id": "t-1",
            "span_id": span.span_id.upper(),
            "reward": 0.9,
            "feedback_text": "매우 만족합니다",
            "metadata": {"rating": 5, "satisfied": True, "used_result": True, "more": [1]},
        },
    )

    assert (told["reward"], told["judges"], told["rollout_id"]) == (0.9, "span", "seeds")
    (kept,) = [
        each for each in client.store.spans(rollout_id="seeds") if each.span_id == told["span_id"]
    ]
    assert kept.attributes[c.FEEDBACK_TEXT] == "매우 만족합니다"
    assert kept.attributes[c.FEEDBACK_RATING] == 5
    assert kept.attributes[c.TASK_ID] == "t-1"
    assert json.loads(str(kept.attributes[c.FEEDBACK_METADATA]))["more"] == [1]
    assert kept.attributes[c.RECEIVED] == "http+token:127.0.0.1"


@pytest.mark.pain(20)
def test_feedback_before_its_span_waits_and_says_so(client: Client) -> None:
    """202; it is counted until the span lands, and is given within seconds then."""
    body = {"rollout_id": "later", "reward": 0.5, "feedback_id": "later-1"}
    others = client.get("/v1/status")["pending_feedback"]["count"]

    first = client.post("/v1/feedback", body, 202)
    waits = client.get("/v1/status")["pending_feedback"]
    numbers = client.ask("GET", "/metrics").body.decode()
    client.act("later")
    wait_until(lambda: client.get("/v1/status")["pending_feedback"]["count"] <= others)

    assert (first["status"], first["rollout_id"]) == ("pending", None)
    assert waits["count"] == others + 1
    assert waits["oldest_s"] >= 0
    assert f"lightning_otel_feedback_pending {others + 1}" in numbers.splitlines()
    assert [step.reward for step in client.store.transitions(rollout_id="later")] == [0.5]
    assert client.post("/v1/feedback", body)["is_new"] is False


def test_an_id_stands_for_one_feedback(client: Client) -> None:
    """Another under it is refused, whether the first was given or waits."""
    client.act("same")
    client.act("another")
    for name, status in (("same", 200), ("never", 202)):
        body = {"rollout_id": name, "reward": 1, "feedback_id": name}
        client.post("/v1/feedback", body, status)
        told = client.post("/v1/feedback", {**body, "reward": 0}, 409)
        client.post("/v1/feedback", {**body, "rollout_id": "another"}, 409)
        assert "cannot become 0" in told["message"] or status == 202
    assert [step.reward for step in client.store.transitions(rollout_id="same")] == [1.0]


@pytest.mark.parametrize(
    "address",
    ["/v1/transitions", "/v1/transitions?limit=5", "/transitions/download?format=triplets"],
)
def test_feedback_is_given_before_transitions_are_handed_out(
    store: Store, asking: AskingOf, address: str
) -> None:
    """By no maintenance, which this server has none of: whoever asks gets the reward, once."""
    asked, body = asking(store), '{"rollout_id": "r1", "reward": 0.5}'
    told = asked.ask("POST", "/v1/feedback", body, Content_Type=JSON, Accept=JSON)
    assert json.loads(told.body)["status"] == "pending"
    act(store, "r1")

    rows = [asked.get(address, Accept="*/*").body.splitlines() for _ in range(2)]

    assert [[json.loads(row)["reward"] for row in each] for each in rows] == [[0.5], [0.5]]
    assert len(store.sql("SELECT * FROM rewards").rows()) == 1


def test_feedback_survives_the_server(tmp_path: Path) -> None:
    """Killed right after it was told 202, and begun anew when the span is there: it is given."""
    path = tmp_path / "s.duckdb"
    body = json.dumps({"trace_id": "ab" * 16, "reward": -1, "feedback_id": "f"}).encode()
    with Serving(path, "--port", "0") as running:
        answer = running.ask("POST", "/v1/feedback", body, content_type=JSON)
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait(20)
    found = invoke("doctor", "--store", path)
    with Serving(path, "--port", "0") as running:
        request = request_of(1)
        request.resource_spans[0].scope_spans[0].spans[0].trace_id = bytes.fromhex("ab" * 16)
        assert running.post(request.SerializeToString()).status == 200
        wait_until(lambda: Store(path).sql("SELECT 1 FROM rewards").rows())

    assert answer.status == 202
    assert "1 piece of feedback waits" in found.stdout + found.stderr
    (reward,) = Store(path).sql("SELECT * FROM rewards")
    assert (reward["rollout_id"], reward["value"]) == ("ab" * 16, -1.0)


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
        wait_until(lambda: not client.get("/v1/status")["pending_feedback"]["count"])
        found = {step.rollout_id: step.rewards for step in client.store.transitions(bodies=False)}

    assert set(statuses) <= {200, 202}
    assert found == {name: {"feedback": 1.0} for name in names}
