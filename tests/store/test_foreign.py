"""A store that somebody else made: what stands in it names nothing outside of it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.command import examine
from tests.manifests import seal_manifest
from tests.store.conftest import Layout, MakeSpan, Settled, Write

from lightning_otel import Store
from lightning_otel.errors import LightningOtelError, StoreError, StoreVersionError
from lightning_otel.state import State

DOORS: dict[str, Callable[[Store], object]] = {
    "sql": lambda store: store.sql("SELECT * FROM spans").rows(),
    "connect": lambda store: store.connect().sql("SELECT count(*) FROM spans").fetchall(),
    "stats": lambda store: store.accounting(),
    "follow": lambda store: store.follow("f").batch(),
    "doctor": lambda store: examine(store),
    "settle": lambda store: store.settle(),
    "compact": lambda store: store.compact(),
    "redact": lambda store: store.redact(patterns=["work"]),
    "repair": lambda store: store.repair(),
    "state": lambda store: State.beside(store).ensure(),
    "record": lambda store: (store.add([]), store.writer().seal()),
}


@pytest.fixture
def home(tmp_path: Path, make_span: MakeSpan) -> Path:
    """A folder outside of the store, with a data file, a segment and a note of somebody's own."""
    other = Store(tmp_path / "other" / "traces.duckdb")
    other.add([make_span(name="private")])
    other.writer().seal()
    other.settle()
    folder = tmp_path / "home"
    folder.mkdir()
    for path in [*(tmp_path / "other").rglob("spans-*"), *(tmp_path / "other").rglob("*-*-*-0*")]:
        shutil.copy(path, folder)
    (folder / "note.json").write_text("{}")
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    return folder


def _look(folder: Path) -> dict[str, tuple[bytes, float]]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime) for path in paths}


def _try_doors(store: Store, doors: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Open each door, twice; return the errors. Whatever is no error of ours is a bug."""
    errors = []
    for name in [*filter(doors, DOORS)] * 2:
        try:
            shown = DOORS[name](store)
            assert "private" not in str(shown), name
        except LightningOtelError as exc:
            errors.append(str(exc))
    return errors


def _write_rows(layout: Layout, rows: list[Any], schema: Any = 1) -> None:
    for path in (layout.manifest_path, layout.manifest_copy):
        path.write_bytes(seal_manifest(rows, schema))


def _read_rows(layout: Layout) -> list[Any]:
    rows = map(json.loads, layout.manifest_path.read_bytes().splitlines())
    return [row for row in rows if row["kind"] not in ("store", "end")]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("kind", ["file", "segment", "segment's file", "note"])
@pytest.mark.parametrize("form", ["../../../home/{}", "{home}/{}", "../data/{}", "{}\0", "{}\n"])
def test_a_name_is_never_a_path(
    store: Store,
    layout: Layout,
    home: Path,
    settled: Settled,
    make_span: MakeSpan,
    kind: str,
    form: str,
) -> None:
    """S7: a list that names a path is damaged, and reported; nothing outside is touched or read."""
    settled([make_span(name="own")])
    pattern = "*.ndjson" if kind == "segment" else "spans-*"
    name = form.replace("{home}", str(home)).format(next(home.glob(pattern)).name)
    rows = _read_rows(layout)
    (file,) = (row for row in rows if row["kind"] == "file")
    (segment,) = (row for row in rows if row["kind"] == "segment")
    if kind == "note":
        layout.quarantine.mkdir()
        note = {"name": name, "noun": "data file", "why": "x", "found_us": 1, "missing": 5}
        (layout.quarantine / "spans-1-f.parquet.json").write_text(json.dumps({**note, "rows": 9}))
    elif kind == "segment's file":
        segment["file"] = name
    else:
        (file if kind == "file" else segment).update(name=name, settled_us=0)
    _write_rows(layout, rows)
    before = _look(home)

    reports = [finding.text for finding in examine(store) if finding.level == "problem"]
    _try_doors(store)

    assert len(reports) == 1
    assert "manifest.ndjson is damaged: the" in reports[0] or "its note cannot" in reports[0]
    assert _look(home) == before
    assert [span.name for span in store.spans()] == ["own"]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    "place",
    [
        "new", "live", "data", "quarantine", "followers", "manifest.ndjson", "settler.lock",
        "state.sqlite", "state.sqlite-wal", "redactions.ndjson", "viewer.key",
    ],
)  # fmt: skip
def test_no_link_within_a_store_is_followed(
    store: Store, layout: Layout, home: Path, settled: Settled, make_span: MakeSpan, place: str
) -> None:
    """S7: the store is refused by the link's name, whatever is asked, and recorded into by none."""
    settled([make_span()])
    path = layout.root / place
    if path.exists():
        path.rename(layout.root / f"was-{place}")
    path.symlink_to(home if "." not in place else home / "note.json")
    before = _look(home)

    errors = _try_doors(store, lambda name: name not in ("doctor", "record"))
    (report,) = [finding.text for finding in examine(store) if finding.level == "problem"][:1]

    assert len(errors) == 2 * (len(DOORS) - 2)
    assert all(f"{path} is a link" in error for error in [*errors, report])
    with pytest.raises(StoreError, match="is a link"):
        Store(layout.catalogue).add([])
    assert _look(home) == before


@pytest.mark.usefixtures("at_once")
def test_links_to_files_are_put_aside_unread(
    store: Store, layout: Layout, home: Path, settled: Settled, write: Write, make_span: MakeSpan
) -> None:
    """S7: as data file, segment or note, and where temporary files go; the others are read."""
    linked = settled([make_span()])
    settled([make_span(name="own")])
    linked.unlink()
    layout.quarantine.mkdir()
    shutil.rmtree(layout.new / "spill", ignore_errors=True)
    (parquet,), (segment,) = home.glob("spans-*"), home.glob("*.ndjson")
    for path, target in {
        linked: parquet,
        layout.data / "spans-9-f.parquet": parquet,
        layout.live / segment.name: segment,
        layout.quarantine / "spans-8-f.parquet": parquet,
        layout.quarantine / "spans-8-f.parquet.json": home / "note.json",
        layout.new / "spill": home,
    }.items():
        path.symlink_to(target)
    for path in layout.segments():
        path.unlink()
    before = _look(home)

    _try_doors(store)
    write([make_span(name="own")])
    store.settle()

    assert _look(home) == before
    assert [span.name for span in store.spans()] == ["own", "own"]


def test_the_store_as_a_whole_may_be_behind_a_link(tmp_path: Path, make_span: MakeSpan) -> None:
    """Its folder or its files lie on a larger disk, because their owner put them there."""
    (tmp_path / "disk" / "files").mkdir(parents=True, mode=0o700)
    (tmp_path / "place").symlink_to(tmp_path / "disk")
    (tmp_path / "place" / "traces.duckdb.d").symlink_to(tmp_path / "disk" / "files")
    store = Store(tmp_path / "place" / "traces.duckdb")

    store.add([make_span()])
    errors = _try_doors(store)

    assert errors == []
    assert len(store.spans().rows()) == 1
    assert list((tmp_path / "disk" / "files" / "data").glob("spans-*"))


ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=9),
    st.sampled_from(["../x", "spans-1-a.parquet", "a-1-1-1.ndjson", "1000.8.8.00000000"]),
)  # fmt: skip
NESTED = st.recursive(
    ATOMS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5
)
KINDS = st.fixed_dictionaries({"kind": st.sampled_from(["file", "segment", "counts"])})
FIELDS = [
    "kind", "name", "added_us", "rows", "size_bytes", "min_start_ns", "max_start_ns", "dropped_us",
    "is_compact", "publication", "checksum", "settled_us", "damaged", "counts", "file", "crc32",
]  # fmt: skip
CHANGES = st.dictionaries(st.sampled_from(FIELDS), NESTED, min_size=1, max_size=4)


