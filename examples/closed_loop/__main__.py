"""A closed loop on two cores: an agent runs, a trainer learns from it, the agent gets better.

Three processes: an engine with vLLM's contract and a tiny real model; an agent that calls it through
the openai client and is recorded; and a trainer, which is killed on the way and resumed. The agent
is never stopped, and the weights change under it.

    pip install 'lightning-otel[train,openai]'
    python examples/closed_loop [--steps 40] [--folder FOLDER]
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import lightning_otel as lo
from lightning_otel.resources import Resources
from lightning_otel.runs import Runs
from lightning_otel.state import State

HERE = Path(__file__).resolve().parent
LIMIT_S = 600
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def start(program: str, *arguments: object) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **dict.fromkeys(OFFLINE, "1"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / f"{program}.py"), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def wait_for(what: str, is_there, *, among: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + LIMIT_S
    while not is_there():
        for process in among:
            if process.poll() is not None:
                raise SystemExit(f"{process.args[1]} ended with {process.returncode}")
        if time.monotonic() > until:
            raise SystemExit(f"no {what} within {LIMIT_S} s")
        time.sleep(0.1)


class Loop:
    """The three processes, and what is known of them from the outside."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.store = lo.Store(folder / "traces.duckdb")
        assert self.store.layout is not None
        self.store.layout.create()
        self.state = State(self.store.layout.catalogue)
        self.runs, self.resources = Runs(self.state), Resources(self.state)

    def run(self) -> None:
        """Begin all three; kill the trainer half way, and resume it; end when the steps are done."""
        import tiny

        model = tiny.saved(self.folder / "model")
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
            asked = (self.store.layout.catalogue, model, url, self.steps)
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
            for process in reversed(processes):
                if process is engine or process.poll() is None:
                    time.sleep(0.5 if process is not engine else 0)
                    process.send_signal(signal.SIGTERM)
            for process in processes:
                process.wait(20)

    def step(self) -> int:
        """How many steps of training are kept."""
        return max((each.step for each in self.runs.all()), default=0)

    def report(self) -> float:
        """Print the curve, and what became of every rollout; gives what the reward rose by."""
        run = self.runs.get("@last")
        measured = self.runs.metrics(run.run_id)
        rewards = [each.value for each in measured if each.name == "reward"]
        counted = sum(int(each.value) for each in measured if each.name == "rollouts")
        claims = self.runs.claims(run)
        trained, states = claims.trained(), claims.counts()
        versions = Counter(
            step.resources.get("llm") for step in self.store.transitions(bodies=False)
        )
        edge = max(1, len(rewards) // 8)
        first = sum(rewards[:edge]) / edge
        last = sum(rewards[-edge:]) / edge
        print(f"mean reward of each step\n{curve(rewards)}")
        print(f"reward {first:.2f} -> {last:.2f} in {len(rewards)} steps")
        print(f"{len(trained)} rollouts trained, each once; {counted} counted in steps; {states}")
        print(f"{sum(versions.values())} calls of {len(versions)} versions of the weights")
        assert run.step == self.steps == len(rewards)
        assert len(trained) == counted, "a rollout was lost or repeated"
        return last - first


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
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        loop = Loop(given.folder or Path(scratch), given.steps)
        loop.run()
        loop.report()


if __name__ == "__main__":
    main()
