"""What a recording knows: its ids, its spans wherever they are by now, what they come to."""

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from tests.waiting import wait_until

from lightning_otel import (
    Recording,
    Span,
    Store,
    auto_trace,
    emit_action,
    emit_message,
    emit_reward,
    emit_span,
)
from lightning_otel.errors import ConfigError
from lightning_otel.types import conventions as c


def names(recording: Recording) -> list[str]:
    return [span.name for span in recording.spans()]


def test_spans_of_other_rollouts_are_not_in_it(store: Store) -> None:
    """What the process recorded before, after and meanwhile in other rollouts is left out."""
    with auto_trace(store=store):
        emit_message("before")
    with auto_trace(store=store) as recording:
        emit_message("within")
        thread = threading.Thread(target=auto_trace(emit_message, rollout_id="x"), args=["beside"])
        thread.start()
        thread.join()
    with auto_trace(store=store):
        emit_message("after")

    assert len(store.spans().rows()) == 8
    assert [span.attributes.get(c.MESSAGE_BODY) for span in recording.spans()] == [None, "within"]


@pytest.mark.parametrize("is_removed", [False, True])
def test_recording_whose_segment_was_settled_answers_from_the_store(
    is_removed: bool, store: Store
) -> None:
    """Once its lines are packed into Parquet, and gone, the spans are read from there."""
    with auto_trace(store=store) as recording:
        emit_message("kept")
        with auto_trace() as part:
            emit_action("think", "aloud")
    before = recording.spans()

    store.writer().seal()
    store.settle()
    if is_removed:
        for path in store.writer().paths:
            path.unlink(missing_ok=True)
    # What is settled counts from a moment later on: a segment goes long after that, not at once.
    wait_until(lambda: len(recording.spans()) >= len(before))

    assert recording.spans() == before
    assert names(part) == [c.SPAN_ROLLOUT, c.SPAN_ACTION]
    assert len(recording.trajectories()) == 1


def test_recording_spans_across_segments(store: Store) -> None:
    """A recording that outlives its segment is read from all of them."""
    with auto_trace(store=store) as recording:
        emit_message("first")
        store.writer().seal()
        emit_message("second")
        store.writer().seal()
        emit_message("third")

    assert names(recording) == [c.SPAN_ROLLOUT, *[c.SPAN_MESSAGE] * 3]
    assert not recording.spans()[0].is_incomplete


def test_part_holds_all_below_it_whatever_the_order(store: Store) -> None:
    """Also what arrives before its parent; a circle among foreign spans is no part of it."""
    with auto_trace(store=store) as whole, auto_trace() as part:
        for span_id, parent_id, name in (
            ("b" * 16, "a" * 16, "grandchild"),
            ("a" * 16, part.span_id, "child"),
            ("c" * 16, whole.span_id, "beside"),
            ("d" * 16, "e" * 16, "circle"),
            ("e" * 16, "d" * 16, "circle"),
            ("f" * 16, "f" * 16, "circle"),
        ):
            attributes = {c.ROLLOUT_ID: part.rollout_id}
            span = Span(part.trace_id, span_id, parent_id, name, 1, 2, attributes=attributes)
            store.add([span])

    below = [c.SPAN_ROLLOUT, "child", "grandchild"]
    assert sorted(names(part)) == below
    assert sorted(names(whole)) == sorted([c.SPAN_ROLLOUT, *below, "beside", *["circle"] * 3])


def test_end_of_a_span_counts_once_even_if_it_was_written_twice(store: Store) -> None:
    """A poorer copy of a span, as an exporter writes one, does not take the place of the first."""
    with auto_trace(store=store) as recording:
        emit_message("the whole of it")
    message = recording.spans()[1]

    store.add([Span(message.trace_id, message.span_id, None, "copy", 1, 2,
                    attributes={c.ROLLOUT_ID: recording.rollout_id})])  # fmt: skip

    assert recording.spans()[1] == message
    assert len(recording.spans()) == 2


def test_trajectories_and_report_take_a_credit_rule(store: Store) -> None:
    """The credit rule and discount are passed on, and checked."""
    with auto_trace(store=store) as recording:
        for step in range(2):
            emit_action("step", str(step))
        emit_reward(1.0)

    (plain,) = recording.trajectories()
    (discounted,) = recording.trajectories(credit="discounted", gamma=0.5)
    assert [step.reward for step in plain.transitions] == [None, 1.0]
    assert [step.reward for step in discounted.transitions] == [0.5, 1.0]
    assert recording.report(credit="last").rewards_placed == 1
    with pytest.raises(ConfigError, match="credit"):
        recording.trajectories(credit="best")  # type: ignore[arg-type]  # on purpose


