"""From a store to transitions: batches, rewards that come later, and the views that show them."""

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
    reward_attributes,
    rewards,
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
from lightning_otel.formats.format import distinct
from lightning_otel.formats.transition_rows import COLUMNS
from lightning_otel.formats.transition_rows import row as row_of
from lightning_otel.tracing import operation
from lightning_otel.types import Report, Span, Trajectory

DAY_NS = 24 * 3600 * 1_000_000_000


def rollout(name: str, response_id: str | None = None, tick: int = 0) -> Forest:
    """A rollout with two calls under a root."""
    forest = Forest(rollout_id=name, trace_id=name.ljust(32, "0"), process=name, tick=tick)
    with forest.inside(c.SPAN_ROLLOUT):
        forest.call(f"{name} first")
        forest.call(f"{name} second", response_id=response_id)
    return forest


def late(name: str, value: float, rollout_id: str | None = None, **links: str) -> Span:
    """A reward in a trace of its own, a day after everything else."""
    attributes = reward_attributes(value, **links)
    if rollout_id is not None:
        attributes[c.ROLLOUT_ID] = rollout_id
    return Span(
        name.ljust(32, "f"), name, None, c.SPAN_ANNOTATION, DAY_NS, DAY_NS, attributes=attributes
    )


def rewards_of(store: Store, **options: Any) -> dict[str, float | None]:
    """The reward of each answer in a store."""
    return rewards(list(store.trajectories(**options)))


def rollouts_of(store: Store) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows of the ``rollouts`` view by rollout and attempt."""
    return {(row["rollout_id"], row["attempt_id"]): row for row in store.rollouts().dicts()}


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


def test_transition_row_is_json_in_column_order(store: Store) -> None:
    """A row holds only what JSON knows, with token ids as lists."""
    forest = Forest()
    forest.make("chat", {**call_attributes("q", "a"), **token_attributes([1], [2])})
    (path,) = TripletAdapter().adapt(forest.spans)

    row = row_of(path.transitions[0], path.branch)

    assert list(row) == list(COLUMNS)
    assert json.loads(json.dumps(row))["prompt_ids"] == [1]


def test_transitions_yield_a_shared_step_once(store: Store) -> None:
    """A plan that five paths share is one row, on the first branch; the parts are five."""
    forest = Forest()
    with forest.inside("root"):
        forest.call("plan")
        forest.close(*[forest.open_call(f"part {index}") for index in range(5)])
    store.add(forest.spans)

    found = store.transitions().rows()

    assert [text_of(step.action) for step in found if step.is_shared] == ["plan"]
    assert len(found) == 6
    assert [row["branch"] for row in store.transitions().dicts()] == [0, 0, 1, 2, 3, 4]
    assert sum(len(path.transitions) for path in store.trajectories()) == 10


def test_transitions_select_agents_by_glob(store: Store) -> None:
    """Only agents whose name matches are given, with what they share told once."""
    forest = Forest()
    for name in ("planner", "plan critic", "worker"):
        with forest.agent(name):
            forest.call(f"by {name}")
    store.add(forest.spans)

    found = store.transitions(agents="plan*")

    assert [step.agent for step in found] == ["planner", "plan critic"]


def test_transitions_select_one_rollout(store: Store) -> None:
    """One rollout's transitions are read without the others."""
    store.add([*rollout("r1").spans, *rollout("r2", tick=10).spans])

    found = store.transitions(rollout_id="r2").rows()

    assert [text_of(step.action) for step in found] == ["r2 first", "r2 second"]
    assert store.report(rollout_id="r2").rollouts == 1
    assert store.transitions(rollout_id="r3").rows() == []


def test_transitions_apply_the_credit_rule(store: Store) -> None:
    """The rule and its discount are those of the adapter."""
    forest = rollout("r1")
    forest.reward(1.0)
    store.add(forest.spans)

    found = store.transitions(credit="discounted", gamma=0.5).rows()

    assert [step.reward for step in found] == [0.5, 1.0]


def test_transitions_report_what_led_to_them(store: Store) -> None:
    """The table's funnel is the store's, before a pass over its rows and after one."""
    store.add([*rollout("r1").spans, *rollout("r2", tick=10).spans, late("lost", 1.0)])
    fresh, read = store.transitions(credit="last"), store.transitions(credit="last")

    rows = read.rows()

    assert fresh.report() == read.report() == store.report(credit="last")
    assert read.report().transitions == len(rows)


