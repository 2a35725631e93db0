"""Rows for verl make a ``DataProto`` that its advantages and losses take."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.formats.consumers import tiny
from tests.formats.consumers.recorded import TASKS, TRIES, recorded

from lightning_otel.dataset.formats.verl import data_proto
from lightning_otel.errors import ConfigError

torch = pytest.importorskip("torch")
verl = pytest.importorskip("verl")

pytestmark = [
    # What verl warns of is its own; to import it takes long on a busy machine.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """The rows of a store with two tasks, tried four times each."""
    found: list[dict[str, Any]] = []
    recorded(tmp_path / "traces.duckdb").export("verl", found.append)
    return found


def test_data_proto_holds_the_rows(rows: list[dict[str, Any]]) -> None:
    """Prompts end where responses begin; masks, positions and rewards are where verl looks."""
    rows[0]["prompt_ids"] = rows[0]["prompt_ids"][:2]
    rows[0]["response_ids"] = [*rows[0]["response_ids"], 99]
    rows[0]["response_mask"] = [*rows[0]["response_mask"], 0]
    rows[0]["rollout_log_probs"] = [*rows[0]["rollout_log_probs"], 0.0]

    batch = data_proto(rows, pad_token_id=0)

    assert isinstance(batch, verl.DataProto)
    assert len(batch) == len(TASKS) * TRIES
    held = {name: value.tolist() for name, value in batch[:2].batch.items()}
    assert held["prompts"] == [[0, 0, 3, 4], [3, 4, 5, 6]]
    assert held["responses"][0] == [7, 8, 9, 10, 11, 12, 13, 99]
    assert held["responses"][1][-1] == 0
    assert held["input_ids"] == [
        one + two for one, two in zip(held["prompts"], held["responses"], strict=True)
    ]
    assert held["attention_mask"][0] == [0, 0, *[1] * 10]
    assert held["attention_mask"][1] == [*[1] * 11, 0]
    assert held["position_ids"][0] == [0, 0, *range(10)]
    assert held["response_mask"] == [[1, 1, 1, 0, 0, 1, 1, 0]] * 2
    assert held["token_level_scores"] == [[0.0] * 7 + [1.0], [0.0] * 8]
    assert held["rollout_log_probs"][0] == [-0.5, -0.25, -0.125, 0.0, 0.0, -1.0, -0.75, 0.0]
    assert len(set(batch.non_tensor_batch["uid"])) == len(TASKS)


def test_rows_of_a_file_come_in_batches(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Parquet gives the same ``DataProto``, and verl's iterator brings each row once."""
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "rows.parquet"
    recorded(tmp_path / "again.duckdb").export("verl", path)
    stored = datasets.load_dataset(
        "parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )

    batch, direct = (data_proto(source, pad_token_id=0) for source in (stored, rows))
    parts = list(batch.make_iterator(mini_batch_size=4, epochs=1))

    assert all(torch.equal(batch.batch[name], value) for name, value in direct.batch.items())
    names = [name for part in parts for name in part.non_tensor_batch["rollout_id"]]
    assert [len(part) for part in parts] == [4, 4]
    assert sorted(names) == sorted(row["rollout_id"] for row in rows)


def test_prompts_are_loaded_for_new_rollouts(tmp_path: Path) -> None:
    """Its loader of prompts takes a Parquet file whose arguments are text."""
    loaders = pytest.importorskip("verl.utils.dataset.rl_dataset")
    store, path = recorded(tmp_path / "traces.duckdb"), tmp_path / "rows.parquet"
    store.export("sft", path, arguments="text")
    config = {"cache_dir": str(tmp_path / "cache"), "max_prompt_length": 512, "num_workers": 1}

    prompts = loaders.RLHFDataset([str(path)], tiny.tokenizer(), config)

    assert len(prompts) == len(TASKS) * TRIES
    assert [turn["role"] for turn in prompts[0]["raw_prompt"]] == ["system", "user"]
    assert prompts[0]["raw_prompt"][1]["content"] == TASKS[0]


def test_advantages_are_relative_to_the_group(rows: list[dict[str, Any]]) -> None:
    """Its GRPO compares the tries of a task, by the rows' uid."""
    from verl.trainer.ppo import core_algos

    batch = data_proto(rows, pad_token_id=0)

    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        token_level_rewards=batch.batch["token_level_rewards"],
        response_mask=batch.batch["response_mask"],
        index=batch.non_tensor_batch["uid"],
    )

    groups = defaultdict(list)
    for row in rows:
        groups[row["uid"]].append(row["reward"])
    for row, found, mask in zip(rows, advantages, batch.batch["response_mask"], strict=True):
        group = np.array(groups[row["uid"]])
        wanted = (row["reward"] - group.mean()) / (group.std(ddof=1) + 1e-6)
        assert torch.allclose(found, mask * wanted, atol=1e-4)


def test_policy_loss_takes_the_recorded_logprobs(rows: list[dict[str, Any]]) -> None:
    """With the logprobs that were recorded the ratio is one, and the loss minus the advantage."""
    from verl.trainer.ppo import core_algos

    batch = data_proto(rows, pad_token_id=0)
    recorded_logprobs = batch.batch["rollout_log_probs"]
    advantages = torch.ones_like(recorded_logprobs)

    loss, clipped, *_ = core_algos.compute_policy_loss(
        old_log_prob=recorded_logprobs,
        log_prob=recorded_logprobs,
        advantages=advantages,
        response_mask=batch.batch["response_mask"],
        cliprange=0.2,
        cliprange_low=0.2,
        cliprange_high=0.2,
        clip_ratio_c=3.0,
        loss_agg_mode="token-mean",
    )

    assert float(loss) == pytest.approx(-1.0)
    assert float(clipped) == 0.0


def test_rows_too_long_or_without_logprobs_are_refused(rows: list[dict[str, Any]]) -> None:
    """Nothing is cut, and no column is dropped in silence."""
    with pytest.raises(ConfigError, match="8 of 8 rows have more than 3 prompt_ids, up to 4"):
        data_proto(rows, pad_token_id=0, max_prompt_length=3)
    rows[1]["rollout_log_probs"] = None
    with pytest.raises(ConfigError, match="1 of 8 rows have no rollout_log_probs"):
        data_proto(rows, pad_token_id=0)
    for row in rows:
        row["rollout_log_probs"] = None
    assert "rollout_log_probs" not in data_proto(rows, pad_token_id=0).batch.keys()  # noqa: SIM118  # a TensorDict


def test_widths_may_be_given(rows: list[dict[str, Any]]) -> None:
    """Batches of one run have one shape."""
    batch = data_proto(rows, pad_token_id=0, max_prompt_length=6, max_response_length=9)

    assert tuple(batch.batch["prompts"].shape) == (8, 6)
    assert tuple(batch.batch["responses"].shape) == (8, 9)
