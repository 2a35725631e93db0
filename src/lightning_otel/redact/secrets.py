"""Secrets out of texts: tokens of vendors' shapes, random values of telling names, a few phrases.

A token is a long run of letters, digits, ``-``, ``_`` and ``.``. Runs are searched for, not each
vendor's pattern: ordinary text has few of them, so more shapes cost nothing. ``secrets.json`` has
the shapes and their sources.
"""

import functools
import re
import string
from base64 import b64decode
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import orjson

from lightning_otel.types import conventions as c

_SHAPES: Final = orjson.loads(Path(__file__).with_name("secrets.json").read_bytes())
_SHORTEST: Final = 15
"""Characters of the shortest text with a secret, such as a password and its name."""
_LONGEST: Final = 8 << 20
"""No record is longer: what is cut to fit into one is looked at then."""
_RUN: Final = b"x" * 19
"""As long as the shortest token, once all that tokens are made of is ``x``."""
_MARKS: Final = bytes(120 if re.match(r"[\w.-]", chr(code), re.A) else 32 for code in range(256))
_LONGEST_WORD: Final = 32
"""A longer run may hold a token within, as after a prefix and ``-``."""
_MOST_INNER: Final = 16
_FARTHEST_INNER: Final = 4096
"""Places looked at within a run, so that no text costs more than its length."""

_BEFORE_VALUE: Final = (
    *'=:>/+%\\', *(sign + quote for sign in ("=", ":", " ", "\\") for quote in ('"', "'")),
    "= ", ": ", "> ", "asic ", "ASIC ", "oken ", "OKEN ", "earer ", "EARER ",
)  # fmt: skip
"""Ends of what stands before a value that something else tells to be one."""
_SIGNS: Final = " \t\"'\\>=:"
_BASE64: Final = f"{string.ascii_letters}{string.digits}+/="
_VALUE: Final = re.compile(r"[^\s\"'\\,;&<>(){}\[\]|`$]{19,512}+(?![(\[])")
_KEPT: Final = frozenset(
    {c.ROLLOUT_ID, c.ATTEMPT_ID, c.OPERATION, c.RESPONSE_ID, c.SEQUENCE_ID, c.CUT, c.REDACTED}
)
_KEPT_PREFIXES: Final = (f"{c.LINK_PREFIX}.", f"{c.REWARD_PREFIX}.")
_NUMBERS: Final = frozenset({int, float, bool})
_NEAR: Final = 96
_AROUND: Final = 256
_SENTENCE: Final = re.compile(r"[a-z]{2,}[ :,]{1,3}['\"`(]?$|['\"`)]?[.,;:]? [a-z]{2,}")
"""How what a value stands in ends before it, or goes on after it."""
_NAME_LENGTH: Final = 32
_NAMES: Final = tuple(_SHAPES["named"])
_NAME_ENDS: Final = frozenset(name[-3:] for name in _NAMES)
_PHRASES: Final = tuple(
    (literal, phrase) for phrase in _SHAPES["phrases"] for literal in phrase["holds"]
)
_AWS_KEY: Final = re.compile(
    r"(?=[a-z0-9]*[A-Z])(?=[A-Z0-9]*[a-z])(?=[A-Za-z]*\d)[A-Za-z0-9]{40}(?![\w+/])"
)
"""Hashes, which are as long, have letters of one case; text in base64 is ASCII behind it."""
_AWS_TURNS: Final = 17
_TURNS: Final = re.compile(r"[a-z]+|[A-Z]+|[0-9]+")
_ONE_CASE: Final = re.compile(r"[a-z0-9]+|[A-Z0-9]+")
_USER: Final = re.compile(r"(://)[^/\s@\"']{1,512}@")
_QUERY: Final = re.compile(r"([?&][\w.~%-]{1,64}=)[^&\s\"'<>#)\]}]+")
"""User and password, and the values of a query, in an address of any shape."""
_compiled: Final = functools.cache(functools.partial(re.compile, flags=re.ASCII))
"""Patterns are compiled once something begins as they do: all at once would take 50 ms."""


