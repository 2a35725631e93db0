"""``serve`` and ``ui``: a store behind a port, for programs that send and people who look."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import click

from lightning_otel.cli.output import count_noun, store_option, talk
from lightning_otel.errors import ConfigError, NotInstalledError
from lightning_otel.markup import safe

if TYPE_CHECKING:
    from lightning_otel.serve.server import Door
    from lightning_otel.store.layout import Layout

_OPENER = "open.html"


@dataclass(frozen=True, slots=True)
class _Listening:
    """A server that is ready.

    Attributes:
        link: Opens the viewer, with the key in it.
        wanted: The port asked for, if one was.
        has_token: Whether the key is a token out of a file, which nothing prints.
    """

    door: "Door"
    layout: "Layout"
    link: str
    wanted: int | None
    has_token: bool

    def say(self) -> None:
        """Say where it listens, if that is elsewhere than asked for, and where spans go."""
        from lightning_otel.serve.server import PORT

        if self.wanted is None and self.door.port != PORT:
            talk(f"port {PORT} is in use: listening at {self.door.port} instead")
        talk(f"⚡ taking spans → {self.layout.catalogue}")
        url = self.door.url
        talk(f"→ OTEL_EXPORTER_OTLP_ENDPOINT={url} OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf")


def _add_serve_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds what both commands take."""
    for option in (
        store_option,
        click.option(
            "--allow-host", "names", multiple=True, metavar="NAME",
            help="A further name of this server.",
        ),
        click.option(
            "--token-file",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Holds what everybody must send; made if it is not there.",
        ),
        click.option(
            "--port", type=click.IntRange(0, 65_535),
            help="Port; 0 is any [default: 4318, or the next free one].",
        ),
        click.option(
            "--host", default="127.0.0.1", show_default=True, help="Address to listen at."
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command()
@click.option(
    "--open-loopback",
    is_flag=True,
    help="Ask programs of this machine, of any user, for no key; not behind a proxy.",
)
@_add_serve_options
def serve(**given: Any) -> int:
    """Take spans by OTLP (HTTP or gRPC) from any language, and serve the store's pages and API.

    Prints its address; stops at SIGTERM or Ctrl-C.
    """

    def ready(found: _Listening) -> None:
        click.echo(found.door.url)
        found.say()
        talk(f"→ look: {f'{found.door.url}/?key=TOKEN' if found.has_token else found.link}")

    return _run_server(ready, **given)


@click.command()
@click.option("--open", "is_opened", is_flag=True, help="Open it in the browser.")
@_add_serve_options
def ui(is_opened: bool, **given: Any) -> int:
    """Look at a store in the browser: traces, rewards, transitions, prompts, training runs.

    Prints the link that opens it, with a key that is nobody else's business. It is the same server
    as `serve`, and takes spans, too; stops at SIGTERM or Ctrl-C.
    """
    opener: list[Path] = []

    def ready(found: _Listening) -> None:
        click.echo(found.link)
        found.say()
        if is_opened:
            opener.append(_open_browser(found))

    try:
        return _run_server(ready, **given)
    finally:
        for path in opener:
            path.unlink(missing_ok=True)


def _open_browser(found: _Listening) -> Path:
    """Have the browser open a private page that leads on; gives its path.

    Everybody on a machine sees with which arguments a program was started, and must not see a key.
    """
    from lightning_otel.store.layout import write_private

    path = found.layout.root / _OPENER
    path.unlink(missing_ok=True)
    page = (
        '<!doctype html><meta charset="utf-8"><title>lightning-otel</title>'
        f'<meta http-equiv="refresh" content="0;url={safe(found.link)}">'
        f'<a href="{safe(found.link)}">lightning-otel</a>\n'
    )
    write_private(path, page.encode())
    if click.launch(str(path)):
        talk("no browser could be started; open the link above")
    return path


def _run_server(
    ready: Callable[[_Listening], None],
    *,
    host: str,
    port: int | None,
    token_file: Path | None,
    names: tuple[str, ...],
    store: str | None,
    open_loopback: bool = False,
) -> int:
    """Serve until it is told to end, and say what came."""
    try:
        from lightning_otel.serve import server
    except ModuleNotFoundError as exc:
        missing = str(exc.name).partition(".")[0]
        raise NotInstalledError(
            f"serve needs {missing}; run: pip install 'lightning-otel[serve]'"
        ) from exc
    from lightning_otel.dataset import Store
    from lightning_otel.serve.answers import said
    from lightning_otel.serve.tokens import key_in, token_in

    opened = Store(store)
    layout = opened.layout
    if layout is None:
        raise ConfigError("serve needs a store on disk; name one with --store")
    os.umask(0o077)
    token, is_new = token_in(token_file) if token_file else ("", False)
    if is_new:
        talk(f"made {token_file}; senders need: Authorization: Bearer TOKEN")
    access = server.access_for(host, token, names)
    opened.writer()
    if open_loopback and (token or access.is_open):
        raise ConfigError(
            "--open-loopback asks for no key, and --token-file or another machine wants one; "
            "leave one of them out"
        )
    access = replace(access, key=key_in(layout), is_keyless=open_loopback)
    door = server.open_door(host, port)
    link = f"{door.url}/?{urlencode({'key': access.reading_key})}"
    listening = _Listening(door, layout, link, port, bool(token))
    counts = server.run(opened, door, access, lambda: ready(listening))
    refused = sum(counts.refused.values())
    talk(f"⚡ {count_noun(counts.stored, 'span')} taken → {opened.name}")
    if counts.rejected:
        talk(f"  rejected: {said(counts.rejected)}")
    if refused:
        talk(f"  {count_noun(refused, 'request')} refused")
    return 0
