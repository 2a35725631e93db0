"""``verl``: token sequences for verl, and the ``DataProto`` of a batch of them.

Source: verl 0.9's ``DataProto`` and ``AgentLoopOutput`` (``prompt_ids``, ``response_ids``,
``response_mask``), and what its trainer computes advantages of.
"""

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from lightning_otel.dataset.formats.format import ORIGIN, SPAN_IDS, Format, LeftOut, Made, origin
from lightning_otel.dataset.formats.sequences import compared
from lightning_otel.errors import ConfigError, NotInstalledError
from lightning_otel.types import Trajectory


def make(trajectories: Iterable[Trajectory]) -> Made:
    """One row a sequence that has a reward; ``uid`` is its task's, where there is one."""
    for item in compared(trajectories, lambda sequence: sequence.reward is not None):
        if isinstance(item, LeftOut):
            yield item
            continue
        uid, (row, reward) = item
        yield {
            "uid": uid,
            "prompt_ids": list(row.prompt_ids),
            "response_ids": list(row.completion_ids),
            "response_mask": list(row.loss_mask),
            "rollout_log_probs": list(row.logprobs) if len(row.logprobs) else None,
            "steps": len(row.transitions),
            **origin(item[1].last, reward),
            "span_ids": item[1].span_ids,
        }


def data_proto(
    rows: Iterable[Mapping[str, Any]],
    *,
    pad_token_id: int,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
) -> Any:
    """A ``verl.DataProto`` of rows of this format, ready for verl's advantages and losses.

    Its tensors are ``prompts`` [B, P], padded on the left; ``responses`` [B, R], padded on the
    right; ``input_ids``, ``attention_mask`` and ``position_ids`` [B, P + R]; ``response_mask``
    [B, R]; ``token_level_scores`` and ``token_level_rewards`` [B, R] with the row's reward on its
    last token; and ``rollout_log_probs`` [B, R] if the rows have them. ``uid``, ``rollout_id`` and
    ``agent`` are in its ``non_tensor_batch``.

    Args:
        rows: As ``rows("verl", …)`` gives them, or as they are read from a file.
        pad_token_id: What fills up, as the tokenizer has it.
        max_prompt_length: P; by default that of the longest.
        max_response_length: R; likewise.

    Raises:
        ConfigError: There is no row, one is too long, only some have logprobs, or verl is not
            installed.
    """
    batch = list(rows)
    if not batch:
        raise ConfigError("no rows; see what is missing with: export --format verl --dry-run")
    try:
        numpy, torch, verl = map(import_module, ("numpy", "torch", "verl"))
    except ImportError as exc:
        raise NotInstalledError(
            f"this needs verl ({exc}); install it with: pip install verl"
        ) from exc
    tensors, attention = _make_tensors(
        batch,
        _pad_width(batch, "prompt_ids", max_prompt_length),
        _pad_width(batch, "response_ids", max_response_length),
        pad_token_id,
    )
    arrays = {name: torch.tensor(values) for name, values in tensors.items()}
    arrays["attention_mask"] = torch.tensor(attention)
    # As verl counts them: padding on the left is at 0, and the first token too.
    arrays["position_ids"] = torch.clip(torch.cumsum(arrays["attention_mask"], dim=-1) - 1, min=0)
    names = ("uid", "rollout_id", "agent")
    others = {name: numpy.array([row.get(name) for row in batch], dtype=object) for name in names}
    return verl.DataProto.from_dict(tensors=arrays, non_tensors=others)


def _make_tensors(
    batch: Sequence[Mapping[str, Any]], width: int, length: int, pad_token_id: int
) -> tuple[dict[str, list[list[Any]]], list[list[int]]]:
    """The tensors by name, and where they hold a token and not padding, [B, P + R]."""
    # On the last token.
    scores = [[0.0] * (len(row["response_ids"]) - 1) + [float(row["reward"])] for row in batch]
    tensors = {
        "prompts": _pad_left([row["prompt_ids"] for row in batch], width, pad_token_id),
        "responses": _pad_right([row["response_ids"] for row in batch], length, pad_token_id),
        "response_mask": _pad_right([row["response_mask"] for row in batch], length, 0),
        "token_level_scores": _pad_right(scores, length, 0.0),
        "token_level_rewards": _pad_right(scores, length, 0.0),
    }
    if _has_logprobs(batch):
        tensors["rollout_log_probs"] = _pad_right(
            [r["rollout_log_probs"] for r in batch], length, 0.0
        )
    prompts = _pad_left([[1] * len(row["prompt_ids"]) for row in batch], width, 0)
    sampled = _pad_right([[1] * len(row["response_ids"]) for row in batch], length, 0)
    attention = [before + after for before, after in zip(prompts, sampled, strict=True)]
    both = zip(tensors["prompts"], tensors["responses"], strict=True)
    tensors["input_ids"] = [before + after for before, after in both]
    return tensors, attention


def _pad_width(rows: Sequence[Mapping[str, Any]], name: str, limit: int | None) -> int:
    longest = max(len(row[name]) for row in rows)
    if limit is None or longest <= limit:
        return limit or longest
    long = sum(len(row[name]) > limit for row in rows)
    raise ConfigError(
        f"{long} of {len(rows)} rows have more than {limit} {name}, up to {longest}; "
        "leave them out, or allow for them: cut, they would be other answers"
    )


def _has_logprobs(rows: Sequence[Mapping[str, Any]]) -> bool:
    missing = sum(row.get("rollout_log_probs") is None for row in rows)
    if 0 < missing < len(rows):
        raise ConfigError(
            f"{missing} of {len(rows)} rows have no rollout_log_probs; leave these rows, or "
            "the column, out"
        )
    return not missing


def _pad_left(rows: Sequence[Sequence[Any]], width: int, padding: Any) -> list[list[Any]]:
    return [[padding] * (width - len(row)) + list(row) for row in rows]


def _pad_right(rows: Sequence[Sequence[Any]], width: int, padding: Any) -> list[list[Any]]:
    return [list(row) + [padding] * (width - len(row)) for row in rows]


FORMAT: Final = Format(
    make,
    {
        "uid": "VARCHAR",
        "prompt_ids": "INTEGER[]",
        "response_ids": "INTEGER[]",
        "response_mask": "INTEGER[]",
        "rollout_log_probs": "DOUBLE[]",
        "steps": "INTEGER",
        **ORIGIN,
        **SPAN_IDS,
    },
    used_by="verl (data_proto)",
    needs="token ids, logprobs, rewards",
    is_grouped=True,
    is_by_task=True,
)
