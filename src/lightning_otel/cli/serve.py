"""``serve``: an OTLP receiver in front of a store."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lightning_otel.cli.output import counted, store_option, talk
from lightning_otel.errors import ConfigError

if TYPE_CHECKING:
    from lightning_otel.serve.server import Door


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option(
    "--port", type=click.IntRange(0, 65_535),
    help="Port; 0 is any [default: 4318, or the next free one].",
)  # fmt: skip
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Holds what senders must send; made if it is not there.",
)
@click.option(
    "--allow-host", "names", multiple=True, metavar="NAME", help="A further name of this server."
)
@store_option
def serve(
    host: str, port: int | None, token_file: Path | None, names: tuple[str, ...], store: str | None
) -> int:
    """Take spans by OTLP/HTTP from any language, and keep them in the store.

    Prints its address; stops at SIGTERM or Ctrl-C.
    """
    try:
        from lightning_otel.serve import server
    except ModuleNotFoundError as exc:
        missing = str(exc.name).partition(".")[0]
        raise ConfigError(
            f"serve needs {missing}; run: pip install 'lightning-otel[serve]'"
        ) from exc
    from lightning_otel.serve.answers import said
    from lightning_otel.serve.tokens import token_in
    from lightning_otel.store import Store

    opened = Store(store)
    if opened.layout is None:
        raise ConfigError("serve needs a store on disk; name one with --store")
    os.umask(0o077)
    token, is_new = token_in(token_file) if token_file else ("", False)
    if is_new:
        talk(f"made {token_file}; senders need: Authorization: Bearer TOKEN")
    access = server.access_for(host, token, names)
    opened.writer()
    door = server.open_door(host, port)
    counts = server.run(opened, door, access, lambda: _announce(door, port, opened.name))
    refused = sum(counts.refused.values())
    talk(f"⚡ {counted(counts.stored, 'span')} taken → {opened.name}")
    if counts.rejected:
        talk(f"  rejected: {said(counts.rejected)}")
    if refused:
        talk(f"  {counted(refused, 'request')} refused")
    return 0


def _announce(door: "Door", wanted: int | None, name: str) -> None:
    from lightning_otel.serve.server import PORT

    if wanted is None and door.port != PORT:
        talk(f"port {PORT} is in use: listening at {door.port} instead")
    click.echo(door.url)
    talk(f"⚡ taking spans → {name}")
    talk(f"→ OTEL_EXPORTER_OTLP_ENDPOINT={door.url} OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf")
