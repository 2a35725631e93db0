"""Secrets out of text before it is kept: by the shape of the value, never by a key's name."""

import re
from typing import Final


def _at_word_start(literal: str) -> str:
    r"""A pattern for a literal that starts a word, or follows a line break written as ``\n``.

    The condition stands after the literal: a pattern that starts with plain letters is searched for
    twenty times as fast as one that starts with a condition.
    """
    return rf"{literal}(?:(?<!\w{literal})|(?<=\\[bfnrt]{literal}))"


_PATTERNS: Final[tuple[tuple[str, str, int, str, str], ...]] = (
    # (text that every match holds, a rare character, its place from that text's start, name,
    # pattern)
    ("sk-", "-", 2, "api_key", _at_word_start("sk-") + r"[A-Za-z0-9_-]{20,}"),
    ("AKIA", "K", 1, "aws_key", _at_word_start("AKIA") + r"[0-9A-Z]{16}\b"),
    ("AIza", "I", 1, "google_key", _at_word_start("AIza") + r"[0-9A-Za-z_-]{35}"),
    ("gh", "_", 3, "github_token", _at_word_start("gh") + r"[pousr]_[A-Za-z0-9]{36,}"),
    ("xox", "-", 4, "slack_token", _at_word_start("xox") + r"[abprs]-[A-Za-z0-9-]{10,}"),
    ("hf_", "_", 2, "hf_token", _at_word_start("hf_") + r"[A-Za-z0-9]{30,}"),
    # Without the first bound, a text of many "-eyJ" would be read to its end from each of them.
    ("eyJ", "J", 2, "jwt", _at_word_start("eyJ") + r"[\w-]{8,512}\.[\w-]{8,}\.[\w-]{8,}"),
    ("Bearer ", "B", 0, "bearer", _at_word_start("Bearer ") + r"[A-Za-z0-9._~+/-]{20,}=*"),
    ("bearer ", "b", 0, "bearer", _at_word_start("bearer ") + r"[A-Za-z0-9._~+/-]{20,}=*"),
    (
        "PRIVATE KEY",
        "V",
        3,
        "private_key",
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]+-----END [A-Z ]*PRIVATE KEY-----",
    ),
)
_COMPILED: Final = tuple(
    (literal, rare, place, f"[redacted:{name}]", re.compile(pattern, re.ASCII))
    for literal, rare, place, name, pattern in _PATTERNS
)

_USER: Final = re.compile(r"(://)[^/\s@\"']{1,512}@")
_QUERY: Final = re.compile(r"([?&][\w.~%-]{1,64}=)[^&\s\"'<>#)\]}]+")
"""User and password, and the values of a query, in an address of any shape."""


class Scrubbed(str):
    """A text that holds no secrets any more, whoever looks again."""

    __slots__ = ()


def scrub(text: str) -> str:
    """The text with every recognised secret replaced by ``[redacted:what]``."""
    if type(text) is Scrubbed:
        return str(text)
    looks = len(text) >> 12
    for literal, rare, place, replacement, pattern in _COMPILED:
        if rare not in text or (looks and not _may_hold(text, literal, rare, place, looks)):
            continue
        if pattern.search(text):
            text = pattern.sub(replacement, text)
    return text


def scrub_error(text: str) -> str:
    """What an error says without secrets: errors quote addresses, whose parts may be keys."""
    text = scrub(text)
    if "@" in text:
        text = _USER.sub(r"\1[redacted]@", text)
    return _QUERY.sub(r"\1[redacted]", text) if "=" in text else text


def _may_hold(text: str, literal: str, rare: str, place: int, looks: int) -> bool:
    """False if a few looks at the text's rare characters show that the literal is not there.

    Going from one to the next reads a text fifty times as fast as a search for a pattern does.
    """
    at = -1
    for _ in range(looks):
        at = text.find(rare, at + 1)
        if at < 0:
            return False
        if at >= place and text.startswith(literal, at - place):
            return True
    return True
