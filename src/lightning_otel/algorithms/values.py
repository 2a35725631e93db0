"""PPO on recorded rows: the clipped loss of ``recorded``, and beside it the loss of a value head.

Imported only where TRL is installed.

Source: Schulman et al., arXiv 1707.06347, equation 9; arXiv 1506.02438, equations 11 to 16; the
clipped value loss is that of OpenAI's ``baselines/ppo2``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_otel.algorithms.recorded import RecordedGRPOTrainer, torch

_TINY: Final = 1e-8


class RecordedPPOTrainer(RecordedGRPOTrainer):
    """Trains a policy and the ``value_head`` of its model on rows that were recorded.

    Beside what GRPO's have, a row says of each of its steps, [S]: ``order``, its place in the
    ``episode``; ``rewards``; ``starts`` and ``ends``, where the tokens it sampled lie in the
    completion.
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
        """Take a model with a ``value_head`` from a hidden state to a number, and all rows."""
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
        self._judge(backbone)
        hook = backbone.register_forward_hook(self._keep)
        try:
            return super().train(*args, **keywords)
        finally:
            hook.remove()

    def _keep(self, _: Any, __: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state

    def _judge(self, backbone: Any) -> None:
        """Give each row values, returns and advantages of its steps, which stay as they are."""
        rows, size = self.train_dataset, self.args.per_device_train_batch_size
        was_training = self.model.training
        self.model.train(mode=False)
        with torch.no_grad():
            for start in range(0, len(rows), size):
                held = rows[start : start + size]
                batch = self._tokens(held)
                ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
                seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
                hidden = backbone(input_ids=ids, attention_mask=seen).last_hidden_state
                found = iter(self._values(hidden, self._places(batch, held)).tolist())
                for row in held:
                    row["values"] = [next(found) for _ in row["order"]]
        self.model.train(was_training)
        judge_steps(rows, self._gamma, self._gae_lambda, is_whitened=self._is_whitened)
        values, returns = (
            torch.tensor([each for row in rows for each in row[name]])
            for name in ("values", "returns")
        )
        explained = 1 - (returns - values).var(False) / returns.var(False).clamp(min=_TINY)
        self._metrics["train"]["explained_variance"].append(explained.item())

    def _places(self, batch: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Any:
        """Row and place of the last token before each step's own, [2, steps]."""
        width = batch["prompt_ids"].shape[1]
        found = [(at, width + s - 1) for at, row in enumerate(rows) for s in row["starts"]]
        return torch.tensor(found, device=self.accelerator.device).T

    def _values(self, hidden: Any, places: Any) -> Any:
        """The value of each step, [steps]."""
        return self._head(hidden[places[0], places[1]].float()).squeeze(-1).float()

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The micro-batches of one optimizer step, of which all agents' steps are counted."""
        found, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._step_count = sum(len(row["order"]) for rows in found for row in rows)
        return found, items

    def _generate_and_score_completions(self, inputs: list[Any]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        batch["value_places"] = self._places(batch, inputs)
        for name in ("values", "returns"):
            held = [each for row in inputs for each in row[name]]
            batch[name] = torch.tensor(held, device=self.accelerator.device)
        return batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        policy_loss = super()._compute_loss(model, inputs)
        values, clip = self._values(self._hidden, inputs["value_places"]), self._cliprange_value
        moved = torch.clamp(values - inputs["values"], -clip, clip) + inputs["values"]
        errors = [(each - inputs["returns"]) ** 2 for each in (values, moved)]
        value_loss = torch.maximum(*errors).sum() / (2 * self._step_count)
        self._metrics["train"]["value_loss"].append(value_loss.item())
        return policy_loss + self._vf_coef * value_loss


def judge_steps(
    rows: Sequence[dict[str, Any]], gamma: float, gae_lambda: float, *, is_whitened: bool
) -> None:
    """Write into rows the return of each step, [S], and the advantage of each token, [C]."""
    episodes: dict[str, dict[int, tuple[dict[str, Any], int]]] = {}
    for row in rows:
        row["returns"] = [0.0] * len(row["order"])
        row["advantages"] = [0.0] * len(row["completion_ids"])
        for index, place in enumerate(row["order"]):
            episodes.setdefault(row["episode"], {})[place] = (row, index)
    found: list[tuple[dict[str, Any], int, float]] = []
    for episode in episodes.values():
        following = advantage = 0.0
        for _, (row, index) in sorted(episode.items(), reverse=True):
            value = row["values"][index]
            difference = row["rewards"][index] + gamma * following - value
            advantage = difference + gamma * gae_lambda * advantage
            following = value
            row["returns"][index] = advantage + value
            found.append((row, index, advantage))
    mean, deviation = 0.0, 1.0
    if is_whitened and len(found) > 1:
        mean = sum(each for *_, each in found) / len(found)
        squares = sum((each - mean) ** 2 for *_, each in found)
        deviation = (squares / (len(found) - 1)) ** 0.5 + _TINY
    for row, index, advantage in found:
        start, end = row["starts"][index], row["ends"][index]
        row["advantages"][start:end] = [(advantage - mean) / deviation] * (end - start)
