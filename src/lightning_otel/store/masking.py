"""What a redaction does to one span: texts masked, token ids that would spell them taken away.

Pure: no I/O, no clock. What tells which spans belong together (ids, links, the operation) is never
masked; a match in there is counted, so that it can be told.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final

import orjson

from lightning_otel import conventions as c
from lightning_otel.errors import ConfigError
from lightning_otel.scrub import scrub
from lightning_otel.types import Event, Link, Span

MASK: Final = "[redacted]"
PATTERN, KEY, SECRET, WHOLE, TOKENS, IN_ID = "pattern", "key", "secret", "whole", "tokens", "in_id"
"""Why something went; the last is of what was found in an id, which stays."""
_DEPTH: Final = 100
"""Below so many levels of objects and lists a value is one text."""
_REMEMBERED: Final = 4096
_LONGEST_REMEMBERED: Final = 4096

_KEPT: Final = frozenset(
    {c.ROLLOUT_ID, c.ATTEMPT_ID, c.OPERATION, c.RESPONSE_ID, c.SEQUENCE_ID, c.CUT, c.REDACTED}
)
_KEPT_PREFIXES: Final = (f"{c.LINK_PREFIX}.", f"{c.REWARD_PREFIX}.")
_KNOWN: Final = frozenset(
    value for name, value in vars(c).items() if name.isupper() and isinstance(value, str)
) - c.CONTENT_KEYS - {c.EXCEPTION_MESSAGE, c.EXCEPTION_STACKTRACE}  # fmt: skip
"""Keys and names of ours that tell what a span is, not what was said in it."""
_TELLING: Final = re.compile(r"(?:^|[._])(?:kind|type|model|model_name|system|provider)$")
"""Ends of keys of other conventions that tell what a span is."""
_FORM: Final = frozenset({"role", "type", "finish_reason", "id", "tool_call_id"})
"""Keys within messages that make them messages."""
_SPELLED: Final = re.compile(r"token_ids|logprobs")
_MASKS: Final = re.compile(r"(\[redacted(?::\w+)?\])")
_PROMPT: Final = (c.INPUT_MESSAGES, c.SYSTEM_INSTRUCTIONS, c.TOOL_DEFINITIONS)
_MESSAGES: Final = frozenset({*_PROMPT, c.OUTPUT_MESSAGES})
_OF_RESPONSE: Final = frozenset({c.RESPONSE_TOKEN_IDS, c.RESPONSE_LOGPROBS, c.LOGPROB_TOKEN_IDS})
_OF_TOKENS: Final = _OF_RESPONSE | {c.PROMPT_TOKEN_IDS}


@dataclass(frozen=True, slots=True)
class Rules:
    """What is to be masked; with none of the first three, all that was said.

    Attributes:
        patterns: Regular expressions; what they match in any text or number becomes a mask.
        keys: Names of attributes, and of fields within them and within messages; a glob may stand
            for some. What stands under them becomes a mask.
        secrets: Whether keys and tokens of the known shapes go too; see :mod:`scrub`.
    """

    patterns: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    secrets: bool = False
    _compiled: tuple[re.Pattern[str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compile the patterns.

        Raises:
            ConfigError: One is no regular expression, or matches where nothing stands; or a key is
                one that tells which spans belong together.
        """
        compiled = []
        for pattern in self.patterns:
            try:
                found = re.compile(pattern)
            except re.error as exc:
                raise ConfigError(
                    f"the pattern is no regular expression: {exc}; write it as Python's re does"
                ) from exc
            if found.search("") is not None:
                raise ConfigError("the pattern matches the empty text; make it match something")
            compiled.append(found)
        for key in self.keys:
            if _is_kept(key):
                raise ConfigError(
                    f"{key} tells which spans belong together and stays; to have the rollout gone: "
                    "lightning-otel compact --rollout ID"
                )
        object.__setattr__(self, "_compiled", tuple(compiled))

    @property
    def is_whole(self) -> bool:
        """Whether all that was said goes."""
        return not (self.patterns or self.keys or self.secrets)

    def has_key(self, key: str) -> bool:
        """Whether a key is one of those to be masked."""
        return any(key == each or fnmatchcase(key, each) for each in self.keys)


@dataclass(frozen=True, slots=True)
class Masked:
    """A span after redaction.

    Attributes:
        span: What is kept of it; the very span where nothing changed.
        counts: How many values went, by reason.
    """

    span: Span
    counts: Mapping[str, int]

    @property
    def is_changed(self) -> bool:
        """Whether anything was masked."""
        return any(count for reason, count in self.counts.items() if reason != IN_ID)


