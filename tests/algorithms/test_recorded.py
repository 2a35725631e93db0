"""GRPO on recorded rows is what an independent reading of the papers says it is."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from examples.closed_loop import tiny

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl")

from lightning_otel.algorithms.recorded_trainers import RecordedGRPOTrainer, RecordedRow  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]
EPSILON: Final = 0.2
BETA: Final = 0.3
LEARNING_RATE: Final = 0.05
LONGEST: Final = 20


def rows(sizes: Sequence[int] = (1,) * 6, seed: int = 3) -> list[RecordedRow]:
    """Rows of several lengths, sampled by another model, with tokens in between that were given."""
    chance = random.Random(seed)
    found = []
    for _ in range(sum(sizes)):
        size = chance.randint(6, 14)
        mask = [1] * size
        mask[2:4] = [0, 0]
        found.append(
            RecordedRow(
                prompt_ids=[chance.randrange(3, 200) for _ in range(chance.randint(3, 9))],
                completion_ids=[chance.randrange(3, 200) for _ in range(size)],
                loss_mask=mask,
                # Around what an untrained model says, so that some ratios are beyond the clip.
                logprobs=[-5.5 + chance.uniform(-0.5, 0.5) if kept else 0.0 for kept in mask],
                advantages=[chance.uniform(-1.5, 1.5) if kept else 0.0 for kept in mask],
                rollout_tokens=0,
                rollouts=0.0,
            )
        )
    for rollout in rollouts_of(found, sizes):
        tokens = sum(sum(row["loss_mask"]) for row in rollout)
        for row in rollout:
            row["rollout_tokens"] = tokens
            row["rollouts"] = sum(row["loss_mask"]) / tokens
    return found


def rollouts_of(held: list[RecordedRow], sizes: Sequence[int]) -> list[list[RecordedRow]]:
    ends = list(itertools.accumulate(sizes))
    return [held[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def settings(tmp_path: Path, **more: Any) -> Any:
    """A configuration that takes plain gradient steps on the CPU."""
    plain: dict[str, Any] = {
        "output_dir": str(tmp_path / "out"),
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "num_generations": 2,
        "steps_per_generation": 2,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "learning_rate": LEARNING_RATE,
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 12,
        "num_train_epochs": 1,
        "loss_type": "grpo",
        "shuffle_dataset": False,
    }
    return trl.GRPOConfig(**{**plain, **more})


def reference(
    model: Any, rollouts: list[list[RecordedRow]], loss_type: str = "grpo", first: Any = None
) -> Any:
    """The clipped loss, written down from the definitions, a row at a time, unpadded.

    Args:
        model: What is trained.
        rollouts: Rows of each.
        loss_type: Which definition.
        first: The model that ``BETA`` holds it to.

    Source: DeepSeekMath (arXiv 2402.03300), equations 3 and 4: ``grpo``, where a rollout's several
    rows are its one output; Dr. GRPO (arXiv 2503.20783), without the two biases; DAPO (arXiv
    2503.14476), equation 8; DeepSeek-V3.2 (arXiv 2512.02556), section 3.1: the KL term's ratio.
    """
    sums, sizes = [], []
    for rollout in rollouts:
        terms = []
        for row in rollout:
            at = len(row["prompt_ids"])
            ids = torch.tensor([*row["prompt_ids"], *row["completion_ids"]])
            logprobs = torch.log_softmax(model(ids[None]).logits[0, at - 1 : -1], dim=-1)
            if first is not None:
                held = torch.log_softmax(first(ids[None]).logits[0, at - 1 : -1], dim=-1).detach()
            for place, token in enumerate(row["completion_ids"]):
                if row["loss_mask"][place]:
                    ratio = torch.exp(logprobs[place, token] - row["logprobs"][place])
                    advantage = row["advantages"][place]
                    clipped = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON)
                    term = torch.minimum(ratio * advantage, clipped * advantage)
                    if first is not None:
                        log_ratio = held[place, token] - logprobs[place, token]
                        term = term - BETA * ratio * (torch.exp(log_ratio) - log_ratio - 1)
                    terms.append(term)
        sums.append(torch.stack(terms).sum())
        sizes.append(len(terms))
    if loss_type == "dapo":
        return -torch.stack(sums).sum() / sum(sizes)
    if loss_type == "dr_grpo":
        return -torch.stack(sums).mean() / LONGEST
    return -torch.stack([one / size for one, size in zip(sums, sizes, strict=True)]).mean()


def stepped(trainer: Any) -> tuple[float, dict[str, Any]]:
    """The loss that was logged of one step, and the gradient that the step went along."""
    before = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    held: dict[str, Any] = {}

    class Keep(_callback()):  # type: ignore[misc]  # of a library that is not installed everywhere
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            for name, each in trainer.model.named_parameters():
                held[name] = each.grad.detach().clone()

    trainer.add_callback(Keep())
    losses = []
    compute = trainer._compute_loss

    def kept(model: Any, inputs: Any) -> Any:
        losses.append(compute(model, inputs))
        return losses[-1]

    trainer._compute_loss = kept
    trainer.train()
    for name, each in trainer.model.named_parameters():
        assert torch.allclose(each, before[name] - LEARNING_RATE * held[name], atol=1e-7)
    return float(sum(loss.detach() for loss in losses)), held


def _callback() -> Any:
    from transformers import TrainerCallback

    return TrainerCallback


ALONE: Final = (1,) * 12
FORKED: Final = (1, 4, 2, 1, 3, 1)
"""Rows of each rollout, of which there are 12 in all."""


@pytest.mark.parametrize("sizes", [ALONE, FORKED], ids=["alone", "forked"])
@pytest.mark.parametrize(
    ("loss_type", "batch"),
    [*(("grpo", batch) for batch in (12, 1, 4, 5, 8, 10, 11)), ("dapo", 8), ("dr_grpo", 8)],
)
def test_recorded_grpo_equals_the_reference(
    tmp_path: Path, loss_type: str, batch: int, sizes: Sequence[int]
) -> None:
    """Loss and every gradient, off policy, held to a first model, masked tokens, uneven rows."""
    held = rows(sizes)
    model, first = tiny.model(), tiny.model(seed=1)
    expected = reference(model, rollouts_of(held, sizes), loss_type, first)
    expected.backward()
    wanted = {name: each.grad.clone() for name, each in model.named_parameters()}
    accumulation = -(-len(held) // batch)
    trainer = RecordedGRPOTrainer(
        tiny.model(),
        settings(
            tmp_path,
            beta=BETA,
            loss_type=loss_type,
            max_completion_length=LONGEST,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=2 * accumulation,
        ),
        held,
        reference=first,
        processing_class=tiny.tokenizer(),
    )

    loss, gradients = stepped(trainer)

    assert loss == pytest.approx(float(expected), abs=1e-6)
    assert gradients.keys() == wanted.keys()
    found, true = (torch.cat([each[n].flatten() for n in wanted]) for each in (gradients, wanted))
    assert float((found - true).abs().max()) < 1e-6
    assert float(true.abs().max()) > 1e-3


def test_replaying_rows_meets_the_clip(tmp_path: Path) -> None:
    """The more often the same rows are trained, the more are clipped; with stock TRL none is."""
    held = rows()
    model = tiny.model()
    with torch.no_grad():
        for row in held:
            ids = torch.tensor([*row["prompt_ids"], *row["completion_ids"]])
            found = torch.log_softmax(model(ids[None]).logits[0], dim=-1)
            at = len(row["prompt_ids"]) - 1
            row["logprobs"] = [
                float(found[at + place, token]) for place, token in enumerate(row["completion_ids"])
            ]
    trainer = RecordedGRPOTrainer(
        model,
        settings(tmp_path, optim="adamw_torch", learning_rate=3e-3, num_train_epochs=8),
        held,
        processing_class=tiny.tokenizer(),
    )

    trainer.train()

    logged = [each for each in trainer.state.log_history if "loss" in each]
    clipped = [each["clip_ratio/region_mean"] for each in logged]
    assert len(clipped) == 8
    assert clipped[0] == 0.0
    assert clipped[-1] > 0.3
    assert clipped[1] < clipped[3] < clipped[-1]


def test_a_reference_model_holds_it_back(tmp_path: Path) -> None:
    """With ``beta`` the divergence from the first model counts: none at first, then some."""
    trainer = RecordedGRPOTrainer(
        tiny.model(),
        settings(tmp_path, beta=0.1, num_train_epochs=3, learning_rate=0.5),
        rows(),
        reference=tiny.model(),
        processing_class=tiny.tokenizer(),
    )

    trainer.train()

    divergence = [each["kl"] for each in trainer.state.log_history if "kl" in each]
    assert divergence[0] == pytest.approx(0.0, abs=1e-6)
    assert divergence[-1] > 1e-5
