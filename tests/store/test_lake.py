"""How a lake is named, and what a machine without the extensions is told."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_otel import Store
from lightning_otel.errors import ConfigError, StoreMissingError
from lightning_otel.store.lake import is_lake, lake_address
from lightning_otel.store.layout import Layout

URL = "ducklake:postgres://me:geheim@db:5433/traces?data=s3://bucket/lake&local=/disk/own&sslmode=require"


def test_lake_address_of_a_url() -> None:
    """A URL carries PostgreSQL's parameters, the data path and the local store."""
    found = lake_address(URL)

    assert found.parameters == {
        "dbname": "traces", "user": "me", "host": "db", "port": "5433", "sslmode": "require",
    }  # fmt: skip
    assert (found.password, found.data, found.local) == ("geheim", "s3://bucket/lake", "/disk/own")


def test_lake_address_of_connection_words() -> None:
    """Libpq's words do as well, quoted as libpq has them."""
    found = lake_address(r"ducklake:postgres:dbname='my \'db' host = h password=x data='/a b/c'")

    assert found.parameters == {"dbname": "my 'db", "host": "h"}
    assert (found.password, found.data) == ("x", "/a b/c")
    assert found.conninfo == r"dbname='my \'db' host='h'"


def test_lake_address_of_several_hosts() -> None:
    """Libpq tries hosts one after the other."""
    found = lake_address("ducklake:postgresql://u@one:1,[::1]:2/db")

    assert found.parameters == {"dbname": "db", "user": "u", "host": "one,::1", "port": "1,2"}


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


@pytest.mark.parametrize(
    "written",
    [
        "ducklake:",
        "ducklake:x.ducklake",
        "ducklake:sqlite:geheim.db",
        "ducklake:postgres:geheim",
        "ducklake:postgres:dbname='geheim",
        "ducklake:postgres://u@h:1/d?geheim",
        "ducklake:postgres://u:geheim@h/d?data=gs://bucket",
    ],
)
def test_lake_that_cannot_be_read_is_refused_without_repeating_it(written: str) -> None:
    """The error says how to write it, and repeats nothing that may be a password."""
    with pytest.raises(ConfigError, match=r"ducklake:postgres|s3://") as caught:
        lake_address(written)

    assert "geheim" not in str(caught.value)


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

    with pytest.raises(ConfigError, match=r"pip install 'lightning-otel\[lake\]'"):
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