def _tokens_by_head() -> dict[str, list[tuple[str, str, str]]]:
    shapes = defaultdict(list)
    for shape in _SHAPES["tokens"]:
        for start in shape["starts"]:
            pattern = re.escape(start) + shape["rest"]
            shapes[start[:3]].append((start, pattern, f"[redacted:{shape['kind']}]"))
    return dict(shapes)


def _inner_pattern() -> str:
    seconds = defaultdict(set)
    for head in _TOKENS:
        seconds[head[0]].add(re.escape(head[1]))
    heads = (f"{re.escape(first)}[{''.join(group)}]" for first, group in seconds.items())
    return f"(?<=[-_.])(?:{'|'.join(heads)})"


_TOKENS: Final = _tokens_by_head()
_INNER: Final = re.compile(_inner_pattern())


class Scrubbed(str):
    """A text that holds no secrets any more, whoever looks again."""

    __slots__ = ()


def scrub(text: str) -> str:
    """Return the text with every recognised secret replaced by ``[redacted:KIND]``."""
    if type(text) is Scrubbed:
        return str(text)
    if not _SHORTEST <= len(text) <= _LONGEST:
        return text
    # Where a character is a byte, all is found faster.
    plain = text if text.isascii() else text.encode("ascii", "replace").decode("ascii")
    for literal, phrase in _PHRASES:
        if literal in plain and (pattern := _compiled(phrase["pattern"])).search(text):
            text = pattern.sub(phrase["mask"], text)
    marks = text.encode("ascii", "replace").translate(_MARKS)
    return _mask_tokens(text, marks) if _RUN in marks else text


def scrub_error(text: str) -> str:
    """Return an error's text without secrets: errors quote addresses, whose parts may be keys."""
    text = scrub(text)
    if "@" in text:
        text = _USER.sub(r"\1[redacted]@", text)
    return _QUERY.sub(r"\1[redacted]", text) if "=" in text else text


def is_kept(key: str) -> bool:
    """Say whether an attribute tells which spans belong together, and is never masked."""
    return key in _KEPT or key.startswith(_KEPT_PREFIXES)


