"""Older spellings of commands, which help does not list, and guesses at misspelt ones."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final

import click

ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "analyze": ("show", "--findings"),
    "config": ("doctor", "--settings"),
    "config check": ("doctor",),
    "diff": ("show",),
    "drift": ("doctor",),
    "follow": ("tail", "--consumer"),
    "forward": ("export", "otlp"),
    "pack": ("export", "duckdb"),
    "publish": ("export", "lake"),
    "ui": ("serve", "--link"),
}
"""The words that each older spelling stands for."""


def replace_alias(args: list[str]) -> list[str]:
    """Return a command line in today's words."""
    for count in (2, 1):
        words = ALIASES.get(" ".join(args[:count]))
        if words is not None:
            return [*words, *args[count:]]
    return args


class SuggestingGroup(click.Group):
    """A group that suggests the command a misspelt one may have meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command named first."""
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-"):
            near = get_close_matches(args[0], names, n=1)
            guess = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise click.UsageError(f"no such command {args[0]!r}; {guess}", ctx)
        return super().resolve_command(ctx, args)