class Masker:
    """Applies rules to spans; a text that comes again and again is looked at once."""

    def __init__(self, rules: Rules, redaction_id: str) -> None:
        """Take the rules.

        Args:
            rules: What is to be masked.
            redaction_id: Stands on every span that was changed.
        """
        self._rules = rules
        self._id = redaction_id
        self._short = lru_cache(_REMEMBERED)(self._substituted)

    def mask(self, span: Span) -> Masked:
        """A span without what the rules name."""
        counts: Counter[str] = Counter()
        attributes = self._attributes(span.attributes, counts, is_own=True)
        changed = replace(
            span,
            name=span.name if span.name in _KNOWN else self._text(span.name, counts, is_name=True),
            status_message=self._text(span.status_message, counts),
            attributes=attributes,
            events=tuple(
                Event(
                    self._text(each.name, counts, is_name=True),
                    each.time_ns,
                    self._attributes(each.attributes, counts),
                )
                for each in span.events
            ),
            links=tuple(
                Link(each.trace_id, each.span_id, self._attributes(each.attributes, counts))
                for each in span.links
            ),
            otel_resource=span.otel_resource
            if self._rules.is_whole
            else self._attributes(span.otel_resource, counts),
        )
        if self._rules.is_whole and _OF_TOKENS & attributes.keys():
            counts[WHOLE] += 1
        if not any(count for reason, count in counts.items() if reason != IN_ID):
            return Masked(span, counts)
        kept = _without_spelling(span.attributes, attributes, counts, is_whole=self._rules.is_whole)
        kept[c.REDACTED] = self._note(span, counts)
        return Masked(replace(changed, attributes=kept), counts)

    def _note(self, span: Span, counts: Mapping[str, int]) -> str:
        """What stands on a span: the redaction, and how much went by reason, all told."""
        before = _note_of(span)
        told = Counter({key: value for key, value in before.items() if isinstance(value, int)})
        told.update(counts)
        told.pop(IN_ID, None)
        return orjson.dumps({"redaction": self._id, **dict(sorted(told.items()))}).decode()

    def _attributes(
        self, attributes: Mapping[str, Any], counts: Counter[str], *, is_own: bool = False
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in attributes.items():
            name = key if key in _KNOWN or _is_kept(key) else self._name(key, counts, found)
            found[name] = self._attribute(key, value, counts, is_own=is_own)
        return found

    def _attribute(self, key: str, value: Any, counts: Counter[str], *, is_own: bool) -> Any:
        if _is_kept(key):
            if key not in (c.CUT, c.REDACTED) and isinstance(value, str) and self._masks(value):
                counts[IN_ID] += 1
            return value
        if self._rules.has_key(key):
            counts[KEY] += value != MASK
            return MASK
        if is_own and key in _OF_TOKENS:
            return value
        if self._rules.is_whole:
            return self._unsaid(key, value, counts)
        if key in _KNOWN and not isinstance(value, (str, list, tuple, Mapping)):
            return value
        if is_own and key in _MESSAGES and isinstance(value, str):
            return self._messages(value, counts)
        return self._value(value, counts)

    def _unsaid(self, key: str, value: Any, counts: Counter[str]) -> Any:
        """A value, if it tells what a span is, else a mask; of messages the form is kept."""
        if key in _KNOWN or _TELLING.search(key) or isinstance(value, (bool, int, float)):
            return value
        if value in (None, "", MASK):
            return value
        if key in _MESSAGES and isinstance(value, str):
            return self._messages(value, counts)
        counts[WHOLE] += 1
        return MASK

    def _messages(self, text: str, counts: Counter[str]) -> str:
        """Messages as JSON; one that was cut is a text like others."""
        try:
            value = orjson.loads(text)
        except ValueError:
            if self._rules.is_whole:
                counts[WHOLE] += text != MASK
                return MASK
            return self._text(text, counts)
        before = counts.total()
        made = self._value(value, counts, is_message=True)
        return text if counts.total() == before else orjson.dumps(made).decode()

    def _value(
        self, value: Any, counts: Counter[str], *, is_message: bool = False, depth: int = 0
    ) -> Any:
        if isinstance(value, str):
            if self._rules.is_whole:
                counts[WHOLE] += value not in ("", MASK)
                return MASK if value else value
            return self._text(value, counts, depth=depth)
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, (int, float)):
            return self._number(value, counts)
        if depth > _DEPTH:
            text = orjson.dumps(value).decode()
            masked = self._text(text, counts, is_name=True)
            return value if masked == text else masked
        if isinstance(value, Mapping):
            return self._object(value, counts, is_message=is_message, depth=depth + 1)
        return [self._value(each, counts, is_message=is_message, depth=depth + 1) for each in value]

    def _object(
        self, value: Mapping[str, Any], counts: Counter[str], *, is_message: bool, depth: int
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, item in value.items():
            if is_message and key in _FORM and isinstance(item, str):
                found[key] = item
            elif self._rules.has_key(key):
                counts[KEY] += item != MASK
                found[key] = MASK
            else:
                name = self._name(key, counts, found)
                found[name] = self._value(item, counts, is_message=is_message, depth=depth)
        return found

    def _name(self, key: str, counts: Counter[str], taken: Mapping[str, Any]) -> str:
        """A key without what the patterns match; another one where two would become one."""
        name = self._text(key, counts, is_name=True)
        number = 2
        while name != key and name in taken:
            name, number = f"{MASK}#{number}", number + 1
        return name

    def _number(self, value: float, counts: Counter[str]) -> Any:
        if not self._masks(value):
            return value
        counts[PATTERN] += 1
        return MASK

    def _masks(self, value: object) -> bool:
        return any(pattern.search(str(value)) for pattern in self._rules._compiled)

    def _text(
        self, text: str, counts: Counter[str], *, is_name: bool = False, depth: int = 0
    ) -> str:
        if self._rules.is_whole:
            if is_name or text in ("", MASK):
                return text
            counts[WHOLE] += 1
            return MASK
        if not is_name and text[:1] in ("{", "[") and depth <= _DEPTH:
            text = self._nested(text, counts, depth + 1)
        look = self._short if len(text) <= _LONGEST_REMEMBERED else self._substituted
        made, patterns, secrets = look(text)
        counts[PATTERN] += patterns
        counts[SECRET] += secrets
        return made

    def _nested(self, text: str, counts: Counter[str], depth: int) -> str:
        """A text that is JSON, such as a tool's arguments: its own texts hide behind escapes."""
        try:
            value = orjson.loads(text)
        except ValueError:
            return text
        before = counts.total()
        made = self._value(value, counts, depth=depth)
        return text if counts.total() == before else orjson.dumps(made).decode()

    def _substituted(self, text: str) -> tuple[str, int, int]:
        patterns = secrets = 0
        for pattern in self._rules._compiled:
            # A mask that stands there is no text: a pattern that matches within would grow it.
            pieces = _MASKS.split(text) if MASK[:-1] in text else [text]
            for at in range(0, len(pieces), 2):
                made, number = pattern.subn(_masking, pieces[at])
                if made != pieces[at]:
                    pieces[at], patterns = made, patterns + number
            text = "".join(pieces)
        if self._rules.secrets:
            made = scrub(text)
            secrets, text = int(made != text), made
        return text, patterns, secrets


def _masking(match: re.Match[str]) -> str:
    """A mask; nothing for a match of no length, which a look around can give."""
    return MASK if match[0] else ""


def _is_kept(key: str) -> bool:
    return key in _KEPT or key.startswith(_KEPT_PREFIXES)


def _without_spelling(
    before: Mapping[str, Any], after: Mapping[str, Any], counts: Counter[str], *, is_whole: bool
) -> dict[str, Any]:
    """Attributes without the token ids of texts that changed, and without hashes of them."""
    is_prompt = is_whole or any(before.get(key) != after.get(key) for key in _PROMPT)
    is_answer = is_whole or before.get(c.OUTPUT_MESSAGES) != after.get(c.OUTPUT_MESSAGES)
    gone = set(_OF_RESPONSE) if is_answer else set()
    gone |= {c.PROMPT_TOKEN_IDS} if is_prompt else set()
    kept: dict[str, Any] = {}
    for key, value in after.items():
        if key in gone or (key not in _OF_TOKENS and key not in _KNOWN and _SPELLED.search(key)):
            counts[TOKENS] += 1
        else:
            kept[key] = value
    if c.CUT in kept:
        kept[c.CUT] = _without_hashes(kept[c.CUT])
    return kept


def _without_hashes(note: Any) -> Any:
    try:
        found = orjson.loads(note)
    except (ValueError, TypeError):
        return note
    for each in found.values() if isinstance(found, dict) else ():
        if isinstance(each, dict):
            each.pop("sha256", None)
    return orjson.dumps(found).decode()


def _note_of(span: Span) -> dict[str, Any]:
    try:
        found = orjson.loads(span.attributes.get(c.REDACTED, ""))
    except (ValueError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}
