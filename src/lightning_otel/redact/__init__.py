"""Secrets and named content out of texts and spans: what capture, transforms and redactions mask.

Pure. Ids, links and operations, which tell which spans belong together, are never masked; matches
in there are counted.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final

import orjson

from lightning_otel.errors import ConfigError
from lightning_otel.redact.secrets import Scrubbed, is_kept, scrub, scrub_error
from lightning_otel.types import Event, Link, Span
from lightning_otel.types import conventions as c

__all__ = ["Redactor", "Rules", "Scrubbed", "scrub", "scrub_error"]

MASK: Final = "[redacted]"
PATTERN, KEY, SECRET, WHOLE, TOKENS, IN_ID = "pattern", "key", "secret", "whole", "tokens", "in_id"
"""Reasons for which something went; the last is of what was found in an id, which stays."""
_DEPTH: Final = 100
"""Below so many levels of objects and lists a value is one text."""
_REMEMBERED: Final = 4096
"""Texts that are looked at once if they come again and again, and their greatest length."""

_KNOWN: Final = frozenset(
    value for name, value in vars(c).items() if name.isupper() and isinstance(value, str)
) - c.CONTENT_KEYS  # fmt: skip
"""Keys and names of ours that tell what a span is, not what was said in it."""
_TELLING: Final = re.compile(r"(?:^|[._])(?:kind|type|model|model_name|system|provider)$")
"""Ends of keys of other conventions that tell what a span is."""
_FORM: Final = frozenset({"role", "type", "finish_reason", "id", "tool_call_id"})
_SPELLED: Final = re.compile(r"token_ids|logprobs")
_MASKS: Final = re.compile(r"(\[redacted(?::\w+)?\])")
_PROMPT: Final = (c.INPUT_MESSAGES, c.SYSTEM_INSTRUCTIONS, c.TOOL_DEFINITIONS)
_MESSAGES: Final = frozenset({*_PROMPT, c.OUTPUT_MESSAGES})
_OF_RESPONSE: Final = frozenset({c.RESPONSE_TOKEN_IDS, c.RESPONSE_LOGPROBS, c.LOGPROB_TOKEN_IDS})
_OF_TOKENS: Final = _OF_RESPONSE | {c.PROMPT_TOKEN_IDS}
_PLAIN: Final = _OF_TOKENS | _KNOWN


@dataclass(frozen=True, slots=True)
class Rules:
    """Content that is to be masked; with none of the first three, all that was said.

    Attributes:
        patterns: Regular expressions; their matches in any text or number become a mask.
        keys: Names or globs of attributes, and of fields within them and within messages, whose
            values become a mask.
        secrets: Whether keys and tokens of the known shapes go too.
    """

    patterns: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    secrets: bool = False
    compiled: tuple[re.Pattern[str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            compiled = tuple(map(re.compile, self.patterns))
        except re.error as exc:
            raise ConfigError(
                f"the pattern is no regular expression: {exc}; write it as Python's re does"
            ) from exc
        if any(pattern.search("") for pattern in compiled):
            raise ConfigError("the pattern matches the empty text; make it match something")
        for key in filter(is_kept, self.keys):
            raise ConfigError(
                f"{key} tells which spans belong together and stays; to have the rollout gone: "
                "lightning-otel compact --rollout ID"
            )
        object.__setattr__(self, "compiled", compiled)

    @property
    def is_whole(self) -> bool:
        """True if all content goes."""
        return not (self.patterns or self.keys or self.secrets)

    def has_key(self, key: str) -> bool:
        """Say whether a key is one of those to be masked."""
        return any(key == pattern or fnmatchcase(key, pattern) for pattern in self.keys)


class Redactor:
    """Takes what rules name out of spans: texts, and the token ids that would spell them."""

    def __init__(self, rules: Rules, redaction_id: str) -> None:
        self._rules = rules
        self._id = redaction_id
        self._remembered = lru_cache(_REMEMBERED)(self._replace_matches)
        self._counts: Counter[str] = Counter()

    def mask(self, span: Span) -> tuple[Span, Mapping[str, int]]:
        """Return a span masked by the rules, the same if unchanged, and counts by reason."""
        counts = self._counts = Counter()
        attributes = self._mask_attributes(span.attributes, is_own=True)
        changed = replace(
            span,
            name=span.name if span.name in _KNOWN else self._mask_name(span.name),
            status_message=self._mask_text(span.status_message),
            attributes=attributes,
            events=tuple(
                Event(
                    self._mask_name(item.name), item.time_ns, self._mask_attributes(item.attributes)
                )
                for item in span.events
            ),
            links=tuple(
                Link(link.trace_id, link.span_id, self._mask_attributes(link.attributes))
                for link in span.links
            ),
            otel_resource=span.otel_resource
            if self._rules.is_whole
            else self._mask_attributes(span.otel_resource),
        )
        if self._rules.is_whole and _OF_TOKENS & attributes.keys():
            counts[WHOLE] += 1
        if not any(count for reason, count in counts.items() if reason != IN_ID):
            return span, counts
        cleaned = self._without_spelling(span.attributes, attributes)
        before = _object_of(span.attributes.get(c.REDACTED, ""))
        totals = Counter({key: value for key, value in before.items() if isinstance(value, int)})
        totals.update({reason: n for reason, n in counts.items() if reason != IN_ID})
        note = {"redaction": self._id, **dict(sorted(totals.items()))}
        cleaned[c.REDACTED] = orjson.dumps(note).decode()
        return replace(changed, attributes=cleaned), counts

    def _replace_matches(self, text: str) -> tuple[str, int, int]:
        patterns = 0
        for pattern in self._rules.compiled:
            # A mask that stands there is no text: a pattern that matches within would grow it.
            pieces = _MASKS.split(text) if MASK[:-1] in text else [text]
            for at in range(0, len(pieces), 2):
                # A match of no length, which a look around can give, is no text either.
                masked, number = pattern.subn(lambda match: MASK if match[0] else "", pieces[at])
                if masked != pieces[at]:
                    pieces[at], patterns = masked, patterns + number
            text = "".join(pieces)
        scrubbed = scrub(text) if self._rules.secrets else text
        return scrubbed, patterns, int(scrubbed != text)

    def _scrub(self, text: str) -> str:
        """Return a JSON text without secrets that a name within it tells."""
        scrubbed = scrub(text) if self._rules.secrets else text
        self._counts[SECRET] += scrubbed != text
        return scrubbed

    def _mask_value(self, reason: str, value: Any) -> str:
        self._counts[reason] += value != MASK
        return MASK

    def _mask_attributes(
        self, attributes: Mapping[str, Any], *, is_own: bool = False
    ) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in attributes.items():
            name = key if key in _KNOWN or is_kept(key) else self._mask_key(key, result)
            result[name] = self._mask_attribute(key, value, is_own=is_own)
        return result

    def _mask_attribute(self, key: str, value: Any, *, is_own: bool) -> Any:
        is_text = isinstance(value, str)
        if is_kept(key):
            self._counts[IN_ID] += (
                is_text and key not in (c.CUT, c.REDACTED) and self._has_match(value)
            )
            return value
        if self._rules.has_key(key):
            return self._mask_value(KEY, value)
        if is_own and key in _OF_TOKENS:
            return value
        is_known = key in _KNOWN
        if self._rules.is_whole:
            if is_known or _TELLING.search(key) or isinstance(value, (bool, int, float)):
                return value
            if value in (None, "", MASK):
                return value
        elif is_known and not isinstance(value, (str, list, tuple, Mapping)):
            return value
        if key in _MESSAGES and is_text and (is_own or self._rules.is_whole):
            masked = self._mask_json(value, is_message=True)
            return self._mask_text(value, is_json=False) if masked is None else self._scrub(masked)
        return self._mask_value(WHOLE, value) if self._rules.is_whole else self._mask_nested(value)

    def _mask_json(self, text: str, *, is_message: bool = False, depth: int = 0) -> str | None:
        """Mask within a text that is JSON, whose texts hide behind escapes; None if it is none."""
        try:
            value = orjson.loads(text)
        except ValueError:
            return None
        before = self._counts.total()
        masked = self._mask_nested(value, is_message=is_message, depth=depth)
        return text if self._counts.total() == before else orjson.dumps(masked).decode()

    def _mask_nested(self, value: Any, *, is_message: bool = False, depth: int = 0) -> Any:
        if isinstance(value, str):
            return self._mask_text(value, depth=depth)
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, (int, float)):
            return self._mask_value(PATTERN, value) if self._has_match(value) else value
        if depth > _DEPTH:
            text = orjson.dumps(value).decode()
            masked = self._mask_name(text)
            return value if masked == text else masked
        if not isinstance(value, Mapping):
            return [
                self._mask_nested(item, is_message=is_message, depth=depth + 1) for item in value
            ]
        fields: dict[str, Any] = {}
        for key, item in value.items():
            if is_message and key in _FORM and isinstance(item, str):
                fields[key] = item
            elif self._rules.has_key(key):
                fields[key] = self._mask_value(KEY, item)
            else:
                name = self._mask_key(key, fields)
                fields[name] = self._mask_nested(item, is_message=is_message, depth=depth + 1)
        return fields

    def _mask_key(self, key: str, siblings: Mapping[str, Any]) -> str:
        """Return a key without what the patterns match; another one if two would become one."""
        name, number = self._mask_name(key), 2
        while name != key and name in siblings:
            name, number = f"{MASK}#{number}", number + 1
        return name

    def _mask_name(self, text: str) -> str:
        """Return a text that tells what something is: it stays where all that was said goes."""
        return text if self._rules.is_whole else self._mask_text(text, is_json=False)

    def _mask_text(self, text: str, *, is_json: bool = True, depth: int = 0) -> str:
        if self._rules.is_whole:
            return self._mask_value(WHOLE, text) if text else text
        if is_json and text[:1] in ("{", "[") and depth <= _DEPTH:
            text = self._mask_json(text, depth=depth + 1) or text
        find = self._remembered if len(text) <= _REMEMBERED else self._replace_matches
        masked, patterns, secrets = find(text)
        self._counts[PATTERN] += patterns
        self._counts[SECRET] += secrets
        return str(masked)

    def _has_match(self, value: object) -> bool:
        return any(pattern.search(str(value)) for pattern in self._rules.compiled)

    def _without_spelling(
        self, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return attributes without the token ids and the hashes of texts that changed."""
        is_whole = self._rules.is_whole
        gone: set[str] = set()
        if is_whole or before.get(c.OUTPUT_MESSAGES) != after.get(c.OUTPUT_MESSAGES):
            gone |= _OF_RESPONSE
        if is_whole or any(before.get(key) != after.get(key) for key in _PROMPT):
            gone |= {c.PROMPT_TOKEN_IDS}
        result: dict[str, Any] = {}
        for key, value in after.items():
            if key in gone or (key not in _PLAIN and _SPELLED.search(key)):
                self._counts[TOKENS] += 1
            else:
                result[key] = value
        if cut := _object_of(result.get(c.CUT, "")):
            for note in cut.values():
                if isinstance(note, dict):
                    note.pop("sha256", None)
            result[c.CUT] = orjson.dumps(cut).decode()
        return result


def _object_of(text: Any) -> dict[str, Any]:
    try:
        document = orjson.loads(text)
    except (ValueError, TypeError):
        return {}
    return document if isinstance(document, dict) else {}
