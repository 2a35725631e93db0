"""``completion``: the script by which a shell completes our commands, options, ids and agents."""

import click
from click.shell_completion import get_completion_class

from lightning_otel.cli.output import talk

_PROGRAM = "lightning-otel"
_VARIABLE = "_LIGHTNING_OTEL_COMPLETE"
_HOW = {
    "bash": ("~/.bashrc", 'eval "$(lightning-otel completion bash)"'),
    "zsh": ("~/.zshrc", 'eval "$(lightning-otel completion zsh)"'),
    "fish": (
        "~/.config/fish/completions/lightning-otel.fish",
        "lightning-otel completion fish | source",
    ),
}


@click.command()
@click.argument("shell", type=click.Choice(list(_HOW)))
def completion(shell: str) -> None:
    """Print the script for a shell, which asks this program what could stand there.

    bash needs 4.4 or later.
    """
    from lightning_otel.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, _PROGRAM, _VARIABLE).source())
    place, line = _HOW[shell]
    talk(f"→ into {place}: {line}")
