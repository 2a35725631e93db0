"""Resources and training by HTTP: published, asked for once, done by a worker, killed or not."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.acting import act
from tests.serve.api.conftest import Client
from tests.waiting import wait_until

from lightning_otel import Resources
from lightning_otel.state import State

NAME = "system_prompt[image]"
PATH = "/v1/resources/system_prompt%5Bimage%5D"


def test_resources_are_published_and_rolled_back(client: Client) -> None:
    """Versions, aliases and bodies as the library has them."""
    for index in (1, 2):
        made = client.post("/v1/resources", {"name": NAME, "body": f"v{index} {{task}}"}, 201)
        assert made["version"] == index
    canary = {"name": NAME, "alias": "canary", "version": 2, "weight": 0.5}
    assert client.post("/v1/resources/alias", canary)["canary_weight"] == 0.5
    promoted = client.post("/v1/resources/promote", {"name": NAME})
    back = client.post("/v1/resources/rollback", {"name": NAME})
    client.post("/v1/resources/alias", canary)
    client.post("/v1/resources/alias", {**canary, "version": None, "weight": None})

    assert promoted["aliases"] == {"live": 2}
    assert back["aliases"] == {"live": 1}
    found = client.get(PATH)
    assert [each["version"] for each in found["versions"]] == [1, 2]
    assert [each["version"] for each in found["withdrawals"]] == [2]
    assert client.get(f"{PATH}?version=live")["body"]["template"] == "v1 {task}"
    assert client.get(f"{PATH}?version=2")["version"] == 2
    assert NAME in [each["name"] for each in client.get("/v1/resources")["resources"]]


def test_optimize_answers_with_what_is_known(client: Client) -> None:
    """The version that earned most; the prompt fills it in; a search is asked for once."""
    held = Resources(State(client.store.name))
    held.publish("style[video]", "Plain: {task}")
    held.publish("style[video]", "Lively: {task}")
    for index in range(3):
        act(client.store, f"v{index}", 0.9, resources={"*": {"style[video]": "2"}})
    asked = {"category": "video", "name": "style", "prompt": "a sunset"}

    found = client.post("/optimize", asked)
    told = [
        client.post("/optimize", {**asked, "train": True, "idempotency_key": "o-1"}, status)
        for status in (202, 200)
    ]
    unknown = client.post("/optimize", {"category": "music", "name": "nosuch"})
    client.post("/v1/resources/alias", {"name": "style[video]", "alias": "canary", "version": 2})
    held.withdraw("style[video]", "too lively")
    withdrawn = client.post("/optimize", asked)

    assert found["resource"]["version"] == 2
    assert found["optimized_prompt"] == "Lively: a sunset"
    assert found["earned"]["rollouts"] == 3
    assert found["request"] is None
    assert told[0]["request"]["request_id"] == told[1]["request"]["request_id"]
    assert (told[0]["request"]["algorithm"], told[0]["request"]["category"]) == ("apo", "video")
    assert (withdrawn["resource"]["version"], withdrawn["versions"]) == (1, [])
    assert (unknown["resource"], unknown["optimized_prompt"]) == (None, None)
    assert "publish one" in unknown["reason"]


def test_training_is_asked_for_once_per_key(client: Client) -> None:
    """In the body or the header; an empty post, as with curl -X POST, asks as well."""
    first = client.post("/training/trigger", {"algorithm": "baseline"}, 202, Idempotency_Key="t-1")
    again = client.post(
        "/training/trigger", {"algorithm": "baseline", "idempotency_key": "t-1"}, 200
    )
    other = client.post("/training/trigger", {"idempotency_key": "t-1"}, 409)
    empty = client.ask("POST", "/training/trigger")

    assert first["request_id"] == again["request_id"]
    assert "asked for other training" in other["message"]
    assert empty.status == 202
    assert client.get(f"/training/requests/{first['request_id']}")["status"] == "waiting"
    assert client.ask("GET", "/training/requests/nosuch").status == 404


def test_status_counts_by_category(client: Client) -> None:
    """Spans, rewarded shares and average reward, of all and of each kind of task."""
    for name, reward in (("s1", 1.0), ("s2", 0.0), ("s3", None)):
        client.act(name, reward, category="status")
    client.act("s4", 0.5)
    names = ("s1", "s2", "s3")
    spans = sum(row["spans"] for row in client.store.rollouts() if row["rollout_id"] in names)
    steps = len(client.store.transitions(bodies=False).rows())

    # It may be a second old.
    wait_until(lambda: client.get("/training/status")["steps"] >= steps)
    found = client.get("/training/status")

    assert found["rewards"] == len(client.store.sql("SELECT 1 FROM rewards").rows())
    one = found["categories"]["status"]
    assert (one["rollouts"], one["rewarded_rollouts"], one["steps"]) == (3, 2, 3)
    assert (one["average_reward"], one["total_spans"]) == (0.5, spans)
    assert one["rewarded_share"] == pytest.approx(2 / 3)


def test_a_worker_does_what_is_asked_for(client: Client, tmp_path: Path) -> None:
    """One request after the other, what fails with its reason; told to stop, it ends."""
    client.act("w1", 1.0)
    good = client.post("/training/trigger", {"algorithm": "baseline", "max_iterations": 1}, 202)
    bad = client.post("/training/trigger", {"algorithm": "baseline", "options": {"nosuch": 1}}, 202)
    command = [sys.executable, "-m", "lightning_otel", "train", "--worker"]
    started = subprocess.Popen(
        [*command, "--store", client.store.name], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    address = "/training/requests/"
    wait_until(lambda: client.get(address + bad["request_id"])["status"] == "failed")
    started.send_signal(signal.SIGTERM)
    _, said = started.communicate(timeout=20)

    assert started.returncode == 0, said
    done = client.get(address + good["request_id"])
    assert done["status"] == "succeeded", done
    runs = {run["run_id"]: run for run in client.get("/training/status?limit=100")["runs"]}
    assert runs[done["run_id"]]["status"] == "succeeded"
    assert "nosuch" in str(client.get(address + bad["request_id"])["reason"])
    assert good["request_id"] in said
