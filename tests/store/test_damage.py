"""A damaged data file is named, with what to do; nothing else is lost."""

import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from lightning_otel import Store
from lightning_otel import conventions as c
from lightning_otel.errors import QueryError, StoreError
from lightning_otel.store.damage import damage_of
from lightning_otel.store.layout import Layout, Manifest
from lightning_otel.types import Span

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    # DuckDB's own error names no file for these two.
    "beginning overwritten": lambda content: bytes(3000) + content[3000:],
    "footer overwritten": lambda content: content[:-300] + b"\xaa" * 200 + content[-100:],
    "another file's content": lambda content: b"no Parquet at all" * 99,
    "a value flipped": lambda content: content[:60] + b"\xff" * 40 + content[100:],
}


@pytest.fixture
def layout(store: Store, make_span: Callable[..., Span]) -> Layout:
    """The paths of a store of two data files with 400 spans each."""
    layout = store.layout
    assert layout is not None
    for batch in range(2):
        store.add(
            make_span(
                trace_id=f"{batch + 1:032x}",
                span_id=f"{batch + 1:08x}{number:08x}",
                attributes={c.ROLLOUT_ID: f"r{batch}", "text": f"{number * 7919:0300x}"},
            )
            for number in range(400)
        )
        store.writer().seal()
        store.settle()
    _let_commits_count(layout)
    return layout


def _let_commits_count(layout: Layout) -> None:
    """Wait until readers take the data files, no longer the segments, and take those away."""
    manifest = layout.read_manifest()
    last_us = max(file.added_us for file in manifest.files)
    time.sleep(max(0.0, last_us / 1e6 - time.time()) + 0.01)
    layout.write_manifest(Manifest(manifest.files, manifest.segments))
    for path in layout.segments():
        path.unlink()


def _damage(layout: Layout, how: str) -> Path:
    path = sorted(layout.data.glob("spans-*.parquet"))[-1]
    path.write_bytes(DAMAGES[how](path.read_bytes()))
    return path


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_file_is_named_with_what_to_do(store: Store, layout: Layout, how: str) -> None:
    """Whatever is wrong with it, the error says which file it is and how to read the rest."""
    path = _damage(layout, how)

    for read in (
        lambda: store.spans().rows(),
        lambda: store.spans().df(),
        lambda: store.sql("SELECT * FROM spans").rows(),
    ):
        with pytest.raises(StoreError, match=r"which is damaged .*; .* move it") as caught:
            read()
        assert str(path) in caught.value.what


def test_every_reader_names_the_damaged_file(store: Store, layout: Layout, tmp_path: Path) -> None:
    """What reads only a little, and what writes something of it, say the same."""
    path = _damage(layout, "emptied")

    for read in (
        lambda: store.spans(rollout_id="r0").rows(),
        lambda: store.transitions().rows(),
        lambda: store.report(),
        lambda: store.find("r"),
        lambda: store.find("@last"),
        lambda: store.rollout_of("trace", f"{1:032x}"),
        lambda: store.pack(tmp_path / "packed.duckdb"),
        lambda: store.spans().to_parquet(tmp_path / "spans.parquet"),
    ):
        with pytest.raises(StoreError, match=f"cannot read .*{path.name}"):
            read()


def test_rest_is_read_once_the_damaged_file_is_moved(
    store: Store, layout: Layout, tmp_path: Path
) -> None:
    """What the error tells to do does it: every span of the other files is there."""
    path = _damage(layout, "cut off")

    path.rename(tmp_path / path.name)

    assert {span.rollout_id for span in store.spans()} == {"r0"}
    assert len(store.spans().rows()) == 400


def test_settling_beside_a_damaged_file_loses_nothing(
    store: Store, layout: Layout, make_span: Callable[..., Span], tmp_path: Path
) -> None:
    """A settler that must look into it says so, and the segment keeps its spans."""
    path = _damage(layout, "cut off")
    store.add([make_span(span_id="f" * 16, attributes={c.ROLLOUT_ID: "new"})])
    store.writer().seal()

    with pytest.raises(StoreError, match=f"cannot read .*{path.name}"):
        store.settle()

    path.rename(tmp_path / path.name)
    assert len(store.spans().rows()) == 401
    assert [span.span_id for span in store.spans(rollout_id="new")] == ["f" * 16]


def test_a_wrong_query_is_not_blamed_on_a_damaged_file(store: Store, layout: Layout) -> None:
    """A user's own mistake stays one, though a file is damaged too."""
    _damage(layout, "a value flipped")

    for query in ("SELECT * FROM nowhere", "SELECT 'x'::INTEGER", "SELECT error('mine')"):
        with pytest.raises(QueryError):
            store.sql(query).rows()


def test_error_without_a_damaged_file_is_not_explained(layout: Layout) -> None:
    """Where every file can be read, no file is blamed, even if DuckDB names one."""
    path = next(layout.data.glob("spans-*.parquet"))

    assert damage_of(duckdb.IOException(f"cannot open {path}"), layout.data) is None
    assert damage_of(duckdb.IOException("no memory"), layout.data) is None
    assert damage_of(duckdb.IOException(f"{layout.data}/gone.parquet"), layout.data) is None
