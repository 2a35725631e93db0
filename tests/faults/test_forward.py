"""Row L18: the collector is down for ten minutes, and then it is not; what a kill costs.

``LIGHTNING_TEST_KILLS`` is how many forwarders are killed.
"""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.forwarding.collector import Endpoint, Reply, partial
from tests.store.lake.servers import free_port

from lightning_otel import Store, auto_trace, config, emit_message, emit_reward
from lightning_otel.exporters.forwarding import Forwarder
from lightning_otel.exporters.forwarding.senders import sender_for

KILLS = int(os.environ.get("LIGHTNING_TEST_KILLS", "3"))
EXIT_S = 0.1
PROGRAM = """\
import sys, lightning_otel as lo
for number in range(5):
    lo.emit_message(str(number))
"""


def test_collector_that_is_down_for_ten_minutes(store: Store) -> None:
    """Whatever ended meanwhile, settled or not, is delivered once when it is back."""
    port = free_port()
    found = config.otlp_endpoint(f"http://127.0.0.1:{port}")
    assert found is not None
    waits: list[float] = []
    back: list[Endpoint] = []

    def wait(seconds: float) -> bool:
        """Time passes: the program goes on, spans are settled, and after ten minutes it is up."""
        waits.append(seconds)
        with auto_trace(store=store):
            emit_message("meanwhile")
        if len(waits) == 5:
            store.writer().seal()
            store.settle()
        if sum(waits) >= 600 and not back:
            back.append(Endpoint(port))
        return False

    with auto_trace(store=store):
        for number in range(700):
            emit_message(str(number))
    with store.follow("otlp") as follower:
        forwarder = Forwarder(follower, sender_for(found), with_content=False, wait=wait)
        assert forwarder.send_waiting()
    (endpoint,) = back
    endpoint.close()

    wanted = {span.span_id for span in store.spans()}
    assert 600 <= sum(waits) <= 720
    assert len(waits) < 30
    assert endpoint.counts() == dict.fromkeys(wanted, 1)
    assert forwarder.delivered == len(wanted) == 701 + 2 * len(waits)


def way_of(way: str, endpoint: Endpoint, hang: threading.Event) -> str:
    """The URL of an endpoint that is down in some way."""
    if way == "refuses":
        endpoint.reply = lambda spans, size: Reply(503)
    if way == "hangs":
        endpoint.reply = lambda spans, size: Reply(503, hang=hang)
    return f"http://127.0.0.1:{free_port()}" if way == "nobody listens" else endpoint.url


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("way", ["nobody listens", "refuses", "hangs"])
def test_end_waits_for_no_collector(
    store: Store, endpoint: Endpoint, way: str, is_early: bool
) -> None:
    """Told to end, forwarding does within 0.1 s, be it in its first request or between two."""
    with auto_trace(store=store):
        emit_message("waits")
    hang = threading.Event()
    found = config.otlp_endpoint(way_of(way, endpoint, hang))
    assert found is not None
    taken: list[float] = []
    for number in range(3):
        follower = store.follow(f"otlp-{number}")
        forwarder = Forwarder(follower, sender_for(found), with_content=False)
        forwarder.start()
        if not is_early:
            time.sleep(0.2)
        began = time.monotonic()
        is_done = forwarder.finish()
        taken.append(time.monotonic() - began)
    hang.set()

    assert not is_done
    assert forwarder.delivered == 0
    assert min(taken) <= EXIT_S


@pytest.mark.parametrize("way", ["nobody listens", "hangs"])
def test_program_exits_while_the_collector_is_down(
    store: Store, endpoint: Endpoint, tmp_path: Path, spawn: Callable[..., Any], way: str
) -> None:
    """A run ends as ever; what waits is said, is kept, and is sent later, once."""
    hang = threading.Event()
    program = tmp_path / "app.py"
    program.write_text(PROGRAM)
    out = {"OTEL_EXPORTER_OTLP_ENDPOINT": way_of(way, endpoint, hang)}
    run = spawn("run", "--store", store.name, program, env=out)
    hang.set()
    endpoint.reply = lambda spans, size: Reply()
    (row,) = store.rollouts()
    words = ["--to", endpoint.url, "--once", "--rollout", row["rollout_id"], "--store", store.name]
    said = [spawn("forward", *words).stderr for _ in range(2)]

    assert run.returncode == 0
    assert "OTLP: 0 spans delivered, 6 NOT delivered: " in run.stderr
    assert "lightning-otel export otlp --rollout " in run.stderr
    assert ["OTLP: 6 spans delivered" in said[0], "OTLP: 0 spans delivered" in said[1]] == [
        True
    ] * 2
    assert endpoint.counts() == {span.span_id: 1 for span in store.spans()}


TRACED = """\
import atexit, time
import lightning_otel as lo
with lo.auto_trace():
    pass
atexit.register(lambda: print(time.monotonic() - began))
time.sleep(0.5)
with lo.auto_trace():
    for number in range(5):
        lo.emit_message(str(number))
began = time.monotonic()
"""


@pytest.mark.parametrize("way", ["nobody listens", "refuses", "hangs"])
def test_traced_program_exits_while_the_collector_is_down(
    store: Store, endpoint: Endpoint, tmp_path: Path, spawn: Callable[..., Any], way: str
) -> None:
    """Under ``auto_trace``, too: no exit waits, and what waits is sent later, once."""
    hang = threading.Event()
    out = {"OTEL_EXPORTER_OTLP_ENDPOINT": way_of(way, endpoint, hang)}
    traced = subprocess.run(
        [sys.executable, "-c", TRACED], cwd=tmp_path, capture_output=True, text=True, timeout=50,
        env={**os.environ, **out, "LIGHTNING_OTEL_STORE": store.name},
    )  # fmt: skip
    hang.set()
    endpoint.reply = lambda spans, size: Reply()
    (command,) = re.findall("lightning-otel (export otlp --name .+)", traced.stderr)
    words = [*command.split(), "--to", endpoint.url, "--once", "--store", store.name]
    for _ in range(2):
        assert spawn(*words).returncode == 0

    assert traced.returncode == 0
    assert float(traced.stdout) <= EXIT_S
    assert list(endpoint.counts().values()) == [1] * 7