@pytest.mark.timeout(300)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(st.integers(0, 1), CHANGES),
    lacking=st.sets(st.sampled_from(FIELDS), max_size=2),
    extra=st.lists(NESTED | KINDS, max_size=2),
    schema=st.just(1) | ATOMS,
)  # fmt: skip
def test_a_manifest_of_any_records_is_read_or_damaged(
    tmp_path_factory: pytest.TempPathFactory, make_span: MakeSpan, changes: dict[int, Any],
    lacking: set[str], extra: list[Any], schema: Any,
) -> None:  # fmt: skip
    """S7: never a traceback, nothing outside is touched, and the next commands find a store."""
    folder = tmp_path_factory.mktemp("foreign")
    store, layout = Store(folder / "traces.duckdb"), Layout(folder / "traces.duckdb")
    store.add([make_span()])
    store.writer().seal()
    store.settle()
    (folder / "x").write_text("somebody's")
    rows = [
        {key: value for key, value in row.items() if not (key in lacking and number in changes)}
        | changes.get(number, {})
        for number, row in enumerate(_read_rows(layout))
    ]
    _write_rows(layout, [*rows, *extra], schema)

    errors = _try_doors(store, lambda name: name in ("sql", "repair"))
    if type(schema) is int and schema in range(2, 1 << 63):
        assert all("schema" in error for error in errors)
        assert len(errors) == 4
    else:
        assert errors == []
        assert len(store.spans().rows()) <= 1
    assert (folder / "x").read_text() == "somebody's"


@pytest.mark.parametrize("path", ["manifest_path", "manifest_copy"])
def test_a_version_is_believed_after_its_checksum(
    store: Store, layout: Layout, settled: Settled, make_span: MakeSpan, path: str
) -> None:
    """One bit of `"schema":1` is damage: the other copy counts, and is put in its place."""
    settled([make_span()])
    manifest: Path = getattr(layout, path)
    whole = manifest.read_bytes()
    manifest.write_bytes(whole.replace(b'"schema":1', b'"schema":3'))

    (report,) = [each.text for each in examine(store) if each.code == "manifest-damaged"]
    assert f"{manifest} is damaged" in report
    assert len(store.spans().rows()) == 1
    store.repair()

    assert layout.manifest_path.read_bytes() == layout.manifest_copy.read_bytes() == whole
    _write_rows(layout, _read_rows(layout), schema=3)
    with pytest.raises(StoreVersionError, match="schema 3"):
        store.spans().rows()
