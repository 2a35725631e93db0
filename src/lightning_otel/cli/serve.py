"""``serve``: a store behind a port, for programs that send and people who look."""

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import click

from lightning_otel.cli.options import store_option
from lightning_otel.cli.output import count_noun, print_note
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, NotInstalledError, install_command
from lightning_otel.store.files import read_token
from lightning_otel.types.html import render_link_page

if TYPE_CHECKING:
    from lightning_otel.serve.ingest import Counts

_OPENER = "open.html"


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65_535),
              help="Port; 0 picks one [default: 4318, or the next free one].")  # fmt: skip
@click.option("--open", "is_opened", is_flag=True, help="Open the viewer in the browser.")
@click.option("--link", "is_link", is_flag=True, hidden=True,
              help="Print the viewer's link, with its key, in place of the address.")  # fmt: skip
@click.option("--token-file", type=click.Path(dir_okay=False, path_type=Path),
              help="File with the key that clients must send; created if missing.")  # fmt: skip
@click.option("--allow-host", "names", multiple=True, metavar="NAME",
              help="Another Host name to accept.")  # fmt: skip
@click.option("--open-loopback", is_flag=True,
              help="Need no key from programs on this machine, of any user; "
              "not behind a proxy.")  # fmt: skip
@store_option
def serve(
    host: str, port: int | None, is_opened: bool, is_link: bool, token_file: Path | None,
    names: tuple[str, ...], open_loopback: bool, store: str | None,
) -> int:  # fmt: skip
    """Serve the viewer and the API, and receive spans by OTLP (HTTP or gRPC) from any language.

    Prints its address and a link to the viewer, on a terminal with its private access key; stops
    at SIGTERM or Ctrl-C.
    """
    try:
        from lightning_otel.serve import server
    except ModuleNotFoundError as exc:
        missing = str(exc.name).partition(".")[0]
        raise NotInstalledError(f"serve needs {missing}; run: {install_command('serve')}") from exc

    opened = Store(store)
    layout = opened.layout
    if layout is None:
        raise ConfigError("serve needs a store on disk; name one with --store")
    os.umask(0o077)
    token, is_new = read_token(token_file) if token_file else ("", False)
    if is_new:
        print_note(f"made {token_file}; senders need: Authorization: Bearer TOKEN")
    access = server.make_access(host, token, names)
    opened.writer()
    if open_loopback and (token or access.is_open):
        raise ConfigError(
            "--open-loopback asks for no key, and --token-file or another machine wants one; "
            "leave one of them out"
        )
    key_file = layout.root / server.KEY_FILE
    key, is_kept = server.read_key(key_file)
    access = replace(access, key=key, is_keyless=open_loopback)
    listener = server.open_listener(host, port)
    link = f"{listener.url}/?{urlencode({'key': access.reading_key})}"
    folder = layout.root
    if is_opened and not is_kept:
        folder = Path(tempfile.mkdtemp(prefix="lightning-otel-"))
    opener = folder / _OPENER

    is_link = is_link or (sys.stdout.isatty() and not token)

    def tell_address() -> None:
        click.echo(link if is_link else listener.url)
        if port is None and listener.port != server.PORT:
            print_note(f"port {server.PORT} is in use: listening at {listener.port} instead")
        print_note(f"⚡ taking spans → {layout.catalogue}")
        address = f"OTEL_EXPORTER_OTLP_ENDPOINT={listener.url}"
        header = " OTEL_EXPORTER_OTLP_HEADERS=Authorization=Bearer%20TOKEN" if token else ""
        print_note(f"→ {address} OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf{header}")
        if not is_kept:
            print_note("the store may only be read: spans are refused, and the key is not kept")
        if not is_link:
            print_note(f"→ look: {_word_link(listener.url, link, key_file, token, is_kept)}")
        if is_opened:
            _open_browser(link, opener)

    try:
        counts = server.run(opened, listener, access, tell_address)
    finally:
        if is_opened:
            opener.unlink(missing_ok=True)
            if folder != layout.root:
                folder.rmdir()
    _tell_counts(counts, opened.name)
    return 0


def _word_link(url: str, link: str, key_file: Path, token: str, is_kept: bool) -> str:
    """Word where to look; a key is printed on a terminal alone, as logs are kept and sent on."""
    if token:
        return f"{url}/?key=TOKEN"
    if sys.stderr.isatty():
        return link
    return f"{url}/?key=KEY, " + (
        f"with the key in {key_file}" if is_kept else "with a key of your own: --token-file FILE"
    )


def _tell_counts(counts: "Counts", store: str) -> None:
    from lightning_otel.serve.responses import said

    print_note(f"⚡ {count_noun(counts.stored, 'span')} taken → {store}")
    if counts.rejected:
        print_note(f"  rejected: {said(counts.rejected)}")
    if refused := counts.refused.total():
        print_note(f"  {count_noun(refused, 'request')} refused")


def _open_browser(link: str, opener: Path) -> None:
    """Open a private page that leads on: a program's arguments may hold no key."""
    from lightning_otel.store.files import write_private

    opener.unlink(missing_ok=True)
    write_private(opener, render_link_page(link).encode())
    if click.launch(str(opener)):
        print_note("no browser could be started; open the link above")
