"""What every test has: a demo server, a store of its own, a clean environment, loopback only."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from tests.command import forget_settings
from tests.forwarding.collector import Endpoint
from tests.viewer.browsing import KEY
from tests.viewer.client import Asking, AskingOf

from lightning_otel import Store, capture, errors
from lightning_otel.demo.server import DemoServer
from lightning_otel.store.layout import Layout
from lightning_otel.store.writer import writers_by_catalogue
from lightning_otel.tracing import emitters

if TYPE_CHECKING:
    import openai

settings.register_profile(
    "shared machine",
    # Other examples every time; more of them at once with LIGHTNING_TEST_EXAMPLES=1000.
    max_examples=int(os.environ.get("LIGHTNING_TEST_EXAMPLES", "30")),
    # A busy machine is no fault of the code's.
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shared machine")

_connect = socket.socket.connect
_KEPT_CLIENTS = "langchain_openai.chat_models._client_utils"


def _connect_to_loopback(self: socket.socket, address: Any) -> Any:
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in (
        "127.0.0.1",
        "::1",
        "localhost",
    ):
        raise AssertionError(f"a test tried to leave this machine: {address}")
    return _connect(self, address)


@pytest.fixture(autouse=True)
def _loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test leaves 127.0.0.1."""
    monkeypatch.setattr(socket.socket, "connect", _connect_to_loopback)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the developer's shell, and no default store outside the test's folder."""
    forget_settings(monkeypatch)
    monkeypatch.setenv("LIGHTNING_OTEL_STORE", str(tmp_path / "default" / "traces.duckdb"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _nothing_told_yet() -> None:
    """Warnings that come once a process come once a test."""
    errors._warned.clear()
    emitters._is_silenced = False
    capture.process.faults = 0
    capture.refresh_settings()


@pytest.fixture(autouse=True)
def _no_client_closes_itself_in_another_test() -> None:
    """LangChain keeps async clients; one that is collected closes itself in the loop that runs.

    That loop is a later test's, and the client's connections belong to a loop that is closed.
    """
    cls = getattr(sys.modules.get(_KEPT_CLIENTS), "_AsyncHttpxClientWrapper", None)
    if cls is not None and "__del__" in vars(cls):
        del cls.__del__


@pytest.fixture(autouse=True)
def _no_writer_waits_for_a_disk_of_another_test() -> Iterator[None]:
    """What a test's full or broken disk never took is not asked for by a later test's flush."""
    yield
    for catalogue, writer in list(writers_by_catalogue.items()):
        if not writer.flush():
            del writers_by_catalogue[catalogue]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A local store that does not exist yet; its segment is closed at the end of the test."""
    found = Store(tmp_path / "store" / "traces.duckdb")
    yield found
    assert found.layout is not None
    writer = writers_by_catalogue.get(found.layout.catalogue)
    if writer is not None:
        writer.seal()


@pytest.fixture
def layout(store: Store) -> Layout:
    """The paths of a store that exists."""
    assert store.layout is not None
    store.layout.create()
    return store.layout


@pytest.fixture
def server() -> Iterator[DemoServer]:
    """An OpenAI-compatible server on loopback, with a log of all it was asked and answered."""
    with DemoServer() as running:
        yield running


@pytest.fixture
def client(server: DemoServer) -> Iterator["openai.OpenAI"]:
    """A client of that server that does not retry."""
    import openai

    with openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as opened:
        yield opened


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """An OTLP endpoint on loopback that takes everything until it is told otherwise."""
    with contextlib.closing(Endpoint()) as made:
        yield made


@pytest.fixture
def served() -> Iterator[Callable[..., str]]:
    """A function that serves a store on loopback, by the real web app; gives the URL with token.

    With a key and no token it gives the bare URL: whatever reads needs the key.
    """
    pytest.importorskip("hypercorn")
    ends: list[Callable[[], None]] = []

    def serve(store: Store, token: str = "a-token-of-some-length", *, key: str = "") -> str:
        url, end = _serve(store, token, key)
        ends.append(end)
        return url.replace("://", f"://:{token}@") if token else url

    yield serve
    for end in ends:
        end()


@pytest.fixture
def asking(served: Callable[..., str]) -> AskingOf:
    """``asking(store)``: a served store, asked without a browser."""
    return cache(lambda store: Asking(served(store, "", key=KEY)))


def _serve(store: Store, token: str, key: str) -> tuple[str, Callable[[], None]]:
    """The URL of a served store, and what ends the server."""
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    from lightning_otel.serve.api.events import EventBroker
    from lightning_otel.serve.api.repositories import Repositories
    from lightning_otel.serve.app import make_app
    from lightning_otel.serve.ingest import Ingester
    from lightning_otel.serve.server import make_access, open_listener

    listener = open_listener("127.0.0.1", 0)
    settings = Config()
    settings.bind = [f"fd://{listener.socket.detach()}"]
    settings.graceful_timeout = 1
    settings.accesslog = settings.errorlog = None
    ingester = Ingester(store)
    repositories = Repositories(store)
    broker = EventBroker(store, repositories)
    access = replace(make_access("127.0.0.1", token), key=key)
    app = make_app(store, ingester, access, repositories, broker)
    loop = asyncio.new_event_loop()
    told = asyncio.Event()

    def run() -> None:
        loop.run_until_complete(serve(app, settings, shutdown_trigger=told.wait, mode="asgi"))  # type: ignore[arg-type]  # an ASGI app
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> None:
        loop.call_soon_threadsafe(broker.close)
        loop.call_soon_threadsafe(told.set)
        thread.join(10)
        ingester.close()

    return listener.url, end


@pytest.fixture
def spawn(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command line of ours in a process of its own."""

    def run(
        *args: object, stdin: str = "", env: Mapping[str, str] | None = None, cwd: Path = tmp_path
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lightning_otel", *map(str, args)],
            capture_output=True, input=stdin, encoding="utf-8", timeout=55, cwd=cwd,
            env={**os.environ, **(env or {})},
        )  # fmt: skip

    return run


@pytest.fixture
def run_python() -> Callable[..., str]:
    """A function that runs a script in a process of its own and gives what it printed."""

    def run(script: str, *arguments: object, timeout_s: float = 50) -> str:
        # From 3.12 on Python warns of each fork in a process with threads, which is what is tested.
        quiet = "-Wignore:This process:DeprecationWarning"
        done = subprocess.run(
            [sys.executable, quiet, "-c", textwrap.dedent(script), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    return run


@pytest.fixture
def warnings_in(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Lists what was logged so far at warning level or above."""

    def find() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]

    return find


Install = Callable[..., None]


@pytest.fixture
def install_agentlightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package of that name before any other: its real one is 470 MB."""

    def put(version: str, code: str = "") -> None:
        (tmp_path / "agentlightning").mkdir()
        (tmp_path / "agentlightning" / "__init__.py").write_text(code)
        info = tmp_path / f"agentlightning-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: agentlightning\nVersion: {version}\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "agentlightning", raising=False)

    yield put
    sys.modules.pop("agentlightning", None)