FORKED = """
import os
import lightning_otel as lo

store = lo.Store("store")
with lo.auto_trace(store=store) as recording:
    lo.emit_message("parent")
    pid = os.fork()
    if pid == 0:
        lo.emit_message("child")
        print(sorted(span.name for span in recording.spans()), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
here = len(recording.spans())
recording.span_processes()
print(here, len(recording.spans()), len(store.spans(rollout_id=recording.rollout_id).rows()))
"""


def test_forked_child_reads_the_recording_from_the_store(tmp_path: Path) -> None:
    """A child's recording is what the store holds, and so is the parent's, read from segments."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKED)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )

    in_child, counts = done.stdout.splitlines()
    assert in_child == str(sorted([c.SPAN_ROLLOUT, c.SPAN_MESSAGE, c.SPAN_MESSAGE]))
    assert counts == "3 3 3"
    assert done.stderr == ""


TARGETS = ("rollout_id", "span_id", "response_id")


def recorded_call(store: Store) -> tuple[Recording, dict[str, str]]:
    """A finished recording of one call, and what a reward may name of it."""
    message = '[{"role":"user","parts":[{"type":"text","content":"hi"}]}]'
    call = {
        c.OPERATION: "chat",
        c.RESPONSE_ID: "chatcmpl-1",
        c.INPUT_MESSAGES: message,
        c.OUTPUT_MESSAGES: message.replace("user", "assistant"),
    }
    with auto_trace(store=store) as recording:
        span_id = emit_span("chat m", metadata=call)
    assert span_id is not None
    targets = {
        "rollout_id": recording.rollout_id,
        "span_id": span_id,
        "response_id": "chatcmpl-1",
    }
    return recording, targets


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("is_here", [True, False])
def test_recording_has_rewards_given_in_another_rollout(
    store: Store, name: str, *, is_here: bool
) -> None:
    """Of this process or another, while its segment is live and once it is settled."""
    recording, targets = recorded_call(store)
    script = (
        "import sys; from lightning_otel import Store, emit_reward, auto_trace\n"
        "with auto_trace(store=Store(sys.argv[1])): emit_reward(0.5, **{sys.argv[2]: sys.argv[3]})"
    )

    if is_here:
        with auto_trace(store=store) as judge:
            emit_reward(0.5, **{name: targets[name]})
        assert names(judge) == [c.SPAN_ROLLOUT]
    else:
        command = [sys.executable, "-c", script, store.name, name, targets[name]]
        subprocess.run(command, check=True)

    live = recording.spans()
    assert names(recording) == [c.SPAN_ROLLOUT, "chat m", c.SPAN_ANNOTATION]
    assert live == store.spans(rollout_id=recording.rollout_id).rows()
    (trajectory,) = recording.trajectories()
    assert [step.reward for step in trajectory.transitions] == [0.5]
    store.settle()
    assert recording.spans() == live


def test_reward_within_for_an_older_response_leaves_the_recording(store: Store) -> None:
    """What a recording gives to something recorded before it began is not its own."""
    older, targets = recorded_call(store)

    with auto_trace(store=store) as recording:
        emit_action("judge", "good")
        emit_reward(1.0, response_id=targets["response_id"])
        emit_reward(0.5)
        emit_reward(0.1, response_id="chatcmpl-unknown")

    rewards = [span.attributes.get(c.REWARD_VALUE) for span in recording.spans()]
    assert rewards == [None, None, 0.5, 0.1]
    assert [span.attributes.get(c.REWARD_VALUE) for span in older.spans()] == [None, None, 1.0]


def test_part_has_the_rewards_linked_to_it(store: Store) -> None:
    """A nested recording has the rewards that name something of it, and no others."""
    with auto_trace(store=store) as outer:
        with auto_trace() as part:
            span_id = emit_action("think", "aloud")
        emit_reward(0.5, span_id=span_id)
        emit_reward(0.1)

    assert names(part) == [c.SPAN_ROLLOUT, c.SPAN_ACTION, c.SPAN_ANNOTATION]
    assert len(outer.spans()) == 5
