"""A lake as a source of spans: each once, only what is selected, and no secret in any text."""

import logging
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.store.lake import servers
from tests.store.lake.test_publish import recorded

from lightning_otel import Store
from lightning_otel.errors import ConfigError, StoreError, StoreMissingError, StoreVersionError
from lightning_otel.store.engines.ducklake import attach_lake
from lightning_otel.store.lake import LakeAddress
from lightning_otel.store.selection import Selection
from lightning_otel.types import Span

Spans = Callable[..., list[Span]]
DAY_NS = 86_400_000_000_000


def published(path: Path, lake: str, spans: list[Span]) -> Store:
    """A local store with these spans, which are in the lake too."""
    store = recorded(path, spans)
    store.publish(lake, is_rest_included=True)
    return store


def test_spans_published_by_two_machines_appear_once(
    lake: str, make_spans: Spans, tmp_path: Path
) -> None:
    """Of spans with one id the first published wins, by whichever way they are read."""
    published(tmp_path / "one", lake, make_spans(30))
    published(tmp_path / "two", lake, [*make_spans(60, name="late"), *make_spans(3, machine="b")])
    there, (span,) = Store(lake), make_spans(1)
    trace = make_spans(1)[0].trace_id

    names = {span.span_id: span.name for span in there.spans()}

    assert len([*there.spans()]) == len(names) == 63
    firsts = {span.span_id for span in make_spans(30)}
    assert {name == "late" for id, name in names.items() if id in firsts} == {False}
    assert len([*there.spans(trace_id=trace)]) == 3
    assert len([*there.spans(rollout_id="a-3")]) == 3
    assert len([*there.transitions()]) == 21
    assert [*there.sql("SELECT count(*) AS n FROM calls")] == [{"n": 21}]

    # As in a local store an id that comes again days later is another span.
    (later,) = make_spans(1, start_ns=span.start_ns + 3 * DAY_NS, end_ns=span.end_ns)
    published(tmp_path / "one", lake, [later])
    assert len([*there.spans()]) == 64
    assert len([*there.spans(trace_id=trace)]) == 4


def test_selection_leaves_out_whole_files(lake: str, make_spans: Spans, tmp_path: Path) -> None:
    """A trace, and a time, are looked for only in the files that may hold them."""
    first = make_spans(30)
    second = make_spans(30, machine="b", start_ns=10 * DAY_NS, end_ns=10 * DAY_NS + 1)
    published(tmp_path / "one", lake, first)
    published(tmp_path / "two", lake, second)
    source = Store(lake).source
    con = source.connect(("spans",))

    def files_read(selection: Selection) -> int:
        text, values = (query := source.fetch(selection, con))._text, query._parameters
        plan = con.execute(f"EXPLAIN ANALYZE {text}", values).fetchall()[0][1]
        return sum(map(int, re.findall(r"Total Files Read: (\d+)", plan)))

    assert files_read(Selection(since_ns=0)) == 2
    assert files_read(Selection(since_ns=9 * DAY_NS)) == 1
    assert files_read(Selection(trace_ids=[first[0].trace_id])) == 1
    assert len([*source.fetch(Selection(trace_ids=[first[0].trace_id])).dicts()]) == 3
    assert len([*source.fetch(Selection(since_ns=9 * DAY_NS)).dicts()]) == 30


def test_connection_sees_one_snapshot(lake: str, make_spans: Spans, tmp_path: Path) -> None:
    """What is published while somebody reads comes with the next connection, all of it."""
    published(tmp_path / "one", lake, make_spans(30))
    source = Store(lake).source
    con = source.connect()

    published(tmp_path / "two", lake, make_spans(60))

    assert con.execute("SELECT count(*) FROM spans").fetchone() == (30,)
    assert len([*source.fetch(Selection(), con).dicts()]) == 30
    assert len([*Store(lake).spans()]) == 60


def test_lake_that_is_not_there_is_missing(
    lake: str, postgres: servers.Postgres, database: str
) -> None:
    """Reading makes no lake, and says how to."""
    with pytest.raises(StoreMissingError, match="lightning-otel export lake"):
        Store(lake).connect()

    tables = "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
    assert postgres.run(tables, database) == "0"


def test_lake_of_a_newer_version_is_refused(
    lake: str, address: LakeAddress, make_spans: Spans, tmp_path: Path
) -> None:
    """Neither read nor published into."""
    local = published(tmp_path / "one", lake, make_spans(3))
    with attach_lake(address, application="test", is_read_only=False) as con:
        con.execute("UPDATE lake.published SET schema_version = 99")
    recorded(tmp_path / "one", make_spans(3, machine="b"))

    with pytest.raises(StoreVersionError, match="schema 99"):
        Store(lake).connect()
    with pytest.raises(StoreVersionError, match="schema 99"):
        local.publish(lake, is_rest_included=True)


def test_lake_of_an_earlier_version_gets_the_columns_it_lacks(
    lake: str, address: LakeAddress, make_spans: Spans, tmp_path: Path
) -> None:
    """Spans of then read with the column empty, and later ones have it."""
    local = published(tmp_path / "one", lake, make_spans(3))
    with attach_lake(address, application="test", is_read_only=False) as con:
        con.execute("ALTER TABLE lake.spans DROP COLUMN scope")
    before = [span.scope for span in Store(lake).spans()]
    local.add(make_spans(3, machine="b", scope="mine"))
    local.writer().seal()

    local.publish(lake, is_rest_included=True)

    assert before == ["", "", ""]
    assert sorted(span.scope for span in Store(lake).spans()) == [*[""] * 3, *["mine"] * 3]


def test_new_lake_needs_a_data_path(
    postgres: servers.Postgres, database: str, make_spans: Spans, tmp_path: Path
) -> None:
    """Without one nothing is made; later on the lake knows its own."""
    url = f"ducklake:postgres://lake:{servers.PASSWORD}@127.0.0.1:{postgres.port}/{database}"
    with pytest.raises(ConfigError, match="data="):
        published(tmp_path / "one", url, make_spans(3))

    Store(tmp_path / "one").publish(f"{url}?data={tmp_path}/lake", is_rest_included=True)

    assert len([*Store(url).spans()]) == 3
    assert len([*Store(url, data=str(tmp_path / "lake")).spans()]) == 3


def test_no_text_holds_a_secret(
    remote_lake: str,
    postgres: servers.Postgres,
    make_spans: Spans,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passwords and keys stand in no error, traceback, log, name, catalogue or packed file."""
    caplog.set_level(logging.DEBUG)
    local = published(tmp_path / "one", remote_lake, make_spans(3))
    texts: list[str] = [repr(Store(remote_lake)), Store(remote_lake).name]
    Store(remote_lake).pack(tmp_path / "packed.duckdb")
    recorded(tmp_path / "one", make_spans(3, machine="b"))
    wrong = [
        remote_lake.replace("127.0.0.1:", "127.0.0.1:1"),
        remote_lake.replace(f":{postgres.port}/", ":1/"),
        remote_lake.replace("/lake", "/nowhere"),
        remote_lake.replace("data=s3://", "data=s3://elsewhere-"),
    ]
    for url in wrong:
        with pytest.raises(StoreError) as caught:
            local.publish(url)
        texts += traceback.format_exception(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StoreError) as caught:
        list(Store(remote_lake).spans())
    texts += traceback.format_exception(caught.value)

    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for secret in (servers.PASSWORD, *servers.KEYS.values()):
        if secret != servers.KEYS["AWS_REGION"]:
            assert secret not in "".join(texts) + caplog.text
            assert not any(secret.encode() in content for content in kept)
