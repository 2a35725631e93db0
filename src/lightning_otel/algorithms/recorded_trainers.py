"""GRPO and PPO on recorded rows: TRL's trainer, with what agents sampled instead of generating.

Nothing of the clipped ratio is here. Stock TRL takes it to the weights as they are, and so trains
on stale data as if it were fresh; here it is to the log-probabilities that were recorded. Stock TRL
takes a mean over each micro-batch, so that rows of a small one count for more; here the loss is one
sum over the tokens of a step, as TRL has it for ``dapo``, and ``loss_type`` says their weights.

Imported only where TRL is installed; it overrides private methods, so releases of TRL are pinned.

Source: TRL 1.16, ``trl/trainer/grpo_trainer.py``: ``_compute_loss`` says what a batch holds. PPO:
Schulman et al., arXiv 1707.06347, equation 9; arXiv 1506.02438, equations 11 to 16; the clipped
value loss is that of OpenAI's ``baselines/ppo2``.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final, TypedDict

datasets: Any = import_module("datasets")
torch: Any = import_module("torch")
transformers: Any = import_module("transformers")
trl: Any = import_module("trl")
utils: Any = import_module("trl.trainer.utils")

_TINY: Final = 1e-8


class RecordedRow(TypedDict):
    """A token sequence as the trainer takes it."""

    prompt_ids: Sequence[int]  # before the first sampled token, [P]
    completion_ids: Sequence[int]  # from the first sampled token on, [C]
    loss_mask: Sequence[int]  # 1 where the model sampled the token, 0 where it was given it, [C]
    logprobs: Sequence[float]  # of each sampled token when it was sampled, anything else, [C]
    advantages: Sequence[float]  # of each sampled token, anything else, [C]
    rollout_tokens: int  # how many its rollout sampled, in this row and others
    # How many rollouts it counts as in a mean over rollouts: the share of its own that lies in it,
    # more where others taught nothing.
    rollouts: float


class RecordedGRPOTrainer(trl.GRPOTrainer):  # type: ignore[misc]  # not installed everywhere
    """TRL's GRPO trainer on recorded rows; an epoch is one pass, and nothing is generated."""

    def __init__(
        self,
        model: Any,
        args: Any,
        rows: Sequence[Mapping[str, Any]],
        *,
        reference: Any = None,
        **others: Any,
    ) -> None:
        """Take what ``GRPOTrainer`` takes, and recorded rows; ``beta`` pulls to ``reference``."""
        # TRL would load the reference anew, or copy the adapter as it is by now, in each trainer.
        beta, args.beta = args.beta, 0.0
        placeholder = datasets.Dataset.from_dict({"prompt": [""]})
        super().__init__(model, [_refuse_reward], args=args, train_dataset=placeholder, **others)
        self.beta = args.beta = beta
        self.train_dataset: list[Any] = list(rows)
        self._longest = max((row["rollout_tokens"] for row in rows), default=1)
        self._normalizer = 0.0
        self._weighing: str = args.loss_type
        if self._weighing == "sapo":
            raise ValueError(
                "loss_type 'sapo' is a mean over each micro-batch; take 'grpo' or 'dapo'"
            )
        if self._weighing in ("grpo", "bnpo", "dr_grpo", "luspo"):
            self.loss_type = "dapo"
        if reference is not None:
            utils.add_fused_lm_head(
                reference, self.temperature, cast_lm_head_to_fp32=args.cast_lm_head_to_fp32
            )
            self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)

    def get_train_dataloader(self) -> Any:
        """Micro-batches of rows; TRL's own would repeat each prompt for its generations."""
        return transformers.Trainer.get_train_dataloader(self)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return transformers.Trainer._get_train_sampler(self, dataset)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the micro-batches of an optimizer step, and the divisor of their tokens' sum.

        Source: DeepSeekMath, arXiv 2402.03300, equation 3 (``grpo``: a mean over rollouts of the
        mean over each one's tokens); Dr. GRPO, arXiv 2503.20783; DAPO, arXiv 2503.14476, equation 8
        (a mean over all tokens); LUSPO, arXiv 2602.05261.
        """
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        all_rows = [row for rows in batches for row in rows]
        rollouts = sum(row["rollouts"] for row in all_rows)
        by_rollout = {
            "grpo": rollouts * self._longest,
            "dr_grpo": rollouts * (self.max_completion_length or 1),
            "luspo": rollouts,
        }
        tokens = sum(sum(row["loss_mask"]) for row in all_rows)
        self._normalizer = by_rollout.get(self._weighing, tokens)
        return batches, items

    def _token_weights(self, row: RecordedRow) -> list[float]:
        """Return token weights [C], 0 where given, none below 1: TRL takes a sum below 1 for 1."""
        weight = self._longest / row["rollout_tokens"] if self._weighing == "grpo" else 1
        return [weight * bit for bit in row["loss_mask"]]

    def _prepare_inputs(self, inputs: list[RecordedRow]) -> dict[str, Any]:
        batch = self._make_tokens(inputs)
        batch |= {
            "tool_mask": self._pad_rows([self._token_weights(row) for row in inputs], 0),
            "advantages": self._pad_rows([row["advantages"] for row in inputs], 0.0),
            "old_per_token_logps": self._pad_rows([row["logprobs"] for row in inputs], 0.0),
        }
        # TRL counts what is in a generation batch, and divides by what falls to one step of it.
        share = self.args.steps_per_generation / self.current_gradient_accumulation_steps
        batch["num_items_in_batch"] = torch.tensor(
            self._normalizer * share, device=self.accelerator.device
        )
        if self.beta != 0.0:
            batch["ref_per_token_logps"] = self._reference_logprobs(batch)
        return batch

    def _make_tokens(self, rows: Sequence[RecordedRow]) -> dict[str, Any]:
        pad = self._tokenizer.pad_token_id
        prompts = [row["prompt_ids"] for row in rows]
        completions = [row["completion_ids"] for row in rows]
        return {
            "prompt_ids": self._pad_rows(prompts, pad, is_left=True),
            "prompt_mask": self._pad_rows([[1] * len(ids) for ids in prompts], 0, is_left=True),
            "completion_ids": self._pad_rows(completions, pad),
            "completion_mask": self._pad_rows([[1] * len(ids) for ids in completions], 0),
        }

    def _reference_logprobs(self, batch: dict[str, Any]) -> Any:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        size = batch["completion_ids"].shape[1]
        with torch.no_grad():
            if self.ref_model is not None:
                return self._get_per_token_logps_and_entropies(self.ref_model, ids, mask, size)[0]
            # Without its adapter the model is what it was.
            with self.accelerator.unwrap_model(self.model).disable_adapter():
                return self._get_per_token_logps_and_entropies(self.model, ids, mask, size)[0]

    def _pad_rows(
        self, rows: Sequence[Sequence[float]], padding: float, *, is_left: bool = False
    ) -> Any:
        """The rows as one tensor, [B, longest]."""
        width = max(map(len, rows))
        full = [
            [padding] * (width - len(row)) * is_left
            + list(row)
            + [padding] * (width - len(row)) * (not is_left)
            for row in rows
        ]
        return torch.tensor(full, device=self.accelerator.device)


def _refuse_reward(**_: Any) -> list[float]:
    raise AssertionError("recorded rows have their rewards; no function is to be asked for one")


class RecordedPPOTrainer(RecordedGRPOTrainer):
    """Trains a policy and the ``value_head`` of its model on recorded rows.

    Rows also have, by step [S]: ``order``, the place in the ``episode``; ``rewards``; ``starts``
    and ``ends`` of the sampled tokens in the completion.
    """

    def __init__(
        self,
        model: Any,
        args: Any,
        rows: Sequence[Mapping[str, Any]],
        *,
        gamma: float,
        gae_lambda: float,
        vf_coef: float,
        cliprange_value: float,
        whiten_advantages: bool,
        **others: Any,
    ) -> None:
        super().__init__(model, args, [dict(row) for row in rows], **others)
        self._gamma, self._gae_lambda = gamma, gae_lambda
        self._vf_coef, self._cliprange_value = vf_coef, cliprange_value
        self._is_whitened = whiten_advantages
        self._head = model.value_head
        self._hidden: Any = None
        self._step_count = 1

    def train(self, *args: Any, **keywords: Any) -> Any:
        """Judge the steps by the values as they are, then train."""
        base = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        backbone = getattr(base, base.base_model_prefix)
        self._estimate_values(backbone)
        hook = backbone.register_forward_hook(self._keep_hidden)
        try:
            return super().train(*args, **keywords)
        finally:
            hook.remove()

    def _keep_hidden(self, _: Any, __: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state

    def _estimate_values(self, backbone: Any) -> None:
        """Give each row values, returns and advantages of its steps, which stay as they are."""
        rows, size = self.train_dataset, self.args.per_device_train_batch_size
        was_training = self.model.training
        self.model.train(mode=False)
        with torch.no_grad():
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                batch = self._make_tokens(part)
                ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
                mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
                hidden = backbone(input_ids=ids, attention_mask=mask).last_hidden_state
                items = iter(self._read_values(hidden, self._find_places(batch, part)).tolist())
                for row in part:
                    row["values"] = [next(items) for _ in row["order"]]
        self.model.train(was_training)
        credit_steps(rows, self._gamma, self._gae_lambda, is_whitened=self._is_whitened)
        values, returns = (
            torch.tensor([item for row in rows for item in row[name]])
            for name in ("values", "returns")
        )
        explained = 1 - (returns - values).var(False) / returns.var(False).clamp(min=_TINY)
        self._metrics["train"]["explained_variance"].append(explained.item())

    def _find_places(self, batch: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Any:
        """Row and place of the last token before each step's own, [2, steps]."""
        width = batch["prompt_ids"].shape[1]
        places = [(at, width + s - 1) for at, row in enumerate(rows) for s in row["starts"]]
        return torch.tensor(places, device=self.accelerator.device).T

    def _read_values(self, hidden: Any, places: Any) -> Any:
        """The value of each step, [steps]."""
        return self._head(hidden[places[0], places[1]].float()).squeeze(-1).float()

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The micro-batches of one optimizer step, of which all agents' steps are counted."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._step_count = sum(len(row["order"]) for rows in batches for row in rows)
        return batches, items

    def _prepare_inputs(self, inputs: list[Any]) -> dict[str, Any]:
        batch = super()._prepare_inputs(inputs)
        batch["value_places"] = self._find_places(batch, inputs)
        for name in ("values", "returns"):
            numbers = [number for row in inputs for number in row[name]]
            batch[name] = torch.tensor(numbers, device=self.accelerator.device)
        return batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        policy_loss = super()._compute_loss(model, inputs)
        values, clip = (
            self._read_values(self._hidden, inputs["value_places"]),
            self._cliprange_value,
        )
        moved = torch.clamp(values - inputs["values"], -clip, clip) + inputs["values"]
        errors = [(estimate - inputs["returns"]) ** 2 for estimate in (values, moved)]
        value_loss = torch.maximum(*errors).sum() / (2 * self._step_count)
        self._metrics["train"]["value_loss"].append(value_loss.item())
        return policy_loss + self._vf_coef * value_loss


def credit_steps(
    rows: Sequence[dict[str, Any]], gamma: float, gae_lambda: float, *, is_whitened: bool
) -> None:
    """Write into rows the return of each step, [S], and the advantage of each token, [C]."""
    episodes: dict[str, dict[int, tuple[dict[str, Any], int]]] = {}
    for row in rows:
        row["returns"] = [0.0] * len(row["order"])
        row["advantages"] = [0.0] * len(row["completion_ids"])
        for index, place in enumerate(row["order"]):
            episodes.setdefault(row["episode"], {})[place] = (row, index)
    entries: list[tuple[dict[str, Any], int, float]] = []
    for episode in episodes.values():
        following = advantage = 0.0
        for _, (row, index) in sorted(episode.items(), reverse=True):
            value = row["values"][index]
            difference = row["rewards"][index] + gamma * following - value
            advantage = difference + gamma * gae_lambda * advantage
            following = value
            row["returns"][index] = advantage + value
            entries.append((row, index, advantage))
    mean, deviation = 0.0, 1.0
    if is_whitened and len(entries) > 1:
        mean = sum(advantage for *_, advantage in entries) / len(entries)
        squares = sum((advantage - mean) ** 2 for *_, advantage in entries)
        deviation = (squares / (len(entries) - 1)) ** 0.5 + _TINY
    for row, index, advantage in entries:
        start, end = row["starts"][index], row["ends"][index]
        row["advantages"][start:end] = [(advantage - mean) / deviation] * (end - start)
