"""The proxy that records: under ``run --proxy`` for one program, as ``proxy`` for any."""

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from lightning_otel.cli.options import Stop, store_option
from lightning_otel.cli.output import count_noun, print_note
from lightning_otel.errors import ConfigError, NotInstalledError

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_otel.proxy import Proxy
    from lightning_otel.tracing import Options, Scope

_MOST_ADDRESSES: Final = 3
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


def load_proxy() -> None:
    """Import what the proxy needs.

    Raises:
        NotInstalledError: It is not installed.
    """
    try:
        import h11  # noqa: F401
    except ModuleNotFoundError as exc:
        raise NotInstalledError(
            "the proxy needs h11; run: pip install 'lightning-otel[proxy]'"
        ) from exc


class Gate:
    """The proxy of one run; with ``is_only`` nothing else of ours reaches the program."""

    _proxy: "Proxy | None" = None

    def __init__(self, *, is_only: bool) -> None:
        self._is_only = is_only

    def open(
        self, scope: "Scope", program: Sequence[str], environment: dict[str, str]
    ) -> tuple[Sequence[str], dict[str, str]]:
        """Start it in a thread; return program and environment with the addresses."""
        from lightning_otel import config
        from lightning_otel.proxy import Proxy
        from lightning_otel.proxy.routes import add_recipe, make_addresses

        context, own = scope.context, config.read_environment("")
        if context is None:
            return program, environment
        proxy = self._proxy = Proxy({}, lambda _: context)
        proxy.start()
        proxy.upstreams, variables = make_addresses(proxy.port, own)
        address = f"http://127.0.0.1:{proxy.port}"
        pairs = (f"{address}/{key}={upstream.url}" for key, upstream in proxy.upstreams.items())
        inner = own if self._is_only else {**environment, config.PROXY.name: " ".join(pairs)}
        return add_recipe(program, variables), {**inner, **variables}

    def close(self) -> None:
        """Stop it."""
        if self._proxy is not None:
            self._proxy.stop()

    def tell(self) -> None:
        """Say what did not pass, or was not recorded."""
        if self._proxy is None:
            return
        from lightning_otel.proxy.routes import SETTINGS_FILES, VARIABLES

        _tell_unrecorded(self._proxy)
        if not self._proxy.requests:
            print_note("  warning: no request came to the proxy:")
            print_note(f"    the program reads none of {', '.join(VARIABLES)}")
            print_note(f"    or its own settings name a server: {SETTINGS_FILES}")


def _tell_unrecorded(proxy: "Proxy") -> None:
    for address, count in proxy.unread.most_common(_MOST_ADDRESSES):
        times = "once" if count < 2 else f"{count:,} times"
        print_note(f"  warning: not recorded: {address}, asked {times}")
    if proxy.upgrades:
        print_note(f"  refused, so that it asks by HTTP: {count_noun(proxy.upgrades, 'WebSocket')}")
    if proxy.too_long:
        print_note(f"  passed unread: {count_noun(proxy.too_long, 'request')}, too long")


class _Rollouts:
    """The open rollouts of programs that were not started here, by session; "" for no session."""

    def __init__(self, options: "Options", key: str) -> None:
        self._options = options
        self._end_path = f"/{key}/end" if key else "/end"
        self._open: dict[str, tuple[Scope, float]] = {}
        self._lock = threading.Lock()
        self.count = 0

    def place(self, headers: Mapping[str, str]) -> "Context":
        """Return the context of a request: of the rollout of its session."""
        from opentelemetry.context import Context

        from lightning_otel import tracing
        from lightning_otel.instrumentors.model_requests import session_of

        session_id = session_of(headers) or ""
        with self._lock:
            if session_id in self._open:
                scope = self._open[session_id][0]
            else:
                scope = tracing.Scope({**self._options, "rollout_id": session_id or None}, "proxy")
                self.count += 1
            self._open[session_id] = scope, time.monotonic()
        return scope.context if scope.context is not None else Context()

    def answer(self, method: str, target: str, headers: Mapping[str, str]) -> str | None:
        """End the rollout of a session that a program says is over."""
        from lightning_otel.instrumentors.model_requests import session_of

        if method != "POST" or target != self._end_path:
            return None
        self.end(session_of(headers) or "")
        return "ended"

    def end(self, session_id: str | None = None, *, idle_s: float = 0.0) -> None:
        """End rollouts: all of them, one, or those that were idle for so long."""
        before_s = time.monotonic() - idle_s
        with self._lock:
            names = [
                name
                for name, (_, used_s) in self._open.items()
                if session_id in (None, name) and used_s <= before_s
            ]
            scopes = [self._open.pop(name)[0] for name in names]
        for scope in scopes:
            scope.end()


