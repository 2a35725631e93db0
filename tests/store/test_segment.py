"""A segment is locked from its first moment to its last, and holds whole lines only."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_otel.store.layout import Layout
from lightning_otel.store.segment import Segment, boot_id


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """An empty store's paths."""
    layout = Layout(tmp_path / "traces.duckdb")
    layout.create()
    return layout


@pytest.fixture
def segment(layout: Layout) -> Iterator[Segment]:
    """An open segment."""
    segment = Segment(layout, "boot-1-2", 3)
    yield segment
    segment.close()


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_segment_appears_only_when_it_is_locked(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No settler can find a segment between its making and its locking."""
    seen: list[tuple[list[Path], bool]] = []
    rename = os.rename

    def watched(made: Path, final: Path) -> None:
        seen.append((layout.segments(), _is_locked(made)))
        rename(made, final)

    # A patch, because the moment of the rename is the subject.
    monkeypatch.setattr(os, "rename", watched)

    segment = Segment(layout, "boot-1-2", 3)

    assert seen == [([], True)]
    assert layout.segments() == [segment.path]
    assert segment.path.name == "boot-1-2-000003.ndjson"
    assert _is_locked(segment.path)
    segment.close()
    assert not _is_locked(segment.path)


def test_segment_that_cannot_be_made_leaves_nothing(layout: Layout) -> None:
    """A refusal leaves no file behind, neither where it was made nor where it was to be."""
    shutil.rmtree(layout.live)
    layout.live.write_text("in the way")

    with pytest.raises(NotADirectoryError):
        Segment(layout, "boot-1-2", 3)

    assert list(layout.new.iterdir()) == []


def test_segment_takes_back_a_short_write(
    layout: Layout, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that went in by half is taken out again, and what stood before it stays."""
    segment.append(b"whole\n")
    write = os.write

    def short(descriptor: int, content: bytes) -> int:
        return write(descriptor, content[:3])

    # A patch, because only a disk that fills up in the middle of a line writes half of it.
    monkeypatch.setattr(os, "write", short)
    with pytest.raises(OSError, match="short write"):
        segment.append(b"another\n")
    monkeypatch.undo()
    segment.append(b"next\n")

    assert segment.path.read_bytes().endswith(b"}\nwhole\nnext\n")
    assert segment.size_bytes == segment.path.stat().st_size


def test_segment_stays_locked_when_a_forked_child_closes_it(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    """A child that closes its copy does not free its parent's lock."""
    script = """
    import fcntl, os, sys
    from lightning_otel.store.layout import Layout
    from lightning_otel.store.segment import Segment
    layout = Layout(sys.argv[1])
    layout.create()
    segment = Segment(layout, "boot-1-2", 3)
    child = os.fork()
    if not child:
        segment.close()
        os._exit(0)
    os.waitpid(child, 0)
    with segment.path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("locked")
    """

    assert run_python(script, tmp_path / "traces.duckdb").strip() == "locked"


def test_boot_id_is_the_same_in_every_process(run_python: Callable[..., str]) -> None:
    """Eight characters that processes of one boot share."""
    script = "from lightning_otel.store.segment import boot_id; print(boot_id())"

    assert run_python(script).strip() == boot_id()
    assert len(boot_id()) == 8


def test_boot_id_without_linux_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the machine's name serves."""

    def missing(self: Path) -> str:
        raise FileNotFoundError(self)

    # A patch, because this machine has the file.
    monkeypatch.setattr(Path, "read_text", missing)

    assert boot_id() == boot_id()
    assert len(boot_id()) == 8
