"""Feedback before what it judges: it waits on disk, goes to that alone, and is kept once."""

import json
import signal
import subprocess
import sys
import threading
import time

import pytest

from lightning_otel import Store, auto_trace, context, emit_action, emit_feedback
from lightning_otel.errors import ConfigError, StateError
from lightning_otel.rewards import pending as module
from lightning_otel.rewards.feedback import Feedback, Noun, StoredReward
from lightning_otel.rewards.pending import Pending, Settled, settle_pending
from lightning_otel.state import State
from lightning_otel.types import Span
from lightning_otel.types import conventions as c


@pytest.fixture
def pending(store: Store) -> Pending:
    """Where nothing waits yet, beside a store that is empty."""
    store.writer()
    return Pending(State(store.name))


def feedback(noun: Noun, target: str, value: float = 0.5, feedback_id: str = "f1") -> Feedback:
    """Something that was said."""
    return Feedback(noun, target, value, time.time_ns(), {c.FEEDBACK_TEXT: "so"}, feedback_id)


@pytest.mark.parametrize("noun", ["trace", "span", "response", "conversation"])
def test_feedback_finds_whatever_it_names(store: Store, pending: Pending, noun: Noun) -> None:
    """By the id of a trace, span, response or conversation, given before it was there."""
    target = {"trace": "a" * 32, "span": "b" * 16, "response": "resp-1", "conversation": "c-1"}
    assert pending.give(store, feedback(noun, target[noun])) is None
    now = time.time_ns()
    said = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}])
    stamps = {
        c.ROLLOUT_ID: "r1",
        c.OPERATION: "chat",
        c.CONVERSATION_ID: "c-1",
        c.INPUT_MESSAGES: said,
        c.OUTPUT_MESSAGES: said,
    }
    for number, span_id in enumerate(["b" * 16, "c" * 16], 1):
        attributes = {**stamps, c.RESPONSE_ID: f"resp-{number}"}
        begun = now + number * 10
        store.add([Span("a" * 32, span_id, None, "chat", begun, begun + 1, attributes=attributes)])

    assert pending.settle(store) == Settled(given=1)
    (reward,) = store.sql("SELECT * FROM rewards")
    assert (reward["rollout_id"], reward["value"]) == ("r1", 0.5)
    rewarded = {step.span_id for step in store.transitions() if step.reward is not None}
    assert len(rewarded) == 1
    if noun != "trace":
        assert rewarded == {"b" * 16}  # of a conversation: the first, as all began after it


def test_conversation_is_judged_by_its_latest_call_then(store: Store) -> None:
    """What is said later in it is not what was judged."""
    with (
        auto_trace(store=store, rollout_id="r1"),
        context(conversation_id="c-1"),
    ):
        emit_action("say", "first")
        judged = emit_action("say", "second")
        emit_feedback(conversation_id="c-1", rating=5, store=store)
        emit_action("say", "third")

    rewards = {step.span_id: step.reward for step in store.transitions()}
    assert rewards[judged or ""] == 1.0
    assert [reward for reward in rewards.values() if reward is not None] == [1.0]


def test_two_who_settle_at_once_give_it_once(store: Store, pending: Pending) -> None:
    """A server and a trainer may both find it."""
    for index in range(20):
        pending.give(store, feedback("rollout", "r1", 0.1, f"f{index}"))
    with auto_trace(store=store, rollout_id="r1"):
        emit_action("say", "hi")
    gate = threading.Barrier(2)

    def settle() -> None:
        gate.wait()
        Pending(State(store.name)).settle(store)

    threads = [threading.Thread(target=settle) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(store.sql("SELECT * FROM rewards").rows()) == 20
    assert pending.waiting().count == 0


def test_what_waits_is_bounded_and_named(
    store: Store, pending: Pending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too much is refused rather than the disk filled; without an id nothing can wait."""
    monkeypatch.setattr(module, "MOST", 2)
    for index in range(2):
        pending.give(store, feedback("rollout", "r1", feedback_id=f"f{index}"))

    with pytest.raises(StateError, match="is it this store"):
        pending.give(store, feedback("rollout", "r1", feedback_id="f2"))
    with pytest.raises(ConfigError, match="without an id"):
        pending.give(store, feedback("rollout", "r1", feedback_id=""))
    assert [each.feedback_id for each in pending.all()] == ["f0", "f1"]
    with auto_trace(store=store, rollout_id="r2"):  # what is there is given at once, full or not
        emit_action("say", "hi")
    assert isinstance(
        pending.give(store, feedback("rollout", "r2", feedback_id="f3")), StoredReward
    )
    oldest_ns = pending.waiting().oldest_ns
    assert oldest_ns is not None
    assert oldest_ns <= time.time_ns()


def test_senders_without_a_key_leave_room(
    store: Store, pending: Pending, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fill their share alone; and what has waited for 30 days is gone."""
    monkeypatch.setattr(module, "MOST", 4)

    def sent(name: str, came: str, days: int = 0) -> Feedback:
        given_ns = time.time_ns() - days * 86_400_000_000_000
        return Feedback("rollout", "r1", 0.5, given_ns, {c.RECEIVED: came}, name)

    for name in ("a", "b"):
        pending.give(store, sent(name, "http:127.0.0.1", days=29))
    with pytest.raises(StateError, match="2 pieces"):
        pending.give(store, sent("c", "http:127.0.0.1"))
    assert pending.give(store, sent("d", "http+token:127.0.0.1", days=31)) is None
    assert pending.waiting().count == 3
    assert pending.settle(store) == Settled(waiting=2)


def test_looking_for_what_waits_makes_nothing(store: Store) -> None:
    """Whoever reads a store without a state finds that nothing waits."""
    store.writer()

    assert settle_pending(store) == Settled()
    assert store.layout is not None
    assert not (store.layout.root / "state.sqlite").exists()


KILLED = """
import os, signal, sys, time
from lightning_otel import Store
from lightning_otel.rewards import pending as module
from lightning_otel.rewards.feedback import Feedback
from lightning_otel.state import State

store, where = Store(sys.argv[1]), sys.argv[2]
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if where == "kept":
    module.give = die                              # it is on disk, and was not looked for
elif where == "given":
    module.Pending._delete_feedback = die          # the reward stands there, and it waits still
module.Pending(State(store.name)).settle(store)
"""


@pytest.mark.parametrize("where", ["kept", "given"])
def test_kill_between_any_two_steps_is_no_matter(
    store: Store, pending: Pending, where: str
) -> None:
    """What was taken is given once, whoever comes next."""
    pending.give(store, feedback("rollout", "r1"))
    with auto_trace(store=store, rollout_id="r1"):
        emit_action("say", "hi")

    done = subprocess.run([sys.executable, "-c", KILLED, store.name, where], timeout=30)

    assert done.returncode == -signal.SIGKILL
    assert pending.waiting().count == 1
    assert settle_pending(store) == Settled(given=1)
    assert [step.reward for step in store.transitions()] == [0.5]
    assert len(store.sql("SELECT * FROM rewards").rows()) == 1
