"""Structures that a convention has flattened into keys, such as ``prompt.0.role``."""

import json
from collections.abc import Mapping
from typing import Any, Final

_DEEPEST: Final = 64
"""How many levels a key tells of; what is below them is one name."""


def rows(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """The objects under ``prefix.N.…``, in order of N; inner ones with only numbers are lists."""
    tree: dict[str, Any] = {}
    start = len(prefix) + 1
    for key, value in attributes.items():
        if key.startswith(prefix) and key[start - 1 : start] == ".":
            node = tree
            *above, leaf = key[start:].split(".", _DEEPEST)
            for step in above:
                inner = node.setdefault(step, {})
                if not isinstance(inner, dict):
                    break
                node = inner
            else:
                node.setdefault(leaf, value)
    found = _as_list(tree)
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _as_list(node: Any) -> Any:
    """A node whose keys are all numbers as a list; as deep as a key is long."""
    if not isinstance(node, dict):
        return node
    inner = {key: _as_list(value) for key, value in node.items()}
    # Longer numbers are nobody's index, and int() refuses very long ones.
    if inner and all(key.isascii() and key.isdigit() and len(key) < 10 for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]
    return inner


def loaded(text: object) -> Any:
    """Parse JSON; return None for anything else."""
    if not isinstance(text, str) or not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def known(found: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes without those that nothing is known of."""
    return {key: value for key, value in found.items() if value is not None}
