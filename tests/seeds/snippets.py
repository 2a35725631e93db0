"""Runs the seed documents' snippets as text, in names that the text leaves to its reader."""

from typing import Any


def ran(snippet: str, **names: Any) -> dict[str, Any]:
    """The names after a snippet ran; ``names`` are those that it uses and does not define."""
    after = {"__name__": "seed", **names}
    exec(compile(snippet, "<seed>", "exec"), after)
    return after
