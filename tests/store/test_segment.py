"""A segment is locked from its first moment to its last, and holds whole lines only."""

import fcntl
import os
import shutil
from collections.abc import Iterator
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


def test_boot_id_without_linux_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the machine's name serves."""

    def missing(self: Path) -> str:
        raise FileNotFoundError(self)

    # A patch, because this machine has the file.
    monkeypatch.setattr(Path, "read_text", missing)

    assert boot_id() == boot_id()
    assert len(boot_id()) == 8
