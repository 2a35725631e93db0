"""From a store to transitions: their columns, their funnel, and real clients and processes."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import duckdb
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapter.forest import (
    Forest,
    call_attributes,
    text_of,
    token_attributes,
)
from tests.adapter.forests import forests

from lightning_otel import (
    Store,
    auto_trace,
    context,
    emit_action,
    emit_observation,
    emit_reward,
)
from lightning_otel import conventions as c
from lightning_otel.adapter import Adaptation, TripletAdapter
from lightning_otel.dataset import batches as batches_module
from lightning_otel.dataset.batches import batches
from lightning_otel.demo.server import DemoServer
from lightning_otel.formats.transition_rows import COLUMNS
from lightning_otel.store import settle
from lightning_otel.tracing import operation
from lightning_otel.types import Report, Span, Trajectory


def rollout(name: str, response_id: str | None = None, tick: int = 0) -> Forest:
    """A rollout with two calls under a root."""
    forest = Forest(rollout_id=name, trace_id=name.ljust(32, "0"), process=name, tick=tick)
    with forest.inside(c.SPAN_ROLLOUT):
        forest.call(f"{name} first")
        forest.call(f"{name} second", response_id=response_id)
    return forest


# --- transitions ---------------------------------------------------------------------------------


def test_transitions_have_one_column_for_each_field(store: Store) -> None:
    """The table has the columns it promises, filled as the transition's fields are."""
    forest = Forest()
    with forest.agent("planner"):
        forest.make("chat", {**call_attributes("q", "a"), **token_attributes([1, 2], [3], [-0.5])})
        forest.reward(("ok", 1.0), ("short", 0.25))
    store.add(forest.spans)

    table = store.transitions()

    (row,) = table.dicts()
    (step,) = table
    assert table.columns == list(COLUMNS)
    assert (row["agent"], row["branch"], row["step"], row["done"]) == ("planner", 0, 0, True)
    assert (row["reward"], json.loads(row["rewards"])) == (1.0, {"ok": 1.0, "short": 0.25})
    assert json.loads(row["observation"]) == list(step.observation)
    assert (row["prompt_ids"], row["response_ids"], row["logprobs"]) == ([1, 2], [3], [-0.5])
    assert (row["capture"], row["next_observation"]) == ("exact", None)


def test_transitions_yield_a_shared_step_once(store: Store) -> None:
    """A plan that five paths share is one row, on the first branch; the parts are five.

    The same ids in another trace are other spans.
    """
    for trace in "ab":
        forest = Forest(rollout_id=trace, trace_id=trace * 32)
        with forest.inside("root"):
            forest.call("plan")
            forest.close(*[forest.open_call(f"part {index}") for index in range(5)])
        store.add(forest.spans)

    found = store.transitions().rows()

    assert [text_of(step.action) for step in found if step.is_shared] == ["plan"] * 2
    assert len(found) == 12
    assert [row["branch"] for row in store.transitions().dicts()] == [0, 0, 1, 2, 3, 4] * 2
    assert sum(len(path.transitions) for path in store.trajectories()) == 20


def test_transitions_report_what_led_to_them(store: Store) -> None:
    """The table's funnel is the store's, before a pass over its rows and after one."""
    lost = Forest(rollout_id=None, attempt_id=None, trace_id="f" * 32, process="f", tick=99)
    lost.reward(1.0)
    store.add([*rollout("r1").spans, *rollout("r2", tick=10).spans, *lost.spans])
    fresh, read = store.transitions(credit="last"), store.transitions(credit="last")

    rows = read.rows()

    assert fresh.report() == read.report() == store.report(credit="last")
    assert read.report().transitions == len(rows)


PEAK = """
import sys
from pathlib import Path
from lightning_otel import Store
Store(sys.argv[1]).transitions().to_parquet(sys.argv[2])
(peak,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
print(peak.split()[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's mark of a process is read")
def test_a_file_of_transitions_takes_the_same_memory_for_thrice_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settled spans are read, and rows are written, so many at a time."""
    monkeypatch.setattr(settle, "COMMIT_AHEAD_US", 2_000)  # else a quick reader reads segments
    peaks = []
    for count in (2_500, 7_500):
        store = Store(tmp_path / f"{count}.duckdb")
        for number in range(count):
            forest = Forest(rollout_id=f"r{number}", trace_id=f"{number:032x}", tick=10 * number)
            for _ in range(2):
                forest.call(os.urandom(1500).hex())
            store.add(forest.spans)
        store.writer().seal()
        store.settle()
        command = [sys.executable, "-c", PEAK, store.name, str(tmp_path / "t.parquet")]
        peaks.append(int(subprocess.run(command, capture_output=True, check=True).stdout))

    # DuckDB 1.5 keeps more of the file that it reads than 2.0.
    most = 1.6 if duckdb.__version__.startswith("1.") else 1.3
    assert peaks[1] < most * peaks[0]


# --- the store and the adapter say the same ------------------------------------------------------


def _ordered(found: Iterable[Adaptation]) -> tuple[list[Trajectory], Report]:
    adaptations = list(found)
    report = Report.total(each.report for each in adaptations)
    dropped = tuple(sorted(report.dropped, key=lambda each: (each.trace_id, each.span_id)))
    repairs = tuple(sorted(report.repairs, key=lambda each: (each.trace_id, each.span_id)))
    paths = [path for each in adaptations for path in each.trajectories]
    return (
        sorted(paths, key=lambda path: (path.rollout_id, path.attempt_id)),
        dataclasses.replace(report, dropped=dropped, repairs=repairs),
    )


