"""What is said of one thing that was looked at."""

from dataclasses import dataclass
from typing import Literal

Code = Literal[
    "versions",
    "no-openai",
    "httpx-pre-release",
    "instrumentors",
    "no-entry-points",
    "foreign-broken",
    "foreign",
    "recording-off",
    "collect-off",
    "content-off",
    "content-exported",
    "otlp",
    "few-files",
    "no-store",
    "network-disk",
    "no-place",
    "open-to-others",
    "open-parent",
    "other-owner",
    "not-writable",
    "manifest-damaged",
    "store-damaged",
    "store-refused",
    "unreadable",
    "catalogue-damaged",
    "file-damaged",
    "file-missing",
    "quarantined",
    "spans-gone",
    "healed",
    "quarantine",
    "store",
    "damaged-lines",
    "not-stored",
    "waiting",
    "slow-disk",
    "missing-spans",
    "feedback-waits",
    "state-unreadable",
]
"""What a finding is about, for good: each has a paragraph in ``docs/settings.md``."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        code: What it is about; the same in every version.
        level: ``ok``; ``note`` for what may be meant so; ``problem`` for what is not.
        text: What was found.
        remedy: What to do about it; empty where nothing is to be done.
    """

    code: Code
    level: Literal["ok", "note", "problem"]
    text: str
    remedy: str = ""
