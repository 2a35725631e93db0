"""The snippets of document 004, a service around it, as written: only the import is changed.

Its own reward, its batch and its parallel requests use no name of ours, and are left out.
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.examples.test_service import run_service
from tests.seeds.snippets import ran
from tests.serve.serving import Serving
from tests.waiting import wait_until

import lightning_otel.agl as agl
from lightning_otel import Store

pytest.importorskip("hypercorn", reason="needs the extra serve")

SPAN = """
def emit_prompt_span(
    prompt: str,
    optimized_prompt: str,
    category: str,
    model: Optional[str] = None,
    task_id: Optional[str] = None,
    metadata: Optional[Dict[str, Any]] = None
) -> Optional[str]:
    span = agl.emit_span(
        name=f"prompt_optimization_{category}",
        metadata={
            "original_prompt": prompt,
            "optimized_prompt": optimized_prompt,
            "category": category,
            "model": model,
            **metadata
        },
        task_id=task_id
    )
    return span.span_id
"""
REWARD = """
def calculate_reward_from_feedback(
    quality_score: float,
    user_rating: Optional[float] = None,
    user_feedback: Optional[Dict[str, Any]] = None
) -> float:
    base_reward = (quality_score / 100.0) * 2.0 - 1.0

    if user_rating is not None:
        user_reward = (user_rating / 5.0) * 2.0 - 1.0
        base_reward = base_reward * 0.4 + user_reward * 0.6

    if user_feedback:
        if user_feedback.get("satisfied", False):
            base_reward = min(base_reward + 0.2, 1.0)
        if user_feedback.get("used_result", False):
            base_reward = min(base_reward + 0.1, 1.0)

    return max(-1.0, min(1.0, base_reward))
"""
CLIENT = """
import requests

response = requests.post("http://localhost:8001/optimize", json={
    "prompt": "a beautiful sunset",
    "category": "image",
    "model": "midjourney",
    "options": {}
})

result = response.json()
print(f"최적화된 프롬프트: {result['optimized_prompt']}")
print(f"품질 점수: {result['quality_score']}")
print(f"Task ID: {result.get('task_id')}")
print(f"Span ID: {result.get('span_id')}")

if result.get('span_id'):
    feedback_response = requests.post("http://localhost:8001/feedback", json={
        "task_id": result['task_id'],
        "span_id": result['span_id'],
        "reward": 0.9,
        "feedback_text": "매우 만족합니다. 결과를 사용했습니다.",
        "metadata": {
            "rating": 5,
            "satisfied": True,
            "used_result": True
        }
    })
    print(f"피드백 기록: {feedback_response.json()}")
"""
STATUS = """
status = requests.get("http://localhost:8001/training/status").json()
print(f"Agent Lightning 사용 가능: {status['agent_lightning_available']}")
print(f"Store 사용 가능: {status['store_available']}")
print(f"Trainer 사용 가능: {status['trainer_available']}")
print(f"총 Span 수: {status.get('total_spans', 0)}")
print(f"평균 보상: {status.get('average_reward', 0.0)}")
"""
TRIGGER = """
response = requests.post("http://localhost:8001/training/trigger")
print(response.json())
"""
TABLES = ("SELECT * FROM spans LIMIT 10;", "SELECT * FROM rewards LIMIT 10;")
TYPING = "from typing import Any, Dict, Optional\n"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """``lightning-otel serve --open-loopback``, with a store of nothing."""
    folder: Path = tmp_path_factory.mktemp("seed")
    with Serving(folder / "traces.duckdb", "--port", "0", "--open-loopback") as server:
        yield server


@pytest.fixture
def ask(running: Serving) -> Iterator[httpx.Client]:
    """A client without a key."""
    with httpx.Client(base_url=running.url, timeout=30) as client:
        yield client


def test_span_and_what_is_learnt_of_it(store: Store) -> None:
    """The span's id takes feedback; the words of the better half are learnt, with a confidence."""
    emit = ran(TYPING + SPAN, agl=agl)["emit_prompt_span"]
    with agl.auto_trace(store=store):
        ids = [
            emit("a sunset", f"{'cinematic golden' if n % 2 else 'plain'} sunset {n}", "image",
                 "midjourney", metadata={})
            for n in range(12)
        ]  # fmt: skip
    for number, span_id in enumerate(ids):
        agl.emit_feedback(span_id=span_id, rating=5 * (number % 2), store=store)

    learned = agl.get_learned_optimizations("image", "midjourney", store=store)

    assert set(learned["learned_keywords"]) == {"cinematic", "golden"}
    assert {each["pattern"] for each in learned["learned_patterns"]} == {
        "cinematic golden", "golden sunset",
    }  # fmt: skip
    assert 0.9 < learned["confidence"] < 1
    unknown = {"learned_keywords": [], "learned_patterns": [], "confidence": 0.0}
    assert agl.get_learned_optimizations("video", store=store) == unknown
    assert agl.get_learned_optimizations("image") == unknown  # of a store that is not there


