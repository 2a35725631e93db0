"""A store's name tells which engine holds it; lakes; what a server sends, refuses or breaks."""

import http.client
import importlib.util
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.conftest import MakeSpan

from lightning_otel import Store, auto_trace
from lightning_otel.errors import ConfigError, StoreError, StoreMissingError
from lightning_otel.store.engines import MemorySource, make_source
from lightning_otel.store.engines.remote import RemoteSource
from lightning_otel.store.lake import is_lake, lake_address
from lightning_otel.store.layout import Layout
from lightning_otel.store.source import LocalSource
from lightning_otel.types import Event, Link, Span


def test_a_name_tells_the_engine() -> None:
    """Nothing is opened for it, nor asked."""
    assert isinstance(make_source(":memory:"), MemorySource)
    assert isinstance(make_source("some/folder"), LocalSource)
    for url in ("http://h:1", "https://h", "clickhouse://h/db", "HTTP://h:1"):
        assert isinstance(make_source(url), RemoteSource)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://:secret@host:4318", "http://host:4318"),
        ("https://secret@host/under/", "https://host/under"),
        ("http://[::1]:4318?since=2026-01-01", "http://[::1]:4318"),
        ("clickhouse://me:secret@h/db", "clickhouse://h:8123/db?table=otel_traces"),
        ("clickhouse://h", "clickhouse://h:8123/default?table=otel_traces"),
        (
            "clickhouses://me:secret@[::1]:9000/a%60b?table=spans",
            "clickhouses://[::1]:9000/a`b?table=spans",
        ),
    ],
)
def test_a_name_holds_no_secret(url: str, name: str) -> None:
    """It is shown, logged and pasted."""
    store = Store(url)

    assert store.name == name
    assert "secret" not in repr(store)


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:secret@h/0",
        "http://",
        "http://h:x",
        "http://h:1?sinse=2026-01-01",
        "http://h:1?since=tomorrow",
        "clickhouse://h/db?until=",
        "clickhouse://",
        "clickhouse+chdb:///folder",
        "clickhouse://h:port/x",
        "clickhouse://h/x?tabel=a",
        "ducklake:",
        "ducklake:x.ducklake",
        "ducklake:sqlite:secret.db",
        "ducklake:postgres:secret",
        "ducklake:postgres:dbname='secret",
        "ducklake:postgres://u@h:1/d?secret",
        "ducklake:postgres://u:secret@h/d?data=gs://bucket",
    ],
)
def test_what_names_no_engine_is_refused(url: str) -> None:
    """Before anything is asked, and without its password: errors end in logs."""
    how = r"ducklake:postgres|s3://" if url.startswith("ducklake") else "."
    with pytest.raises(ConfigError, match=how) as caught:
        Store(url)

    assert "secret" not in str(caught.value)


def test_times_are_utc_where_they_name_no_zone() -> None:
    """To the microsecond."""
    source = make_source("http://h:1?since=2026-01-01&until=2026-01-01T01:00:00.000001%2B01:00")

    assert isinstance(source, RemoteSource)
    assert source.window.since_ns == 1_767_225_600 * 10**9
    assert source.window.until_ns == 1_767_225_600 * 10**9 + 1000


URL = "ducklake:postgres://me:geheim@db:5433/traces?data=s3://bucket/lake&local=/disk/own&sslmode=require"


@pytest.mark.parametrize(
    ("written", "parameters", "own"),
    [
        (
            URL,
            {"dbname": "traces", "user": "me", "host": "db", "port": "5433", "sslmode": "require"},
            ("geheim", "s3://bucket/lake", "/disk/own"),
        ),
        (
            r"ducklake:postgres:dbname='my \'db' host = h password=x data='/a b/c'",
            {"dbname": "my 'db", "host": "h"},
            ("x", "/a b/c", ""),
        ),
        (
            "ducklake:postgresql://u@one:1,[::1]:2/db",
            {"dbname": "db", "user": "u", "host": "one,::1", "port": "1,2"},
            ("", "", ""),
        ),
    ],
)
def test_lake_address_is_a_url_or_words_of_libpq(
    written: str, parameters: dict[str, str], own: tuple[str, str, str]
) -> None:
    """It carries PostgreSQL's parameters, the password, the data path and the local store."""
    found = lake_address(written)

    assert found.parameters == parameters
    assert (found.password, found.data, found.local) == own


@pytest.mark.parametrize("written", [URL, "ducklake:postgres:dbname=d host=/run/pg user=u"])
def test_lake_name_stands_for_the_lake_without_its_password(written: str) -> None:
    """The name of a lake names the same one again, and no text of it holds the password."""
    address = lake_address(written)
    store = Store(written)

    again = lake_address(address.name)

    assert (again.parameters, again.data, again.local, again.password) == (
        address.parameters, address.data, address.local, "",
    )  # fmt: skip
    for text in (address.name, repr(address), address.conninfo, store.name, repr(store)):
        assert "geheim" not in text


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_lake_conninfo_is_read_back(value: str) -> None:
    """Whatever a value holds, it is one word for libpq."""
    address = lake_address("ducklake:postgres:dbname=x")

    written = type(address)({"dbname": value}).conninfo

    assert lake_address(f"ducklake:postgres:{written}").parameters == {"dbname": value}


def test_lake_records_into_the_local_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_span: Any
) -> None:
    """With a lake for its store a program records on its own disk, and touches no database."""
    lake = f"ducklake:postgres://u@127.0.0.1:1/d?data=s3://b/p&local={tmp_path}/own"
    monkeypatch.setenv("LIGHTNING_OTEL_STORE", lake)
    span = make_span()

    Store().add([span])

    assert is_lake(lake)
    assert Layout(lake).catalogue == tmp_path / "own" / "traces.duckdb"
    assert list(Store(tmp_path / "own").spans()) == [span]
    assert Store().local.name == str(tmp_path / "own" / "traces.duckdb")


