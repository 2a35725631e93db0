"""Patterns of agents: those whose calls are training data, and their resources.

What is recorded is not decided here: spans say what was asked for, and are read by it.
"""

import json
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

from lightning_otel.adapter.attributes import to_text
from lightning_otel.errors import ConfigError
from lightning_otel.types.values import parse_json

REGEX: Final = "re:"
"""What comes before a regular expression; it may match anywhere in a name."""

_LONGEST: Final = 2000
"""Characters of a pattern."""

Resources = Mapping[str, Mapping[str, object]]
"""By pattern of agents the version of each named resource: text, or any JSON value."""


def matches(agent: str, pattern: str) -> bool:
    """Match an agent's name with a pattern: the exact name, a glob, or a regular expression.

    An invalid regular expression, or a glob too long (one of brackets takes the square of its
    length), means nobody else: spans are read whoever wrote them.
    """
    if agent == pattern:
        return True
    if len(pattern) > _LONGEST:
        return False
    if not pattern.startswith(REGEX):
        return fnmatchcase(agent, pattern)
    compiled = _compile_pattern(pattern)
    return compiled is not None and compiled.search(agent) is not None


@lru_cache(maxsize=256)
def _compile_pattern(pattern: str) -> "re.Pattern[str] | None":
    try:
        return re.compile(pattern.removeprefix(REGEX))
    except (re.error, RecursionError, OverflowError):
        return None


def is_tracked(agent: str, patterns: object) -> bool:
    """Return whether an agent's calls are training data: no patterns, or one that matches."""
    if isinstance(patterns, str):
        patterns = (patterns,)
    if not isinstance(patterns, (list, tuple)):
        return True
    return any(isinstance(pattern, str) and matches(agent, pattern) for pattern in patterns)


def check_patterns(value: str | Iterable[str], option: str = "track_only") -> list[str]:
    """Return an option's patterns, in order; ConfigError if one is no valid text."""
    patterns = [value] if isinstance(value, str) else list(value)
    for pattern in patterns:
        _check_pattern(pattern, option)
    return patterns


def _check_pattern(pattern: object, option: str) -> None:
    if not isinstance(pattern, str):
        raise ConfigError(f"{option} names {pattern!r}; an agent's name, glob or re:… is text")
    if pattern.startswith(REGEX):
        try:
            re.compile(pattern.removeprefix(REGEX))
        except (re.error, RecursionError, OverflowError) as exc:
            raise ConfigError(
                f"{option} names {pattern!r}, which is no valid regular expression ({exc}); "
                "correct it, or leave out the re: to mean the name itself"
            ) from exc


def resources_text(resources: object, outer: object = None) -> str:
    """Return the resources as stamped on spans, before those of ``outer``; ConfigError if unfit."""
    if not isinstance(resources, Mapping):
        raise ConfigError(f"resources is {resources!r}; write {{agent: {{resource: version}}}}")
    table: dict[str, dict[str, object]] = {}
    for pattern, versions in resources.items():
        _check_pattern(pattern, "resources")
        if not isinstance(versions, Mapping) or not all(isinstance(key, str) for key in versions):
            raise ConfigError(
                f"resources of {pattern!r} are {versions!r}; write {{resource: version}}, "
                'and {"*": {…}} for all agents'
            )
        table[pattern] = dict(versions)
    for pattern, versions in _parse_resources(outer).items() if isinstance(outer, str) else ():
        table[pattern] = {**versions, **table.get(pattern, {})}
    try:
        text = json.dumps(table, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ConfigError(
            f"resources cannot be written as JSON ({exc}); give versions as text"
        ) from exc
    return text.encode("utf-8", "replace").decode("utf-8")


@lru_cache(maxsize=64)
def _parse_resources(text: str) -> dict[str, dict[str, object]]:
    table = parse_json(text)
    if not isinstance(table, dict):
        return {}
    return {pattern: versions for pattern, versions in table.items() if isinstance(versions, dict)}


@lru_cache(maxsize=256)
def _resources_of(agent: str, text: str) -> dict[str, str]:
    versions: dict[str, object] = {}
    for pattern, defaults in _parse_resources(text).items():
        if matches(agent, pattern):
            versions = {**defaults, **versions}
    return {name: _version_text(versions[name]) for name in sorted(versions)}


def _version_text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    except RecursionError:
        return to_text(value)


def resources_of(agent: str, stamped: object) -> dict[str, str]:
    """Return the version of each resource on an agent's span; of several the first named counts."""
    return dict(_resources_of(agent, stamped)) if isinstance(stamped, str) else {}


def join_versions(resources: Mapping[str, str]) -> str | None:
    """One text for all of an agent's resources, such as ``model@m,prompt@v3``; None if none."""
    return ",".join(f"{name}@{version}" for name, version in sorted(resources.items())) or None
