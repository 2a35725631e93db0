"""SFT: supervised training on what agents answered, of the best rollouts or of all.

Source: TRL's ``SFTTrainer``.
"""

from dataclasses import replace
from typing import Any, ClassVar, Final

from lightning_otel.adapter.rows import is_trainable
from lightning_otel.algorithms.base import Batch
from lightning_otel.algorithms.gradients import GradientAlgorithm, Rows, format_rows
from lightning_otel.types import Trajectory, Transition
from lightning_otel.types.transitions import distinct_steps

NOTHING_SAID: Final = "no answer: the model returned nothing"


class SFT(GradientAlgorithm):
    """Trains on recorded answers: token ids where all have them, else messages."""

    name: ClassVar[str] = "sft"
    config = "SFTConfig"

    def __init__(self, model: Any = None, *, threshold: float | None = None, **others: Any) -> None:
        super().__init__(model, **others)
        self._threshold = threshold
        self.needs_reward = threshold is not None

    def rows(self, batch: Batch) -> Rows:
        """Return conversations up to their last answer; own answers train, each once."""
        answered = [_cut_to_answer(path) for path in batch]
        paths = [path for path in answered if path.transitions]
        steps = distinct_steps(paths)
        exact = sum(map(is_trainable, steps))
        self.format = "tokens" if exact == len(steps) else "sft"
        rows, exclusions = format_rows(self.format, paths, threshold=self._threshold)
        if silent := len(distinct_steps(batch)) - len(steps):
            exclusions[NOTHING_SAID] += silent
        return Rows(rows, exclusions, {"exact": exact / max(len(steps), 1)})

    def trainer(self, args: Any, rows: Rows, **shared: Any) -> Any:
        """Return TRL's; of a completion, what the assistant said is trained alone."""
        is_text = self.format == "sft"
        if is_text and "assistant_only_loss" not in self._settings:
            args.assistant_only_loss = True
        self.columns = ("prompt", "completion", "tools") if is_text else ("input_ids", "labels")
        return super().trainer(args, rows, **shared)


def _cut_to_answer(path: Trajectory) -> Trajectory:
    steps = list(path.transitions)
    while steps and _is_silent(steps[-1]):
        steps.pop()
    return replace(path, transitions=tuple(steps)) if len(steps) < len(path.transitions) else path


def _is_silent(step: Transition) -> bool:
    parts = [part for message in step.action[:1] for part in message.get("parts") or ()]
    return bool(parts) and all(
        part.get("type") == "text" and not str(part.get("content") or "").strip() for part in parts
    )
