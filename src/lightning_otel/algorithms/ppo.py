"""PPO: reinforcement learning with a model of values, over the steps of a rollout.

A step is one action: the answer to one prompt, its state. A trained linear head reads the value off
the last hidden state. A rollout is one episode in the order of time, whichever agents act.

Source: Schulman et al., Proximal Policy Optimization Algorithms, arXiv 1707.06347; High-Dimensional
Continuous Control Using Generalized Advantage Estimation, arXiv 1506.02438.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from lightning_otel.adapter.rows import is_trainable, last_tokens
from lightning_otel.algorithms import models
from lightning_otel.algorithms.base import Batch
from lightning_otel.algorithms.gradients import Compared
from lightning_otel.algorithms.policy import PolicyGradient
from lightning_otel.algorithms.run import Run
from lightning_otel.errors import ConfigError
from lightning_otel.types import TrainingRow, Transition
from lightning_otel.types.transitions import distinct_steps

NO_REWARD: Final = "no reward: nothing says how well its rollout did"
HEAD: Final = "value_head"
FAULTY: Final = "another step of its rollout cannot be trained"


class PPO(PolicyGradient):
    """Trains on rollouts each by itself, against what a head expected of each step."""

    name: ClassVar[str] = "ppo"
    unfit_if = staticmethod(any)

    def __init__(
        self,
        model: Any = None,
        *,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        vf_coef: float = 0.1,
        cliprange_value: float = 0.2,
        whiten_advantages: bool = True,
        reward_shaping: bool = True,
        batch_size: int | None = None,
        **others: Any,
    ) -> None:
        """Args:
            model: The model, as :class:`GradientAlgorithm` takes it.
            gamma: Discount per step, 0 to 1.
            gae_lambda: Reach of advantages beyond the next value, 0 to 1.
            vf_coef: Weight of the value loss.
            cliprange_value: The most that a value may move.
            whiten_advantages: Give the advantages of a batch mean 0 and deviation 1.
            reward_shaping: Count rewards of single steps at their steps; else all at the end.
            batch_size: Rollouts of a step, where the trainer is given no ``min_batch_size``.
            **others: Further options; ``num_train_epochs`` is 4 by default.

        Raises:
            ConfigError: A number is out of range.
        """
        for name, value in (("gamma", gamma), ("gae_lambda", gae_lambda)):
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"{name} is {value!r}; it is 0 to 1")
        super().__init__(model, **others)
        self.batch_size = batch_size
        self._gamma = gamma
        self._gae_lambda = gae_lambda
        self._value_settings: dict[str, Any] = {
            "vf_coef": vf_coef,
            "cliprange_value": cliprange_value,
            "whiten_advantages": whiten_advantages,
        }
        self._is_shaped = reward_shaping
        self._episodes: dict[int, tuple[str, int, float]] = {}
        self._faulty: set[str] = set()

    def defaults(self) -> Mapping[str, Any]:
        """Return settings by which each token counts alike, in several passes over a batch."""
        return {**super().defaults(), "loss_type": "dapo", "num_train_epochs": 4}

    def run(self, context: Run) -> None:
        """Train on each batch, and publish the weights; refuse rewards that are discounted."""
        if context.config.select.get("credit") == "discounted":
            raise ConfigError(
                "PPO discounts rewards itself; leave credit='discounted' out of select, and give "
                "PPO(gamma=…)"
            )
        super().run(context)

    def compare(self, batch: Batch) -> Compared:
        """Return rollouts with a reward, all of whose steps can be trained."""
        steps: dict[str, list[Transition]] = {}
        for step in distinct_steps(batch):
            steps.setdefault(step.rollout_id, []).append(step)
        exclusions: Counter[str] = Counter()
        self._episodes, self._faulty = {}, set()
        for rollout_id, rollout_steps in steps.items():
            if rollout_id not in batch.rewards:
                exclusions[NO_REWARD] += len(rollout_steps)
                continue
            if not all(is_trainable(step) and not self._fault(step) for step in rollout_steps):
                self._faulty.add(rollout_id)
            rollout_steps.sort(key=lambda step: (step.start_ns, step.end_ns, step.step))
            rewards = [step.reward or 0.0 if self._is_shaped else 0.0 for step in rollout_steps]
            # What no step was given, such as a reward for a rollout as a whole, comes at the end.
            rewards[-1] += batch.rewards[rollout_id] - sum(rewards)
            for place, (step, reward) in enumerate(zip(rollout_steps, rewards, strict=True)):
                self._episodes[id(step)] = (rollout_id, place, reward)
        usable = [path for path in batch if path.rollout_id in batch.rewards and path.transitions]
        return Compared(usable, exclusions)

    def explain_useless(self, row: TrainingRow) -> str | None:
        """Return the reason if the value of another step of its rollout is unknown."""
        return FAULTY if row.transitions[0].rollout_id in self._faulty else ""

    def row(self, row: TrainingRow) -> dict[str, Any]:
        """Return its steps, each with its place in the episode and its reward."""
        steps = [self._episodes[id(step)] for step in row.transitions]
        ends = [last + 1 for last in last_tokens(row)]
        sizes = [len(step.response_ids) for step in row.transitions]
        return {
            "episode": steps[0][0],
            "order": [place for _, place, _ in steps],
            "rewards": [reward for _, _, reward in steps],
            "starts": [end - size for end, size in zip(ends, sizes, strict=True)],
            "ends": ends,
        }

    def make_trainer(self, **shared: Any) -> Any:
        """Return the trainer of GRPO, with a value loss beside the clipped one."""
        from lightning_otel.algorithms.recorded_trainers import RecordedPPOTrainer

        return RecordedPPOTrainer(
            gamma=self._gamma, gae_lambda=self._gae_lambda, **self._value_settings, **shared
        )

    def _open(self) -> None:
        super()._open()
        if not hasattr(self._model, HEAD):
            # Of no value at first, and of the model, so that it is trained and kept with it.
            nn = models.library("torch").nn
            head = nn.Linear(self._model.config.get_text_config().hidden_size, 1)
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
            self._model.add_module(HEAD, head.to(self._model.device))

    def _publish_weights(self) -> dict[str, Any]:
        # Engines know no such head.
        head = self._model._modules.pop(HEAD)
        try:
            return super()._publish_weights()
        finally:
            self._model.add_module(HEAD, head)