def test_distinct_keeps_equal_ids_of_different_traces_apart() -> None:
    """A span id is one within its trace only."""
    found: list[Trajectory] = []
    for trace_id in ("1" * 32, "2" * 32):
        forest = Forest(trace_id=trace_id, rollout_id=trace_id)
        forest.call("plan")
        forest.close(*[forest.open_call(f"part {index}") for index in range(2)])
        found += TripletAdapter().adapt(forest.spans)

    assert len(list(distinct(found))) == 6


PEAK = """
import sys
from pathlib import Path
from lightning_otel import Store
Store(sys.argv[1]).transitions().to_parquet(sys.argv[2])
(peak,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
print(peak.split()[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's mark of a process is read")
def test_a_file_of_transitions_takes_the_same_memory_for_thrice_as_many(tmp_path: Path) -> None:
    """Spans are read, and rows are written, so many at a time."""
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


# --- rewards that come later ---------------------------------------------------------------------


@pytest.fixture(params=[1, 20_000], ids=["one rollout a batch", "one batch"])
def batch_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store read a rollout at a time, and one read at once.

    The size is replaced because no test should write as many spans as fill two real batches.
    """
    monkeypatch.setattr(batches_module, "BATCH_SPANS", request.param)


@pytest.mark.usefixtures("batch_size")
def test_a_late_reward_reaches_the_response_it_names(store: Store) -> None:
    """A reward from elsewhere comes with its rollout, is counted once, and is no rollout itself."""
    store.add([*rollout("r1", "chatcmpl-1").spans, *rollout("r2", "chatcmpl-2", 50).spans])
    store.add([late("l1", 0.0, response_id="chatcmpl-1")])

    report = store.report()

    assert rewards_of(store) == {
        "r1 first": None,
        "r1 second": 0.0,
        "r2 first": None,
        "r2 second": None,
    }
    assert (report.rollouts, report.spans) == (2, 7)
    assert (report.rewards, report.rewards_placed, report.dropped) == (1, 1, ())


@pytest.mark.usefixtures("batch_size")
def test_a_late_reward_reaches_the_span_it_names(store: Store) -> None:
    """A reward for a root span goes to the last call inside it."""
    one, two = rollout("r1"), rollout("r2", tick=50)
    root = two.spans[0].span_id
    store.add([*one.spans, *two.spans, late("l1", 0.5, span_id=root)])

    assert rewards_of(store)["r2 second"] == 0.5
    assert store.report().rewards_placed == 1


@pytest.mark.usefixtures("batch_size")
def test_a_late_reward_reaches_the_rollout_it_names(store: Store) -> None:
    """A reward that names only a rollout is placed in it by the rule."""
    store.add([*rollout("r1").spans, *rollout("r2", tick=50).spans])
    store.add([late("l1", 0.5, rollout_id="r1")])

    assert rewards_of(store)["r1 second"] == 0.5
    assert rollouts_of(store)["r1", "1"]["reward"] == 0.5


@pytest.mark.usefixtures("batch_size")
def test_late_rewards_reach_their_targets_in_any_number(store: Store) -> None:
    """Rewards for every rollout of a store, given in another order, all arrive."""
    forests_made = [rollout(f"r{index}", f"chatcmpl-{index}", 50 * index) for index in range(5)]
    store.add(
        late(f"l{index}", float(index), response_id=f"chatcmpl-{index}")
        for index in reversed(range(5))
    )
    store.add(span for forest in forests_made for span in forest.spans)

    found = rewards_of(store)

    assert {name: value for name, value in found.items() if "second" in name} == {
        f"r{index} second": float(index) for index in range(5)
    }
    assert store.report().dropped == ()


@pytest.mark.usefixtures("batch_size")
def test_rewards_of_a_judging_rollout_go_to_what_it_judged(store: Store) -> None:
    """A judge's own rollout keeps its calls and loses its rewards to those it judged."""
    judge = Forest(rollout_id="judge", trace_id="j" * 32, process="judge", tick=500)
    with judge.inside(c.SPAN_ROLLOUT):
        for index in range(2):
            judge.call(f"verdict {index}")
            judge.reward(float(index), response_id=f"chatcmpl-{index}")
    for index in range(2):
        store.add(rollout(f"r{index}", f"chatcmpl-{index}", 50 * index).spans)
    store.add(judge.spans)

    found = rewards_of(store)

    assert [found[f"r{index} second"] for index in range(2)] == [0.0, 1.0]
    assert [found[f"verdict {index}"] for index in range(2)] == [None, None]
    assert rollouts_of(store)["judge", "1"]["rewards"] == 0
    report = store.report()
    assert (report.rollouts, report.rewards) == (3, 2)


