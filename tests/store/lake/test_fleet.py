"""Two machines with disks of their own, one lake, a trainer, and SIGKILL.

``LIGHTNING_TEST_LAKE_S`` is for how long they run, in seconds. The machines run this file:

    python -m tests.store.lake.test_fleet record STORE MACHINE ACKNOWLEDGED
    python -m tests.store.lake.test_fleet publish STORE LAKE
"""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.store.lake.conftest import SPANS, spans_of

from lightning_otel import Store
from lightning_otel.errors import StoreMissingError
from lightning_otel.store.engines.ducklake import attach_lake
from lightning_otel.store.lake import lake_address

SECONDS = float(os.environ.get("LIGHTNING_TEST_LAKE_S", "8"))
MACHINES = "ab"
BURST = 30
"""Rollouts recorded between two acknowledgements."""


def record(store: str, machine: str, acknowledged: str) -> None:
    """Record rollouts for ever; say which are kept, after they are."""
    path, opened = Path(acknowledged), Store(store)
    rollout = 0
    if path.exists():
        # Far from what earlier lives of this machine recorded without coming to say so.
        rollout = int((path.read_text().split() or "0")[-1]) + random.randrange(10, 10_000) * BURST
    said = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    while True:
        numbers = range(rollout, rollout := rollout + BURST)
        opened.add(span for number in numbers for span in spans_of(machine, number))
        os.write(said, "".join(f"{number}\n" for number in numbers).encode())
        time.sleep(0.1)


def publish(store: str, lake: str) -> None:
    while True:
        Store(store).publish(lake, is_rest_included=random.random() < 0.5)
        time.sleep(0.1)


class Part:
    """A program that is killed now and then, and comes back."""

    def __init__(self, *words: object) -> None:
        self._command = [sys.executable, "-m", "tests.store.lake.test_fleet", *map(str, words)]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=Path(__file__).parents[3])
        self._until = time.monotonic() + random.uniform(1.5, 4)

    def turn(self) -> None:
        """Kill it if its time has come, and start it again."""
        assert self._process.poll() is None, f"{self._command} ended by itself"
        if time.monotonic() >= self._until:
            self.end()
            self._start()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def steps_of(store: Store) -> list[tuple[str, str, str]]:
    """What a trainer learns from."""
    return [(s.trace_id, str(s.observation), str(s.reward)) for s in store.transitions()]


def train(lake: Store, deadline: float, reads: list[int], faults: list[str]) -> None:
    """Read all transitions again and again, as a trainer does."""
    while time.monotonic() < deadline:
        try:
            found = [(step.trace_id, step.span_id) for step in lake.transitions()]
        except StoreMissingError:
            time.sleep(0.1)  # nobody has published anything yet
        except Exception as exc:  # noqa: BLE001  # told, and the test fails by it
            faults.append(repr(exc))
        else:
            reads.append(len(found))
            if len(set(found)) < len(found):
                faults.append(f"doubled: {len(found) - len(set(found))}")


@pytest.mark.timeout(90 + 3 * SECONDS)
def test_machines_that_are_killed_publish_everything_once(remote_lake: str, tmp_path: Path) -> None:
    """Every acknowledged span is in the lake, none twice, and every read on the way answered."""
    stores = {machine: Store(tmp_path / machine / "disk") for machine in MACHINES}
    words = {machine: tmp_path / machine / "acknowledged" for machine in MACHINES}
    parts: list[Part] = []
    for machine, store in stores.items():
        store.writer().seal()
        parts.append(Part("record", store.name, machine, words[machine]))
        parts.append(Part("publish", store.name, remote_lake))
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.stat().st_size for path in words.values()):
        assert time.monotonic() < deadline, "no word of a machine"
        time.sleep(0.05)
    deadline, reads, faults = time.monotonic() + SECONDS, list[int](), list[str]()
    trainer = threading.Thread(target=train, args=(Store(remote_lake), deadline, reads, faults))
    trainer.start()
    try:
        while time.monotonic() < deadline:
            for part in parts:
                part.turn()
            time.sleep(0.05)
    finally:
        for part in parts:
            part.end()
        trainer.join()

    for store in stores.values():
        store.publish(remote_lake, is_rest_included=True)

    acknowledged = {
        f"{ord(machine):02x}{SPANS * int(number) + step:014x}"
        for machine, path in words.items()
        for number in path.read_text().split()
        for step in range(SPANS)
    }
    query = "SELECT span_id FROM spans"
    recorded = [row["span_id"] for store in stores.values() for row in store.sql(query)]
    with attach_lake(lake_address(remote_lake), application="test", is_read_only=True) as con:
        published = [
            span_id for (span_id,) in con.execute("FROM lake.spans SELECT span_id").fetchall()
        ]
    assert acknowledged
    assert acknowledged <= set(recorded)
    assert sorted(published) == sorted(recorded)
    assert len(set(published)) == len(published)
    assert faults == []
    assert reads == sorted(reads)
    steps = [step for store in stores.values() for step in steps_of(store)]
    assert sorted(steps_of(Store(remote_lake))) == sorted(steps)


if __name__ == "__main__":
    {"record": record, "publish": publish}[sys.argv[1]](*sys.argv[2:])
