"""Machines that record and publish into one lake, killed and started again while a trainer reads.

    python fleet.py record STORE MACHINE ACKNOWLEDGED
    python fleet.py publish STORE LAKE

Each of these runs until it is killed.
"""

import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from lightning_otel import Store
from lightning_otel.errors import StoreMissingError
from lightning_otel.store.engines.ducklake import attached
from lightning_otel.store.lake import lake_address
from lightning_otel.types import Span

BURST = 30
"""Rollouts recorded between two acknowledgements."""
SPANS = 3
"""Of each rollout."""
_FIRST_WORD_S = 60


@dataclass(slots=True)
class Outcome:
    """What became of the spans, by id, and what a trainer saw of them meanwhile."""

    acknowledged: set[str] = field(default_factory=set)
    recorded: list[str] = field(default_factory=list)
    in_lake: list[str] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    """How many transitions each read gave."""
    bad_reads: list[str] = field(default_factory=list)
    is_equal: bool = False
    """Whether the lake gives the transitions of the machines."""


def spans_of(machine: str, rollout: int) -> list[Span]:
    """An agent, its chat and its reward."""
    trace = f"{ord(machine):02x}{rollout:030x}"
    start_ns = 1_000_000_000 * (rollout + 1)
    marks = {"agentlightning.rollout_id": f"{machine}-{rollout}", "gen_ai.agent.name": "planner"}
    message = '[{"role":"%s","parts":[{"type":"text","content":"%s"}]}]'
    chat = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "toy",
        "gen_ai.response.id": f"r-{machine}-{rollout}",
        "gen_ai.input.messages": message % ("user", f"{rollout} " * 100),
        "gen_ai.output.messages": message % ("assistant", "ho"),
    }
    kinds = (
        ("invoke_agent planner", {"gen_ai.operation.name": "invoke_agent"}),
        ("chat toy", chat),
        ("reward", {"agentlightning.reward.0.value": rollout % 2}),
    )
    return [
        Span(
            trace_id=trace,
            span_id=f"{ord(machine):02x}{SPANS * rollout + step:014x}",
            parent_span_id=f"{ord(machine):02x}{SPANS * rollout:014x}" if step else None,
            name=name,
            start_ns=start_ns + step,
            end_ns=start_ns + 1_000 - step,
            attributes={**marks, **attributes},
        )
        for step, (name, attributes) in enumerate(kinds)
    ]


def record(store: str, machine: str, acknowledged: str) -> None:
    """Record rollouts for ever; say which are kept, after they are."""
    path = Path(acknowledged)
    rollout = 0
    if path.exists():
        # Far from what earlier lives of this machine recorded without coming to say so.
        rollout = int((path.read_text().split() or "0")[-1]) + random.randrange(10, 10_000) * BURST
    said = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    opened = Store(store)
    while True:
        last = rollout + BURST
        opened.add(span for number in range(rollout, last) for span in spans_of(machine, number))
        os.write(said, "".join(f"{number}\n" for number in range(rollout, last)).encode())
        rollout = last
        time.sleep(float(os.environ.get("FLEET_PAUSE_S", "0.1")))


def publish(store: str, lake: str) -> None:
    """Publish for ever."""
    while True:
        Store(store).publish(lake, is_rest_included=random.random() < 0.5)
        time.sleep(0.1)


class Part:
    """A program that is killed now and then, and comes back."""

    def __init__(self, *words: object) -> None:
        self._command = [sys.executable, __file__, *map(str, words)]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command)
        self._until = time.monotonic() + random.uniform(1.5, 4)

    def turn(self) -> None:
        """Kill it if its time has come, and start it again."""
        assert self._process.poll() is None, f"{self._command} ended by itself"
        if time.monotonic() >= self._until:
            self.end()
            self._start()

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()


def run(lake: str, folder: Path, seconds: float, machines: str = "ab") -> Outcome:
    """Let machines record and publish for a while, killing them, and count what is in the lake."""
    outcome = Outcome()
    parts: list[Part] = []
    for machine in machines:
        local = folder / machine / "disk"
        local.mkdir(parents=True)
        Store(local).writer().seal()
        parts.append(Part("record", local, machine, folder / machine / "acknowledged"))
        parts.append(Part("publish", local, lake))
    _wait_for_words(folder, machines)
    deadline = time.monotonic() + seconds
    trainer = threading.Thread(target=_train, args=(Store(lake), outcome, deadline))
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
    steps: list[tuple[str, str, str]] = []
    for machine in machines:
        local_store = Store(folder / machine / "disk")
        local_store.publish(lake, is_rest_included=True)
        outcome.acknowledged |= {
            f"{ord(machine):02x}{SPANS * int(number) + step:014x}"
            for number in (folder / machine / "acknowledged").read_text().split()
            for step in range(SPANS)
        }
        outcome.recorded += [row["span_id"] for row in local_store.sql("SELECT span_id FROM spans")]
        steps += _steps_of(local_store)
    with attached(lake_address(lake), application="test", is_read_only=True) as con:
        rows = con.execute("SELECT span_id FROM lake.spans").fetchall()
    outcome.in_lake = [span_id for (span_id,) in rows]
    outcome.is_equal = sorted(_steps_of(Store(lake))) == sorted(steps)
    return outcome


def _steps_of(store: Store) -> list[tuple[str, str, str]]:
    return [(s.trace_id, str(s.observation), str(s.reward)) for s in store.transitions()]


def _wait_for_words(folder: Path, machines: str) -> None:
    """See that each machine has recorded before one is killed, however slowly they start."""
    paths = [folder / machine / "acknowledged" for machine in machines]
    deadline = time.monotonic() + _FIRST_WORD_S
    while not all(path.exists() and path.stat().st_size for path in paths):
        assert time.monotonic() < deadline, f"no word of a machine within {_FIRST_WORD_S} s"
        time.sleep(0.05)


def _train(lake: Store, outcome: Outcome, deadline: float) -> None:
    """Read all transitions again and again, as a trainer does."""
    while time.monotonic() < deadline:
        try:
            found = [(step.trace_id, step.span_id) for step in lake.transitions()]
        except StoreMissingError:
            # Nobody has published anything yet.
            time.sleep(0.1)
        except Exception as exc:  # noqa: BLE001  # told, and the test fails by it
            outcome.bad_reads.append(repr(exc))
        else:
            outcome.reads.append(len(found))
            if len(set(found)) < len(found):
                outcome.bad_reads.append(f"doubled: {len(found) - len(set(found))}")


if __name__ == "__main__":
    {"record": record, "publish": publish}[sys.argv[1]](*sys.argv[2:])
