"""Findings: one line for each thing looked at."""

from dataclasses import dataclass
from typing import Literal

Code = Literal[
    "versions", "no-openai", "httpx-pre-release", "instrumentors", "no-entry-points",
    "foreign-broken", "foreign", "recording-off", "collect-off", "content-off",
    "content-exported", "otlp", "few-files", "no-store", "network-disk", "no-place",
    "open-to-others", "open-parent", "other-owner", "not-writable", "manifest-damaged",
    "store-damaged", "store-refused", "unreadable", "catalogue-damaged", "file-damaged",
    "file-missing", "quarantined", "spans-gone", "healed", "quarantine", "store", "damaged-lines",
    "not-stored", "waiting", "slow-disk", "missing-spans", "feedback-waits", "state-unreadable",
]  # fmt: skip
"""Subject of a finding, for good: each has a paragraph in ``docs/settings.md``."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        code: Its subject; the same in every version.
        level: ``ok``; ``note`` for what may be meant so; ``problem`` for what is not.
        text: One sentence.
        remedy: A command or advice; empty where nothing is to be done.
    """

    code: Code
    level: Literal["ok", "note", "problem"]
    text: str
    remedy: str = ""


def ok(code: Code, text: str) -> Finding:
    """Say that something is as it should be."""
    return Finding(code, "ok", text)


def note(code: Code, text: str, remedy: str = "") -> Finding:
    """Say something that may be meant so."""
    return Finding(code, "note", text, remedy)


def problem(code: Code, text: str, remedy: str = "") -> Finding:
    """Say that something is wrong."""
    return Finding(code, "problem", text, remedy)