@pytest.mark.usefixtures("batch_size")
def test_a_late_reward_without_a_target_is_reported_once(store: Store) -> None:
    """A link to nothing stays with its own rollout, in the report and in the views."""
    orphan = late("l1", 1.0, response_id="chatcmpl-gone")
    store.add([*rollout("r1").spans, orphan])

    report = store.report()

    assert [each.span_id for each in report.dropped] == ["l1"]
    assert (report.rewards, report.rewards_placed) == (1, 0)
    assert {row["rollout_id"] for row in store.sql("SELECT * FROM rewards").dicts()} == {
        orphan.trace_id
    }


def test_one_rollout_is_read_with_the_rewards_that_came_later(store: Store) -> None:
    """Reading one rollout finds its late rewards, and leaves those of others alone."""
    store.add([*rollout("r1", "chatcmpl-1").spans, *rollout("r2", "chatcmpl-2", 50).spans])
    reward = late("l1", 0.25, response_id="chatcmpl-1")
    store.add([reward, late("l2", 0.75, response_id="chatcmpl-2")])

    assert rewards_of(store, rollout_id="r1") == {"r1 first": None, "r1 second": 0.25}
    assert store.report(rollout_id="r1").rewards == 1
    assert store.report(rollout_id=reward.trace_id) == Report()


def test_views_show_late_rewards_where_they_belong(store: Store) -> None:
    """``rewards`` and ``rollouts`` list a late reward under the rollout it judges."""
    store.add([*rollout("r1", "chatcmpl-1").spans, late("l1", 0.25, response_id="chatcmpl-1")])

    (reward,) = store.sql("SELECT * FROM rewards").dicts()
    rollouts = rollouts_of(store)

    assert (reward["rollout_id"], reward["attempt_id"], reward["value"]) == ("r1", "1", 0.25)
    assert (reward["link_key"], reward["link_value"]) == (c.RESPONSE_ID, "chatcmpl-1")
    assert list(rollouts) == [("r1", "1")]
    row = rollouts["r1", "1"]
    assert (row["spans"], row["traces"], row["calls"], row["rewards"]) == (4, 1, 2, 1)
    assert row["reward"] == 0.25
    assert row["end_ns"] < DAY_NS  # a reward given later does not prolong its rollout


def test_views_show_the_final_reward_of_a_rollout(store: Store) -> None:
    """Of rewards given within and later the last one is the rollout's."""
    forest = rollout("r1", "chatcmpl-1")
    forest.reward(0.1)
    store.add([*forest.spans, late("l1", 0.9, response_id="chatcmpl-1")])

    row = rollouts_of(store)["r1", "1"]

    assert (row["reward"], row["rewards"]) == (0.9, 2)


def test_views_give_a_rollouts_reward_to_its_latest_attempt(store: Store) -> None:
    """A reward that names a rollout and no attempt makes no attempt of its own."""
    second = Forest(rollout_id="r1", attempt_id="2", trace_id="2" * 32, tick=10)
    second.call("second try")
    store.add([*second.spans, late("l1", 0.5, rollout_id="r1")])

    assert list(rollouts_of(store)) == [("r1", "2")]
    assert rewards_of(store) == {"second try": 0.5}


def test_views_hold_in_memory_packed_and_settled(store: Store, tmp_path: Path) -> None:
    """Live, settled, packed and in memory the views say the same of a late reward."""
    spans = [*rollout("r1", "chatcmpl-1").spans, late("l1", 0.25, response_id="chatcmpl-1")]
    memory = Store(":memory:")
    memory.add(spans)
    store.add(spans)
    query = "SELECT rollout_id, attempt_id, rewards, reward, end_ns FROM rollouts"

    live = list(store.sql(query).dicts())
    store.writer().seal()
    store.settle()
    settled = list(store.sql(query).dicts())
    store.pack(tmp_path / "packed.duckdb")
    with duckdb.connect(str(tmp_path / "packed.duckdb"), read_only=True) as con:
        packed = con.execute(query).fetchall()

    assert live == settled == list(memory.sql(query).dicts())
    assert packed == [tuple(live[0].values())]


def test_rewards_of_foreign_traces_without_ids_stay(store: Store) -> None:
    """Spans that name neither rollout nor attempt are rollouts by trace, rewards included."""
    forest = Forest(rollout_id=None, attempt_id=None)
    with forest.inside("root"):
        forest.call("answer")
        forest.reward(1.0)
    store.add(forest.spans)

    assert rewards_of(store) == {"answer": 1.0}
    assert rollouts_of(store)[forest.trace_id, "1"]["rewards"] == 1


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
    assert list(rollouts_of(store)) == [(recording.rollout_id, "1")]


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
    assert store.report().rollouts == len(rollouts_of(store)) == 2


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
