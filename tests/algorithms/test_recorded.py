"""GRPO on recorded rows is what an independent reading of the papers says it is."""

import random
from pathlib import Path
from typing import Any

import pytest
from examples.closed_loop import tiny

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl")

from lightning_otel.algorithms.recorded import RecordedGRPOTrainer, RecordedRow  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]
EPSILON = 0.2
LEARNING_RATE = 0.05


def rows(count: int = 6, seed: int = 3) -> list[RecordedRow]:
    """Rows of several lengths, sampled by another model, with tokens in between that were given."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
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
            )
        )
    return found


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
        "per_device_train_batch_size": 6,
        "num_train_epochs": 1,
        "loss_type": "grpo",
        "shuffle_dataset": False,
    }
    return trl.GRPOConfig(**{**plain, **more})


def reference(model: Any, held: list[RecordedRow], loss_type: str = "grpo") -> Any:
    """The clipped loss of the rows, written down from the definition, a row at a time, unpadded.

    Source: DeepSeekMath (arXiv 2402.03300), equation 3, without a KL term; DAPO (arXiv 2503.14476),
    equation 8.
    """
    sums, sizes = [], []
    for row in held:
        ids = torch.tensor([*row["prompt_ids"], *row["completion_ids"]])
        logits = model(ids[None]).logits[0]
        at = len(row["prompt_ids"])
        logprobs = torch.log_softmax(logits[at - 1 : -1], dim=-1)
        terms = []
        for place, token in enumerate(row["completion_ids"]):
            if row["loss_mask"][place]:
                ratio = torch.exp(logprobs[place, token] - row["logprobs"][place])
                advantage = row["advantages"][place]
                clipped = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON)
                terms.append(torch.minimum(ratio * advantage, clipped * advantage))
        sums.append(torch.stack(terms).sum())
        sizes.append(len(terms))
    if loss_type == "dapo":
        return -torch.stack(sums).sum() / sum(sizes)
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


@pytest.mark.parametrize(
    ("loss_type", "batch", "accumulation"),
    [("grpo", 6, 1), ("grpo", 2, 3), ("dapo", 6, 1), ("dapo", 2, 3), ("dapo", 4, 2)],
)
def test_recorded_grpo_equals_the_reference(
    tmp_path: Path, loss_type: str, batch: int, accumulation: int
) -> None:
    """Loss and every gradient, off policy, with masked tokens and an advantage for each token."""
    held = rows()
    model = tiny.model()
    expected = reference(model, held, loss_type)
    expected.backward()
    wanted = {name: each.grad.clone() for name, each in model.named_parameters()}
    trainer = RecordedGRPOTrainer(
        tiny.model(),
        settings(
            tmp_path,
            loss_type=loss_type,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=2 * accumulation,
        ),
        held,
        processing_class=tiny.tokenizer(),
    )

    loss, gradients = stepped(trainer)

    assert loss == pytest.approx(float(expected), abs=1e-6)
    assert gradients.keys() == wanted.keys()
    worst = max(float((gradients[name] - wanted[name]).abs().max()) for name in wanted)
    assert worst < 1e-6
    assert max(float(each.abs().max()) for each in wanted.values()) > 1e-3


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