@settings(max_examples=8, deadline=None)
@given(forests, st.lists(st.integers(0, 2), min_size=14, max_size=14), st.booleans(), st.booleans())
def test_splitting_spans_across_segments_and_batches_changes_nothing(
    spans: list[Span], parts: list[int], is_settled: bool, is_one_batch: bool
) -> None:
    """However spans lie in segments and files, and are read, the adapter finds the same."""
    expected = _ordered([TripletAdapter().explain(spans)])
    # Replaced because no test should write as many spans as fill two real batches.
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches_module, "BATCH_SPANS", 20_000 if is_one_batch else 1)
        store = Store(Path(folder) / "traces.duckdb")
        for part in range(3):
            store.add(span for span, own in zip(spans, parts, strict=False) if own == part)
            store.writer().seal()
            if is_settled and part == 1:
                store.settle()

        found = _ordered(map(TripletAdapter().explain, batches(store.source)))
        homes = {row["rollout_id"] for row in store.sql("SELECT * FROM rollouts").dicts()}

    assert found == expected
    assert {path.rollout_id for path in expected[0]} <= homes
    assert len(homes) == expected[1].rollouts


# --- from the client to the table ----------------------------------------------------------------


def test_a_reward_from_another_process_reaches_its_call(
    store: Store, server: DemoServer, run_python: Any
) -> None:
    """An agent records, ends, and a script knows only the response's id: the reward arrives."""
    client = openai.OpenAI(base_url=server.base_url, api_key="k")
    with auto_trace(store=store) as recording:
        replies = [
            client.chat.completions.create(
                model="toy", messages=[{"role": "user", "content": f"hello {index}"}]
            )
            for index in range(2)
        ]
    client.close()

    run_python(
        """
        import os, sys
        os.environ["LIGHTNING_OTEL_STORE"] = sys.argv[1]
        from lightning_otel import emit_reward
        assert emit_reward(0.0, response_id=sys.argv[2])
        """,
        store.name,
        replies[0].id,
    )

    found = store.transitions().rows()
    assert [(step.response_id, step.reward) for step in found] == [
        (replies[0].id, 0.0),
        (replies[1].id, None),
    ]
    assert [row["rollout_id"] for row in store.rollouts()] == [recording.rollout_id]


def test_a_reward_from_another_recording_reaches_the_rollout_it_names(
    store: Store, server: DemoServer
) -> None:
    """A judge that records itself gives its reward to the rollout it names, not to its own call."""
    with openai.OpenAI(base_url=server.base_url, api_key="k") as client:
        asked: list[Any] = [{"role": "user", "content": "hello"}]
        with auto_trace(store=store) as judged:
            answer = client.chat.completions.create(model="toy", messages=asked)
        with auto_trace(store=store):
            verdict = client.chat.completions.create(model="toy", messages=asked)
            emit_reward(0.5, rollout_id=judged.rollout_id)

    found = {step.response_id: step.reward for step in store.transitions()}

    assert found == {answer.id: 0.5, verdict.id: None}
    assert store.report().rollouts == len(store.rollouts().rows()) == 2


def test_marks_by_hand_become_transitions(store: Store) -> None:
    """What is marked in code without a client is a trajectory with rewards and its ending."""
    with auto_trace(store=store, agent="walker"):
        emit_observation("start")
        emit_action("move", "left")
        emit_reward(0.25)
        emit_observation("wall")
        emit_action("move", {"direction": "right"})
        emit_reward(1.0)
        emit_observation("exit")

    first, last = store.transitions(agents="walk*").rows()

    assert (text_of(first.observation), text_of(first.action)) == ("start", "left")
    assert (text_of(first.next_observation), first.reward) == ("wall", 0.25)
    assert json.loads(text_of(last.action)) == {"direction": "right"}
    assert (text_of(last.next_observation), last.reward, last.done) == ("exit", 1.0, True)


def test_a_fan_out_through_the_client_is_five_paths(store: Store, server: DemoServer) -> None:
    """A plan and five gathered calls of the real client share one exact transition."""

    async def agent() -> None:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k") as client:

            async def ask(text: str) -> None:
                await client.chat.completions.create(
                    model="slow", messages=[{"role": "user", "content": text}]
                )

            await ask("plan")
            await asyncio.gather(*(ask(f"part {index}") for index in range(5)))

    with auto_trace(store=store) as recording:
        asyncio.run(agent())

    assert [len(path.transitions) for path in store.trajectories()] == [2] * 5
    found = store.transitions().rows()
    assert len(found) == 6
    assert [text_of(step.observation) for step in found if step.is_shared] == ["plan"]
    assert len(recording.trajectories()) == 5


def test_a_tool_loop_of_concurrent_agents_is_one_path_each(
    store: Store, server: DemoServer
) -> None:
    """Agents with tool loops, run at once under one name, keep their conversations and rewards."""
    client = openai.OpenAI(base_url=server.base_url, api_key="k")

    def ask(messages: list[Any]) -> None:
        reply = client.chat.completions.create(model="toy", messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})

    with auto_trace(store=store):
        loops: list[list[Any]] = [[{"role": "user", "content": f"task {i}"}] for i in range(3)]
        for turn in range(2):
            for index, messages in enumerate(loops):
                with context(agent="worker"), operation(f"loop {index}"):
                    ask(messages)
                    if turn:
                        emit_reward(float(index))
                messages.append({"role": "user", "content": "go on"})
    client.close()

    found = list(store.trajectories())

    ends = {
        text_of(path.transitions[-1].observation[:1]): path.transitions[-1].reward for path in found
    }
    assert ends == {"task 0": 0.0, "task 1": 1.0, "task 2": 2.0}
    assert store.report().dropped == ()
