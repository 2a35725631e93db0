"""The nouns of lightning-otel as frozen dataclasses, and nothing else.

Ids are lower-case hex, times are Unix nanoseconds. See ``docs/concepts.md`` for the words.
"""

from lightning_otel.types.prompts import Prompt
from lightning_otel.types.report import Credited, Dropped, Repair, Report
from lightning_otel.types.rollouts import (
    Endpoint,
    Mode,
    Resource,
    ResourceKind,
    Rollout,
    RolloutStatus,
)
from lightning_otel.types.spans import Event, Link, Span
from lightning_otel.types.steps import (
    BranchCause,
    Call,
    CaptureLevel,
    Compose,
    Conversation,
    Credit,
    CreditRule,
    Estimator,
    Message,
    Reward,
    RowCause,
    TrainingRow,
    Trajectory,
    Transition,
)

__all__ = [
    "BranchCause",
    "Call",
    "CaptureLevel",
    "Compose",
    "Conversation",
    "Credit",
    "CreditRule",
    "Credited",
    "Dropped",
    "Endpoint",
    "Estimator",
    "Event",
    "Link",
    "Message",
    "Mode",
    "Prompt",
    "Repair",
    "Report",
    "Resource",
    "ResourceKind",
    "Reward",
    "Rollout",
    "RolloutStatus",
    "RowCause",
    "Span",
    "TrainingRow",
    "Trajectory",
    "Transition",
]
