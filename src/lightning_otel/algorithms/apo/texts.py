"""Prompts as the search sees them: named texts to change, and back into bodies of resources.

A prompt is one text, its template; where examples are searched for too they are a second one, a
JSON list of chat messages.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from lightning_otel.types import Prompt, Resource

EXAMPLES: Final = "#examples"
"""What comes after a prompt's name in the name of its examples."""

Candidate = dict[str, str]
"""Texts by name: what is tried together."""


def is_examples(name: str) -> bool:
    """Return whether a text is a prompt's examples, rather than its template."""
    return name.endswith(EXAMPLES)


class Texts:
    """The prompts that a run changes: what they were, and what becomes of them."""

    def __init__(self, seeds: Sequence[Resource], *, with_examples: bool) -> None:
        """Take the prompts as they are."""
        self._seeds = {seed.name: seed for seed in seeds}
        self._with_examples = with_examples

    @property
    def names(self) -> list[str]:
        """The resources' names."""
        return list(self._seeds)

    def seed(self) -> Candidate:
        """The texts to begin with."""
        found = {}
        for name, seed in self._seeds.items():
            found[name] = str(seed.body["template"])
            if self._with_examples:
                found[name + EXAMPLES] = written(seed.body.get("examples") or ())
        return found

    def bodies(self, candidate: Candidate) -> dict[str, dict[str, Any]]:
        """The body of each resource, with a candidate's texts in place of its own."""
        found = {}
        for name, seed in self._seeds.items():
            body = {**seed.body, "template": candidate[name]}
            if self._with_examples:
                body["examples"] = read(candidate[name + EXAMPLES])
            found[name] = body
        return found

    def changed(self, candidate: Candidate) -> dict[str, dict[str, Any]]:
        """Return the bodies that differ from before."""
        start = self.seed()
        return {
            name: body
            for name, body in self.bodies(candidate).items()
            if any(candidate[key] != start[key] for key in (name, name + EXAMPLES) if key in start)
        }

    def fault(self, name: str, template: str) -> str:
        """Return the reason to reject a template; empty if there is none.

        An agent fills in the placeholders it knows: of one that is new it knows no value, and
        without one of the old its task would never be told.
        """
        if not template.strip():
            return "the text is empty"
        if any("\ud800" <= letter <= "\udfff" for letter in template):
            return "the text has half a letter (a lone surrogate) in it"
        want = set(self.placeholders(name))
        have = set(Prompt(template).placeholders)
        if lost := sorted(want - have):
            return f"the placeholders {_brace_names(lost)} are gone"
        if new := sorted(have - want):
            return (
                f"nobody fills in {_brace_names(new)}; double the braces of what is meant as text"
            )
        return ""

    def placeholders(self, name: str) -> tuple[str, ...]:
        """The names that the agent fills into a prompt."""
        return Prompt(str(self._seeds[name].body["template"])).placeholders


def written(examples: Iterable[Mapping[str, Any]]) -> str:
    """Chat messages as the text that the search sees."""
    return json.dumps(list(examples), ensure_ascii=False, sort_keys=True)


def read(text: str) -> list[dict[str, Any]]:
    """The way back."""
    found: list[dict[str, Any]] = json.loads(text)
    return found


def _brace_names(names: Iterable[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in names)
