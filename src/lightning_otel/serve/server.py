"""The running server: its key, where it listens, its idle work, how it ends.

Hypercorn closes a connection that has not sent its whole header in time, which uvicorn does not:
there, 800 stalled sockets keep everybody else out.
"""

import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import os
import resource
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config

from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, LightningOtelError
from lightning_otel.serve.api.events import EventBroker
from lightning_otel.serve.api.repositories import Repositories
from lightning_otel.serve.app import make_app
from lightning_otel.serve.guard import Access
from lightning_otel.serve.heap import limit_arenas, trim_heap
from lightning_otel.serve.ingest import Counts, Ingester
from lightning_otel.serve.viewer.trace import KEPT_S, drop_traces
from lightning_otel.store.files import read_token
from lightning_otel.store.maintenance import Maintainer

log = logging.getLogger(__name__)

PORT: Final = 4318
"""OTLP/HTTP's own."""
HEADER_S: Final = 10
"""For a whole header, and for the next request: senders that batch come every 5 s."""
LAST_S: Final = 2
"""For requests under way when the server is told to end."""
END_S: Final = 3
"""Until it has ended, whatever is under way: nothing here is lost by the death of a process."""
KEY_FILE: Final = "viewer.key"
"""In a store's folder; the key is made once, so that links to its pages go on working."""
EVERY_S: Final = 10.0
GIVEN_S: Final = 2.0
"""How soon feedback is given to a span that came after it, where looking takes no time."""
_LATEST_S: Final = 15.0
IDLE_S: Final = 5.0
"""Without a span for so long, the segment is closed, so that it can be settled."""
_BACKLOG: Final = 1024
_OPEN_FILES: Final = 65_536
_TRIED_PORTS: Final = 50


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket, and how senders call it."""

    socket: socket.socket
    host: str
    port: int

    @property
    def url(self) -> str:
        """The value for ``OTEL_EXPORTER_OTLP_ENDPOINT``."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def read_key(path: Path) -> tuple[str, bool]:
    """Return the viewer's key in a file of a store, and whether it can be kept there."""
    try:
        return read_token(path)[0], True
    except ConfigError:
        if path.exists() and os.access(path.parent, os.W_OK):
            raise
        return secrets.token_urlsafe(32), False


def resolve_host(host: str) -> str:
    """The IP address a host name stands for on this machine."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigError(f"cannot listen at {host!r}: {exc.strerror}; try 127.0.0.1") from exc
    return str(addresses[0][4][0])


def make_access(host: str, token: str, names: Iterable[str] = ()) -> Access:
    """Make the rules of access of a host; without a token, clients may send and not read.

    Raises:
        ConfigError: Other machines could, without a token.
    """
    address = ipaddress.ip_address(resolve_host(host).partition("%")[0])
    if not address.is_loopback and not token:
        raise ConfigError(
            f"{host} can be reached from other machines, where anybody could write and read spans; "
            "name a token with --token-file, or listen at 127.0.0.1"
        )
    address_text = f"[{address}]" if address.version == 6 else str(address)
    hosts = {"localhost", address_text, host.lower(), *(name.lower() for name in names)}
    if not address.is_loopback:
        hosts |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return Access(frozenset(hosts), token, is_open=not address.is_loopback)


def open_listener(host: str, port: int | None) -> Listener:
    """Listen at a port; without one at OTLP's own, or the next one that is free.

    Raises:
        ConfigError: It cannot be had.
    """
    address = resolve_host(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    ports = range(PORT, PORT + _TRIED_PORTS) if port is None else [port]
    reason = ""
    for candidate in ports:
        try:
            listening = socket.create_server((address, candidate), family=family, backlog=_BACKLOG)
        except OSError as exc:
            reason = os.strerror(exc.errno) if exc.errno else str(exc)
            if exc.errno == errno.EADDRINUSE:
                continue
            raise ConfigError(f"cannot listen at {host}: {reason}; try 127.0.0.1") from exc
        return Listener(listening, host, listening.getsockname()[1])
    raise ConfigError(
        f"cannot listen at {host}, port {ports[0]}: {reason}; "
        "leave --port out for the next free one"
    )


def run(store: Store, listener: Listener, access: Access, ready: Callable[[], None]) -> Counts:
    """Serve until SIGTERM or SIGINT, and then close the segment.

    ``ready`` is called when both signals are heard and the store is there.

    Raises:
        StoreError: The store cannot be made.
    """
    _allow_many_files()
    limit_arenas()
    ingester = Ingester(store)
    try:
        asyncio.run(_serve_listener(store, listener, access, ingester, ready))
    finally:
        ingester.close()
    return ingester.counts


async def _serve_listener(
    store: Store, listener: Listener, access: Access, ingester: Ingester, ready: Callable[[], None]
) -> None:
    config = Config()
    config.bind = [f"fd://{listener.socket.detach()}"]
    config.backlog = _BACKLOG
    config.keep_alive_timeout = HEADER_S
    # It would end an answer that takes longer, too; the guard gives bodies and answers their time.
    config.read_timeout = None
    config.graceful_timeout = LAST_S
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = log
    repositories = Repositories(store)
    broker = EventBroker(store, repositories)
    end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end.set)

    async def wait_for_end() -> None:
        await end.wait()
        # Threads that go on would be waited for, and cannot be ended.
        last = threading.Timer(END_S, os._exit, [0])
        last.daemon = True
        last.start()
        broker.close()  # or who listens would keep the server for as long as it waits

    maintenance = asyncio.create_task(_maintain(store, repositories, ingester))
    ready()
    app: Any = make_app(store, ingester, access, repositories, broker)
    try:
        await hypercorn_serve(app, config, shutdown_trigger=wait_for_end, mode="asgi")
    finally:
        maintenance.cancel()
        await asyncio.gather(maintenance, return_exceptions=True)


async def _maintain(store: Store, repositories: Repositories, ingester: Ingester) -> None:
    """Settle what is worth it, and give feedback that waits."""
    maintainer = None if store.layout is None else Maintainer(store.layout)
    settle = partial(_settle_store, maintainer, ingester)
    give = partial(repositories.deliver_feedback, ingester.keep)
    await asyncio.gather(
        _repeat(settle, EVERY_S, EVERY_S, f"{store.name} could not be settled"),
        _repeat(give, GIVEN_S, _LATEST_S, f"feedback to {store.name} could not be given"),
    )


async def _repeat(work: Callable[[], None], least_s: float, most_s: float, fault: str) -> None:
    """Do some work again and again, a fifth of the time at most."""
    wait_s = least_s
    while True:
        await asyncio.sleep(wait_s)
        began_s = time.monotonic()
        try:
            await asyncio.to_thread(work)
        except (LightningOtelError, OSError) as exc:
            log.warning("%s: %s", fault, exc)
        wait_s = min(max(least_s, 4 * (time.monotonic() - began_s)), most_s)


def _settle_store(maintainer: Maintainer | None, ingester: Ingester) -> None:
    ingester.seal_if_idle(IDLE_S)
    while maintainer is not None and maintainer.run_once().segments:
        pass  # a batch at a time, as long as there is a backlog
    drop_traces(KEPT_S)
    gc.collect()  # 40 ms; empties the interpreter's own lists of free objects, too
    trim_heap()


def _allow_many_files() -> None:
    """Allow as many descriptors as we may: a stalled connection costs one until its time is up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft < limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