def test_lake_without_extensions_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is fetched from the network; the error names the extra."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"pip install .*\[lake\]'"):
        Store("ducklake:postgres://u@127.0.0.1:1/d").connect()

    assert not (tmp_path / ".duckdb" / "extensions").exists()


def test_publish_needs_a_lake_and_a_store(tmp_path: Path, make_span: Any) -> None:
    """What is no lake is refused, and so is a store that is not there."""
    store = Store(tmp_path / "local")
    store.add([make_span()])

    with pytest.raises(ConfigError, match="is no lake"):
        store.publish(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="is no lake"):
        store.publish()
    with pytest.raises(StoreMissingError, match="no store"):
        Store(tmp_path / "nothing").publish("ducklake:postgres://u@127.0.0.1:1/d")


TOKEN = "a-token-of-some-length"
Served = Callable[..., str]


@pytest.fixture
def answering() -> Callable[[bytes], str]:
    """A function that gives the URL of a server that answers one request with these bytes."""

    def answer(data: bytes) -> str:
        listening = socket.create_server(("127.0.0.1", 0))

        def run() -> None:
            with listening, listening.accept()[0] as peer:
                peer.settimeout(10)
                with peer.makefile("rb") as request:  # the whole of it: else closing is a reset
                    request.readline()
                    length = http.client.parse_headers(request).get("Content-Length", "0")
                    request.read(int(length))
                peer.sendall(data)

        threading.Thread(target=run, daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    return answer


@pytest.mark.parametrize("end_ns", [10**18 + 5, None])
def test_spans_added_come_by_otlp(store: Store, served: Served, end_ns: int | None) -> None:
    """They lie in the server's store when the call returns, ended or not."""
    store.writer()
    span = Span(
        "1" * 32, "2" * 16, "3" * 16, "näme", 10**18, end_ns, kind="CLIENT", status="ERROR",
        status_message="no", attributes={"i": -1, "f": 1.5, "t": True, "n": None, "big": 2**70,
        "l": [1, "a", [None]], "o": {"k": {}}, "nan": float("nan")},
        events=(Event("e", 10**18, {"a": 1}),), links=(Link("4" * 32, "5" * 16, {"b": "c"}),),
        otel_resource={"service.name": "s"}, scope="my.scope",
    )  # fmt: skip

    Store(served(store)).add([span])

    (found,) = store.spans()
    attributes = dict(found.attributes)
    assert attributes.pop("lightning.received").startswith("otlp")
    expected = {**span.attributes, "big": str(2**70), "nan": "NaN"}
    assert attributes == expected
    for name in ("name", "kind", "status", "status_message", "events", "links", "scope", "end_ns"):
        assert getattr(found, name) == getattr(span, name)
    assert found.otel_resource == span.otel_resource


def test_many_spans_are_added_in_several_requests(
    store: Store, served: Served, make_span: MakeSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each small enough for any server; what is rejected is told, and the others are kept."""
    store.writer()
    monkeypatch.setattr("lightning_otel.store.engines.http.ADD_BYTES", 2000)

    with pytest.raises(StoreError, match="rejected 1 of 61"):
        Store(served(store)).add([*(make_span() for _ in range(60)), make_span(span_id="no id")])

    assert len(store.spans().rows()) == 60


def test_a_token_is_asked_for(
    store: Store, served: Served, monkeypatch: pytest.MonkeyPatch, make_span: MakeSpan
) -> None:
    """From the URL or the environment; without the right one nothing is answered."""
    store.add([make_span()])
    url = served(store, TOKEN).replace(f":{TOKEN}@", "")

    with pytest.raises(StoreError, match="401") as raised:
        Store(url).spans().rows()
    with pytest.raises(StoreError, match="401"):
        Store(url.replace("://", "://:wrong@")).add([make_span()])
    assert len(Store(url.replace("://", f"://:{TOKEN}@")).spans().rows()) == 1
    monkeypatch.setenv("LIGHTNING_OTEL_TOKEN", TOKEN)
    assert len(Store(url).spans().rows()) == 1
    assert "LIGHTNING_OTEL_TOKEN" in raised.value.remedy


def test_nothing_is_recorded_over_a_network(caplog: pytest.LogCaptureFixture) -> None:
    """A program traced into it runs on, and is told what to do instead."""
    url = "http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="OTLP"):
        Store(url).writer()

    with caplog.at_level(logging.WARNING), auto_trace(store=url):
        answer = 1 + 1

    assert answer == 2
    assert "never waits for a network" in caplog.text


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n", "302"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 6\r\n\r\nbroken", "broken"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "cannot read spans"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\n<html>", "cannot read spans"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n\xff\xff\xff\xff\r\n",
            "cannot",
        ),
        (b"SSH-2.0-OpenSSH\r\n", "cannot reach"),
        (b"", "cannot reach"),
    ],
)
def test_what_is_no_answer_is_an_error(
    answering: Callable[[bytes], str], answer: bytes, said: str
) -> None:
    """A redirection, a page, a broken connection: never an empty store."""
    with pytest.raises(StoreError, match=said):
        Store(answering(answer)).spans().rows()


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"partialSuccess": {"rejectedSpans": "x"}}'])
def test_an_answer_that_says_nothing_of_the_spans_is_an_error(
    answering: Callable[[bytes], str], make_span: MakeSpan, body: bytes
) -> None:
    """A page that a proxy sends for everything is no receipt."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    with pytest.raises(StoreError, match="did not say"):
        Store(answering(answer)).add([make_span()])
