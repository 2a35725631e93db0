"""GRPO on recorded rows: TRL's trainer, with what agents sampled instead of generating.

Nothing of the clipped ratio is here. Stock TRL takes it to the weights as they are, and so trains
on stale data as if it were fresh; here it is to the log-probabilities that were recorded. Stock TRL
takes a mean over each micro-batch, so that rows of a small one count for more; here the loss is one
sum over the tokens of a step, as TRL has it for ``dapo``, and ``loss_type`` says their weights.

Imported only where TRL is installed; it overrides private methods, so releases of TRL are pinned.

Source: TRL 1.16, ``trl/trainer/grpo_trainer.py``: ``_compute_loss`` says what a batch holds.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, TypedDict

datasets: Any = import_module("datasets")
torch: Any = import_module("torch")
transformers: Any = import_module("transformers")
trl: Any = import_module("trl")
utils: Any = import_module("trl.trainer.utils")


class RecordedRow(TypedDict):
    """A token sequence as the trainer takes it.

    Attributes:
        prompt_ids: Token ids before the first sampled one, [P].
        completion_ids: Token ids from the first sampled one on, [C].
        loss_mask: 1 where the model sampled the token, 0 where it was given it, [C].
        logprobs: Log-probability of each sampled token when it was sampled, anything else, [C].
        advantages: Advantage of each sampled token, anything else, [C].
        rollout_tokens: How many tokens its rollout sampled, in this row and others.
        rollouts: How many rollouts it counts as in a mean over rollouts: the share of its own that
            lies in it, more where others taught nothing.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float]
    advantages: Sequence[float]
    rollout_tokens: int
    rollouts: float


class RecordedGRPOTrainer(trl.GRPOTrainer):  # type: ignore[misc]  # not installed everywhere
    """TRL's GRPO trainer on rows that were recorded; ``train_dataset`` holds them.

    An epoch is one pass over the rows. Nothing is generated and no reward function is called.
    """

    def __init__(
        self,
        model: Any,
        args: Any,
        rows: Sequence[Mapping[str, Any]],
        *,
        reference: Any = None,
        **others: Any,
    ) -> None:
        """Take the rows.

        Args:
            model: As ``GRPOTrainer`` takes it.
            args: A ``GRPOConfig``.
            rows: What is trained, each a :class:`RecordedRow`.
            reference: The model that ``beta`` holds it to; an adapter's is the model without it.
            **others: As ``GRPOTrainer`` takes them, such as ``processing_class``.
        """
        # TRL would load the reference anew, or copy the adapter as it is by now, in each trainer.
        beta, args.beta = args.beta, 0.0
        placeholder = datasets.Dataset.from_dict({"prompt": [""]})
        super().__init__(model, [_never], args=args, train_dataset=placeholder, **others)
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
        """The micro-batches of an optimizer step, and what the sum over their tokens is divided by.

        Source: DeepSeekMath, arXiv 2402.03300, equation 3 (``grpo``: a mean over rollouts of the
        mean over each one's tokens); Dr. GRPO, arXiv 2503.20783; DAPO, arXiv 2503.14476, equation 8
        (a mean over all tokens); LUSPO, arXiv 2602.05261.
        """
        found, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        held = [row for rows in found for row in rows]
        rollouts = sum(row["rollouts"] for row in held)
        by_rollout = {
            "grpo": rollouts * self._longest,
            "dr_grpo": rollouts * (self.max_completion_length or 1),
            "luspo": rollouts,
        }
        tokens = sum(sum(row["loss_mask"]) for row in held)
        self._normalizer = by_rollout.get(self._weighing, tokens)
        return found, items

    def _weights(self, row: RecordedRow) -> list[float]:
        """The weight of each token in the step's sum, 0 where it was given, [C].

        TRL takes a sum of weights below 1 for 1, hence none is.
        """
        weight = self._longest / row["rollout_tokens"] if self._weighing == "grpo" else 1
        return [weight * each for each in row["loss_mask"]]

    def _prepare_inputs(self, generation_batch: list[RecordedRow]) -> dict[str, Any]:
        return self._generate_and_score_completions(generation_batch)

    def _generate_and_score_completions(self, inputs: list[RecordedRow]) -> dict[str, Any]:
        batch = self._tokens(inputs)
        batch |= {
            "tool_mask": self._padded([self._weights(row) for row in inputs], 0),
            "advantages": self._padded([row["advantages"] for row in inputs], 0.0),
            "old_per_token_logps": self._padded([row["logprobs"] for row in inputs], 0.0),
        }
        # TRL counts what is in a generation batch, and divides by what falls to one step of it.
        share = self.args.steps_per_generation / self.current_gradient_accumulation_steps
        batch["num_items_in_batch"] = torch.tensor(
            self._normalizer * share, device=self.accelerator.device
        )
        if self.beta != 0.0:
            batch["ref_per_token_logps"] = self._reference_logprobs(batch)
        return batch

    def _tokens(self, rows: Sequence[RecordedRow]) -> dict[str, Any]:
        """Their tokens; what was given to the model in between is seen by it as well."""
        pad = self._tokenizer.pad_token_id
        prompts = [row["prompt_ids"] for row in rows]
        completions = [row["completion_ids"] for row in rows]
        return {
            "prompt_ids": self._padded(prompts, pad, is_left=True),
            "prompt_mask": self._padded([[1] * len(each) for each in prompts], 0, is_left=True),
            "completion_ids": self._padded(completions, pad),
            "completion_mask": self._padded([[1] * len(each) for each in completions], 0),
        }

    def _reference_logprobs(self, batch: dict[str, Any]) -> Any:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        size = batch["completion_ids"].shape[1]
        with torch.no_grad():
            if self.ref_model is not None:
                return self._get_per_token_logps_and_entropies(self.ref_model, ids, seen, size)[0]
            # Without its adapter the model is what it was.
            with self.accelerator.unwrap_model(self.model).disable_adapter():
                return self._get_per_token_logps_and_entropies(self.model, ids, seen, size)[0]

    def _padded(
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


def _never(**_: Any) -> list[float]:
    raise AssertionError("recorded rows have their rewards; no function is to be asked for one")
