"""The recording proxy of ``run --proxy``, for one program."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from lightning_otel.cli.output import count_noun, print_note

if TYPE_CHECKING:
    from lightning_otel.proxy import Proxy
    from lightning_otel.tracing import Options, Scope

_MOST_ADDRESSES: Final = 3


def changes_requests(options: "Options") -> bool:
    """Return whether requests may be sent otherwise than programs write them."""
    from lightning_otel import config

    settings = {"apply": config.APPLY, "enable_retokenization_fix": config.RETOKENIZATION_FIX}
    return any(options.get(name) or setting.read() for name, setting in settings.items())


class Gate:
    """The proxy of one run, if it is wanted; with ``is_only`` the program gets nothing else."""

    _proxy: "Proxy | None" = None

    def __init__(self, options: "Options", *, is_wanted: bool, is_only: bool) -> None:
        self._options, self._is_wanted, self._is_only = options, is_wanted, is_only

    def open(
        self, scope: "Scope", program: Sequence[str], environment: dict[str, str]
    ) -> tuple[Sequence[str], dict[str, str]]:
        """Start it in a thread; return program and environment with the addresses."""
        context = scope.context
        if context is None or not self._is_wanted:
            return program, environment
        from lightning_otel import config
        from lightning_otel.proxy import Proxy
        from lightning_otel.proxy.routes import add_recipe, make_addresses

        own = config.read_environment("")
        proxy = Proxy({}, lambda *_: context, is_changing=changes_requests(self._options))
        proxy.start()
        self._proxy = proxy
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

        tell_unrecorded(self._proxy)
        if not self._proxy.requests:
            print_note("  warning: no request came to the proxy:")
            print_note(f"    the program reads none of {', '.join(VARIABLES)}")
            print_note(f"    or its own settings name a server: {SETTINGS_FILES}")


def tell_unrecorded(proxy: "Proxy") -> None:
    """Say what a proxy did not record."""
    for address, count in proxy.unread.most_common(_MOST_ADDRESSES):
        times = "once" if count < 2 else f"{count:,} times"
        print_note(f"  warning: not recorded: {address}, asked {times}")
    if proxy.upgrades:
        print_note(f"  refused, so that it asks by HTTP: {count_noun(proxy.upgrades, 'WebSocket')}")
    if proxy.too_long:
        print_note(f"  passed unread: {count_noun(proxy.too_long, 'request')}, too long")
