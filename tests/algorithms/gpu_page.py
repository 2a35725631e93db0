"""The page's files and commands for GPU machines, with the example's engine and model.

    python -m tests.algorithms.gpu_page [--steps 40] [--seeds 0 3 11]

runs them to their end, kills the trainer half way and resumes it, and once with rewards that say
nothing, which must not rise. CI runs two steps.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from examples.closed_loop import tiny
from examples.closed_loop.__main__ import OFFLINE, wait_for
from tests.pages import DOCS, blocks, environment, part

import lightning_otel as lo

HERE = Path(__file__).parent
PAGE = DOCS / "training.md"
REWARD = re.compile(r"lo\.emit_reward\((.*)\)\n")


def write_files(
    folder: Path, programs: list[str], base_url: str, model: Path, *, steps: int, is_shuffled: bool
) -> None:
    """Write the page's programs with another address, model, learning rate and number of steps."""
    for text in programs:
        for old, new in (
            ("http://127.0.0.1:8000/v1", base_url),
            ("Qwen/Qwen3-1.7B", str(model)),
            ("learning_rate=1e-5", "learning_rate=5e-3, per_device_train_batch_size=32"),
            ("max_iterations=40", f"max_iterations={steps}"),
        ):
            text = text.replace(old, new)
        if is_shuffled:
            text = REWARD.sub(
                r'lo.emit_reward({"given": __import__("random").random(), "earned": \1}, '
                r'primary="given")\n',
                text,
            )
        name = re.search(r"# (\w+\.py)", text)
        assert name is not None
        (folder / name[1]).write_text(text)


def split_commands(text: str) -> tuple[list[str], list[str]]:
    """Return the page's commands of the trainer and the agent."""
    train, agent = text.strip().splitlines()
    return train.removesuffix(" &").split(), agent.split()


def start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a command of the page in a group of its own."""
    variables = [word for word in command if "=" in word and not word.startswith("-")]
    words = [word for word in command if word not in variables]
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
    settings = {**dict.fromkeys(OFFLINE, "1"), **quiet}
    settings.update(word.split("=", 1) for word in variables)
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            words,
            cwd=folder,
            env=environment(**settings),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def run_page(
    folder: Path,
    programs: list[str],
    commands: list[str],
    *,
    steps: int,
    seed: int = 0,
    is_shuffled: bool = False,
) -> lo.Trainer:
    """Run the page; kill the trainer after half of its steps, and resume it."""
    from examples.closed_loop.engine import Engine

    model = tiny.saved(folder / "model", seed, sharpness=8.0)
    train, agent = split_commands(*commands)
    with Engine(model) as engine:
        write_files(folder, programs, engine.base_url, model, steps=steps, is_shuffled=is_shuffled)
        processes = [start(train, folder)]
        trainer = lo.Trainer(store=lo.Store(folder / ".lightning" / "traces.duckdb"))
        try:
            wait_for("endpoint", lambda: "endpoint" in trainer.resources.names(), among=processes)
            processes.append(start(agent, folder))
            wait_for("step", lambda: read_step(trainer) >= steps // 2, among=processes)
            processes[0].kill()
            processes[0].wait(60)
            processes[0] = start(train, folder)
            wait_for("end", lambda: processes[0].poll() is not None, among=processes[1:])
            assert processes[0].returncode == 0, (folder / "log").read_text()[-4000:]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGINT)
                    process.wait(60)
    return trainer


def read_step(trainer: lo.Trainer) -> int:
    """Return the number of steps that are kept."""
    return max((run.step for run in trainer.runs.all()), default=0)


def read_rewards(trainer: lo.Trainer) -> list[float]:
    """Return what each rollout earned, by time."""
    steps = sorted(trainer.store.transitions(bodies=False), key=lambda step: step.start_ns)
    return [step.rewards.get("earned", step.reward or 0.0) for step in steps]


def main() -> None:
    """Print a line for each seed, and one for rewards that say nothing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 3, 11])
    options = parser.parse_args()
    page, failures = part(PAGE, str(HERE / "test_gpu_page.py")), 0
    texts = blocks(page, "python"), blocks(page, "bash")
    for seed, is_shuffled in [*((seed, False) for seed in options.seeds), (options.seeds[0], True)]:
        with tempfile.TemporaryDirectory() as folder:
            trainer = run_page(
                Path(folder), *texts, steps=options.steps, seed=seed, is_shuffled=is_shuffled
            )
            rewards = read_rewards(trainer)
            size = len(rewards) // 8
            before, after = sum(rewards[:size]) / size, sum(rewards[-size:]) / size
            run = trainer.runs.get("@last")
            counts = trainer.runs.claims(run).counts()
            measured = trainer.runs.metrics(run.run_id, names=["rollouts"])
            is_right = after - before < 0.15 if is_shuffled else after - before >= 0.3
            is_right &= counts.get("trained") == sum(int(each.value) for each in measured)
            failures += not is_right
            sys.stdout.write(
                f"seed {seed}{' shuffled' if is_shuffled else ''}: {before:.3f} → {after:.3f}, "
                f"{run.step} steps, {counts}\n"
            )  # fmt: skip
    sys.exit(min(failures, 1))


if __name__ == "__main__":
    main()
