"""Each algorithm trains on a batch, refuses what cannot be, and goes on where it stopped."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examples.closed_loop import tiny
from tests.adapter.forest import said
from tests.formats.consumers.recorded import TASKS, TRIES, recorded

from lightning_otel.algorithms import Batch, get
from lightning_otel.errors import ConfigError, TrainingError
from lightning_otel.trainer import Trainer
from lightning_otel.types import Trajectory, Transition

torch = pytest.importorskip("torch")
pytest.importorskip("trl")


pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]
FAST: dict[str, Any] = {"learning_rate": 1e-3}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
MAKERS: dict[str, Any] = {name: get(name) for name in ("sft", "kto", "dpo", "grpo", "ppo")}
SFT, KTO, DPO, GRPO, PPO = MAKERS.values()
NEUTRAL = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    return tiny.saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Trajectory]:
    """Two tasks, four tries each, of two steps; half of them were right."""
    store = recorded(tmp_path_factory.mktemp("recorded") / "traces.duckdb")
    return list(store.trajectories(credit="discounted", gamma=1.0))


def batch_of(paths: list[Trajectory], number: int = 1) -> Batch:
    """The trajectories as a trainer gives them: grouped by task, with their rewards."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(f"task-{int(path.rollout_id[1:]) // TRIES}", []).append(path.rollout_id)
    rewards = {path.rollout_id: path.transitions[-1].reward or 0.0 for path in paths}
    return Batch(paths, number=number, rewards=rewards, groups=groups)


def changed(paths: list[Trajectory], change: Callable[[Transition], Transition]) -> Batch:
    """The batch with every step changed."""
    return batch_of(
        [replace(path, transitions=tuple(map(change, path.transitions))) for path in paths]
    )


def parameters(algorithm: Any) -> dict[str, Any]:
    """A copy of what the algorithm has trained so far."""
    return {
        name: each.detach().clone()
        for name, each in algorithm._model.named_parameters()
        if each.requires_grad
    }


@pytest.mark.parametrize("adapter", [None, LORA], ids=["whole", "adapter"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_resumed_run_is_one_that_never_stopped(
    base: Path, paths: list[Trajectory], tmp_path: Path, name: str, adapter: Any
) -> None:
    """Every batch moves the weights; and one, a checkpoint and another are two."""
    # Each answer another one, or pairs of them would say nothing.
    held = changed(paths, lambda s: replace(s, action=(said("assistant", f"Try {s.rollout_id}."),)))

    def made() -> Any:
        return MAKERS[name](str(base), peft_config=adapter, **FAST)

    straight, broken, resumed = made(), made(), made()
    losses = [straight.train_step(held).metrics["loss"] for _ in range(2)]
    broken.train_step(held)
    before = parameters(broken)
    broken.save(tmp_path)
    resumed.load_state_dict(broken.state_dict())
    resumed.load(tmp_path)
    resumed.train_step(held)

    found, wanted = parameters(resumed), parameters(straight)
    assert resumed.state_dict()["steps"] == 2
    assert all(torch.equal(found[each], wanted[each]) for each in wanted)
    assert any(not torch.equal(found[each], before[each]) for each in wanted)
    if name not in ("grpo", "ppo"):
        assert losses[-1] < losses[0]
    if adapter:
        assert all("lora" in each or "value_head" in each for each in wanted)


def test_metrics_are_the_trainers(base: Path, paths: list[Trajectory]) -> None:
    """What TRL logs comes back under its own names, beside how much was trained."""
    before = random.getstate()

    found = GRPO(str(base), **FAST).train_step(batch_of(paths)).metrics

    assert random.getstate() == before  # ids of spans are drawn from it
    assert found["rows"] == len(TASKS) * TRIES
    assert found["learning_rate"] == FAST["learning_rate"]
    assert found["grad_norm"] > 0
    assert {"loss", "entropy", "clip_ratio/region_mean"} <= found.keys()
    assert "train_runtime" not in found


@pytest.mark.parametrize("name", ["sft", "kto", "dpo"])
def test_long_rows_are_not_cut(base: Path, paths: list[Trajectory], name: str) -> None:
    """TRL keeps the first 1,024 tokens, in which there is no answer here, unless it is told."""
    whole = {"observation": (said("user", "x" * 1200),), "prompt_ids": (), "response_ids": ()}
    held = changed(
        paths, lambda s: replace(s, action=(said("assistant", f"Try {s.rollout_id}."),), **whole)
    )

    found = MAKERS[name](str(base), **FAST).train_step(held).metrics

    assert found["grad_norm"] > 0


def test_a_step_is_a_mean_over_rollouts(base: Path, paths: list[Trajectory]) -> None:
    """Rollouts that earned the same as their group count in it; and forks make no rollout more."""

    def norm(held: list[Trajectory], flat: str) -> float:
        batch = batch_of(held)
        batch.rewards |= dict.fromkeys(batch.groups.get(flat, ()), 0.0)
        return float(GRPO(str(base), **FAST).train_step(batch).metrics["grad_norm"])

    half = paths[:TRIES]
    forked = changed(
        half, lambda s: replace(s, prompt_ids=[9, *s.prompt_ids] if s.step else s.prompt_ids)
    )
    made = GRPO(str(base), **FAST).rows(forked)

    assert norm(paths, "task-1") == pytest.approx(norm(half, "") / 2)
    assert len(made.rows) == 2 * TRIES
    assert sum(row["rollouts"] for row in made.rows) == pytest.approx(TRIES)
    assert {row["rollout_tokens"] for row in made.rows} == {
        sum(len(step.response_ids) for step in path.transitions) for path in half
    }


def test_settings_are_the_librarys(base: Path, paths: list[Trajectory]) -> None:
    """Settings go through by their own names; what is none is told, with what may be meant."""
    twice = GRPO(
        str(base),
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        num_train_epochs=2,
        lr_scheduler_type="linear",
        **FAST,
    )

    metrics = twice.train_step(batch_of(paths)).metrics

    assert metrics["learning_rate"] < FAST["learning_rate"]
    with pytest.raises(ConfigError, match="no option 'learning_rat'; did you mean 'learning_rate'"):
        SFT(str(base), learning_rat=1e-3).train_step(batch_of(paths))
    with pytest.raises(ConfigError, match="output_dir cannot be set"):
        KTO(str(base), output_dir="here")
    with pytest.raises(ConfigError, match="DPOConfig does not take these settings"):
        DPO(str(base), optim="no such one", **FAST).train_step(batch_of(paths))


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (GRPO, {"num_iterations": 2}, "num_train_epochs counts"),
        (GRPO, {"reward_weights": [1.0]}, "compose"),
        (GRPO, {"mask_truncated_completions": True}, "as recorded"),
        (GRPO, {"use_vllm": True}, "nothing is generated"),
        (PPO, {"use_adaptive_entropy": True}, "set entropy_coef"),
        (DPO, {"padding_free": True}, "weighed by their rows"),
        (KTO, {"sync_ref_model": True}, "stays the initial model"),
    ],
)
def test_settings_without_effect_are_refused(
    kind: Any, options: dict[str, Any], reason: str
) -> None:
    """TRL would take them, and they would change nothing."""
    with pytest.raises(ConfigError, match=rf"{next(iter(options))} cannot be set: .*{reason}"):
        kind("model", **options)


@pytest.mark.parametrize(("kind", "loss_type"), [(DPO, "sigmoid"), (KTO, "apo_zero_unpaired")])
def test_rows_of_a_small_micro_batch_count_as_others(
    base: Path, paths: list[Trajectory], kind: Any, loss_type: str
) -> None:
    """One step of all rows, at once or in uneven micro-batches, moves the weights alike."""
    moves = []
    for size, count in ((64, 1), (3, 64)):
        options = {**FAST, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}
        algorithm = kind(
            str(base),
            loss_type=loss_type,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=count,
            **options,
        )
        algorithm._open()
        before = parameters(algorithm)
        algorithm.train_step(
            changed(paths, lambda step: replace(step, action=(said("assistant", step.span_id),)))
        )
        after = parameters(algorithm)
        moves.append(torch.cat([(after[n] - before[n]).flatten() for n in before]))

    assert float(moves[0].abs().max()) > 1e-3
    assert float((moves[0] - moves[1]).norm() / moves[0].norm()) < 1e-4


def test_whole_bfloat16_checkpoints_train_in_float32(
    paths: list[Trajectory], tmp_path: Path
) -> None:
    """Small updates are not lost to rounding: as many weights move as in TRL's own training."""
    tiny.model().to(torch.bfloat16).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    algorithm = SFT(str(tmp_path), learning_rate=1e-6, optim="adamw_torch")
    algorithm._open()
    before = parameters(algorithm)
    algorithm.train_step(batch_of(paths))
    after = parameters(algorithm)
    moved = sum(int((after[n] != before[n]).sum()) for n in before)

    assert moved / sum(each.numel() for each in before.values()) > 0.7


def test_old_weights_are_deleted_unless_named(base: Path, tmp_path: Path) -> None:
    """With ``keep_weights``; what an alias names stays, and without the option everything does."""
    store = recorded(tmp_path / "traces.duckdb")
    trainer = Trainer(
        algorithm="sft", store=store, model=str(base), keep_weights=1, min_batch_size=1,
        max_iterations=6,
    )  # fmt: skip

    def name_second(step: int, *_: Any) -> None:
        if step == 2:
            trainer.resources.set_alias("weights", "best", 2)

    trainer.progress = name_second
    fit = trainer.fit()

    folder = Path(fit.resources["weights"].body["uri"]).parent
    names = {path.name for path in folder.iterdir()}
    assert {"000002", "000006"} <= names
    assert names.isdisjoint({"000001", "000003"})


def test_callbacks_of_trl_are_those_asked_for(
    base: Path, paths: list[Trajectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL reports by itself where it is told to, and nowhere else."""
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed here")
    monkeypatch.chdir(tmp_path)

    SFT(str(base), **FAST).train_step(batch_of(paths))
    assert not list(tmp_path.rglob("events.*"))
    SFT(str(base), report_to="tensorboard", **FAST).train_step(batch_of(paths))
    assert list(tmp_path.rglob("events.*"))


def test_models_that_cannot_be_loaded_are_told(tmp_path: Path, paths: list[Trajectory]) -> None:
    """No model, none at that place, a damaged one, and a checkpoint of another."""
    with pytest.raises(ConfigError, match="GRPO has no model to train"):
        GRPO().train_step(batch_of(paths))
    with pytest.raises(ConfigError, match="nowhere' cannot be loaded"):
        GRPO(str(tmp_path / "nowhere")).train_step(batch_of(paths))
    damaged = tiny.saved(tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="damaged' cannot be loaded"):
        SFT(str(damaged), **FAST).train_step(batch_of(paths))
    whole = tiny.saved(tmp_path / "whole")
    trained = SFT(str(whole), **FAST)
    trained.train_step(batch_of(paths))
    trained.save(tmp_path)
    with pytest.raises(ConfigError, match="is not of this model: other parameters"):
        SFT(str(whole), peft_config=LORA, **FAST).load(tmp_path)
    with pytest.raises(ConfigError, match="no adapter can be made"):
        SFT(str(whole), peft_config={"ranks": 4}, **FAST).train_step(batch_of(paths))


def _text(step: Transition) -> Transition:
    return replace(step, prompt_ids=(), response_ids=(), logprobs=(), capture="text")


def _at(**sampling: Any) -> Callable[[Transition], Transition]:
    return lambda step: replace(step, sampling=sampling)


def test_grpo_refuses_before_a_step(base: Path, paths: list[Trajectory]) -> None:
    """Text, mixed capture levels, other logprobs, and rewards that say nothing: told, no step."""
    mixed = [
        replace(path, transitions=tuple(map(_text, path.transitions))) if number % 2 else path
        for number, path in enumerate(paths)
    ]
    grpo = GRPO(str(base), **FAST)
    cases = {
        "mixed capture levels: 8 of 16": batch_of(mixed),
        "no token ids": changed(paths, _text),
        "16 of 16 steps have no logprobs": changed(paths, lambda s: replace(s, logprobs=())),
        "logprobs of the wrong mode": changed(paths, _at(temperature=0.7, logprobs_mode="raw")),
        "logprobs of an unknown mode": changed(paths, _at(temperature=0.7)),
        "another temperature than the trainer's; set temperature=0.7": changed(
            paths, _at(temperature=0.7, logprobs_mode="processed")
        ),
        "truncating sampling": changed(paths, _at(top_p=0.9)),
        "not sampled: temperature 0": changed(paths, _at(temperature=0.0)),
        "8 × no advantage: no other rollout of its group": Batch(
            paths[:4],
            number=1,
            rewards={path.rollout_id: 1.0 for path in paths[:4]},
            groups={path.rollout_id: [path.rollout_id] for path in paths[:4]},
        ),
        "8 × no advantage: its rollout has no reward": Batch(
            paths[:4], number=1, rewards={}, groups={"one": [p.rollout_id for p in paths[:4]]}
        ),
        "16 × no difference": Batch(
            paths,
            number=1,
            rewards={path.rollout_id: 1.0 for path in paths},
            groups={"one": [path.rollout_id for path in paths]},
        ),
    }

    for reason, batch in cases.items():
        with pytest.raises(TrainingError, match=reason):
            grpo.train_step(batch)

    assert grpo.state_dict()["steps"] == 0
    warm = GRPO(str(base), temperature=0.7, **FAST)
    warm.train_step(changed(paths, _at(temperature=0.7, logprobs_mode="processed")))
    assert warm.state_dict()["steps"] == 1


def test_what_a_server_fills_in_is_seen(paths: list[Trajectory], tmp_path: Path) -> None:
    """A request that leaves sampling out is sampled as the model's folder says; said whole, not."""
    folder = tiny.saved(tmp_path / "model")
    settings = {"do_sample": True, "top_k": 20, "top_p": 0.95, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(settings))

    with pytest.raises(TrainingError, match=r"truncating sampling: .*generation_config\.json"):
        GRPO(str(folder), **FAST).train_step(changed(paths, _at(temperature=1.0)))
    with pytest.raises(TrainingError, match="logprobs of an unknown mode"):
        GRPO(str(folder), **FAST).train_step(changed(paths, _at(top_p=1.0, top_k=-1)))

    assert GRPO(str(folder), **FAST).train_step(changed(paths, _at(**NEUTRAL))).metrics["rows"] == 8


@pytest.mark.parametrize(
    ("name", "action", "reason"),
    [
        ("sft", (), "no messages"),
        ("sft", (said("assistant", " "),), "16 × no answer: the model returned nothing"),
        ("kto", (), "no messages"),
        ("dpo", (said("assistant", ""),), "the same answer earned more and less"),
        ("grpo", (said("assistant", ""),), "no token ids"),
    ],
)
def test_a_model_that_returned_nothing_teaches_nothing(
    base: Path, paths: list[Trajectory], name: str, action: Any, reason: str
) -> None:
    """Refused before a step, with the reason."""
    algorithm = MAKERS[name](str(base), **FAST)
    batch = changed(
        paths, lambda s: replace(s, response_ids=(), logprobs=(), inexact="x", action=action)
    )

    with pytest.raises(TrainingError, match=reason):
        algorithm.train_step(batch)

    assert algorithm.state_dict()["steps"] == 0


def test_later_batches_are_counted_not_refused(base: Path, paths: list[Trajectory]) -> None:
    """A batch of a running training that holds nothing to learn takes no step, and says why."""
    grpo = GRPO(str(base), **FAST)
    grpo.train_step(batch_of(paths))
    before = parameters(grpo)

    found = grpo.train_step(changed(paths, _text))

    assert found.metrics == {"left_out/no token ids": 16.0, "rows": 0.0}
    assert not found.resources
    assert all(torch.equal(before[name], each) for name, each in parameters(grpo).items())


def test_sft_keeps_the_best(base: Path, paths: list[Trajectory]) -> None:
    """Exact tokens are trained as they are, text by its template; a threshold keeps the best."""
    best = SFT(str(base), threshold=1.0, **FAST)
    text = SFT(str(base), **FAST)

    exact = best.train_step(batch_of(paths)).metrics
    messages = text.train_step(changed(paths, _text)).metrics

    assert exact["rows"] == len(paths) / 2
    assert exact["exact"] == 1.0
    assert exact["left_out/reward below the threshold"] == len(paths)
    assert messages["rows"] == len(paths)
    assert messages["exact"] == 0.0
    with pytest.raises(TrainingError, match="16 × reward below the threshold"):
        SFT(str(base), threshold=9.0, **FAST).train_step(batch_of(paths))


def test_dpo_without_pairs_is_refused(base: Path, paths: list[Trajectory]) -> None:
    """Answers that earned the same make no pair."""
    with pytest.raises(TrainingError, match="whose reward differs by enough"):
        DPO(str(base), **FAST).train_step(changed(paths, lambda step: replace(step, reward=1.0)))