@pytest.mark.parametrize("way", ["nobody listens", "hangs"])
def test_forward_stops_when_it_is_told_to(store: Store, endpoint: Endpoint, way: str) -> None:
    """``forward`` ends with SIGTERM, though the endpoint is down or silent, and says what waits."""
    with auto_trace(store=store):
        emit_message("waits")
    hang = threading.Event()
    url = way_of(way, endpoint, hang)
    with subprocess.Popen(
        [sys.executable, "-m", "lightning_otel", "forward", "--to", url, "--store", store.name],
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stderr is not None
        child.stderr.readline()
        if way == "hangs":
            assert endpoint.asked.acquire(timeout=30)
        else:
            assert "waiting: " in child.stderr.readline()
        began = time.monotonic()
        child.send_signal(signal.SIGTERM)
        said = child.stderr.read()
        child.wait(30)
        taken = time.monotonic() - began
    hang.set()

    assert child.returncode == 0
    assert "NOT delivered" in said
    assert taken < 2  # mostly the interpreter's own end, on a busy machine


def test_forward_once_counts_what_was_not_delivered(
    store: Store, spawn: Callable[..., Any]
) -> None:
    """Nobody listens: so many wait, and wait on."""
    with auto_trace(store=store):
        emit_message("waits")
    command = ["export", "otlp", "--to", f"http://127.0.0.1:{free_port()}", "--once"]

    first, again = (spawn(*command, "--store", store.name) for _ in range(2))

    assert (first.returncode, again.returncode) == (1, 1)
    assert "0 spans delivered, 2 NOT delivered: " in first.stderr
    assert "0 spans delivered, 2 NOT delivered: " in again.stderr


@pytest.mark.parametrize("is_ended", [True, False])
def test_forward_once_counts_what_a_silent_endpoint_leaves(
    store: Store, endpoint: Endpoint, is_ended: bool
) -> None:
    """Spans and rewards, once it has waited long enough, or is told to end while it waits."""
    with auto_trace(store=store):
        emit_message("waits")
        emit_reward(1.0)
        emit_reward("tone", 0.5)
    hang = threading.Event()
    url = way_of("hangs", endpoint, hang)
    command = ["export", "otlp", "--to", url, "--once", "--phoenix", "--store", store.name]
    with subprocess.Popen(
        [sys.executable, "-m", "lightning_otel", *command], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "30" if is_ended else "0.2"},
    ) as child:  # fmt: skip
        assert endpoint.asked.acquire(timeout=30)
        if is_ended:
            child.send_signal(signal.SIGTERM)
        _, text = child.communicate(timeout=30)
    hang.set()

    assert child.returncode == 1
    assert "OTLP: 0 spans delivered, 4 NOT delivered: " in text
    assert "Phoenix: 0 rewards delivered, 2 NOT delivered: " in text


def test_forward_once_tells_by_its_code_what_was_rejected(
    store: Store, endpoint: Endpoint, spawn: Callable[..., Any]
) -> None:
    """1 where the endpoint did not take all, though nothing waits any more."""
    with auto_trace(store=store):
        emit_message("bad")
    endpoint.reply = lambda spans, size: Reply(200, partial(len(spans), "no"))
    command = ["forward", "--to", endpoint.url, "--once", "--store", store.name]

    first, again = (spawn(*command) for _ in range(2))

    assert (first.returncode, again.returncode) == (1, 0)
    assert "2 REJECTED: " in first.stderr


def test_killed_forwarder_sends_at_most_one_batch_twice(store: Store, endpoint: Endpoint) -> None:
    """After every kill the next one goes on: nothing is missing, one batch at most came twice."""
    with auto_trace(store=store):
        for number in range(3_000):
            emit_message(str(number))
    kills = 0
    command = [sys.executable, "-m", "lightning_otel", "forward", "--to", endpoint.url]
    command += ["--store", store.name]
    while kills < KILLS:
        before = len(endpoint.spans)
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
            while len(endpoint.spans) == before and len(endpoint.counts()) < 3_001:
                time.sleep(0.002)
            time.sleep(random.random() / 50)
            child.kill()
        kills += 1
    done = subprocess.run([*command, "--once"], capture_output=True, text=True, timeout=50)

    counts = endpoint.counts()
    assert done.returncode == 0, done.stderr
    assert set(counts) == {span.span_id for span in store.spans()}
    assert max(counts.values()) <= 1 + KILLS
    assert sum(counts.values()) - len(counts) <= 512 * KILLS


def test_two_forwarders_do_not_meet(store: Store, endpoint: Endpoint) -> None:
    """A second forwarder to the same endpoint is refused while the first is at work."""
    with auto_trace(store=store):
        emit_message("hello")
    command = [sys.executable, "-m", "lightning_otel", "forward", "--to", endpoint.url]
    command += ["--store", store.name]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as first:
        while len(endpoint.spans) < 2:
            time.sleep(0.01)
        second = subprocess.run(command, capture_output=True, text=True, timeout=50)
        first.terminate()

    assert first.returncode == 0
    assert second.returncode == 4
    assert "at work in another process" in second.stderr
    assert endpoint.counts() == Counter(span.span_id for span in store.spans())
