"""``proxy``: the recording proxy for programs that are not started here."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import click
from opentelemetry.context import Context, create_key, set_value

from lightning_otel import provider
from lightning_otel.adapter.histories import hash_answers, hash_history
from lightning_otel.cli.gate import changes_requests, tell_unrecorded
from lightning_otel.cli.options import SignalStop, store_option
from lightning_otel.cli.output import count_noun, print_note
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError
from lightning_otel.instrumentors.model_requests import session_of
from lightning_otel.messages import parse_messages
from lightning_otel.redact import scrub
from lightning_otel.store.files import read_token
from lightning_otel.store.maintenance import maintain_store
from lightning_otel.tracing import Options, Scope

_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_PLACE: Final = create_key("lightning-otel-place")


@dataclass(slots=True, eq=False)
class _ProxyRollout:
    scope: Scope
    is_named: bool
    used_s: float = 0.0
    is_over: bool = False


class _Rollouts:
    """The open rollouts of programs that were not started here.

    A request is of the session that its headers name, else of the rollout whose answer its history
    goes on with, or whose failed request it repeats. Those without messages share one.
    """

    def __init__(self, options: Options, key: str) -> None:
        self._options = options
        self._end_path = f"/{key}/end" if key else "/end"
        self._open: dict[str | int, _ProxyRollout] = {}
        """By id, and by the hash of each history that may go on."""
        self._lock = threading.Lock()
        self.count = 0

    def place(self, headers: Mapping[str, str], read_prompt: Callable[[], str]) -> Context:
        """Return the context of a request, in which its rollout and its history stand."""
        session_id = session_of(headers)
        messages = parse_messages(read_prompt()) if session_id is None else None
        history = hash_history(messages or ())
        name = session_id or (None if messages else "")
        keys = reversed(history.prefixes) if name is None else [name]
        with self._lock:
            rollout = next((self._open[key] for key in keys if key in self._open), None)
            if rollout is None:
                scope = Scope({**self._options, "rollout_id": session_id}, "proxy")
                rollout = _ProxyRollout(scope, session_id is not None)
                self._open[scope.opened.rollout_id if name is None else name] = rollout
                self.count += 1
            rollout.used_s = time.monotonic()
        return set_value(_PLACE, (rollout, history.given), rollout.scope.context or Context())

    def note_answer(self, context: Context, answer: str) -> None:
        """Note what the next request of a conversation goes on with."""
        rollout, history = cast("tuple[_ProxyRollout, int]", context.get(_PLACE))
        hashes = hash_answers(history, parse_messages(scrub(answer)) or ()) or (history,)
        with self._lock:
            rollout.used_s = time.monotonic()
            if history and not rollout.is_over:
                self._open.update(dict.fromkeys(hashes, rollout))

    def answer(self, method: str, target: str, headers: Mapping[str, str]) -> str | None:
        """End the rollout that a program says is over; without a name all that no header named."""
        if method != "POST" or target != self._end_path:
            return None
        session_id = session_of(headers)
        session = self._open.get(session_id or "")
        self._end(lambda rollout: rollout is session if session_id else not rollout.is_named)
        return "ended"

    def end(self, idle_s: float = 0.0) -> None:
        """End the rollouts that were idle for so long."""
        before_s = time.monotonic() - idle_s
        self._end(lambda rollout: rollout.used_s <= before_s)

    def _end(self, is_over: Callable[[_ProxyRollout], bool]) -> None:
        with self._lock:
            over = set(filter(is_over, self._open.values()))
            for rollout in over:
                rollout.is_over = True
            self._open = {key: entry for key, entry in self._open.items() if not entry.is_over}
        for rollout in over:
            rollout.scope.end()


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
    rollout is a session that a header names, such as X-Session-ID, or else a conversation: requests
    that go on with the answer before. POST /end with the header ends it at once, without a header
    all that no header named. GET /healthz answers while it runs.
    """
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
    server = Proxy(
        {key: Upstream(upstream)}, rollouts.place, rollouts.note_answer, rollouts.answer,
        is_changing=changes_requests(options),
    )  # fmt: skip
    with SignalStop() as stop, maintain_store(opened.layout):
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
    tell_unrecorded(server)
    return 0


def _parse_listen(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"{text!r} is no HOST:PORT, such as 127.0.0.1:4319")
    return host.strip("[]"), int(port)


def _read_key(file: Path) -> str:
    key, is_new = read_token(file)
    if is_new:
        print_note(f"made {file}: addresses begin with /KEY, the key in it")
    if "/" in key or "?" in key:
        raise ConfigError(f"the key in {file} has / or ?; remove it, and a new one is made")
    return key
