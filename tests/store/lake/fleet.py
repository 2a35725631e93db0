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
    """What became of the spans, and of those who dealt with them."""

    machines: int
    seconds: float
    kills: dict[str, int] = field(default_factory=lambda: {"record": 0, "publish": 0})
    reads: int = 0
    failed_reads: list[str] = field(default_factory=list)
    went_back: int = 0
    acknowledged: int = 0
    recorded: int = 0
    in_lake: int = 0
    lost: int = 0
    unacknowledged_lost: int = 0
    doubled: int = 0
    files: int = 0
    is_equal: bool = False
    slowest_read_s: float = 0.0

    def __str__(self) -> str:
        return "\n".join(f"{name}: {getattr(self, name)}" for name in self.__slots__)


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

    def __init__(self, noun: str, words: list[object], between_s: tuple[float, float]) -> None:
        self.noun, self._words, self._between_s = noun, words, between_s
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen([sys.executable, __file__, *map(str, self._words)])
        self._until = time.monotonic() + random.uniform(*self._between_s)

    def turn(self) -> bool:
        """Kill it if its time has come, and start it again; whether it was."""
        assert self.process.poll() is None, (
            f"{self.noun} ended by itself: {self.process.returncode}"
        )
        if time.monotonic() < self._until:
            return False
        self.end()
        self._start()
        return True

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


def run(
    lake: str,
    folder: Path,
    seconds: float,
    machines: str = "ab",
    lives_s: tuple[float, float] = (1.5, 4),
) -> Outcome:
    """Let machines record and publish for a while, killing them, and count what is in the lake."""
    outcome = Outcome(len(machines), seconds)
    parts: list[Part] = []
    for machine in machines:
        local, said = folder / machine / "disk", folder / machine / "acknowledged"
        local.mkdir(parents=True)
        Store(local).writer().seal()
        parts.append(Part("record", ["record", local, machine, said], lives_s))
        parts.append(Part("publish", ["publish", local, lake], lives_s))
    _wait_for_words(folder, machines)
    deadline = time.monotonic() + seconds
    trainer = threading.Thread(target=_train, args=(Store(lake), outcome, deadline))
    trainer.start()
    try:
        while time.monotonic() < deadline:
            for part in parts:
                outcome.kills[part.noun] += part.turn()
            time.sleep(0.05)
    finally:
        for part in parts:
            part.end()
        trainer.join()
    for machine in machines:
        Store(folder / machine / "disk").publish(lake, is_rest_included=True)
    _count(outcome, lake, folder, machines)
    return outcome


def _wait_for_words(folder: Path, machines: str) -> None:
    """See that each machine has recorded before one is killed, however slowly they start."""
    paths = [folder / machine / "acknowledged" for machine in machines]
    deadline = time.monotonic() + _FIRST_WORD_S
    while not all(path.exists() and path.stat().st_size for path in paths):
        assert time.monotonic() < deadline, f"no word of a machine within {_FIRST_WORD_S} s"
        time.sleep(0.05)


def _train(lake: Store, outcome: Outcome, deadline: float) -> None:
    """Read all transitions again and again, as a trainer does."""
    seen = 0
    while time.monotonic() < deadline:
        began = time.monotonic()
        try:
            found = [(step.trace_id, step.span_id) for step in lake.transitions()]
        except StoreMissingError:
            # Nobody has published anything yet.
            time.sleep(0.1)
            continue
        except Exception as exc:  # noqa: BLE001  # counted, and the test fails by it
            outcome.failed_reads.append(repr(exc))
            continue
        outcome.reads += 1
        outcome.slowest_read_s = max(outcome.slowest_read_s, round(time.monotonic() - began, 2))
        outcome.doubled += len(found) - len(set(found))
        outcome.went_back += len(found) < seen
        seen = len(found)


def _count(outcome: Outcome, lake: str, folder: Path, machines: str) -> None:
    acknowledged: set[str] = set()
    recorded: set[str] = set()
    steps: list[tuple[str, str, str]] = []
    for machine in machines:
        said = (folder / machine / "acknowledged").read_text().split()
        acknowledged |= {
            f"{ord(machine):02x}{SPANS * int(number) + step:014x}"
            for number in said
            for step in range(SPANS)
        }
        local = Store(folder / machine / "disk")
        recorded |= {row["span_id"] for row in local.sql("SELECT span_id FROM spans")}
        steps += [(s.trace_id, str(s.observation), str(s.reward)) for s in local.transitions()]
    with attached(lake_address(lake), application="test", is_read_only=True) as con:
        there = [row[0] for row in con.execute("SELECT span_id FROM lake.spans").fetchall()]
        outcome.files = len(con.execute("FROM ducklake_list_files('lake', 'spans')").fetchall())
    outcome.acknowledged, outcome.recorded = len(acknowledged), len(recorded)
    outcome.in_lake = len(there)
    outcome.lost = len(acknowledged - set(there))
    outcome.unacknowledged_lost = len(recorded - set(there))
    outcome.doubled += len(there) - len(set(there))
    read = [(s.trace_id, str(s.observation), str(s.reward)) for s in Store(lake).transitions()]
    outcome.is_equal = sorted(read) == sorted(steps)


if __name__ == "__main__":
    {"record": record, "publish": publish}[sys.argv[1]](*sys.argv[2:])
