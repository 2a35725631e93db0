"""A rollback in the middle of traffic: threads ask through real clients, somebody else decides."""

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from lightning_otel import Store, auto_trace, provider
from lightning_otel.demo.server import DemoServer, Exchange
from lightning_otel.resources import Resources
from lightning_otel.state import State
from lightning_otel.substitution import watching

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


def prompt_of(exchange: Exchange) -> list[Any]:
    """What a request began with."""
    return list((exchange.request or {})["messages"][:3])


def test_rollback_in_traffic_reaches_every_request_whole(
    store: Store,
    server: DemoServer,
    operator: "subprocess.Popen[str]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No request fails, none is made of two versions, and each span says which one it was given."""
    monkeypatch.setattr(watching, "FRESH_S", 0.02)
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
    provider.uninstrument()

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
