"""The recipe for a training service of one's own, against what it should compute."""

from pathlib import Path
from typing import Any

import pytest
from examples.closed_loop import tiny
from tests.algorithms.apo.desk import load_example
from tests.trainer.made import spans_of

import lightning_otel as lo

TRIES = 4
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def example() -> Any:
    """The example as a module; nothing is run."""
    return load_example("own_trainer")


def recorded(path: Path) -> lo.Store:
    """Two tasks, four rollouts each of another answer; half of them were right."""
    store = lo.Store(path)
    for number in range(2 * TRIES):
        task, reward, tokens = f"{number // TRIES}?", float(number % 2 == 0), [5 + number, 40]
        store.add(spans_of(f"r{number}", task, reward, tokens=tokens))
    return store


def read_gradients(model: Any, steps: list[lo.Transition], advantages: dict[str, float]) -> Any:
    """The policy gradient, written down from its definition, step by step, unpadded."""
    total = torch.zeros(())
    sizes = dict.fromkeys(advantages, 0)
    for step in steps:
        sizes[step.rollout_id] += len(step.response_ids)
    for step in steps:
        ids = torch.tensor([*step.prompt_ids, *step.response_ids])
        at = len(step.prompt_ids)
        logprobs = torch.log_softmax(model(ids[None]).logits[0, at - 1 : -1], dim=-1)
        sampled = logprobs[range(len(step.response_ids)), list(step.response_ids)]
        ratio = torch.exp(sampled - torch.tensor(list(step.logprobs)))
        scale = advantages[step.rollout_id] / sizes[step.rollout_id] / len(sizes)
        total = total - scale * ratio.sum()
    total.backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()])


def test_the_services_gradient_is_the_definitions(tmp_path: Path, example: Any) -> None:
    """One step of every rollout moves the weights along the gradient, to 1e-5."""
    store = recorded(tmp_path / "traces.duckdb")
    # A rate so large that rounding of the weights is small beside the step.
    service = example.Service(tiny.saved(tmp_path / "model"), tmp_path / "disk", 1000.0)
    before = torch.cat([each.detach().clone().flatten() for each in service.model.parameters()])

    fit = lo.Trainer(algorithm=example.Remote(service), store=store).fit()

    after = torch.cat([each.detach().flatten() for each in service.model.parameters()])
    steps = list(store.transitions())
    rewards = {key: float(int(key[1:]) % 2 == 0) for key in {s.rollout_id for s in steps}}
    deviation = (4 * 0.25 / 3) ** 0.5  # of TRIES rewards, half 1 and half 0
    advantages = {key: (reward - 0.5) / deviation for key, reward in rewards.items()}
    expected = read_gradients(tiny.model(), steps, advantages)
    moved = (before - after) / 1000.0
    assert float((moved - expected).norm() / expected.norm()) < 1e-5
    assert fit.resources["llm"].body["model"] == "policy-000001"


def test_a_resumed_run_trains_each_rollout_once(tmp_path: Path, example: Any) -> None:
    """A run that breaks off between the service's step and its checkpoint goes on."""
    model = tiny.saved(tmp_path / "model")
    weights = []
    for name, breaks in (("whole", False), ("broken", True)):
        store = recorded(tmp_path / name / "traces.duckdb")
        options: dict[str, Any] = {"store": store, "min_batch_size": TRIES, "max_iterations": 2}
        service = example.Service(model, tmp_path / name / "disk")
        trainer = lo.Trainer(algorithm=example.Remote(service), **options)
        if breaks:
            trainer.progress = interrupt
            with pytest.raises(KeyboardInterrupt):
                trainer.fit()
            service = example.Service(model, tmp_path / name / "disk")
            trainer = lo.Trainer(algorithm=example.Remote(service), **options)
            trainer.resume_from_checkpoint()
        fit = trainer.fit()
        assert fit.run.step == 2
        assert trainer.runs.claims(fit.run).counts() == {"trained": 2 * TRIES}
        weights.append(torch.cat([each.detach().flatten() for each in service.model.parameters()]))

    assert torch.equal(*weights)


def interrupt(*_: Any) -> None:
    """Break off, as Ctrl-C does."""
    raise KeyboardInterrupt
