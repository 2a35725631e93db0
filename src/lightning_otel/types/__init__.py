"""The nouns of lightning-otel as frozen dataclasses, and nothing else.

Ids are lower-case hex, times are Unix nanoseconds. Modules are imported with the first of their
names: a traced program needs spans alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lightning_otel.types.report import Credited, Dropped, Repair, Report
    from lightning_otel.types.rollouts import (
        Endpoint,
        Mode,
        Prompt,
        Resource,
        ResourceKind,
        Rollout,
        RolloutStatus,
    )
    from lightning_otel.types.spans import Event, Link, Message, Span
    from lightning_otel.types.transitions import (
        BranchCause,
        Call,
        CaptureLevel,
        Compose,
        Conversation,
        Credit,
        CreditRule,
        Estimator,
        Reward,
        RowCause,
        TrainingRow,
        Trajectory,
        Transition,
    )

_MODULES: Final = ("spans", "transitions", "report", "rollouts")

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


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            names = vars(import_module(f"{__name__}.{module}"))
            if name in names:
                return globals().setdefault(name, names[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
