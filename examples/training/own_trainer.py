"""Train with a service of your own: rows go out, gradients stay there, a new endpoint comes back.

The service here is a stand-in with the three calls that such services have (forward_backward,
optim_step, save), computed with torch in this process; put a client of yours in its place. Claims,
checkpoints, resumption and the endpoint's versions are the trainer's.

    pip install 'lightning-otel[train]'
    python examples/training/own_trainer.py STORE MODEL_FOLDER STATE_FOLDER
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

import lightning_otel as lo
from lightning_otel.algorithms import Batch, rows_of, token_advantages


class Datum(NamedTuple):
    """A token sequence; weights are 0 where the token was given, [T] each."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    weights: Sequence[float]


class Service:
    """A stand-in of a training service, which has a disk of its own."""

    def __init__(self, model: Path, folder: Path, learning_rate: float = 0.05) -> None:
        self.folder, self.model = folder, AutoModelForCausalLM.from_pretrained(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate)

    def forward_backward(self, data: Sequence[Datum]) -> float:
        """Add the gradients of ``-sum(ratio * weight)``; return the loss."""
        total = 0.0
        for datum in data:
            tokens = torch.tensor(datum.tokens)
            logits = self.model(tokens[None]).logits[0, :-1]
            logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0]
            ratios = torch.exp(logprobs - torch.tensor(datum.logprobs[1:]))
            loss = -(ratios * torch.tensor(datum.weights[1:])).sum()
            loss.backward()
            total += float(loss)
        return total

    def optim_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), self.folder / name)

    def load(self, name: str) -> None:
        self.model.load_state_dict(torch.load(self.folder / name, weights_only=True))


class Remote(lo.BaseAlgorithm):
    """Importance-weighted policy gradient, computed by the service; each rollout counts once."""

    needs = "exact"
    needs_logprobs = True
    group_size = 2

    def __init__(self, service: Service) -> None:
        self.service, self.steps = service, 0

    def train_step(self, batch: Batch) -> lo.StepResult:
        data = list(self.read_data(batch))
        loss = self.service.forward_backward(data)
        self.service.optim_step()
        self.steps += 1
        name = f"policy-{self.steps:06d}"
        self.service.save(name)
        endpoint = {"base_url": "http://127.0.0.1:8000/v1", "model": name}
        return lo.StepResult({"loss": loss, "rows": float(len(data))}, {"llm": endpoint})

    def read_data(self, batch: Batch) -> Iterator[Datum]:
        """Return the rows that the advantages of their groups weigh."""
        rows = [(row, token_advantages(row)) for row in rows_of(batch)]
        sizes: Counter[str] = Counter()
        for row, _ in rows:
            sizes[row.transitions[0].rollout_id] += sum(row.loss_mask)
        for row, advantages in rows:
            if advantages is None:  # its group has no other rollout with a reward
                continue
            share = 1 / sizes[row.transitions[0].rollout_id] / len(sizes)
            given = [0.0] * len(row.prompt_ids)
            pairs = zip(row.loss_mask, advantages, strict=True)
            yield Datum(
                [*row.prompt_ids, *row.completion_ids],
                [*given, *row.logprobs],
                [*given, *(bit * advantage * share for bit, advantage in pairs)],
            )

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        if self.steps:
            self.service.load(f"policy-{self.steps:06d}")


def main() -> None:
    store, model, folder = map(Path, sys.argv[1:4])
    trainer = lo.Trainer(
        algorithm=Remote(Service(model, folder)), store=lo.Store(store), min_batch_size=4
    )
    if trainer.runs.all():
        trainer.resume_from_checkpoint()
    fit = trainer.fit()
    print(fit.run.step, fit.metrics["loss"], fit.resources["llm"].body["model"])


if __name__ == "__main__":
    main()
