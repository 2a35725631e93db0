"""PPO over steps is what an independent reading of the papers says it is."""

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from examples.closed_loop import tiny
from tests.formats.consumers.recorded import recorded

from lightning_otel import Trainer
from lightning_otel.algorithms import Batch, get
from lightning_otel.errors import ConfigError, TrainingError
from lightning_otel.types import Trajectory, Transition

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

PPO: Any = get("ppo")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]
GAMMA: Final = 0.9
LAMBDA: Final = 0.8
CLIP: Final = 0.2
VALUE_CLIP: Final = 0.05
VALUE_WEIGHT: Final = 0.5
RATE: Final = 0.02
LENGTHS: Final = (1, 3, 2, 4, 1)
"""Steps of each rollout."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    return tiny.saved(tmp_path_factory.mktemp("model"), sharpness=8.0)


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> Transition:
    """A step as it is recorded."""
    store = recorded(tmp_path_factory.mktemp("recorded") / "traces.duckdb")
    return next(iter(store.transitions()))


def batch_of(pattern: Transition, number: int = 1) -> Batch:
    """Rollouts of one to four steps, some of which fork, with a reward here and there."""
    chance = random.Random(number)

    def ids(count: int) -> list[int]:
        return [chance.randrange(3, 200) for _ in range(count)]

    paths, rewards = [], {}
    for index, length in enumerate(LENGTHS):
        held: list[Transition] = []
        seen = ids(chance.randint(3, 7))
        for step in range(length):
            # Every third prompt is another one than was held: a row of its own begins.
            prompt = ids(5) if step % 3 == 2 else [*seen, *ids(2)]
            answer = ids(chance.randint(2, 5))
            seen = [*prompt, *answer]
            made = replace(
                pattern,
                rollout_id=f"r{index}",
                step=step,
                start_ns=1000 * step + index,
                prompt_ids=prompt,
                response_ids=answer,
                logprobs=[-5.5 + chance.uniform(-1, 1) for _ in answer],
                reward=chance.uniform(-1, 1) if chance.random() < 0.6 else None,
                sampling={},
            )
            held.append(made)
        paths.append(Trajectory(f"r{index}", "1", "writer", 0, tuple(held)))
        # A half more than its steps were given: a reward for the rollout as a whole.
        rewards[f"r{index}"] = 0.5 + sum(step.reward or 0.0 for step in held)
    groups = {key: [key] for key in rewards}
    return Batch(paths, number=number, rewards=rewards, groups=groups)


class Reference:
    """PPO written down from the papers: a step at a time, each with a pass of its own, unpadded."""

    def __init__(self, model: Any, batch: Batch, *, is_shaped: bool, is_whitened: bool) -> None:
        self.model, self.batch = model, batch
        self.steps = [step for path in batch for step in path.transitions]
        with torch.no_grad():
            self.old = [self.value(step) for step in self.steps]
        self.advantages, self.returns = [], []
        at = 0
        for path in batch:
            count = len(path.transitions)
            given = [step.reward or 0.0 if is_shaped else 0.0 for step in path.transitions]
            given[-1] += batch.rewards[path.rollout_id] - sum(given)
            values = [*self.old[at : at + count], torch.tensor(0.0)]
            errors = [given[t] + GAMMA * values[t + 1] - values[t] for t in range(count)]
            for t in range(count):
                ahead = [(GAMMA * LAMBDA) ** n * each for n, each in enumerate(errors[t:])]
                self.advantages.append(sum(ahead))
                self.returns.append(sum(ahead) + values[t])
            at += count
        if is_whitened:
            whole = torch.stack(self.advantages)
            self.advantages = list((whole - whole.mean()) / (whole.std() + 1e-8))

    def hidden(self, ids: list[int]) -> Any:
        """The last hidden states of tokens, [tokens, width]."""
        return self.model.model(torch.tensor([ids])).last_hidden_state[0]

    def value(self, step: Transition) -> Any:
        """What the head says of a step's prompt."""
        return self.model.value_head(self.hidden(list(step.prompt_ids))[-1])[0]

    def loss(self) -> Any:
        """The clipped objective, a mean over sampled tokens, and the clipped value loss."""
        terms, errors = [], []
        held = zip(self.steps, self.old, self.advantages, self.returns, strict=True)
        for step, old, advantage, earned in held:
            hidden = self.hidden([*step.prompt_ids, *step.response_ids])
            scores = torch.log_softmax(self.model.lm_head(hidden), -1)[len(step.prompt_ids) - 1 :]
            for place, token in enumerate(step.response_ids):
                ratio = torch.exp(scores[place, token] - step.logprobs[place])
                clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
                terms.append(torch.minimum(ratio * advantage, clipped * advantage))
            value = self.value(step)
            near = torch.clamp(value, old - VALUE_CLIP, old + VALUE_CLIP)
            errors.append(torch.maximum((value - earned) ** 2, (near - earned) ** 2) / 2)
        return VALUE_WEIGHT * torch.stack(errors).mean() - torch.stack(terms).mean()

    def descend(self) -> None:
        """One plain step down the gradient."""
        self.model.zero_grad()
        self.loss().backward()
        with torch.no_grad():
            for each in self.model.parameters():
                each -= RATE * each.grad


