"""The route that sends spans: what it answers, refuses, and holds while it does."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from lightning_otel import Store
from lightning_otel.types import Span

pytest.importorskip("hypercorn")
pytest.importorskip("nanoarrow")

from lightning_otel.serve import fetching
from lightning_otel.store.engines.http import FETCH_PATH

Served = Callable[..., str]


@pytest.fixture
def filled(store: Store) -> Store:
    """A store of 100 spans, of which five begin at a time."""
    store.add(
        Span(f"{n + 1:032x}", f"{n + 1:016x}", None, f"n{n}", 1000 + n // 5, 2000)
        for n in range(100)
    )
    return store


def ask(url: str, body: bytes, **headers: str) -> http.client.HTTPResponse:
    """The answer to a body."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(f"{parts.hostname}:{parts.port}", timeout=20)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if parts.password:
        named["Authorization"] = f"Bearer {parts.password}"
    headers = {"Content-Type": "application/json", "Connection": "close", **named}
    connection.request("POST", FETCH_PATH, body, headers)
    return connection.getresponse()


def test_an_answer_is_an_arrow_stream(filled: Store, served: Served) -> None:
    """Which any library reads."""
    pyarrow = pytest.importorskip("pyarrow")

    answer = ask(served(filled), b'{"columns": ["name", "start_ns"], "until_ns": 1000}')

    table = pyarrow.ipc.open_stream(answer.read()).read_all()
    assert answer.headers["Content-Type"] == "application/vnd.apache.arrow.stream"
    assert answer.headers["Cache-Control"] == "no-store"
    assert table.column_names == ["name", "start_ns"]
    assert sorted(table.column("name").to_pylist()) == ["n0", "n1", "n2", "n3", "n4"]


def test_nothing_is_read_without_a_token_or_key(filled: Store, served: Served) -> None:
    """Any user of the machine reaches a port, and the files are one user's alone."""
    open_to_all, guarded = served(filled, ""), served(filled)

    assert ask(open_to_all, b"{}").status == 401
    assert ask(guarded.replace("://:", "://:x"), b"{}").status == 401
    assert ask(guarded.replace("a-token-of-some-length", ""), b"{}").status == 401


def test_what_is_no_selection_is_refused(filled: Store, served: Served) -> None:
    """With what is wrong with it, and nothing of the store."""
    url = served(filled)

    for body in (b"", b"[]", b'{"columns": ["x"]}', b'{"also": {}}'):
        answer = ask(url, body)
        assert answer.status == 400
        assert json.loads(answer.read())["message"]
    assert ask(url, b"{}", Content_Type="text/plain").status == 415
    assert ask(url, b"{}", Origin="http://elsewhere.example").status == 403
    assert ask(url, b"{}", Host="elsewhere.example").status == 421


def test_long_answers_come_in_parts(
    filled: Store, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of whole instants; none is lost or doubled where they meet."""
    monkeypatch.setattr(fetching, "_PART_SPANS", 7)
    sizes: list[int] = []
    real = fetching.parts

    def counted(tables: Iterator[Any]) -> Iterator[bytes]:
        for part in real(tables):
            sizes.append(len(part))
            yield part

    monkeypatch.setattr(fetching, "parts", counted)

    spans = Store(served(filled)).spans().rows()

    assert len(spans) == 100
    assert {span.span_id: span for span in spans} == {s.span_id: s for s in filled.spans()}
    assert len(sizes) > 10


def test_too_many_readers_are_asked_to_come_again(
    filled: Store, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are answered are not disturbed, and leave room when they are done."""
    url = served(filled)
    gate = threading.Event()
    entered = threading.Semaphore(0)
    real = fetching._tables

    def waiting(*arguments: Any) -> Iterator[Any]:
        entered.release()
        gate.wait(20)
        yield from real(*arguments)

    monkeypatch.setattr(fetching, "_tables", waiting)
    found: list[int] = []
    readers = [
        threading.Thread(target=lambda: found.append(len(Store(url).spans().rows())))
        for _ in range(fetching._MOST_AT_ONCE)
    ]
    for reader in readers:
        reader.start()
    for _ in readers:
        assert entered.acquire(timeout=20)
    refused = ask(url, b"{}")
    gate.set()
    for reader in readers:
        reader.join(20)
    after = ask(url, b"{}")

    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
    assert found == [100] * fetching._MOST_AT_ONCE
    assert after.status == 200
    after.read()


def test_a_reader_that_leaves_makes_room(
    store: Store, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many leave in the middle of an answer that is longer than any buffer."""
    monkeypatch.setattr(fetching, "_PART_SPANS", 5)
    long = {"text": "x" * 200_000}
    store.add(Span("1" * 32, f"{n:016x}", None, "n", n, n, attributes=long) for n in range(1, 41))
    url = served(store)

    for _ in range(fetching._MOST_AT_ONCE + 2):
        answer = ask(url, b"{}")
        while answer.status == 503:
            answer.read()
            time.sleep(0.1)
            answer = ask(url, b"{}")
        assert answer.read(10)
        answer.close()

    assert len(Store(url).spans().rows()) == 40
