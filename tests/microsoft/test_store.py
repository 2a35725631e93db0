"""Spans and rewards to a running Agent Lightning 0.3 store and back: its own server."""

import importlib.util
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from tests.rewards.test_apply import exact_match

from lightning_otel import (
    Store,
    apply_rewards,
    auto_trace,
    context,
    emit_action,
    emit_feedback,
    emit_reward,
)
from lightning_otel.algorithms.exchange import hand_over, read_back
from lightning_otel.algorithms.exchange.client import OUR_ROLLOUT, Client
from lightning_otel.demo.agent import solve
from lightning_otel.types import conventions as c

if importlib.util.find_spec("agentlightning") is None:
    pytest.skip("agentlightning is not installed here", allow_module_level=True)

HERE = Path(__file__).parent
TASK = {"question": "What is 17*23?", "want": "391"}


@contextmanager
def running() -> Iterator[str]:
    """Its store's server in a process of its own; gives its address."""
    with subprocess.Popen(
        [sys.executable, HERE / "their_store.py"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(20)


@pytest.fixture(scope="module")
def theirs() -> Iterator[str]:
    """The address of one such server for all tests: each has rollouts of its own."""
    with running() as url:
        yield url


@pytest.fixture
def solved(store: Store, client: openai.OpenAI, request: pytest.FixtureRequest) -> str:
    """A rollout of the demo's agent: two calls with a tool between, token ids, and a reward."""
    name = request.node.name
    with auto_trace(store=store, rollout_id=name, task=TASK, agent="calc", mode="train"):
        answer = solve(client, TASK["question"])
        emit_reward(float(answer == TASK["want"]))
    return name


def ask(url: str, path: str, body: object = None) -> Any:
    data = None if body is None else orjson.dumps(body)
    request = urllib.request.Request(
        f"{url}/v1/agl{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return orjson.loads(answer.read())


def there(url: str, our_id: str) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """The rollout that stands for ours, and its spans."""
    (rollout,) = (
        each for each in Client(url).rollouts() if each["metadata"].get(OUR_ROLLOUT) == our_id
    )
    return rollout, [dict(span) for span in Client(url).spans(rollout["rollout_id"])]


def test_rollout_is_handed_over(store: Store, solved: str, theirs: str) -> None:
    """It stands there with its task, mode, status, every span in order, and its reward."""
    done = hand_over(store, theirs, content=True)

    rollout, spans = there(theirs, solved)
    ours = store.spans(rollout_id=solved).rows()
    assert (done.rollouts, done.attempts, done.spans, done.rewards) == (1, 1, len(ours), 1)
    assert (rollout["input"], rollout["mode"], rollout["status"]) == (TASK, "train", "succeeded")
    assert [span["span_id"] for span in spans] == [span.span_id for span in ours]
    assert [span["parent_id"] for span in spans] == [span.parent_span_id for span in ours]
    (reward,) = (span["attributes"] for span in spans if c.REWARD_VALUE in span["attributes"])
    assert reward[c.REWARD_VALUE] in (0.0, 1.0)


def test_its_adapter_makes_our_transitions(store: Store, solved: str, theirs: str) -> None:
    """What its own adapter learns from what was handed over are our steps: texts, ids, rewards."""
    pytest.importorskip("agentops")
    from tests.adapter.differential import upstream

    hand_over(store, theirs, content=True)

    _, spans = there(theirs, solved)
    adapter = upstream.TracerTraceToTriplet()
    found = adapter.adapt([upstream.TheirSpan.model_validate(span) for span in spans])
    steps = list(store.transitions(rollout_id=solved))
    assert len(found) == len(steps) == 2
    for triplet, step in zip(found, steps, strict=True):
        assert triplet.prompt["token_ids"] == list(step.prompt_ids)
        assert triplet.response["token_ids"] == list(step.response_ids)
        assert [each["logprob"] for each in triplet.response["logprobs"]] == list(step.logprobs)
        assert triplet.reward == step.reward
        assert triplet.metadata["response_id"] == step.response_id
        assert triplet.metadata["agent_name"] == step.agent == "calc"
    assert step.action[0]["parts"][0]["content"] == found[-1].response["raw_content"][0]["content"]
    assert found[0].response["raw_content"][0]["tool_calls"][0]["name"] == "calculator"


def test_content_stays_unless_it_may_leave(store: Store, solved: str, theirs: str) -> None:
    """By default neither messages nor tokens nor the task leave this machine."""
    done = hand_over(store, theirs)

    rollout, spans = there(theirs, solved)
    assert not done.with_content
    assert rollout["input"] is None
    told = orjson.dumps(spans).decode()
    assert not [words for words in ("careful assistant", "17*23", "calculator") if words in told]
    assert not any("token_ids" in key for span in spans for key in span["attributes"])


def test_handing_over_again_sends_what_came_since(store: Store, solved: str, theirs: str) -> None:
    """Nothing is there twice; a reward given late and a rollout that ended meanwhile follow."""
    first = hand_over(store, theirs, content=True)
    apply_rewards(store, answered)
    with auto_trace(store=store, rollout_id=f"{solved}-open"):
        emit_action("say", "hi")
        second = hand_over(store, theirs, content=True)
    third = hand_over(store, theirs, content=True)

    assert (second.rollouts, second.running, second.spans, second.rewards) == (0, 1, 1, 1)
    assert second.held == first.spans
    assert (third.rollouts, third.running, third.spans, third.rewards) == (1, 0, 2, 0)
    _, spans = there(theirs, solved)
    assert len({span["span_id"] for span in spans}) == len(spans) == first.spans + 1
    assert spans[-1]["attributes"]["agentlightning.reward.0.name"] == "answered"


def answered(answer: str) -> float:
    """A reward for anything."""
    return float(bool(answer))


def test_attempts_are_kept_apart(store: Store, theirs: str) -> None:
    """Each attempt of ours is one there, the failed one failed."""
    for attempt in ("1", "2"):
        try:
            with auto_trace(store=store, rollout_id="tried", attempt_id=attempt):
                emit_action("say", attempt)
                if attempt == "1":
                    raise RuntimeError("no")
        except RuntimeError:
            pass

    done = hand_over(store, theirs)

    rollout, spans = there(theirs, "tried")
    attempts = Client(theirs).attempts(rollout["rollout_id"])
    assert (done.rollouts, done.attempts) == (1, 2)
    assert [attempt["status"] for attempt in attempts] == ["failed", "succeeded"]
    assert rollout["status"] == "succeeded"
    assert {span["attempt_id"] for span in spans} == {each["attempt_id"] for each in attempts}
    assert hand_over(store, theirs).spans == 0


def test_rollout_that_it_ran_keeps_its_ids(store: Store, theirs: str) -> None:
    """An agent that was recorded under its rollout and attempt gets its spans there."""
    begun = ask(theirs, "/rollouts", {"input": "hi"})
    rollout_id, attempt_id = begun["rollout_id"], begun["attempt"]["attempt_id"]
    with auto_trace(store=store, rollout_id=rollout_id, attempt_id=attempt_id):
        emit_action("say", "hi")

    done = hand_over(store, theirs)

    spans = list(Client(theirs).spans(rollout_id, attempt_id))
    assert (done.rollouts, done.spans) == (0, 2)
    assert [span["name"] for span in spans] == [c.SPAN_ROLLOUT, c.SPAN_ACTION]
    assert ask(theirs, f"/rollouts/{rollout_id}")["status"] == "running"  # it says when it ends


def test_its_rewards_come_home(store: Store, solved: str, theirs: str) -> None:
    """A reward that was given there is the rollout's here, once; what was ours is not doubled."""
    hand_over(store, theirs, content=True)
    rollout, spans = there(theirs, solved)
    call = [span for span in spans if span["name"] == "openai.chat.completion"][-1]
    attributes = {
        "agentlightning.reward.0.name": "their_judge",
        "agentlightning.reward.0.value": 0.75,
        "agentlightning.link.0.key_match": "gen_ai.response.id",
        "agentlightning.link.0.value_match": call["attributes"]["gen_ai.response.id"],
    }
    ask(theirs, "/spans", {
        **call, "span_id": "ab" * 8, "trace_id": "cd" * 16, "parent_id": None,
        "name": "agentlightning.annotation", "attributes": attributes,
        "sequence_id": 99, "start_time": call["end_time"] + 1, "end_time": call["end_time"] + 1,
        "context": None,
    })  # fmt: skip

    first = read_back(store, theirs, rollout_id=solved)
    again = read_back(store, theirs, rollout_id=rollout["rollout_id"])

    *_, last = store.transitions(rollout_id=solved)
    assert (first.spans, first.held) == (1, len(spans))
    assert (again.spans, again.held) == (0, len(spans) + 1)
    assert last.rewards["their_judge"] == 0.75


def test_its_rollouts_become_ours(store: Store, tmp_path: Path, client: openai.OpenAI) -> None:
    """Of a rollout that it ran, task, status and spans are read, and functions judge it."""
    with running() as url:
        begun = ask(url, "/rollouts", {"input": TASK, "mode": "val"})
        rollout_id, attempt_id = begun["rollout_id"], begun["attempt"]["attempt_id"]
        elsewhere = Store(tmp_path / "elsewhere.duckdb")
        with (
            auto_trace(store=elsewhere),
            context(rollout_id=rollout_id, attempt_id=attempt_id, agent="calc"),
        ):
            solve(client, TASK["question"])
        hand_over(elsewhere, url, content=True, rollout_id=rollout_id)
        unended = read_back(store, url)
        ask(url, f"/rollouts/{rollout_id}/attempts/{attempt_id}", {"status": "succeeded"})

        done = read_back(store, url)

    judged = apply_rewards(store, exact_match)
    steps = list(store.transitions(rollout_id=rollout_id))
    assert (unended.running, unended.spans) == (1, 0)
    assert done.rollouts == 1
    assert judged.rewards == 1
    assert [len(step.response_ids) > 0 for step in steps] == [True, True]
    assert steps[-1].reward in (0.0, 1.0)
    (row,) = (row for row in store.rollouts() if row["rollout_id"] == rollout_id)
    assert (row["status"], orjson.loads(row["task"])) == ("succeeded", TASK)


def test_feedback_and_handing_over_agree(store: Store, solved: str, theirs: str) -> None:
    """Feedback of days later goes along under its name."""
    emit_feedback(rating=5, rollout_id=solved, store=store)

    hand_over(store, theirs, rollout_id=solved)

    _, spans = there(theirs, solved)
    names = [span["attributes"].get(c.REWARD_NAME) for span in spans]
    assert "feedback" in names