@click.command()
@click.option("--listen", default="127.0.0.1:4319", show_default=True, metavar="HOST:PORT",
              help="Address to listen on; port 0 picks one.")  # fmt: skip
@click.option("--upstream", required=True, metavar="URL",
              help="Server that requests go on to, such as https://api.openai.com/v1.")  # fmt: skip
@click.option("--key-file", type=click.Path(dir_okay=False, path_type=Path),
              help="File with the key that addresses begin with; created if missing.")  # fmt: skip
@click.option("--allow-remote", is_flag=True, help="Listen beyond this machine; needs a key.")
@click.option("--idle", "idle_s", type=click.FloatRange(min=0.1), default=600.0, show_default=True,
              metavar="SECONDS", help="Time without a request that ends a rollout.")  # fmt: skip
@click.option("--agent", help="Agent name of the requests.")
@click.option("--enable-retokenization-fix", is_flag=True,
              help="Request token ids and logprobs from vLLM-like servers.")  # fmt: skip
@click.option("--apply", is_flag=True, help="Substitute the live resources in requests.")
@store_option
def proxy(
    listen: str, upstream: str, key_file: Path | None, allow_remote: bool, idle_s: float,
    store: str | None, **switches: Any,
) -> int:  # fmt: skip
    """Pass requests of any program on to a model server, and record them.

    Prints the address to give a program in place of the server's; stops at SIGTERM or Ctrl-C. A
    rollout is a session that a header names, such as X-Session-ID; POST /end with that header ends
    it at once. GET /healthz answers while it runs.
    """
    from lightning_otel import provider
    from lightning_otel.dataset import Store
    from lightning_otel.store.maintenance import maintain_store

    load_proxy()
    from lightning_otel.proxy import Proxy, Upstream

    host, port = _parse_listen(listen)
    if not upstream.startswith(("http://", "https://")):
        raise ConfigError(f"{upstream!r} is no address of a server; give http:// or https://")
    if host not in _LOOPBACK and not (allow_remote and key_file):
        raise ConfigError(
            f"{host} can be reached from other machines, whose requests go out with whatever they "
            "hold; give --allow-remote and --key-file FILE, or listen at 127.0.0.1"
        )
    opened = Store(store).local
    if opened.layout is None:
        raise ConfigError("proxy needs a store on this disk; name one with --store")
    opened.layout.create()
    provider.leave_otlp_to_the_store()
    key = _read_key(key_file) if key_file is not None else ""
    options: Any = {"store": opened, **{name: switches[name] or None for name in switches}}
    rollouts = _Rollouts(options, key)
    server = Proxy({key: Upstream(upstream)}, rollouts.place, rollouts.answer)
    with Stop() as stop, maintain_store(opened.layout):
        try:
            server.start(host, port)
        except OSError as exc:
            raise ConfigError(
                f"cannot listen at {listen}: {exc.strerror}; name another with --listen"
            ) from exc
        name = f"[{host}]" if ":" in host else host
        click.echo(f"http://{name}:{server.port}" + ("/KEY" if key else ""))
        while not stop.wait(min(idle_s / 4, 1.0)):
            rollouts.end(idle_s=idle_s)
        server.stop()
        rollouts.end()
    opened.writer().seal()
    counts = count_noun(server.passed, "call"), count_noun(rollouts.count, "rollout")
    print_note(f"⚡ {', '.join(counts)} → {opened.name}")
    _tell_unrecorded(server)
    return 0


def _parse_listen(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"{text!r} is no HOST:PORT, such as 127.0.0.1:4319")
    return host.strip("[]"), int(port)


def _read_key(file: Path) -> str:
    from lightning_otel.store.files import write_private

    if not file.exists():
        write_private(file, f"{secrets.token_urlsafe(24)}\n".encode())
        print_note(f"made {file}: addresses begin with /KEY, the key in it")
    key = file.read_text().strip()
    if not key or "/" in key or not key.isprintable():
        raise ConfigError(f"{file} holds no key; delete it, and it is made anew")
    return key
