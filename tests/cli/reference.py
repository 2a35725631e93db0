"""The reference of the command line, made from Click's help when the documents are built."""

from collections.abc import Iterator
from typing import Final

import click

from lightning_otel.cli import cli

_ALIKE: Final = "triplets"
"""The format whose options stand for those of all."""


def reference() -> str:
    """Return a page with the usage, help and options of every command."""
    # As it is called: Click keeps the help option that it makes first.
    root = click.Context(cli, info_name="lightning-otel", **cli.context_settings)
    lines = [
        "# Commands", "",
        "[Terminal](looking.md) describes output, ids, times and exit codes.", "",
    ]  # fmt: skip
    lines += _options(cli, root)
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        assert command is not None
        lines += _command(command, click.Context(command, info_name=name, parent=root), "##")
    return "\n".join(lines).rstrip() + "\n"


def _command(command: click.Command, ctx: click.Context, heading: str) -> Iterator[str]:
    yield f"{heading} {ctx.command_path.removeprefix('lightning-otel ')}"
    yield ""
    yield f"`{ctx.command_path} {' '.join(command.collect_usage_pieces(ctx))}`"
    yield ""
    for paragraph in (command.help or "").split("\n\n"):
        yield _escaped(" ".join(paragraph.split()))
        yield ""
    yield from _options(command, ctx)
    if isinstance(command, click.Group):
        is_export = command.name == "export"
        names = command.list_commands(ctx)
        if is_export:
            yield from _formats(command, ctx, names)
        for name in [each for each in names if not is_export or each in ("spans", _ALIKE)]:
            inner = command.get_command(ctx, name)
            assert inner is not None
            yield from _command(inner, click.Context(inner, info_name=name, parent=ctx), "###")


def _formats(command: click.Group, ctx: click.Context, names: list[str]) -> Iterator[str]:
    yield "| format | |"
    yield "|---|---|"
    for name in names:
        inner = command.get_command(ctx, name)
        assert inner is not None
        yield f"| `{name}` | {_escaped(inner.get_short_help_str(200))} |"
    yield ""
    yield f"Every format but `spans` takes the options of `{_ALIKE}`, and those of its own."
    yield ""


def _options(command: click.Command, ctx: click.Context) -> Iterator[str]:
    records = [each.get_help_record(ctx) for each in command.get_params(ctx)]
    options = [each for each in records if each is not None and each[0].startswith("-")]
    found = [each for each in options if "--help" not in each[0]]
    if found:
        yield "| option | |"
        yield "|---|---|"
        for names, text in found:
            yield f"| `{names.replace('|', '/')}` | {_escaped(text)} |"
        yield ""


def _escaped(text: str) -> str:
    for letter in "|<>*":
        text = text.replace(letter, f"\\{letter}")
    return text.replace("``", "`")
