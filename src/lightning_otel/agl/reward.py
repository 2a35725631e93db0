"""Rewards from feedback under Agent Lightning's names."""

from collections.abc import Mapping
from typing import Any

from lightning_otel.rewards.feedback import feedback_reward


def calculate_reward_from_feedback(
    quality_score: float,
    user_rating: float | None = None,
    user_feedback: Mapping[str, Any] | None = None,
) -> float:
    """Return the reward of a quality score (0 to 100), stars (0 to 5) and what else was said."""
    feedback = user_feedback or {}
    return feedback_reward(
        quality_score,
        user_rating,
        satisfied=bool(feedback.get("satisfied")),
        used_result=bool(feedback.get("used_result")),
    )
