"""Who could read a store before it was worked on can do so after, whoever worked."""

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.store.conftest import Layout, MakeSpan, Settled

from lightning_otel import Store
from lightning_otel.state import State

OWNER = 54_321
RECORD = """
import os, sys
import lightning_otel as lo

def act(place):
    with lo.auto_trace(store=place):
        lo.emit_message("said")
    store = lo.Store(place)
    store.settle()
    return len(store.spans().rows()), store.accounting().missing, len(store.follow("f").batch())

act(sys.argv[2])  # which imports all there is: the owner may not be let to the interpreter's files
os.setgroups([])
os.setresgid(*[int(sys.argv[3])] * 3)
os.setresuid(*[int(sys.argv[3])] * 3)
print(*act(sys.argv[1]), flush=True)
os._exit(0)  # what is done at exit would look into the other store
"""
ROOT = """
import sys
import lightning_otel as lo
from lightning_otel.state import State
from lightning_otel.store import settle
settle.GRACE_US, settle.COMMIT_AHEAD_US = 0, 2_000
with lo.auto_trace(store=sys.argv[1]):
    lo.emit_message("of root")
store = lo.Store(sys.argv[1])
print(len(store.spans().rows()))
store.settle()
store.redact(patterns=["said"], wait_s=5)
store.compact()
store.layout.catalogue.unlink()
store.connect()
store.repair()
store.follow("root").batch()
State.beside(store).ensure()
with lo.auto_trace(store=sys.argv[1]):
    lo.emit_message("of root")
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that others can reach, as they cannot what lies in pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root works on other people's stores")
def test_root_leaves_a_store_to_its_owner(
    tmp_path: Path, open_folder: Path, run_python: Callable[..., str]
) -> None:
    """S12: the owner reads and records after root recorded, redacted, compacted and repaired."""
    folder = open_folder
    os.chown(folder, OWNER, OWNER)
    place = folder / "traces.duckdb"
    for count, script in (("2 0 2", RECORD), ("4", ROOT), ("8 0 8", RECORD)):
        scratch = tmp_path / "scratch" / count / "traces.duckdb"
        assert run_python(script, place, scratch, OWNER) == f"{count}\n"

    assert {path.stat().st_uid for path in folder.rglob("*")} == {OWNER}
    assert {path.stat().st_gid for path in folder.rglob("*")} == {OWNER}


@pytest.mark.usefixtures("at_once")
def test_rights_stay_as_they_were_set(
    store: Store, layout: Layout, settled: Settled, make_span: MakeSpan
) -> None:
    """A group that was let in stays in; a merged file is for who could read all of its parts."""
    settled([make_span()])
    store.connect()
    State.beside(store).ensure()
    kept = [layout.manifest_path, layout.manifest_copy, layout.catalogue, layout.state_path]
    for path in [*kept, *layout.data_files()]:
        path.chmod(0o640)
    merged = settled([make_span(name="swordfish")])

    store.redact(patterns=["work"])
    store.connect()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [*kept, *layout.data_files()]}
    store.compact()
    (file,) = layout.read_manifest().live_files

    assert modes.pop(merged.name) == 0o600
    assert set(modes.values()) == {0o640}
    assert stat.S_IMODE((layout.data / file.name).stat().st_mode) == 0o600
