"""Trainers that are killed: a process of its own forks one for each boundary, and one to resume.

Run by ``test_kill.py``. It prints for each boundary what came of it, as one JSON line. The trainer
has three steps; it is killed in its second. ``LIGHTNING_TEST_KILLS`` above 5 kills at every
boundary; by default at those that matter most.
"""

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tests.trainer.made import Ledger, record

from lightning_otel import Resources, Store
from lightning_otel.algorithms import Run, checkpoint, run
from lightning_otel.algorithms.batches import Collector
from lightning_otel.state.runs import Claims, Runs
from lightning_otel.trainer import Trainer

STEPS, ROWS = 3, 4
BOUNDARIES: dict[str, tuple[Any, str, bool]] = {
    # Where the function hangs, its name, and whether the kill comes after it rather than before.
    "before the claim": (Claims, "claim", False),
    "after the claim": (Claims, "claim", True),
    "after the batch was read": (Collector, "next", True),
    "after the step": (Ledger, "train_step", True),
    "after the metrics": (Run, "report", True),
    "while the files are written": (Ledger, "save", True),
    "before the checkpoint has its name": (checkpoint, "put_in_place", False),
    "after the checkpoint has its name": (checkpoint, "put_in_place", True),
    "within the transaction": (Claims, "acknowledge", True),
    "after the transaction": (Runs, "keep_checkpoint", True),
    "after the publication": (Resources, "publish", True),
    "after the publication is noted": (Runs, "mark_published", True),
    "after the commit": (Run, "commit", True),
}


def die_at(home: Any, name: str, *, is_after: bool, at: int) -> None:
    """Have this process killed around a function's so-manieth call."""
    real: Callable[..., Any] = getattr(home, name)
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(*args, **kwargs)
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(home, name, wrapped)


def train(store: Store, *, is_resumed: bool) -> None:
    trainer = Trainer(store=store, algorithm=Ledger(2), min_batch_size=ROWS, max_iterations=STEPS)
    if is_resumed:
        trainer.resume_from_checkpoint()
    trainer.fit()


def forked(work: Callable[[], None]) -> int:
    """How a child that does something ended, as ``os.waitpid`` says it."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001  # a child tells why, and is gone
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def tell(boundary: str, ended: int, **facts: Any) -> None:
    """Print what stands there in the end, and how the killed process ended."""
    told = {"boundary": boundary, "signal": os.WTERMSIG(ended), **facts}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def try_kills(
    command: Iterable[object], every: Iterable[str], few: Iterable[str], limit_s: float = 55
) -> list[dict[str, Any]]:
    """Run a program that kills at boundaries; return what it told, first of any never killed."""
    is_long = int(os.environ.get("LIGHTNING_TEST_KILLS", "5")) > 5
    boundaries = list(every if is_long else few)
    done = subprocess.run(
        [sys.executable, *map(str, command), *boundaries],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=limit_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    killed = [each for each in told if each["signal"] == signal.SIGKILL]
    assert [each["boundary"] for each in killed] == boundaries
    return told


def killed(store: Store, boundary: str) -> None:
    """Train until the boundary."""
    home, name, is_after = BOUNDARIES[boundary]
    die_at(home, name, is_after=is_after, at=2)
    train(store, is_resumed=False)


def told(store: Store, boundary: str, first: int) -> None:
    """Print what stands there in the end."""
    trainer = Trainer(store=store, algorithm=Ledger(2))
    (run,) = trainer.runs.all()
    (kept, *_) = trainer.runs.checkpoints(run.run_id)
    held = checkpoint.read(Path(kept.place))
    prompts = [each.body["template"] for each in trainer.resources.versions("prompt")]
    tell(
        boundary,
        first,
        status=run.status,
        step=run.step,
        rows=held.state["rows"],
        claims=trainer.runs.claims(run).counts(),
        losses=[each.step for each in trainer.runs.metrics(run.run_id, names=["loss"])],
        prompts=prompts,
        canary=trainer.resources.get("prompt", "canary").body["template"],
        folders=sorted(path.name for path in Path(kept.place).parent.iterdir()),
    )


def main(folder: Path, boundaries: list[str]) -> None:
    """Kill and resume at each boundary, each in a store of its own."""
    assert run.KEPT_CHECKPOINTS == 2
    for number, boundary in enumerate(boundaries):
        store = Store(folder / str(number))
        record(store, {f"task {index}": [0.0, 1.0] for index in range(STEPS * ROWS // 2)})
        first = forked(partial(killed, store, boundary))
        again = forked(partial(train, store, is_resumed=True))
        assert again == 0, f"{boundary}: the resumed trainer ended with {again}"
        told(store, boundary, first)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(BOUNDARIES))
