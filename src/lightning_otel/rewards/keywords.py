"""Words and pairs of words that stand in answers that earned more than others of their category.

An answer is the text of a rewarded step, or the ``optimized_prompt`` of a span of one's own
(``emit_span(name, metadata={"optimized_prompt": …, "category": …})``) that a reward is linked to.

Source: Fisher's exact test, one-sided, of "has the word" against "earned more than the median".
"""

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, Final, NamedTuple

from lightning_otel.dataset import Store
from lightning_otel.errors import StoreMissingError
from lightning_otel.rewards.totals import category_of_resources, category_of_task
from lightning_otel.types.text import plain_text

MOST: Final = 10
"""Words and pairs that are given at most."""
CHANCE: Final = 0.05
"""How likely a word may be there by chance."""
SURE: Final = 0.8
"""Confidence from which on learnt words are added to a prompt."""
_WORD: Final = re.compile(r"[^\W\d_][\w'’-]+")
_TASKS: Final = "SELECT rollout_id, any_value(task) AS task FROM rollouts GROUP BY rollout_id"
_NAMED: Final = """
SELECT s.attributes->>'optimized_prompt' AS text, s.attributes->>'category' AS category,
    coalesce(s.attributes->>'model', '') AS model, avg(r.value) AS reward
FROM spans s JOIN rewards r ON r.link_key = 'span_id' AND r.link_value = s.span_id
WHERE s.attributes->>'optimized_prompt' IS NOT NULL AND isfinite(r.value)
GROUP BY s.trace_id, s.span_id, text, s.attributes->>'category', s.attributes->>'model'"""


class _RatedAnswer(NamedTuple):
    text: str
    category: str
    model: str
    reward: float


class _KeywordMatch(NamedTuple):
    chance: float
    gain: float
    words: str
    answers: int


def learned_optimizations(
    category: str, model: str | None = None, *, store: Store | None = None
) -> dict[str, Any]:
    """Return what the better answers of a category have in common.

    Args:
        category: As the task says under ``category``, or the resource as in ``prompt[image]``.
        model: Only answers of this model; a name or glob.
        store: Where rollouts are recorded; by default the default store.

    Returns:
        ``learned_keywords``: words, the surest first. ``learned_patterns``: of pairs of words the
        ``pattern``, the mean ``gain`` in reward and how many answers have it. ``confidence``: one
        less the chance that the best of all words that were tried is there by chance, 0 to 1.

    Raises:
        StoreError: The store cannot be read.
    """
    try:
        answers = [
            answer
            for answer in _read_answers(store if store is not None else Store())
            if answer.category == category and (model is None or fnmatchcase(answer.model, model))
        ]
    except StoreMissingError:
        answers = []
    words, tried = _find_words(answers, list)
    pairs, _ = _find_words(answers, lambda words: [f"{a} {b}" for a, b in pairwise(words)])
    chance = min(1.0, words[0].chance * tried) if words else 1.0
    return {
        "learned_keywords": [word.words for word in words],
        "learned_patterns": [
            {"pattern": pair.words, "gain": pair.gain, "answers": pair.answers} for pair in pairs
        ],
        "confidence": 1.0 - chance,
    }


def missing_words(prompt: str, learned: Mapping[str, Any]) -> list[str]:
    """Return the learnt words that a prompt lacks; none where they may be there by chance."""
    text = prompt.casefold()
    words = [word for word in learned["learned_keywords"] if word not in text]
    return words if learned["confidence"] >= SURE else []


def _read_answers(store: Store) -> Iterator[_RatedAnswer]:
    for row in store.sql(_NAMED):
        yield _RatedAnswer(row["text"], row["category"] or "", row["model"], row["reward"])
    kinds = {row["rollout_id"]: category_of_task(row["task"]) for row in store.sql(_TASKS)}
    for step in store.transitions(rewarded=True):
        kind = kinds.get(step.rollout_id) or category_of_resources(step.resources)
        if kind and step.reward is not None:
            yield _RatedAnswer(plain_text(step.action[:1]), kind, step.model or "", step.reward)


def _find_words(
    answers: Sequence[_RatedAnswer], parts_of: Callable[[list[str]], list[str]]
) -> tuple[list[_KeywordMatch], int]:
    holders: dict[str, list[float]] = {}
    for answer in answers:
        words = [word.casefold() for word in _WORD.findall(answer.text)]
        for part in set(parts_of(words)):
            holders.setdefault(part, []).append(answer.reward)
    rewards = [answer.reward for answer in answers]
    matches = []
    for part, earned in holders.items():
        if len(earned) == len(rewards):
            continue
        mean_without = (math.fsum(rewards) - math.fsum(earned)) / (len(rewards) - len(earned))
        gain = statistics.fmean(earned) - mean_without
        chance = _chance_of(earned, rewards)
        if gain > 0 and chance <= CHANCE:
            matches.append(_KeywordMatch(chance, gain, part, len(earned)))
    matches.sort(key=lambda match: (match.chance, -match.gain, match.words))
    return matches[:MOST], len(holders)


def _chance_of(earned: Sequence[float], rewards: Sequence[float]) -> float:
    """Return the chance of so many answers above the median by accident."""
    middle = statistics.median(rewards)
    good = sum(reward > middle for reward in rewards)
    hits, size, total = sum(reward > middle for reward in earned), len(earned), len(rewards)
    ways = sum(
        math.comb(good, n) * math.comb(total - good, size - n)
        for n in range(hits, min(size, good) + 1)
    )
    return ways / math.comb(total, size)
