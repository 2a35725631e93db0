"""Each format for TRL makes its trainer's dataset and takes one step of a tiny model."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tests.adapter.forest import Forest, said
from tests.formats.consumers import tiny
from tests.formats.consumers.recorded import TASKS, TRIES, recorded

from lightning_otel import Store
from lightning_otel.types import conventions as c

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = [
    # What trainers warn of is theirs; to import them takes long on a busy machine.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]
IGNORED = -100
"""The label of a token that no loss is taken of."""
ENDINGS = ("folder", "rows.jsonl")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two tasks, four tries each."""
    return recorded(tmp_path / "traces.duckdb")


def load(store: Store, name: str, tmp_path: Path, ending: str = "folder", **options: Any) -> Any:
    """What ``datasets.load_dataset`` reads of an export."""
    place = tmp_path / ending
    store.export(name, place, **options)
    cache = str(tmp_path / "cache")
    if ending == "folder":
        return datasets.load_dataset(str(place), split="train", cache_dir=cache)
    kind = "parquet" if ending.endswith("parquet") else "json"
    return datasets.load_dataset(kind, data_files=str(place), split="train", cache_dir=cache)


def settings(tmp_path: Path) -> dict[str, Any]:
    """One step on the CPU, and nothing but that."""
    return {
        "output_dir": str(tmp_path / "trained"),
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "logging_steps": 1,
        "learning_rate": 1e-2,
    }


def trainer_of(kind: str, rows: Any, tmp_path: Path, **options: Any) -> Any:
    """TRL's trainer of a kind, with the tiny model."""
    reference = {} if kind == "SFT" else {"ref_model": tiny.model()}
    return getattr(trl, f"{kind}Trainer")(
        tiny.model(),
        **reference,
        args=getattr(trl, f"{kind}Config")(**options, **settings(tmp_path)),
        train_dataset=rows,
        processing_class=tiny.tokenizer(),
    )


def stepped(trainer: Any) -> dict[str, Any]:
    """What the trainer logged of its one step, by which the weights changed."""
    import torch

    before = [each.detach().clone() for each in trainer.model.parameters()]
    trainer.train()
    after = list(trainer.model.parameters())
    assert any(not torch.equal(one, two) for one, two in zip(before, after, strict=True))
    logged: dict[str, Any] = next(each for each in trainer.state.log_history if "loss" in each)
    assert torch.isfinite(torch.tensor(logged["loss"]))
    return logged


@pytest.mark.parametrize("ending", ENDINGS)
def test_sft_trains_on_what_the_assistant_said(store: Store, tmp_path: Path, ending: str) -> None:
    """Messages and tools become text by the template; the loss is of assistant turns alone."""
    rows = load(store, "sft", tmp_path, ending)

    trainer = trainer_of("SFT", rows, tmp_path, assistant_only_loss=True)

    assert len(rows) == len(TASKS) * TRIES
    first = trainer.train_dataset[0]
    text = tiny.tokenizer().decode(first["input_ids"])
    trained = [label for label in first["labels"] if label != IGNORED]
    calls = '<call>calculator{"expression": "2+2", "round": {"digits": 1}}</call>' * 2
    assert text.startswith('<|tools|>[{"type": "function", "function": {"name": "calculator"')
    assert tiny.tokenizer().decode(trained) == f"{calls}<|end|>It is 4.<|end|>"
    assert text.count("<|tool|>4<|end|>") == 2
    stepped(trainer)


def edited(path: Path) -> Store:
    """A store of an agent with an example in its prompt, and a clock that goes on once."""
    store = Store(path)
    forest = Forest(rollout_id="edited", trace_id=f"{9:032x}", process="p", tick=1000)
    history = [said("user", "1+1?"), said("assistant", "EXAMPLE"), said("user", "go")]
    with forest.agent("solver"):
        for number in range(6):
            answer = said("assistant", f" own {number}\n")
            given = [said("system", f"It is 12:0{number // 3}."), *history]
            forest.make("chat", {
                c.OPERATION: c.CHAT,
                c.INPUT_MESSAGES: json.dumps(given),
                c.OUTPUT_MESSAGES: json.dumps([{**answer, "finish_reason": "stop"}]),
            })  # fmt: skip
            history += [answer, said("user", "on")]
        forest.reward(1.0)
    store.add(forest.spans)
    return store


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_sft_trains_each_answer_once(tmp_path: Path, threshold: float | None) -> None:
    """History, examples and edits are never trained; both masks of the trainer say so."""
    rows = load(edited(tmp_path / "traces.duckdb"), "sft", tmp_path, threshold=threshold)

    trainer = trainer_of("SFT", rows, tmp_path, assistant_only_loss=True)

    trained = [
        tiny.tokenizer().decode([label for label in row["labels"] if label != IGNORED])
        for row in trainer.train_dataset
    ]
    answers = [text for each in trained for text in each.split("<|end|>") if text]
    assert sorted(answers) == [f" own {number}\n" for number in range(6)]
    assert len(rows) == 2


def test_rows_render_in_the_templates_of_trl(tmp_path: Path) -> None:
    """Each row that is exported for a template is trained in it: something of it is generated."""
    store = edited(tmp_path / "traces.duckdb")
    templates = sorted((Path(trl.__file__).parent / "chat_templates").glob("*_training.jinja"))
    tokenizer = tiny.tokenizer()
    counts = []
    for template in templates:
        rows = list(store.rows("sft", template=str(template)))
        counts.append(sum(row["steps"] for row in rows))
        for row in rows:
            turns = row["prompt"] + row["completion"]
            if template.stem.partition("_")[0] in ("idefics3", "smolvlm", "llava"):
                turns = trl.data_utils.prepare_multimodal_messages(turns)
            tokenizer.apply_chat_template(turns, chat_template=template.read_text())

    assert len(templates) > 25
    assert counts.count(6) > 25
    assert counts[[each.stem for each in templates].index("gemma_training")] == 0


