"""Writers, senders, a receiver, readers and settlers under random kills, for minutes.

    python -m tests.faults.soak [--minutes 3] [--writers 8] [--rate 200] [--seed N]

Every role runs in processes of its own; each is killed with SIGKILL at random and started again.
A writer acknowledges a span when its ``end()`` has returned, a sender its spans when the receiver
answered 200; until then it sends the same ones again, so that some arrive twice. At the end every
acknowledged span must be stored once, and the store's own numbers must add up, before the last
settling and after.
"""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.harness import Host
from tests.store.lake.servers import free_port

WRITER = """
run, rate = sys.argv[1], float(sys.argv[2])
path = os.path.join("acknowledged", run)
acks = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
number = 0
while True:
    with tracer.start_as_current_span(f"{run}.{number}", attributes={"text": "x" * 1000}):
        tracer.start_span(f"{run}.{number}.inner").end()
        os.write(acks, b".")
    os.write(acks, b".")
    number += 1
    time.sleep(2 / rate)
"""
BATCH = 50
SENDER = """
import http.client, os, sys, time
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
run, port, batch, rate = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
acks = os.open(os.path.join("acknowledged", run), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
number = 0
while True:
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    for _ in range(batch):
        now = time.time_ns()
        spans.add(name=f"{run}.{number}", trace_id=os.urandom(16), span_id=os.urandom(8),
                  start_time_unix_nano=now, end_time_unix_nano=now + 1)
        number += 1
    body, kind = request.SerializeToString(), {"Content-Type": "application/x-protobuf"}
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            connection.request("POST", "/v1/traces", body, kind)
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                break
            assert answer.status in (429, 503), answer.status
        except (OSError, http.client.HTTPException):
            pass  # the receiver was killed: the same spans once more
        finally:
            connection.close()
        time.sleep(0.2)
    os.write(acks, b"." * batch)
    time.sleep(batch / rate)
"""
READER = """
import sys, time
from lightning_otel import Store
store, before = Store(sys.argv[1]), 0
while True:
    (row,) = store.sql("SELECT count(*) AS n FROM spans")
    assert row["n"] >= before, (row, before)
    before = row["n"]
    print(before, flush=True)
    time.sleep(0.1)
"""
SETTLER = """
import sys, time
from lightning_otel import Store
while True:
    print(Store(sys.argv[1]).settle().rows, flush=True)
    time.sleep(0.3)
"""


@dataclass
class Role:
    """Processes of one kind, of which one is killed now and then."""

    start: "Callable[[int], subprocess.Popen[str]]"
    wanted: int
    kills: int = 0
    started: int = 0
    alive: "list[subprocess.Popen[str]]" = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    said: int = 0

    def fill(self) -> None:
        """Start what is missing; note what ended unasked."""
        for process in [each for each in self.alive if each.poll() is not None]:
            self.alive.remove(process)
            self.failures.append(self._heard(process))
        while len(self.alive) < self.wanted:
            self.alive.append(self.start(self.started))
            self.started += 1

    def kill(self, chance: random.Random) -> None:
        process = self.alive.pop(chance.randrange(len(self.alive)))
        process.send_signal(signal.SIGKILL)
        self._heard(process)
        self.kills += 1

    def _heard(self, process: "subprocess.Popen[str]") -> str:
        output, errors = process.communicate()
        self.said += len(output.splitlines())
        return errors


def soak(folder: Path, *, minutes: float, writers: int, rate: float, seed: int) -> bool:
    """Run it; prints what became of the spans and gives whether all of it is right."""
    host = Host(folder, WRITER)
    acknowledged = folder / "acknowledged"
    acknowledged.mkdir()
    host.layout.create()
    chance = random.Random(seed)

    def tool(*arguments: object) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            text=True,
        )

    name, port = host.store.name, free_port()
    serve = ("-m", "lightning_otel", "serve", "--store", name, "--port", port)
    roles = {
        "writer": Role(lambda number: host.start(f"w{number}", rate), writers),
        "sender": Role(lambda number: tool("-c", SENDER, f"s{number}", port, BATCH, rate), 2),
        "receiver": Role(lambda _: tool(*serve), 1),
        "reader": Role(lambda _: tool("-c", READER, name), 1),
        "settler": Role(lambda _: tool("-c", SETTLER, name), 2),
    }
    until = time.monotonic() + minutes * 60
    while time.monotonic() < until:
        for role in roles.values():
            role.fill()
        time.sleep(chance.uniform(0.3, 1.5))
        names = chance.choices(list(roles), weights=(12, 3, 3, 1, 4))
        roles[names[0]].kill(chance)
    for role in roles.values():
        while role.alive:
            role.kill(chance)
    return _is_right(host, acknowledged, roles)


def _is_right(host: Host, acknowledged: Path, roles: dict[str, Role]) -> bool:
    before = host.accounted()
    kept = Counter(
        row["name"].partition(".")[0]
        for row in host.store.sql("SELECT name FROM spans WHERE end_ns IS NOT NULL")
    )
    counts = host.counts()
    host.store.settle()
    after = host.accounted()
    acked = {path.name: path.stat().st_size for path in acknowledged.iterdir()}
    lost = sum(max(0, count - kept[name]) for name, count in acked.items())
    # One that is killed may have written a span, or sent a batch, and not acknowledged it any more.
    extra = sum(
        max(0, kept[name] - acked.get(name, 0) - (BATCH if name.startswith("s") else 1))
        for name in kept
    )
    failures = [error for role in roles.values() for error in role.failures]
    kills = ", ".join(f"{role.kills} {name}s" for name, role in roles.items())
    same = before == after and counts == host.counts()
    print(f"killed: {kills}; reads {roles['reader'].said}, settlings {roles['settler'].said}")  # noqa: T201
    print(f"{after.sentence()}; acknowledged {sum(acked.values())}")  # noqa: T201
    print(f"lost {lost}, doubled {counts.doubled}, unexplained {extra}, failures {len(failures)}")  # noqa: T201
    for failure in failures[:3]:
        print(failure[-1500:], file=sys.stderr)  # noqa: T201
    return same and not (lost or counts.doubled or extra or failures)


def main() -> int:
    """Parse the command line and soak; 0 if all is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {given.seed}")  # noqa: T201
    is_right = soak(
        folder,
        minutes=given.minutes,
        writers=given.writers,
        rate=given.rate,
        seed=given.seed,
    )
    if is_right:
        shutil.rmtree(folder)
    else:
        print(f"left for a look: {folder}", file=sys.stderr)  # noqa: T201
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