def test_reward_is_the_same_number() -> None:
    """Bit by bit, on every input: 7 scores × 7 ratings and none × what was said."""
    theirs = ran(TYPING + REWARD)["calculate_reward_from_feedback"]
    said = [
        None, {}, {"satisfied": True}, {"used_result": True},
        {"satisfied": True, "used_result": True}, {"satisfied": False, "used_result": False},
    ]  # fmt: skip
    for quality in (-20, 0, 33.3, 50, 77.7, 100, 140):
        for rating in (None, 0, 1, 2.5, 3.3, 4, 5):
            for each in said:
                given = (quality, rating, each)
                assert agl.calculate_reward_from_feedback(*given) == theirs(*given), given


@pytest.fixture(params=["serve", "serve with a worker", "example"])
def service(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, str]]:
    """Each service by its name and address, with a store of nothing, at ``tmp_path``."""
    path = tmp_path / ".lightning" / "traces.duckdb"
    with contextlib.ExitStack() as stack:
        if request.param == "example":
            pytest.importorskip("fastapi", reason="the service needs fastapi")
            yield request.param, stack.enter_context(run_service(tmp_path)).url
            return
        server = stack.enter_context(Serving(path, "--port", "0", "--open-loopback"))
        if request.param == "serve with a worker":
            command = [sys.executable, "-m", "lightning_otel", "train", "baseline", "--worker"]
            worker = subprocess.Popen([*command, "--store", str(path)], stderr=subprocess.DEVNULL)
            stack.callback(worker.communicate)
            stack.callback(worker.terminate)
            wait_until(lambda: status_of(server.url)["trainer_available"])
        yield request.param, server.url


def status_of(url: str) -> dict[str, Any]:
    """What the service tells of training."""
    found: dict[str, Any] = httpx.get(f"{url}/training/status", timeout=30).json()
    return found


def test_client_runs_through(
    service: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against each service, on an empty store; each answer is a rollout with its reward."""
    name, url = service
    empty = status_of(url)
    for _ in range(2):
        after = ran(CLIENT.replace("http://localhost:8001", url))
    wait_until(lambda: status_of(url)["average_reward"])  # it may be a second old
    for snippet in (STATUS, TRIGGER):
        ran(snippet.replace("http://localhost:8001", url), requests=after["requests"])

    out = capsys.readouterr().out
    trains = name != "serve"
    assert (empty["total_spans"], empty["average_reward"]) == (0, 0.0)
    assert out.count("최적화된 프롬프트: a beautiful sunset\n품질 점수: ") == 2
    assert out.count("'status': 'kept'") == 2
    assert re.search(r"총 Span 수: \d+\n평균 보상: 0\.9\n", out)
    assert "Agent Lightning 사용 가능: True\nStore 사용 가능: True" in out
    assert f"Trainer 사용 가능: {trains}" in out
    assert ("no worker takes it; start one: lightning-otel train apo --worker" in out) != trains
    store = Store(tmp_path / ".lightning" / "traces.duckdb")
    steps = list(store.transitions())
    assert [step.reward for step in steps] == pytest.approx([0.9] * 2)
    assert steps[-1].span_id == after["result"]["span_id"]
    assert steps[-1].rollout_id == after["result"]["task_id"]
    for query in TABLES:
        assert len(list(store.sql(query.rstrip(";")))) >= 2


@pytest.mark.parametrize("template", ["", "Write what a painter can paint."])
def test_answer_is_the_users_prompt_with_what_was_learnt(
    running: Serving, ask: httpx.Client, template: str
) -> None:
    """Words that better answers share are added, once; instructions come before it, not instead."""
    category = f"words{len(template)}"
    body = {"category": category, "prompt": "a sunset"}
    if template:
        ask.post("/v1/resources", json={"name": f"system_prompt[{category}]", "body": template})
    first = ask.post("/optimize", json=body).json()["optimized_prompt"]
    for number in range(12):
        words = "cinematic golden" if number % 2 else "plain"
        found = ask.post("/optimize", json={**body, "prompt": f"{words} lake {number}"}).json()
        reward = {"span_id": found["span_id"], "reward": 1.0 if number % 2 else -1.0}
        assert ask.post("/feedback", json=reward).status_code == 200

    lead = f"{template}\n\n" if template else ""
    assert first == f"{lead}a sunset"
    answer = {}

    def is_learnt() -> bool:
        answer.update(ask.post("/optimize", json=body).json())
        return answer["optimized_prompt"] != first

    wait_until(is_learnt)
    assert answer["optimized_prompt"] == f"{lead}a sunset, cinematic, golden"
    assert "cinematic, golden" in answer["reason"]
    own = ask.post("/optimize", json={**body, "prompt": "Cinematic sea"}).json()
    assert own["optimized_prompt"] == f"{lead}Cinematic sea, golden"


def test_requests_are_cheap(running: Serving, ask: httpx.Client) -> None:
    """Answers and feedback in turn take at most 30 ms of the server's time each."""
    ask.post("/v1/resources", json={"name": "system_prompt[cheap]", "body": "Paint {task}."})
    before = _seconds(running.process.pid)
    for number in range(20):
        found = ask.post("/optimize", json={"prompt": f"p{number}", "category": "cheap"}).json()
        ask.post("/feedback", json={"span_id": found["span_id"], "reward": 0.5})

    assert found["optimized_prompt"] == "Paint p19."
    assert (_seconds(running.process.pid) - before) / 40 <= 0.03


def _seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
