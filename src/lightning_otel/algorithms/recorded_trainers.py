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
from typing import Any, TypedDict

from lightning_otel.algorithms.policy import TINY, credit_steps

datasets: Any = import_module("datasets")
torch: Any = import_module("torch")
transformers: Any = import_module("transformers")
trl: Any = import_module("trl")
utils: Any = import_module("trl.trainer.utils")


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
    age: int | None  # versions of the weights since it was sampled; None if unknown


class RecordedGRPOTrainer(trl.GRPOTrainer):  # type: ignore[misc]  # not installed everywhere
    """TRL's GRPO trainer on recorded rows; an epoch is one pass, and nothing is generated."""

    entropy_coef: float

    def __init__(
        self,
        model: Any,
        args: Any,
        rows: Sequence[Mapping[str, Any]],
        *,
        reference: Any = None,
        corrects_sampling: bool = False,
        **others: Any,
    ) -> None:
        """Take what ``GRPOTrainer`` takes, and recorded rows; ``beta`` pulls to ``reference``.

        With ``corrects_sampling`` the clipped ratio is to the weights before training, and TRL's
        ``vllm_importance_sampling_…`` settings say how those are weighed against the recorded ones.
        """
        # TRL would load the reference anew, or copy the adapter as it is by now, in each trainer.
        beta, args.beta = args.beta, 0.0
        placeholder = datasets.Dataset.from_dict({"prompt": [""]})
        super().__init__(model, [_refuse_reward], args=args, train_dataset=placeholder, **others)
        self.beta = args.beta = beta
        self.train_dataset: list[Any] = [dict(row) for row in rows]
        for entry in self.train_dataset:
            entry["sampled"] = entry["logprobs"]
        self._corrects_sampling = corrects_sampling
        self._logprobs: Any = None
        self._mismatch: list[Any] = []
        self._longest = max((row["rollout_tokens"] for row in rows), default=1)
        self._normalizer = 0.0
        self._step_weight = 1.0
        self._weighing: str = args.loss_type
        if self._weighing == "sapo":
            raise ValueError(
                "loss_type 'sapo' is a mean over each micro-batch; take 'grpo' or 'dapo'"
            )
        if self._weighing == "vespo" and corrects_sampling:
            raise ValueError("loss_type 'vespo' corrects sampling itself; take 'grpo' or 'dapo'")
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
        self._step_weight = sum(sum(self._token_weights(row)) for row in all_rows)
        return batches, items

    def _token_weights(self, row: RecordedRow) -> list[float]:
        """Return token weights [C], 0 where given, none below 1: TRL takes a sum below 1 for 1."""
        weight = self._longest / row["rollout_tokens"] if self._weighing == "grpo" else 1
        return [weight * bit for bit in row["loss_mask"]]

    def _prepare_inputs(self, inputs: list[Any]) -> dict[str, Any]:
        batch = self._make_tokens(inputs)
        is_fresh = [
            [row.get("age") == 0 and bool(bit) for bit in row["loss_mask"]] for row in inputs
        ]
        batch |= {
            "fresh_mask": self._pad_rows(is_fresh, 0).bool(),
            "sampled_logprobs": self._pad_rows([row["sampled"] for row in inputs], 0.0),
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
        if self.ref_model is not None:
            return self._read_logprobs(self.ref_model, batch)
        # Without its adapter the model is what it was.
        with self.accelerator.unwrap_model(self.model).disable_adapter():
            return self._read_logprobs(self.model, batch)

    def _read_logprobs(self, model: Any, batch: dict[str, Any]) -> Any:
        """The log-probability of each token of the completions, [B, C]."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        size = batch["completion_ids"].shape[1]
        with torch.no_grad():
            return self._get_per_token_logps_and_entropies(model, ids, mask, size)[0]

    def train(self, *args: Any, **keywords: Any) -> Any:
        """Weigh rows by how likely the present weights are to sample them, if asked; train."""
        if self._corrects_sampling:
            self._correct_sampling()
        return super().train(*args, **keywords)

    def _correct_sampling(self) -> None:
        """Give rows the log-probabilities of the present weights, and advantages by their ratio.

        Source: TRL 1.16's ``_generate_and_score_completions``.
        """
        rows, size = self.train_dataset, self.args.per_device_train_batch_size
        was_training = self.model.training
        self.model.train(mode=False)
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            logprobs = self._read_logprobs(self.model, self._make_tokens(part)).float()
            mask = self._pad_rows([row["loss_mask"] for row in part], 0)
            recorded = self._pad_rows([row["logprobs"] for row in part], 0.0)
            ratios = self._find_ratios((logprobs - recorded) * mask)
            weights = (ratios * mask).tolist()
            for row, values, ratio in zip(part, logprobs.tolist(), weights, strict=True):
                row["logprobs"] = values[: len(row["loss_mask"])]
                pairs = zip(row["advantages"], ratio, strict=False)
                row["advantages"] = [advantage * weight for advantage, weight in pairs]
            for name, value in (("mean", ratios[mask > 0].mean()), ("max", ratios[mask > 0].max())):
                key = f"sampling/importance_sampling_ratio/{name}"
                self._metrics["train"][key].append(value.item())
        self.model.train(was_training)

    def _find_ratios(self, differences: Any) -> Any:
        """The clipped importance ratio of each token, [B, C], of such log-ratios."""
        level, _, how = self.vllm_importance_sampling_mode.partition("_")
        if level == "sequence":
            differences = differences.sum(dim=-1, keepdim=True).expand_as(differences)
        ratios = torch.exp(differences)
        low = self.vllm_importance_sampling_clip_min
        high = self.vllm_importance_sampling_clip_max
        if low is None and high is None:
            return ratios
        clamped = torch.clamp(ratios, low, high)
        return clamped if how == "truncate" else ratios.masked_fill(clamped != ratios, 0.0)

    def _get_per_token_logps_and_entropies(self, *args: Any, **keywords: Any) -> Any:
        results = super()._get_per_token_logps_and_entropies(*args, **keywords)
        self._logprobs = results[0].detach()
        return results

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        # TRL takes the entropy as a mean over each micro-batch, however uneven they are.
        coefficient = self.entropy_coef
        part = inputs["tool_mask"].sum().item() / self._step_weight
        self.entropy_coef = coefficient * part * self.current_gradient_accumulation_steps
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self.entropy_coef = coefficient
        if self.state.global_step == 0:  # the weights are still those that the newest rows are of
            self._measure_mismatch(inputs)
        return loss

    def _measure_mismatch(self, inputs: Mapping[str, Any]) -> None:
        """Compare recorded log-probabilities of rows of no age with the trainer's.

        Source: Schulman, "Approximating KL divergence" (k3), 2020; χ² of the ratio of trainer to
        engine.
        """
        mask = inputs["fresh_mask"]
        own, engine = self._logprobs[mask].double(), inputs["sampled_logprobs"][mask].double()
        ratio = torch.exp(own - engine)
        terms = torch.stack([ratio - 1 - (own - engine), ratio**2 - 1, -own, -engine])
        self._mismatch.append(terms)
        if not self.accelerator.sync_gradients:
            return
        whole = torch.cat(self._mismatch, dim=1)
        self._mismatch = []
        if whole.shape[1]:
            kl, chi2, own_loss, engine_loss = whole.mean(dim=1)
            measured = {
                "mismatch/kl": kl,
                "mismatch/chi2": chi2,
                "mismatch/trainer_perplexity": own_loss.exp(),
                "mismatch/engine_perplexity": engine_loss.exp(),
            }
            for name, value in measured.items():
                self._metrics["train"][name].append(value.item())

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
        """Give each row the values, returns and advantages of its steps."""
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
        explained = 1 - (returns - values).var(False) / returns.var(False).clamp(min=TINY)
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
        values = self._read_values(self._hidden, inputs["value_places"])
        clip = self._cliprange_value
        moved = torch.clamp(values - inputs["values"], -clip, clip) + inputs["values"]
        errors = [(estimate - inputs["returns"]) ** 2 for estimate in (values, moved)]
        value_loss = torch.maximum(*errors).sum() / (2 * self._step_count)
        self._metrics["train"]["value_loss"].append(value_loss.item())
        return policy_loss + self._vf_coef * value_loss
