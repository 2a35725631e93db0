"""A closed loop on two cores: an agent runs, a trainer learns from it, the agent gets better.

Three processes: an engine with vLLM's contract and a tiny real model; an agent that calls it
through the openai client and is recorded; and a trainer, which is killed on the way and resumed.
The agent is never stopped, and the weights change under it.

    pip install 'lightning-otel[train,openai]'
    python examples/closed_loop [--steps 40] [--folder FOLDER]
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

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny

import lightning_otel as lo
from lightning_otel.resources import Resources
from lightning_otel.runs import Runs
from lightning_otel.state import State

HERE = Path(__file__).resolve().parent
LIMIT_S = 900
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

    def __init__(self, folder: Path, *, steps: int, batch: int) -> None:
        self.folder, self.steps, self.batch = folder, steps, batch
        self.store = lo.Store(folder / "traces.duckdb")
        assert self.store.layout is not None
        self.store.layout.create()
        self.state = State(self.store.layout.catalogue)
        self.runs, self.resources = Runs(self.state), Resources(self.state)

    def run(self) -> None:
        """Begin all three; kill the trainer half way, resume it; end when the steps are done."""
        model = tiny.saved(self.folder / "model", sharpness=8.0)
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
            agent = start("agent", self.store.layout.catalogue, stop)
            processes.append(agent)
            asked = (self.store.layout.catalogue, model, url, self.steps, self.batch)
            trainer = start("learn", *asked)
            processes.append(trainer)
            wait_for("step", lambda: self.step() >= self.steps // 2, among=processes)
            trainer.kill()
            trainer.wait()
            processes[-1] = trainer = start("learn", *asked, "resume")
            wait_for("end", lambda: trainer.poll() is not None, among=[engine, agent])
            if trainer.returncode or agent.poll() is not None:
                raise SystemExit(f"the trainer ended with {trainer.returncode}")
        finally:
            stop.touch()
            # The agent ends its rollout by itself; the engine goes last.
            for process in processes[1:2]:
                process.wait(30)
            for process in reversed(processes):
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                process.wait(30)

    def step(self) -> int:
        """How many steps of training are kept."""
        return max((each.step for each in self.runs.all()), default=0)

    def report(self) -> "Report":
        """What came of it, printed too."""
        run = self.runs.get("@last")
        measured = self.runs.metrics(run.run_id)
        rewards = [each.value for each in measured if each.name == "reward"]
        counted = sum(int(each.value) for each in measured if each.name == "rollouts")
        claims = self.runs.claims(run)
        calls = sorted(self.store.transitions(bodies=False), key=lambda call: call.start_ns)
        gaps = [after.start_ns - call.end_ns for call, after in itertools.pairwise(calls)]
        edge = max(1, len(rewards) // 8)
        found = Report(
            rewards=rewards,
            rise=(sum(rewards[-edge:]) - sum(rewards[:edge])) / edge,
            steps=run.step,
            trained=len(claims.trained()),
            counted=counted,
            states=claims.counts(),
            versions=len({call.resources.get("llm") for call in calls}),
            longest_gap_s=max(gaps, default=0) / 1e9,
        )
        print(f"mean reward of each step\n{curve(rewards)}")
        print(f"it rose by {found.rise:.2f} in {found.steps} steps")
        print(f"{found.trained} rollouts trained, {counted} counted in steps: {found.states}")
        print(f"{len(calls)} calls of {found.versions} versions of the weights;", end=" ")
        print(f"the agent paused for {found.longest_gap_s:.1f} s at most")
        return found


@dataclass(frozen=True)
class Report:
    """What came of a loop.

    Attributes:
        rewards: Mean reward of each step.
        rise: Its last eighth less its first.
        steps: How many steps are kept.
        trained: How many rollouts were trained on, by the claims.
        counted: How many were, by the steps' metrics: more if one was repeated.
        states: How many rollouts were claimed, by what became of them.
        versions: How many versions of the weights the agent called.
        longest_gap_s: How long the agent made no call at most, seconds.
    """

    rewards: list[float]
    rise: float
    steps: int
    trained: int
    counted: int
    states: dict[str, int]
    versions: int
    longest_gap_s: float


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
    parser.add_argument("--folder", type=Path, help="keep store, weights and runs here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        loop = Loop(given.folder or Path(scratch), steps=given.steps, batch=given.batch)
        loop.run()
        loop.report()


if __name__ == "__main__":
    main()
