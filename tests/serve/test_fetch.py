"""The route that sends spans: what it answers, refuses, and holds while it does."""

import http.client
import io
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from lightning_otel import Store
from lightning_otel.types import Span

Served = Callable[..., str]
AT_ONCE = 8


@pytest.fixture
def filled(store: Store) -> Store:
    """A store of 100 spans, of which five begin at a time."""
    store.add(
        Span(f"{n + 1:032x}", f"{n + 1:016x}", None, f"n{n}", 1000 + n // 5, 2000)
        for n in range(100)
    )
    return store


def ask(url: str, body: bytes, **headers: str) -> http.client.HTTPResponse:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(f"{parts.hostname}:{parts.port}", timeout=20)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if parts.password:
        named["Authorization"] = f"Bearer {parts.password}"
    headers = {"Content-Type": "application/json", "Connection": "close", **named}
    connection.request("POST", "/v1/fetch", body, headers)
    return connection.getresponse()


def test_an_answer_is_a_parquet_file(filled: Store, served: Served) -> None:
    """Any library reads it."""
    parquet = pytest.importorskip("pyarrow.parquet")

    answer = ask(served(filled), b'{"columns": ["name", "start_ns"], "until_ns": 1000}')

    table = parquet.read_table(io.BytesIO(answer.read()))
    assert answer.headers["Content-Type"] == "application/vnd.apache.parquet"
    assert answer.headers["Cache-Control"] == "no-store"
    assert table.column_names == ["name", "start_ns"]
    assert sorted(table.column("name").to_pylist()) == ["n0", "n1", "n2", "n3", "n4"]


BAD_SELECTIONS = (
    b"no JSON", b"[]", b"null", b'{"also": {}}', b'{"rollout": ["a"]}', b'{"rollout_ids": "a"}',
    b'{"rollout_ids": [1]}', b'{"trace_ids": [null]}', b'{"columns": []}', b'{"columns": ["x"]}',
    b'{"columns": ["name; DROP TABLE spans"]}', b'{"columns": "name"}', b'{"since_ns": "now"}',
    b'{"since_ns": 1.5}', b'{"since_ns": true}', b'{"until_ns": 18446744073709551615}',
    b'{"only": ["ab"]}', b'{"only": [["a"]]}', b'{"only": [["a", 1]]}',
    b'{"without": {"a": "b"}}', b'{"is_ordered": 1}', b'{"rollout_ids": ["' + b"x" * 2000 + b'"]}',
    b'{"trace_ids": [' + b'"",' * 200_000 + b'""]}', b"[" * 5000,
)  # fmt: skip


def test_what_is_no_selection_is_refused(filled: Store, served: Served) -> None:
    """With what is wrong with it, and nothing of the store; so is who has no key or token."""
    url = served(filled)

    assert ask(served(filled, ""), b"{}").status == 401
    assert ask(url.replace("a-token-of-some-length", "x"), b"{}").status == 401
    assert ask(url.replace("a-token-of-some-length", ""), b"{}").status == 401
    for body in BAD_SELECTIONS:
        answer = ask(url, body)
        assert (answer.status, body[:99]) == (400, body[:99])
        assert json.loads(answer.read())["message"]
    assert ask(url, b"{}", Content_Type="text/plain").status == 415
    assert ask(url, b"{}", Origin="http://elsewhere.example").status == 403
    assert ask(url, b"{}", Host="elsewhere.example").status == 421


def test_too_many_readers_are_asked_to_come_again(
    filled: Store, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are answered are not disturbed, and leave room when they are done."""
    url = served(filled)
    gate = threading.Event()
    entered = threading.Semaphore(0)
    real = filled.source.fetch

    def waiting(*arguments: Any) -> Any:
        entered.release()
        gate.wait(20)
        return real(*arguments)

    # Not a mock of what is tested: it only makes answers take as long as one request more.
    monkeypatch.setattr(filled.source, "fetch", waiting)
    found: list[int] = []
    readers = [
        threading.Thread(target=lambda: found.append(len(Store(url).spans().rows())))
        for _ in range(AT_ONCE)
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
    assert found == [100] * AT_ONCE
    assert after.status == 200
    after.read()


def test_a_reader_that_leaves_makes_room(store: Store, served: Served) -> None:
    """However many leave in the middle of an answer that is longer than any buffer."""
    texts = [{"text": random.Random(n).randbytes(100_000).hex()} for n in range(1, 41)]
    store.add(
        Span("1" * 32, f"{n:016x}", None, "n", n, n, attributes=text)
        for n, text in enumerate(texts, start=1)
    )
    url = served(store)

    for _ in range(AT_ONCE + 2):
        while (answer := ask(url, b"{}")).status == 503:
            answer.read()
            time.sleep(0.1)
        assert answer.read(10)
        answer.close()

    assert len(Store(url).spans().rows()) == 40
