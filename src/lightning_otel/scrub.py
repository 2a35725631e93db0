"""Secrets out of text before it is kept: by the shape of the value, never by a key's name."""

import re
from typing import Final

_PATTERNS: Final[tuple[tuple[str, str, str], ...]] = (
    # (literal every match contains, name, pattern); the literal is looked for first because nine
    # regular expressions over 2 KB cost fifteen times as much.
    ("sk-", "api_key", r"\bsk-[A-Za-z0-9_-]{20,}"),
    ("AKIA", "aws_key", r"\bAKIA[0-9A-Z]{16}\b"),
    ("AIza", "google_key", r"\bAIza[0-9A-Za-z_-]{35}"),
    ("gh", "github_token", r"\bgh[pousr]_[A-Za-z0-9]{36,}"),
    ("xox", "slack_token", r"\bxox[abprs]-[A-Za-z0-9-]{10,}"),
    ("hf_", "hf_token", r"\bhf_[A-Za-z0-9]{30,}"),
    ("eyJ", "jwt", r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"),
    ("earer ", "bearer", r"\b[Bb]earer [A-Za-z0-9._~+/-]{20,}=*"),
    (
        "PRIVATE KEY-----",
        "private_key",
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]+-----END [A-Z ]*PRIVATE KEY-----",
    ),
)
_COMPILED: Final = tuple(
    (literal, f"[redacted:{name}]", re.compile(pattern)) for literal, name, pattern in _PATTERNS
)


def scrub(text: str) -> str:
    """The text with every recognised secret replaced by ``[redacted:what]``."""
    for literal, replacement, pattern in _COMPILED:
        if literal in text:
            text = pattern.sub(replacement, text)
    return text
