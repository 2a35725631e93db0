"""Analysis of one rollout, for a person or as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_otel import conventions as c
from lightning_otel.adapter.outline import Outline, SpanId, outline
from lightning_otel.analysis.episode import (
    Given,
    Step,
    Totals,
    as_json,
    checked,
    rewards_of,
    steps_of,
    totals_of,
)
from lightning_otel.analysis.findings import Finding, findings
from lightning_otel.markup import one_line
from lightning_otel.types.wording import duration

if TYPE_CHECKING:
    from lightning_otel.adapter.advantages import Advantage
    from lightning_otel.dataset import Store
    from lightning_otel.types import Estimator

__all__ = ["Analysis", "Finding", "Given", "Step", "Totals", "analyze", "analyze_episode"]


@dataclass(frozen=True, slots=True)
class Analysis:
    """Steps, rewards, totals and findings of one rollout.

    Attributes:
        rollout_id: Its id.
        task: Its task as recorded; empty if it was not.
        steps: In the order of its trajectories; a step that several share stands once.
        rewards: All that it was given.
        totals: Calls, tokens, time and cost.
        findings: What stands out, errors first.
    """

    rollout_id: str
    task: str
    steps: tuple[Step, ...]
    rewards: tuple[Given, ...]
    totals: Totals
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        """Return all of it for programs."""
        return {
            "rollout_id": self.rollout_id,
            "task": self.task,
            **self.totals._asdict(),
            "steps": as_json(self.steps),
            "rewards": as_json(self.rewards),
            "findings": [each._asdict() for each in self.findings],
        }

    def __str__(self) -> str:
        """Return all of it in lines of text."""
        return "\n".join(
            [
                self.headline(),
                *(_step_line(step) for step in self.steps),
                *(f"reward {_reward_line(given)}" for given in self.rewards),
                *(f"! {each.text}" for each in self.findings),
            ]
        )

    def headline(self) -> str:
        """Return its name and totals in one line."""
        totals = self.totals
        words = [
            one_line(self.rollout_id, 80),
            f"{len(self.steps)} step{'' if len(self.steps) == 1 else 's'}",
            f"{totals.calls} call{'' if totals.calls == 1 else 's'}",
            f"{totals.input_tokens}→{totals.output_tokens} tokens",
            f"{duration(totals.duration_s)}, {duration(totals.model_s)} of it in models",
        ]
        if totals.cost is not None:
            words.append(f"cost {totals.cost:.6g}")
        return " · ".join(words)


def analyze(
    found: Outline,
    *,
    prices: Mapping[str, Sequence[float]] | None = None,
    advantages: Mapping[SpanId, float | None] | None = None,
) -> Analysis:
    """Analyze a rollout by its outline.

    Args:
        found: The outline.
        prices: Prices of a million tokens in and of a million out, by name or glob of a model; the
            first that fits counts.
        advantages: By trace and span id of a step.

    Raises:
        ConfigError: A price is negative, or no pair of numbers.
    """
    priced = checked(prices)
    steps, rewards = steps_of(found, priced, advantages or {}), rewards_of(found)
    totals = totals_of(found, priced)
    rollout_id = found.nodes[0].span.rollout_id if found.nodes else ""
    tasks = (node.span.attributes.get(c.TASK) for node in found.nodes)
    task = one_line(str(next((each for each in tasks if each is not None), "")), 200)
    seen = findings(found, steps, rewards, totals)
    return Analysis(rollout_id, task, tuple(steps), tuple(rewards), totals, tuple(seen))


def analyze_episode(
    episode_id: str = "@last",
    store: "Store | str | None" = None,
    *,
    prices: Mapping[str, Sequence[float]] | None = None,
    advantage: "Advantage | Estimator | None" = None,
) -> Analysis:
    """Analyze one rollout: its steps, rewards and credit, and what stands out.

    Args:
        episode_id: The beginning of the id of a rollout, or of a trace, span or response in it;
            ``@last`` is the newest.
        store: Where it is; by default the one that is used where none is named.
        prices: As :func:`analyze` takes them; without, there is no cost.
        advantage: Also how much better it did than others of its task, such as ``grpo``.

    Raises:
        NotFoundError: Nothing has that id, or several do.
        ConfigError: A price or the advantage cannot be used.
        StoreMissingError: There is no store.
    """
    from lightning_otel.dataset import Store
    from lightning_otel.dataset.batches import incomplete

    checked(prices)  # said before anything is read
    opened = store if isinstance(store, Store) else Store(store)
    noun, whole = opened.find(episode_id)
    rollout_id = whole if noun == "rollout" else opened.rollout_of(noun, whole)
    spans = opened.spans(rollout_id=rollout_id).rows()
    found = outline(spans, incomplete=incomplete(opened.source))
    if advantage is None:
        return analyze(found, prices=prices)
    steps = opened.transitions(rollout_id=rollout_id, advantage=advantage, bodies=False)
    advantages = {(each.trace_id, each.span_id): each.advantage for each in steps}
    told = analyze(found, prices=prices, advantages=advantages)
    own = {(span.trace_id, span.span_id) for span in spans}
    lacking = dict.fromkeys(
        each.reason
        for each in steps.report().dropped
        if each.noun == "advantage" and (each.trace_id, each.span_id) in own
    )
    return replace(
        told, findings=(*told.findings, *(Finding("no_advantage", reason) for reason in lacking))
    )


def _step_line(step: Step) -> str:
    reward = "" if step.reward is None else f" · reward {step.reward:g}"
    advantage = "" if step.advantage is None else f" · advantage {step.advantage:.3g}"
    label = one_line(step.label, 60)
    return f"{label} {step.observation} → {step.action}{reward}{advantage}"


def _reward_line(given: Given) -> str:
    value = f"{given.value:g}" if isinstance(given.value, (int, float)) else str(given.value)
    where = f"→ {', '.join(given.steps)} by {given.by}" if given.steps else given.left_out
    return one_line(" ".join(word for word in (given.name, value, where) if word), 200)