@pytest.mark.parametrize(
    ("rows", "epochs", "is_shaped", "is_whitened"),
    [
        (32, 1, True, False),
        (3, 1, False, True),
        (1, 1, True, True),
        (5, 3, True, True),
        (5, 3, False, False),
    ],
)
def test_ppo_equals_the_reference(
    base: Path, pattern: Transition, rows: int, epochs: int, *, is_shaped: bool, is_whitened: bool
) -> None:
    """All weights after two batches: several steps, forks, uneven micro-batches, epochs."""
    ppo = PPO(
        str(base),
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        vf_coef=VALUE_WEIGHT,
        cliprange_value=VALUE_CLIP,
        whiten_advantages=is_whitened,
        reward_shaping=is_shaped,
        epsilon=CLIP,
        optim="sgd",
        learning_rate=RATE,
        max_grad_norm=0.0,
        per_device_train_batch_size=rows,
        num_train_epochs=epochs,
    )
    ppo._open()
    model = copy.deepcopy(ppo._model)
    for number in (1, 2):  # at first every value is 0
        batch = batch_of(pattern, number)
        before = [each.detach().clone() for each in model.parameters()]
        wanted = Reference(model, batch, is_shaped=is_shaped, is_whitened=is_whitened)
        for _ in range(epochs):
            wanted.descend()

        metrics = ppo.train_step(batch).metrics

        found = dict(ppo._model.named_parameters())
        assert found.keys() == dict(model.named_parameters()).keys()
        assert metrics["rows"] == 7.0
        for name, each in model.named_parameters():
            assert float((found[name] - each).abs().max()) < 1e-6, name
        moved = [
            float((each - was).abs().max())
            for each, was in zip(model.parameters(), before, strict=True)
        ]
        assert max(moved) > 1e-3


def test_the_head_learns_and_stays_behind(base: Path, pattern: Transition, tmp_path: Path) -> None:
    """Values come near what is earned; checkpoints hold the head, what engines load does not."""
    from safetensors import safe_open

    def made() -> Any:
        return PPO(str(base), learning_rate=3e-3, gamma=1.0, batch_size=4)

    straight, resumed = made(), made()
    batch = batch_of(pattern)
    measured = [straight.train_step(batch).metrics for _ in range(12)]
    straight.save(tmp_path)
    resumed.load_state_dict(straight.state_dict())
    resumed.load(tmp_path)
    more = [each.train_step(batch).metrics["value_loss"] for each in (straight, resumed)]

    assert measured[-1]["value_loss"] < measured[0]["value_loss"] / 2
    assert measured[-1]["explained_variance"] > 0.1 > abs(measured[0]["explained_variance"])
    assert more[0] == more[1]

    class Folder:
        run_dir = str(tmp_path)

    straight._context = Folder()  # type: ignore[assignment]  # only its folder is asked for
    (body,) = straight._publish_weights().values()
    with safe_open(Path(body["uri"], "model.safetensors"), "pt") as weights:
        assert not [name for name in weights.keys() if "value_head" in name]  # noqa: SIM118
    assert hasattr(straight._model, "value_head")


def test_a_single_rollout_a_task_teaches(base: Path, tmp_path: Path) -> None:
    """From a store, without groups: what GRPO has no use for."""
    store = recorded(tmp_path / "traces.duckdb")
    trainer = Trainer(
        algorithm=PPO(str(base), learning_rate=3e-4, gamma=0.99, batch_size=3), store=store
    )

    fit = trainer.fit()

    assert trainer.latest is not None
    assert trainer.runs.get(trainer.latest.run_id).step == 2
    assert fit.metrics["rollouts"] == 3.0
    with pytest.raises(ConfigError, match="PPO discounts rewards itself"):
        Trainer(algorithm=PPO(str(base)), store=store, select={"credit": "discounted"}).fit()


def test_what_cannot_be_is_refused(base: Path, pattern: Transition) -> None:
    """Numbers out of range, rollouts without a reward, no model: told before a step."""
    batch = batch_of(pattern)
    with pytest.raises(ConfigError, match=r"gamma is 1.5; it is 0 to 1"):
        PPO(gamma=1.5)
    with pytest.raises(TrainingError, match="11 × no reward"):
        PPO(str(base)).train_step(Batch(batch, number=1, rewards={}, groups=batch.groups))
    with pytest.raises(ConfigError, match="PPO has no model to train"):
        PPO(learning_rate=3e-4, gamma=0.99, batch_size=64).train_step(batch)
