"""A closed loop on two cores: an agent runs, a trainer learns from it, the agent gets better.

Three processes: an engine with vLLM's contract and a tiny real model; an agent that calls it
through the openai client and is recorded; and a trainer, which is killed on the way and resumed.
The agent is never stopped, and the weights change under it.

    pip install 'lightning-otel[train,openai]'
    python examples/closed_loop [--steps 40] [--seed 0] [--shuffle] [--folder FOLDER]


It ends with a table of what was to be shown, and with 1 if any of it does not hold. Its control
is ``--shuffle``: each rollout is given the reward of another one, and what is earned must not rise.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny

import lightning_otel as lo
from lightning_otel.resources import Resources
from lightning_otel.state import State
from lightning_otel.state.runs import Runs

HERE = Path(__file__).resolve().parent
LIMIT_S = 1800
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def start(program: str, *arguments: object) -> subprocess.Popen[bytes]:
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
    environment = {**os.environ, **dict.fromkeys(OFFLINE, "1"), **quiet}
    command = [sys.executable, str(HERE / f"{program}.py"), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def wait_for(
    what: str, is_there: Callable[[], bool], *, among: Sequence[subprocess.Popen[bytes]]
) -> None:
    until = time.monotonic() + LIMIT_S
    while not is_there():
        for process in among:
            if process.poll() is not None:
                raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        if time.monotonic() > until:
            raise SystemExit(f"no {what} within {LIMIT_S} s")
        time.sleep(0.1)


class Loop:
    """The three processes, and what is known of them from the outside."""

    def __init__(
        self, folder: Path, *, steps: int, batch: int, seed: int = 0, is_shuffled: bool = False
    ) -> None:
        self.folder, self.steps, self.batch = folder, steps, batch
        self.seed, self.is_shuffled = seed, is_shuffled
        self.store = lo.Store(folder / "traces.duckdb")
        assert self.store.layout is not None
        self.store.layout.create()
        self.state = State(self.store.layout.catalogue)
        self.runs, self.resources = Runs(self.state), Resources(self.state)
        self.killed = Killed()
        self.agent_code: int | None = None

    def run(self) -> None:
        """Begin all three; kill the trainer half way, resume it; end when the steps are done."""
        model = tiny.saved(self.folder / "model", self.seed, sharpness=8.0)
        port, stop = self.folder / "engine.url", self.folder / "stop"
        engine = start("engine", model, port)
        processes = [engine]
        try:
            wait_for("engine", port.exists, among=processes)
            url = port.read_text()
            first = {"base_url": url, "model": "base", "sampling": {"temperature": 1.0}}
            version = self.resources.publish("llm", first).version
            # Every rollout is given the newest weights: nobody else uses this agent.
            self.resources.set_alias("llm", "canary", version, weight=1.0)
            how = ["shuffle"] if self.is_shuffled else []
            agent = start("agent", self.store.layout.catalogue, stop, *how)
            processes.append(agent)
            asked = (
                self.store.layout.catalogue, model, url, self.steps, self.batch, self.seed
            )  # fmt: skip
            trainer = start("learn", *asked)
            processes.append(trainer)
            wait_for("step", lambda: self.step() >= self.steps // 2, among=processes)
            trainer.kill()
            self.killed = Killed(trainer.wait(), self.step())
            processes[-1] = trainer = start("learn", *asked, "resume")
            wait_for("end", lambda: trainer.poll() is not None, among=[engine, agent])
            if trainer.returncode or agent.poll() is not None:
                raise SystemExit(f"the trainer ended with {trainer.returncode}")
        finally:
            stop.touch()
            # The agent ends its rollout by itself; the engine goes last.
            for process in processes[1:2]:
                self.agent_code = process.wait(30)
            for process in reversed(processes):
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                process.wait(30)

    def earned(self, calls: Sequence[lo.Transition]) -> list[float]:
        """The mean of what was earned, whatever reward was given, in as many parts as steps."""
        values = [call.rewards["earned"] for call in calls if "earned" in call.rewards]
        size = max(1, len(values) // max(1, self.step()))
        parts = [values[start : start + size] for start in range(0, len(values), size)]
        return [sum(part) / len(part) for part in parts]

    def step(self) -> int:
        """How many steps of training are kept."""
        return max((each.step for each in self.runs.all()), default=0)

    def report(self) -> "Report":
        """What came of it, printed too."""
        run = self.runs.get("@last")
        measured = self.runs.metrics(run.run_id)
        claims = self.runs.claims(run)
        calls = sorted(self.store.transitions(bodies=False), key=lambda call: call.start_ns)
        rewards = self.earned(calls)
        gaps = [after.start_ns - call.end_ns for call, after in itertools.pairwise(calls)]
        ended = self.store.sql("SELECT status, count(*) AS n FROM rollouts GROUP BY status").rows()
        statuses = {each["status"]: each["n"] for each in ended}
        found = Report(
            rewards=rewards,
            steps=run.step,
            runs=len(self.runs.all()),
            trained=len(claims.read_trained()),
            counted=sum(int(each.value) for each in measured if each.name == "rollouts"),
            states=claims.counts(),
            rollouts=sum(statuses.values()),
            broken=sum(count for status, count in statuses.items() if status != "succeeded"),
            versions=len({call.resources.get("llm") for call in calls}),
            calls=len(calls),
            longest_gap_s=max(gaps, default=0) / 1e9,
            agent_code=self.agent_code,
            killed=self.killed,
            is_shuffled=self.is_shuffled,
        )
        print(f"mean reward, by time\n{curve(rewards)}\n")
        return found


class Killed(NamedTuple):
    """How the trainer was ended on the way, and after which step; as yet not at all."""

    code: int | None = None
    step: int = 0


class Check(NamedTuple):
    """Something that was to be shown, what was found, and whether that is it."""

    what: str
    found: str
    holds: bool


@dataclass(frozen=True)
class Report:
    """What came of a loop.

    Attributes:
        rewards: Mean of what was earned, by time, in as many parts as there were steps.
        steps: How many steps are kept.
        runs: How many training runs there were: a resumed one goes on as the same.
        trained: How many rollouts were trained on, by the claims.
        counted: How many were, by the steps' metrics: more if one was repeated.
        states: How many rollouts were claimed, by what became of them.
        rollouts: How many the agent made.
        broken: How many of them did not end well.
        versions: How many versions of the weights the agent called.
        calls: How often it did.
        longest_gap_s: How long the agent made no call at most, seconds.
        agent_code: What the agent ended with when it was told to stop.
        killed: How the trainer was ended on the way.
        is_shuffled: Whether rewards were given to other rollouts than had earned them.
    """

    rewards: list[float]
    steps: int
    runs: int
    trained: int
    counted: int
    states: dict[str, int]
    rollouts: int
    broken: int
    versions: int
    calls: int
    longest_gap_s: float
    agent_code: int | None
    killed: Killed
    is_shuffled: bool

    def checks(self, steps: int, rise: float) -> list[Check]:
        """What was to be shown, and whether it holds.

        Args:
            steps: How many steps there were to be.
            rise: How much more the last eighth of them was to earn than the first; shuffled, less
                than half of it.
        """
        edge = max(1, len(self.rewards) // 8)
        before, after = sum(self.rewards[:edge]) / edge, sum(self.rewards[-edge:]) / edge
        left = {each: n for each, n in self.states.items() if each not in ("trained", "claimed")}
        told = ", ".join(f"{n} {each.partition(':')[0]}" for each, n in left.items()) or "none"
        waiting = self.rollouts - sum(self.states.values())
        code, step = self.killed
        once = self.trained == self.counted > 0
        held = self.states.get("claimed", 0)
        return [
            Check("mean reward before", f"{before:.3f}, of the first {edge} steps", True),
            Check("mean reward after", f"{after:.3f}, of the last {edge}", True),
            Check(f"it rose by {rise:g} or more", f"{after - before:+.3f}", after - before >= rise)
            if not self.is_shuffled
            else Check(
                f"shuffled: it rose by less than {rise / 2:g}",
                f"{after - before:+.3f}",
                after - before < rise / 2,
            ),
            Check(f"steps, {steps} at most", str(self.steps), 0 < self.steps <= steps),
            Check("rows trained exactly once", f"{self.trained} of {self.counted} taken", once),
            Check("rows lost", str(held), held == 0),
            Check("rows left out, by reason", told, True),
            Check("rows that wait for another step", str(waiting), waiting >= 0),
            Check(
                "weights swapped live",
                f"{self.versions - 1} times",
                self.versions > max(1, steps // 2),
            ),
            Check("calls of the agent", str(self.calls), self.calls >= self.trained),
            Check(
                "interruptions of the agent",
                f"{self.broken}; it paused for {self.longest_gap_s:.1f} s at most",
                self.broken == 0 and self.agent_code == 0 and self.longest_gap_s < 30,
            ),
            Check(
                "trainer killed",
                f"by signal {-code if code else 'none'} after step {step}",
                code == -signal.SIGKILL and 0 < step < steps,
            ),
            Check("and resumed", f"as {self.runs} run", self.runs == 1 and self.steps > step),
        ]


def table(checks: Sequence[Check]) -> str:
    """The checks as lines of text."""
    width = max(len(each.what) for each in checks)
    return "\n".join(
        f"{'ok  ' if each.holds else 'FAIL'}  {each.what:{width}}  {each.found}" for each in checks
    )


def curve(values: Sequence[float], height: int = 8) -> str:
    """The values as columns of text, between 0 and 1."""
    rows = [
        "".join("█" if value * height >= row + 0.5 else " " for value in values)
        for row in reversed(range(height))
    ]
    labels = ["1.0 │", *["    │"] * (height - 2), "0.0 │"]
    return "\n".join(label + row for label, row in zip(labels, rows, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32, help="rollouts of a step")
    parser.add_argument("--rise", type=float, default=0.3, help="of the mean reward, at least")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the trainer")
    parser.add_argument("--shuffle", action="store_true", help="give rewards to other rollouts")
    parser.add_argument("--folder", type=Path, help="keep store, weights and runs here")
    given = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        loop = Loop(
            given.folder or Path(scratch), steps=given.steps, batch=given.batch,
            seed=given.seed, is_shuffled=given.shuffle,
        )  # fmt: skip
        loop.run()
        checks = loop.report().checks(given.steps, given.rise)
    print(table(checks))
    print(f"in {time.monotonic() - began_s:.0f} s")
    if not all(each.holds for each in checks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
