"""Rollouts read and adapted for a step, and what of them an algorithm cannot use, with reasons."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Final

from lightning_otel.adapter import Advantage, TripletAdapter
from lightning_otel.adapter.exactness import MODE_UNKNOWN, NO_IDS, PENALISED, TRUNCATED, notes_of
from lightning_otel.algorithms.groups import NO_REWARD, Member
from lightning_otel.dataset.batches import batches
from lightning_otel.types import Span, Trajectory, Transition

if TYPE_CHECKING:
    from lightning_otel.dataset import Store
    from lightning_otel.dataset.query import Asked

NO_STEPS: Final = "no transitions: no call of a model was recorded, or none is selected"
RAW: Final = "logprobs of the wrong mode: raw, at a temperature other than 1"
NO_LOGPROBS: Final = "no logprobs: the server gave token ids alone"
_MISLEADING: Final = (TRUNCATED, PENALISED, MODE_UNKNOWN)
"""Notes on a step whose logprobs are not those of the policy it was sampled from."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Rollouts as trajectories.

    Attributes:
        trajectories: By rollout id.
        rewards: The reward of all its steps together, by rollout id.
        faults: Why a rollout is of no use, by rollout id.
    """

    trajectories: Mapping[str, Sequence[Trajectory]]
    rewards: Mapping[str, float]
    faults: Mapping[str, str]


def load(
    store: "Store",
    asked: "Asked",
    groups: Mapping[str, Collection[Member]],
    *,
    needs_reward: bool = False,
    needs_steps: bool = True,
) -> Loaded:
    """The trajectories of groups of rollouts, with advantages among the members of each.

    Args:
        store: Where they are recorded.
        asked: How spans become transitions, and which are wanted.
        groups: Rollouts by group.
        needs_reward: Whether one without a reward is of no use.
        needs_steps: Whether one of which no call was recorded is of no use; else its reward is the
            one that was given to it as a whole.
    """
    group_of = {each.rollout_id: key for key, held in groups.items() for each in held}
    counts = {each.rollout_id: each for held in groups.values() for each in held}
    adapter = _compare_in_groups(asked.adapter, group_of)
    wanted = replace(asked.wanted, rollout_ids=tuple(group_of))
    # Advantages compare a whole group: all of them are adapted at once.
    spans = chain.from_iterable(batches(store.source, wanted))
    found = adapter.explain(asked.wanted.spans(spans))
    paths: dict[str, list[Trajectory]] = {}
    for path in found.trajectories:
        member = counts.get(path.rollout_id)
        if member is None or path.attempt_id != member.attempt_id:
            continue
        if any(map(asked.wanted.wants, path.transitions)):
            paths.setdefault(path.rollout_id, []).append(path)
    rewards = {
        each.key.rollout_id: each.value
        for each in found.outcomes
        if each.value is not None
        and each.key.rollout_id in counts
        and each.key.attempt_id == counts[each.key.rollout_id].attempt_id
    }
    if not needs_steps:
        given = {key: each.reward for key, each in counts.items() if each.reward is not None}
        rewards = {**given, **rewards}
    faults = {key: NO_STEPS for key in counts if needs_steps and key not in paths}
    if needs_reward:
        faults |= {key: NO_REWARD for key in counts if key not in rewards and key not in faults}
    return Loaded(paths, rewards, faults)


def _compare_in_groups(adapter: "object", group_of: Mapping[str, str]) -> "TripletAdapter":
    """The adapter, which compares rollouts within the groups they are claimed in."""

    def group_by(spans: Sequence[Span]) -> str | None:
        ids = (span.rollout_id for span in spans)
        return next((group_of[each] for each in ids if each in group_of), None)

    if not isinstance(adapter, TripletAdapter):
        return adapter  # type: ignore[return-value]  # one of the user's own compares as it likes
    how = adapter.comparison() or Advantage()
    return replace(adapter, advantage=replace(how, group_by=group_by))


def capture_fault(paths: Sequence[Trajectory], *, needs_logprobs: bool) -> str:
    """Return the reason why a rollout's tokens cannot be trained on; empty if they can.

    Args:
        paths: Its trajectories.
        needs_logprobs: Whether the probabilities it was sampled with matter.
    """
    for path in paths:
        for step in path.transitions:
            fault = _find_fault(step, needs_logprobs=needs_logprobs)
            if fault:
                return fault
    return ""


def _find_fault(step: Transition, *, needs_logprobs: bool) -> str:
    if step.capture != "exact":
        return f"text only: {step.inexact or NO_IDS}"
    if not needs_logprobs:
        return ""
    if len(step.logprobs) != len(step.response_ids):
        return NO_LOGPROBS
    sampling = step.sampling
    if sampling.get("temperature", 1) != 1 and sampling.get("logprobs_mode") == "raw":
        return RAW
    notes = notes_of(step)
    return next((note for note in _MISLEADING if note in notes), "")


def told(reasons: Mapping[str, int]) -> str:
    """Reasons with their counts, the most frequent first."""
    common = Counter(dict(reasons)).most_common(4)
    return ", ".join(f"{count} × {reason}" for reason, count in common)
