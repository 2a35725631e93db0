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
                age=None,
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


def _read_logprobs(model: Any, row: RecordedRow) -> Any:
    """The log-probabilities of a row's tokens, [C, V]."""
    ids = torch.tensor([*row["prompt_ids"], *row["completion_ids"]])
    return torch.log_softmax(model(ids[None]).logits[0, len(row["prompt_ids"]) - 1 : -1], dim=-1)


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
            logprobs = _read_logprobs(model, row)
            if first is not None:
                held = _read_logprobs(first, row).detach()
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
            found = _read_logprobs(model, row)
            row["logprobs"] = [float(found[n, t]) for n, t in enumerate(row["completion_ids"])]
    options = settings(tmp_path, optim="adamw_torch", learning_rate=3e-3, num_train_epochs=8)
    trainer = RecordedGRPOTrainer(model, options, held, processing_class=tiny.tokenizer())

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


def _select(row: RecordedRow, logprobs: Any) -> tuple[Any, Any, Any]:
    """Log-probability, recorded log-probability and advantage of each sampled token, [S]."""
    places = [place for place, bit in enumerate(row["loss_mask"]) if bit]
    tokens = [row["completion_ids"][place] for place in places]
    named = (
        torch.tensor([row[name][place] for place in places]) for name in ("logprobs", "advantages")
    )  # type: ignore[literal-required]  # these two
    return (logprobs[places, tokens], *named)


def _compare_gradients(trainer: Any, expected: Any, model: Any) -> None:
    expected.backward()
    _, gradients = stepped(trainer)
    error = max(float((gradients[n] - p.grad).abs().max()) for n, p in model.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in model.parameters())
    assert error < 1e-6
    assert largest > 1e-3


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_entropy_counts_each_token_once(tmp_path: Path, loss_type: str) -> None:
    """12 rows as 8 and 4: the bonus weighs tokens as the loss does, not micro-batches."""
    held, model = rows(FORKED), tiny.model()
    terms, weights = [], []
    for row in held:
        logprobs = _read_logprobs(model, row)
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        mask = torch.tensor(row["loss_mask"], dtype=torch.float)
        weight = 1 / row["rollout_tokens"] if loss_type == "grpo" else 1.0
        terms.append(weight * (entropy * mask).sum())
        weights.append(weight * mask.sum())
    bonus = torch.stack(terms).sum() / torch.stack(weights).sum()
    expected = reference(model, rollouts_of(held, FORKED), loss_type) - 0.5 * bonus
    options = {"loss_type": loss_type, "entropy_coef": 0.5, "per_device_train_batch_size": 8}
    trainer = RecordedGRPOTrainer(
        tiny.model(),
        settings(tmp_path, gradient_accumulation_steps=2, steps_per_generation=4, **options),
        held,
        processing_class=tiny.tokenizer(),
    )

    _compare_gradients(trainer, expected, model)


@pytest.mark.parametrize(
    "mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_truncated_importance_sampling_equals_the_reference(tmp_path: Path, mode: str) -> None:
    """Ratios of the weights before training to the engine's, clipped at 1.2, weigh each token."""
    held, model, limit = rows(), tiny.model(), 1.2
    total, clipped = 0, 0
    for row in held:
        logprobs, recorded, advantages = _select(row, _read_logprobs(model, row))
        difference = logprobs.detach() - recorded
        difference = difference.sum() if mode.startswith("sequence") else difference
        ratio = difference.exp() * torch.ones_like(recorded)
        is_large = ratio > limit
        clipped += int(is_large.sum())
        weight = torch.where(is_large, limit if mode.endswith("truncate") else 0.0, ratio)
        total = total - (torch.exp(logprobs - logprobs.detach()) * advantages * weight).mean()
    options = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": limit}
    trainer = RecordedGRPOTrainer(
        tiny.model(),
        settings(tmp_path, per_device_train_batch_size=6, **options),
        held,
        corrects_sampling=True,
        processing_class=tiny.tokenizer(),
    )

    assert clipped > 0
    _compare_gradients(trainer, total / len(held), model)


def test_mismatch_of_engine_and_trainer_is_measured(tmp_path: Path) -> None:
    """Rows of no age, sampled at temperature 1 and recorded at 0.7, tell; older rows do not."""
    model = tiny.model()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    measured = []
    for scale, age in ((1.0, 0), (0.7, 0), (0.7, 1)):
        held = rows()
        for row in held:
            with torch.no_grad():
                found = torch.log_softmax(_read_logprobs(model, row) / scale, dim=-1)
            row["logprobs"] = [float(found[n, t]) for n, t in enumerate(row["completion_ids"])]
            row["age"] = age
        options = settings(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
        trainer = RecordedGRPOTrainer(model, options, held, processing_class=tiny.tokenizer())
        trainer.args.learning_rate = 0.0
        trainer.train()
        measured.append(trainer.state.log_history[0])

    same, other, old = measured
    assert same["mismatch/kl"] == pytest.approx(0.0, abs=1e-6)
    assert same["mismatch/chi2"] == pytest.approx(0.0, abs=1e-4)
    assert same["mismatch/trainer_perplexity"] == pytest.approx(
        same["mismatch/engine_perplexity"], rel=1e-4
    )
    assert other["mismatch/kl"] > 0.1
    assert "mismatch/kl" not in old
