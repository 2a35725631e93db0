"""A rollback in the middle of traffic: agents ask through real clients, somebody else decides."""

import contextlib
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from lightning_otel import Resources, Store, auto_trace, uninstrument
from lightning_otel.demo.server import DemoServer, LogEntry
from lightning_otel.state import State

THREADS = 4
OPERATOR = """
import sys
from lightning_otel.resources import Resources
from lightning_otel.state import State
resources = Resources(State(sys.argv[1]))
resources.names()
print("ready", flush=True)
sys.stdin.readline()
print(resources.rollback("system_prompt"), flush=True)
"""

AGENT = """
import sys, time
from pathlib import Path
import openai
import lightning_otel as lo
from lightning_otel.instrumentors.substitution import watcher

# How long a request waits for what is read slowly is tested elsewhere: this machine may be busy.
watcher.FIRST_S, watcher.CATCH_UP_S = 20, 5
kind, url, place, stop = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)
store = lo.Store(place)

def ask(prompt):
    for turn in range(4):
        time.sleep(0.1 if turn else 0)
        said = [{"role": "system", "content": prompt}, {"role": "user", "content": str(turn)}]
        client.chat.completions.create(model="toy", messages=said)
    return 1.0

def given(task, resources):
    return ask(resources["system_prompt"].format())

if kind == "unchanged":
    while not Path(stop).exists():
        with lo.auto_trace(store=store, apply=True):
            ask("own")
else:
    queue = lo.Queue(lo.State.beside(store))
    runner = lo.Runner(given, store=store, queue=queue, resources=lo.Resources(queue.state))
    while not Path(stop).exists():
        queue.put(["task"])
        assert runner.step().status == "succeeded"
"""
WITHIN_S = 2.0


def prompt(version: int) -> list[dict[str, str]]:
    """A prompt each of whose parts says which version it is of."""
    return [
        {"role": "system", "content": f"system {version}"},
        {"role": "user", "content": f"question {version}"},
        {"role": "assistant", "content": f"answer {version}"},
    ]


@pytest.fixture
def operator(store: Store) -> Iterator["subprocess.Popen[str]"]:
    """A process that rolls back when it is told to."""
    with subprocess.Popen(
        [sys.executable, "-c", OPERATOR, store.name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        yield running
        running.kill()


def prompt_of(exchange: LogEntry) -> list[Any]:
    return list((exchange.request or {})["messages"][:3])


def test_rollback_in_traffic_reaches_every_request_whole(
    store: Store,
    server: DemoServer,
    operator: "subprocess.Popen[str]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No request fails, none is made of two versions, and each span says which one it was given."""
    monkeypatch.setattr("lightning_otel.instrumentors.substitution.watcher.FRESH_S", 0.02)
    monkeypatch.setattr("lightning_otel.resources.FRESH_S", 0.0)
    resources = Resources(State(store.name))
    for version in (1, 2):
        resources.publish("system_prompt", prompt(version), alias="live")
    assert operator.stdin is not None
    assert operator.stdout is not None
    assert operator.stdout.readline() == "ready\n"
    failures: list[BaseException] = []
    done = threading.Event()

    def work(client: openai.OpenAI) -> None:
        own: Any = [{"role": "system", "content": "own"}, {"role": "user", "content": "hello"}]
        try:
            while not done.is_set():
                with auto_trace(store=store, apply=True):
                    client.chat.completions.create(model="toy", messages=own)
                time.sleep(0.005)
        except BaseException as exc:
            failures.append(exc)
            raise

    with openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:
        threads = [threading.Thread(target=work, args=(client,)) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        server.wait_for_log(5 * THREADS, timeout_s=30)
        operator.stdin.write("now\n")
        operator.stdin.flush()
        rolled_back = operator.stdout.readline()
        before = len(server.log)
        server.wait_for_log(before + 10 * THREADS, timeout_s=30)
        done.set()
        for thread in threads:
            thread.join(30)
    uninstrument()

    assert failures == []
    assert rolled_back == "system_prompt@1\n"
    exchanges = {exchange.response_id: exchange for exchange in server.log}
    given = {exchange.response_id: prompt_of(exchange) for exchange in server.log}
    assert all(found in (prompt(1), prompt(2)) for found in given.values())
    stamped = {
        step.response_id: step.resources
        for path in store.trajectories()
        for step in path.transitions
    }
    assert stamped.keys() == exchanges.keys()
    for response_id, versions in stamped.items():
        assert prompt(int(versions["system_prompt"])) == given[response_id]
    counts = Counter(found[0]["content"] for found in given.values())
    assert min(counts["system 1"], counts["system 2"]) >= THREADS
    assert [prompt_of(exchange) for exchange in server.log[-THREADS:]] == [prompt(1)] * THREADS


def test_rollback_reaches_agents_in_other_processes(
    store: Store, server: DemoServer, tmp_path: Path
) -> None:
    """No rollout mixes versions, and two seconds later none begins with what was taken back."""
    resources, stop = Resources(State(store.name)), tmp_path / "stop"
    for version in (1, 2):
        resources.publish("system_prompt", f"system {version}", alias="live")
    begun = ("unchanged", "unchanged", "given")
    with contextlib.ExitStack() as stack:
        agents = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", AGENT, kind, server.base_url, store.name, str(stop)],
                    stderr=subprocess.PIPE, text=True,
                )
            )
            for kind in begun
        ]  # fmt: skip
        for agent in agents:
            stack.callback(agent.kill)
        server.wait_for_log(6 * len(agents), timeout_s=40)

        resources.rollback("system_prompt")
        done_ns = time.time_ns()
        time.sleep(WITHIN_S)
        server.wait_for_log(len(server.log) + 8 * len(agents), timeout_s=60)
        stop.touch()
        told = [agent.communicate(timeout=60)[1] for agent in agents]
        assert [agent.returncode for agent in agents] == [0] * len(agents), told

    rollouts = [path.transitions for path in store.trajectories()]
    versions = [{step.resources["system_prompt"] for step in steps} for steps in rollouts]
    assert all(len(each) == 1 for each in versions)
    assert all(len(steps) == 4 for steps in rollouts)
    calls = {exchange.response_id: prompt_of(exchange)[0]["content"] for exchange in server.log}
    assert calls == {
        step.response_id: f"system {step.resources['system_prompt']}"
        for steps in rollouts
        for step in steps
    }
    later = [
        found
        for steps, found in zip(rollouts, versions, strict=True)
        if steps[0].start_ns > done_ns + WITHIN_S * 1e9
    ]
    assert len(later) >= len(agents)
    assert later == [{"1"}] * len(later)
    amid = [
        found
        for steps, found in zip(rollouts, versions, strict=True)
        if steps[0].start_ns < done_ns - 1e7 and steps[-1].start_ns > done_ns
    ]
    assert amid
    assert amid == [{"2"}] * len(amid)