def test_sft_of_the_best_alone(store: Store, tmp_path: Path) -> None:
    """A threshold keeps what was right."""
    rows = load(store, "sft", tmp_path, threshold=1.0)

    assert len(rows) == len(TASKS) * TRIES // 2
    assert set(rows["reward"]) == {1.0}


@pytest.mark.parametrize("ending", ENDINGS)
def test_prompt_completion_trains_on_completions(store: Store, tmp_path: Path, ending: str) -> None:
    """Each step is a row, and the loss is of its completion alone."""
    rows = load(store, "prompt-completion", tmp_path, ending)

    trainer = trainer_of("SFT", rows, tmp_path)

    assert len(rows) == 2 * len(TASKS) * TRIES
    trained = [label for label in trainer.train_dataset[1]["labels"] if label != IGNORED]
    assert tiny.tokenizer().decode(trained) == "It is 4.<|end|>"
    stepped(trainer)


def test_tokens_are_trained_as_they_were_recorded(store: Store, tmp_path: Path) -> None:
    """Token ids reach the model untouched, masked but for what was sampled."""
    rows = load(store, "tokens", tmp_path)

    trainer = trainer_of("SFT", rows, tmp_path)

    first = trainer.data_collator([trainer.train_dataset[0]])
    assert first["input_ids"].tolist() == [[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
    assert first["labels"].tolist() == [[-100] * 4 + [7, 8, 9, -100, -100, 12, 13]]
    stepped(trainer)


@pytest.mark.parametrize("ending", ENDINGS)
def test_kto_takes_labels(store: Store, tmp_path: Path, ending: str) -> None:
    """Half of the answers are good ones."""
    rows = load(store, "kto", tmp_path, ending)

    trainer = trainer_of("KTO", rows, tmp_path)

    assert sorted(rows["label"]) == [False] * 4 + [True] * 4
    stepped(trainer)


@pytest.mark.parametrize("ending", ENDINGS)
def test_dpo_takes_pairs(store: Store, tmp_path: Path, ending: str) -> None:
    """Steps of a task that saw the same, judged by what came of them, are pairs."""
    rows = load(store, "dpo", tmp_path, ending, credit="discounted", gamma=1.0)

    trainer = trainer_of("DPO", rows, tmp_path)

    assert len(rows) == len(TASKS) * TRIES
    assert all(one > two for one, two in zip(rows["reward"], rows["rejected_reward"], strict=True))
    stepped(trainer)


def test_grpo_rows_are_trls_samples(store: Store, tmp_path: Path) -> None:
    """Prompt, mask, logprobs and group make the sample that TRL's asynchronous GRPO takes."""
    worker = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker")
    rows = load(store, "grpo", tmp_path)

    samples = [
        worker.RolloutSample(
            prompt=[],
            completion=[],
            input_ids=row["prompt_token_ids"] + row["completion_token_ids"],
            completion_mask=row["loss_mask"],
            old_log_probs=[0.0] * len(row["prompt_token_ids"]) + row["per_token_logps"],
            advantage=row["reward"] - 0.5,
            model_version=0,
            metrics={},
            group_id=row["group_id"],
        )
        for row in rows
    ]

    assert len({sample.group_id for sample in samples}) == len(TASKS)
    for sample in samples:
        lengths = {len(sample.input_ids), len(sample.completion_mask), len(sample.old_log_probs)}
        assert lengths == {11}
        assert sum(sample.completion_mask) == 5


def test_grpo_rows_stand_for_generations(store: Store, tmp_path: Path) -> None:
    """TRL's own GRPO trainer takes a step of recorded tokens, masks and rewards, group by group."""
    rows = load(store, "grpo", tmp_path, advantage="grpo")
    groups = defaultdict(list)
    for row in rows:
        groups[row["group_id"]].append(row)
    taken: list[dict[str, Any]] = []

    def give_rows(prompts: list[str], trainer: Any) -> dict[str, Any]:
        taken.extend(groups[prompt].pop() for prompt in prompts)
        return {
            "prompt_ids": [row["prompt_token_ids"] for row in taken],
            "completion_ids": [row["completion_token_ids"] for row in taken],
            "logprobs": [row["per_token_logps"] for row in taken],
            "env_mask": [row["loss_mask"][len(row["prompt_token_ids"]) :] for row in taken],
            "earned": [row["reward"] for row in taken],
        }

    options = settings(tmp_path) | {"per_device_train_batch_size": len(rows)}
    trainer = trl.GRPOTrainer(
        tiny.model(),
        lambda earned, **_: earned,
        args=trl.GRPOConfig(num_generations=TRIES, scale_rewards="group", **options),
        train_dataset=datasets.Dataset.from_dict({"prompt": sorted(groups)}),
        processing_class=tiny.tokenizer(),
        rollout_func=give_rows,
    )
    compute_loss, batches = trainer.compute_loss, []

    def keep_batch(model: Any, inputs: Any, **options: Any) -> Any:
        batches.append(inputs)
        return compute_loss(model, inputs, **options)

    trainer.compute_loss = keep_batch
    stepped(trainer)

    assert sorted(row["rollout_id"] for row in taken) == sorted(rows["rollout_id"])
    (batch,) = batches
    by_reward = {row["reward"]: row["advantage"] for row in rows}
    assert {round(value, 3) for value in batch["advantages"].tolist()} == {
        round(value, 3) for value in by_reward.values()
    }
    assert batch["tool_mask"].sum().item() == 5 * len(rows)
