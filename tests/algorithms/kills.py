"""Trainers of weights that are killed: as ``tests.trainer.kills``, with GRPO's own trainer.

It prints for each boundary what came of it, as one JSON line; the first line is of a run that was
never killed, which the others must equal to the bit.
"""

import hashlib
import itertools
import sys
from functools import partial
from pathlib import Path

import torch
from examples.closed_loop import tiny
from tests.trainer import made
from tests.trainer.kills import BOUNDARIES, die_at, forked, tell

from lightning_otel import Store
from lightning_otel.algorithms import checkpoint, models
from lightning_otel.algorithms.grpo import GRPO
from lightning_otel.trainer import Trainer

STEPS, GROUPS = 2, 2
NEVER = "never"


def recorded(place: Path) -> Store:
    """Two groups a step, of two rollouts each, which said different things and earned so."""
    store = Store(place)
    made._numbers = itertools.count(1)
    for task in range(STEPS * GROUPS):
        for turn in (0, 1):
            store.add(
                made.spans_of(
                    f"r{task}-{turn}", f"task {task}", float(turn), tokens=(4 + task, 8 + turn)
                )
            )
    return store


def train(store: Store, model: Path, *, is_resumed: bool) -> None:
    torch.set_num_threads(1)
    grpo = GRPO(
        str(model), peft_config={"r": 2, "target_modules": ["q_proj"]}, learning_rate=1e-2, seed=5
    )
    trainer = Trainer(store=store, algorithm=grpo, min_batch_size=2 * GROUPS, max_iterations=STEPS)
    if is_resumed:
        trainer.resume_from_checkpoint()
    trainer.fit()


def killed(store: Store, model: Path, boundary: str) -> None:
    """Train until the boundary, in the second step."""
    home, name, is_after = BOUNDARIES[boundary]
    if home is made.Ledger:
        home = GRPO
    die_at(home, name, is_after=is_after, at=2)
    train(store, model, is_resumed=False)


def told(store: Store, boundary: str, first: int) -> None:
    """Print what stands there in the end."""
    trainer = Trainer(store=store)
    (run,) = trainer.runs.all()
    (kept, *_) = trainer.runs.checkpoints(run.run_id)
    weights = Path(kept.place) / checkpoint.FILES / models._WEIGHTS
    parameters = torch.load(weights, weights_only=True)["parameters"]
    digest = hashlib.sha256()
    for _, values in sorted(parameters.items()):
        digest.update(values.numpy().tobytes())
    versions = trainer.resources.versions("weights")
    tell(
        boundary,
        first,
        status=run.status,
        step=run.step,
        claims=trainer.runs.claims(run).counts(),
        rows=[each.value for each in trainer.runs.metrics(run.run_id, names=["rows"])],
        parameters=digest.hexdigest(),
        changed=any(bool(values.any()) for name, values in parameters.items() if "_B" in name),
        published=[Path(each.body["uri"]).name for each in versions],
    )


def main(folder: Path, boundaries: list[str]) -> None:
    """Kill and resume at each boundary, each in a store of its own."""
    model = tiny.saved(folder / "model")
    for library in ("peft", "lightning_otel.algorithms.recorded_trainers"):
        models.library(library)  # once, and not in every child that is forked
    models.load_model(str(model), {})
    for number, boundary in enumerate([NEVER, *boundaries]):
        store = recorded(folder / str(number) / "traces.duckdb")
        first = 0
        if boundary != NEVER:
            first = forked(partial(killed, store, model, boundary))
        again = forked(partial(train, store, model, is_resumed=boundary != NEVER))
        assert again == 0, f"{boundary}: the trainer ended with {again}"
        told(store, boundary, first)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
