"""Secrets out of text before it is kept: by the shape of the value, never by a key's name."""

import re
from typing import Final


def _at_word_start(literal: str) -> str:
    r"""A pattern for a literal that starts a word, or follows a line break written as ``\n``.

    The condition stands after the literal: a pattern that starts with plain letters is searched for
    twenty times as fast as one that starts with a condition.
    """
    return rf"{literal}(?:(?<!\w{literal})|(?<=\\[bfnrt]{literal}))"


_PATTERNS: Final[tuple[tuple[str, str, str], ...]] = (
    # (rare character that every match contains, name, pattern); the character is looked for first
    # because that costs next to nothing.
    ("-", "api_key", _at_word_start("sk-") + r"[A-Za-z0-9_-]{20,}"),
    ("K", "aws_key", _at_word_start("AKIA") + r"[0-9A-Z]{16}\b"),
    ("I", "google_key", _at_word_start("AIza") + r"[0-9A-Za-z_-]{35}"),
    ("_", "github_token", _at_word_start("gh") + r"[pousr]_[A-Za-z0-9]{36,}"),
    ("-", "slack_token", _at_word_start("xox") + r"[abprs]-[A-Za-z0-9-]{10,}"),
    ("_", "hf_token", _at_word_start("hf_") + r"[A-Za-z0-9]{30,}"),
    # Without the first bound, a text of many "-eyJ" would be read to its end from each of them.
    ("J", "jwt", _at_word_start("eyJ") + r"[\w-]{8,512}\.[\w-]{8,}\.[\w-]{8,}"),
    ("B", "bearer", _at_word_start("Bearer ") + r"[A-Za-z0-9._~+/-]{20,}=*"),
    ("b", "bearer", _at_word_start("bearer ") + r"[A-Za-z0-9._~+/-]{20,}=*"),
    (
        "V",
        "private_key",
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]+-----END [A-Z ]*PRIVATE KEY-----",
    ),
)
_COMPILED: Final = tuple(
    (rare, f"[redacted:{name}]", re.compile(pattern, re.ASCII)) for rare, name, pattern in _PATTERNS
)


def scrub(text: str) -> str:
    """The text with every recognised secret replaced by ``[redacted:what]``."""
    for rare, replacement, pattern in _COMPILED:
        if rare in text and pattern.search(text):
            text = pattern.sub(replacement, text)
    return text