def scrub_attributes(
    attributes: dict[str, Any], checked: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return attributes without secrets, the same if there are none; skip ``known`` ones."""
    if attributes == checked:
        return attributes
    texts: list[str] = []
    for key, value in attributes.items():
        kind = type(value)
        if kind is str:
            if len(value) >= _SHORTEST and not (checked and checked.get(key) is value):
                prefix = _prefix_of(key)
                if prefix is not None:
                    texts.append(prefix + value if prefix else value)
        elif kind in _NUMBERS:
            continue
        elif kind is tuple or kind is list:
            texts += [item for item in value if type(item) is str and len(item) >= _SHORTEST]
        elif issubclass(kind, str):
            texts.append(str.__str__(value))
    if not texts or scrub(whole := "\n".join(texts)) is whole:
        return attributes
    return {key: _scrub_value(key, value) for key, value in attributes.items()}


def _scrub_value(key: str, value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)([_scrub_value("", item) for item in value])
    prefix = _prefix_of(key)
    if prefix is None or not issubclass(type(value), str):
        return value
    return scrub(prefix + str.__str__(value)).removeprefix(prefix)


@functools.lru_cache(1024)
def _prefix_of(key: str) -> str | None:
    """Return what a value is read after: its key, where that may tell a secret; None if kept."""
    if is_kept(key):
        return None
    return f"{key}=" if key[-3:].lower() in _NAME_ENDS else ""


def _mask_tokens(text: str, marks: bytes) -> str:
    pieces: list[str] = []
    copied = place = end = 0
    while (start := marks.find(_RUN, place)) >= 0:
        if start >= end:
            end = marks.find(b" ", start)
            if end < 0:
                end = len(text)
        place = end
        # Most runs are words of a program, which these questions tell from the others.
        if (
            text[start : start + 3] in _TOKENS
            or text[start : start + 2] in _TOKENS
            or end - start > _LONGEST_WORD
            or text.endswith(_BEFORE_VALUE, 0, start)
        ) and (token := _find_token(text, start, end)):
            first, place, mask = token
            pieces += text[copied:first], mask
            copied = place
    return "".join((*pieces, text[copied:])) if pieces else text


def _find_token(text: str, start: int, end: int) -> tuple[int, int, str] | None:
    """Return the first token of a run: where it begins and ends, and what replaces it."""
    head, before = start, text[start - 1 : start]
    if before == "\\":  # a line break of JSON is two letters
        head += 5 if text[start] == "u" else text[start] in "bfnrt"
    elif before == "%":
        head += 2
    for place in _list_heads(text, head, end):
        shapes = _TOKENS.get(text[place : place + 3]) or _TOKENS.get(text[place : place + 2]) or ()
        for literal, pattern, mask in shapes:
            if text.startswith(literal, place) and (match := _compiled(pattern).match(text, place)):
                return place, match.end(), mask
    if text.endswith(_BEFORE_VALUE, 0, start) and (value := _find_value(text, start)):
        return value
    context = text[max(0, start - _NEAR) : start].lower()
    for shape in _SHAPES["near"]:
        if any(word in context for word in shape["words"]):
            match = _compiled(shape["pattern"]).match(text, head)
            if match and (before == "/" or _is_random(match[0])):
                return head, match.end(), f"[redacted:{shape['kind']}]"
    for shape in _SHAPES["bare"]:
        match = _compiled(shape["pattern"]).match(text, head)
        if match and _is_random(match[0]) and _stands_bare(text, match, shape["words"]):
            return head, match.end(), f"[redacted:{shape['kind']}]"
    key = _AWS_KEY.match(text, head) if before not in ("+", "/") else None
    if key is None or len(_TURNS.findall(key[0])) < _AWS_TURNS or b64decode(key[0]).isascii():
        return None
    return head, key.end(), "[redacted:aws_key]"


def _stands_bare(text: str, match: re.Match[str], words: list[str]) -> bool:
    """Say whether a value stands in a sentence that does not speak of versions or files."""
    before = text[max(0, match.start() - _AROUND) : match.start()].lower()
    after = text[match.end() : match.end() + _AROUND].lower()
    if not _SENTENCE.search(before) and not _SENTENCE.match(after):
        return False
    context = f"{before} {after}"
    others = {other[0] for other in match.re.finditer(context)} - {match[0]}
    return not others and not any(word in context for word in words)


def _list_heads(text: str, start: int, end: int) -> Iterator[int]:
    yield start
    if end - start > _LONGEST_WORD or text[start] in "-_.":
        inner = _INNER.finditer(text, start, min(end, start + _FARTHEST_INNER))
        for match, _ in zip(inner, range(_MOST_INNER), strict=False):
            yield match.start()


def _find_value(text: str, start: int) -> tuple[int, int, str] | None:
    before = text[max(0, start - _NEAR) : start]
    if before[-1] in "+/":  # within base64
        length = len(before)
        before = before.rstrip(_BASE64)
        start -= length - len(before)
    name = before.rstrip(_SIGNS)
    if name[-3:].lower() not in _NAME_ENDS:
        return None
    if not name[-_NAME_LENGTH:].lower().replace("-", "_").replace(" ", "_").endswith(_NAMES):
        return None
    match = _VALUE.match(text, start)
    value = match[0].rstrip(".") if match else ""
    return (start, start + len(value), "[redacted:secret]") if _is_random(value) else None


def _is_random(text: str) -> bool:
    turns = len(_TURNS.findall(text))
    if _ONE_CASE.fullmatch(text):
        return turns >= 4
    return turns >= (0.3 if re.search(r"\d", text) else 0.5) * len(text)
