"""Every engine under the same tests: how each is made, and how spans get into it."""

import base64
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lightning_otel import Store
from lightning_otel.types import Span

ENGINES = ("local", "settled", "memory", "http", "chdb", "clickhouse")
"""An engine is added by a name here and a function in ``MAKERS``."""


@dataclass
class Held:
    """A store of one engine, and how a program's spans come into it.

    Attributes:
        store: What is read.
        write: Has spans in it, all of them when it returns.
    """

    store: Store
    write: Callable[[Iterable[Span]], None]


@pytest.fixture(params=ENGINES)
def held(request: pytest.FixtureRequest) -> Held:
    """An empty store of each engine in turn."""
    return MAKERS[request.param](request)


def _local(request: pytest.FixtureRequest) -> Held:
    store = request.getfixturevalue("store")
    store.writer()
    return Held(store, store.add)


def _settled(request: pytest.FixtureRequest) -> Held:
    store = request.getfixturevalue("store")

    def write(spans: Iterable[Span]) -> None:
        store.add(spans)
        store.writer().seal()
        store.settle()

    store.writer()
    return Held(store, write)


def _memory(request: pytest.FixtureRequest) -> Held:
    store = Store(":memory:")
    return Held(store, store.add)


def _http(request: pytest.FixtureRequest) -> Held:
    # What came by OTLP lies in the server's own store; how it gets there is tested with it.
    pytest.importorskip("nanoarrow")
    pytest.importorskip("starlette")
    behind = request.getfixturevalue("store")
    behind.writer()
    return Held(Store(request.getfixturevalue("served")(behind)), behind.add)


def _chdb(request: pytest.FixtureRequest) -> Held:
    return _loaded(Store(f"clickhouse+chdb://{_engine(request)}?database={_name(request)}"))


def _clickhouse(request: pytest.FixtureRequest) -> Held:
    _engine(request)
    port = request.getfixturevalue("clickhouse_port")
    return _loaded(Store(f"clickhouse://someone:secret@127.0.0.1:{port}/{_name(request)}"))


def _engine(request: pytest.FixtureRequest) -> Path:
    pytest.importorskip("chdb")
    pytest.importorskip("clickhouse_connect")
    pytest.importorskip("nanoarrow")
    folder: Path = request.getfixturevalue("chdb_folder")
    return folder


def _name(request: pytest.FixtureRequest) -> str:
    return f"db{abs(hash(request.node.nodeid))}"


def _loaded(store: Store) -> Held:
    store.add([])  # the table is made with the first spans, even none
    return Held(store, store.add)


MAKERS: dict[str, Callable[[pytest.FixtureRequest], Held]] = {
    "local": _local,
    "settled": _settled,
    "memory": _memory,
    "http": _http,
    "chdb": _chdb,
    "clickhouse": _clickhouse,
}


@pytest.fixture(scope="session")
def chdb_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ClickHouse's engine keeps its tables: one folder a process is all it allows."""
    return tmp_path_factory.mktemp("clickhouse")


@pytest.fixture(scope="session")
def clickhouse_port(chdb_folder: Path) -> Iterator[int]:
    """The port of ClickHouse's HTTP interface, with its real engine behind it.

    A server is not to be had from an index, its engine is; so HTTP is spoken here, as far as
    ``clickhouse-connect`` does, and every query is answered by the engine.
    """
    import chdb

    server = ThreadingHTTPServer(("127.0.0.1", 0), _ClickHouseDoor)
    server.daemon_threads = True
    connection = chdb.connect(str(chdb_folder))
    _ClickHouseDoor.engine = connection
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()
    connection.close()


class _ClickHouseDoor(BaseHTTPRequestHandler):
    """Passes on what comes over HTTP to the engine."""

    protocol_version = "HTTP/1.1"
    engine: Any
    turn = threading.Lock()  # the engine's settings are those of one query

    def do_POST(self) -> None:
        """Answer a query."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        options = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        status, answer = 200, b""
        expected = "Basic " + base64.b64encode(b"someone:secret").decode()
        if self.headers.get("Authorization") != expected:
            status, answer = 403, b"Code: 516. DB::Exception: Authentication failed."
        else:
            try:
                answer = self._asked(body, options)
            except Exception as exc:  # noqa: BLE001  # whatever it says is the answer
                status, answer = 500, str(exc).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _asked(self, body: bytes, options: dict[str, str]) -> bytes:
        head, _, data = body.partition(b"FORMAT Parquet\n")
        with self.turn, tempfile.NamedTemporaryFile(suffix=".parquet") as file:
            for name, value in options.items():
                if name not in _NOT_SETTINGS:
                    self.engine.query(f"SET {name} = '{value}'")
            text = body.decode("utf-8", "replace")
            if data:
                file.write(data)
                file.flush()
                text = f"{head.decode()} SELECT * FROM file('{file.name}', Parquet)"
            answer: bytes = self.engine.query(text, "TabSeparated").bytes()
            return answer

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


_NOT_SETTINGS = {"query_id", "wait_end_of_query", "client_protocol_version", "database"}
