"""A store on disk: its place, its permissions, its files, and whether its numbers add up."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from lightning_otel.doctor.finding import Finding
from lightning_otel.errors import LightningOtelError, StoreDamagedError
from lightning_otel.store import Store, damage, quarantine
from lightning_otel.store.counts import MEANT
from lightning_otel.store.layout import Layout
from lightning_otel.types.wording import counted

_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "lustre", "fuse.sshfs", "afs")
_FEW_NOTES = 5


def storage(layout: Layout, store: Store) -> Iterator[Finding]:
    """Where a store lies, who may reach it, and whether all of it is there."""
    if not layout.exists():
        yield Finding(
            "no-store",
            "note",
            f"no store at {layout.catalogue} yet",
            "lightning-otel run -- python your_agent.py",
        )
        yield from _place(layout)
        return
    filesystem = _filesystem(layout.root)
    if filesystem in _NETWORK_FILESYSTEMS:
        yield Finding(
            "network-disk",
            "problem",
            f"{layout.root} lies on {filesystem}, where file locks cannot be relied on",
            "move the store to a local disk",
        )
    yield from _permissions(layout)
    yield from _contents(layout, store)


def _place(layout: Layout) -> Iterator[Finding]:
    """Whether a store could be made where it is to be."""
    folder = layout.catalogue.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        yield Finding(
            "no-place", "problem", f"{folder} is no folder", "name another place with --store"
        )
    elif not os.access(folder, os.W_OK):
        yield Finding(
            "no-place", "problem", f"{folder} is not writable", "name another place with --store"
        )


def _filesystem(path: Path) -> str:
    """The type of the file system a path lies on; empty where the kernel does not list it."""
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in mounts:
        _, place, found, *_ = line.split(" ")
        if path.is_relative_to(place) and len(place) > len(best):
            best, kind = place, found
    return kind


def _permissions(layout: Layout) -> Iterator[Finding]:
    mode = stat.S_IMODE(layout.root.stat().st_mode)
    if mode & 0o077:
        yield Finding(
            "open-to-others",
            "problem",
            f"others may read {layout.root} (mode {mode:o})",
            f"chmod 700 {layout.root}",
        )
    parent = layout.catalogue.parent
    mode = parent.stat().st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        yield Finding(
            "open-parent",
            "problem",
            f"others may put another store in this one's place: they may write in {parent} "
            f"(mode {stat.S_IMODE(mode):o})",
            f"chmod go-w {parent}",
        )
    for folder in (layout.root, layout.new, layout.live, layout.data):
        if folder.exists() and (owner := folder.lstat().st_uid) != os.geteuid():
            yield Finding(
                "other-owner",
                "problem",
                f"{folder} belongs to another user (uid {owner}), who may read and change it",
                "name a store of your own with --store",
            )
    for folder in (layout.new, layout.live, layout.data):
        if not os.access(folder, os.W_OK):
            yield Finding(
                "not-writable",
                "problem",
                f"{folder} is not writable: spans are lost",
                f"chmod u+rwx {folder}",
            )


def _contents(layout: Layout, store: Store) -> Iterator[Finding]:
    command = damage.repair_command(layout)
    try:
        whole = layout.whole_manifest()
        if whole != layout.manifest_path:
            text = f"{layout.manifest_path} is damaged or missing, its copy is whole"
            yield Finding("manifest-damaged", "problem", text, command)
            return
        found = list(_damages(layout, command))
        yield from found
    except StoreDamagedError as exc:
        yield Finding("store-damaged", "problem", exc.what, command)
    except LightningOtelError as exc:
        yield Finding("store-refused", "problem", exc.what, exc.remedy)
    except OSError as exc:
        yield Finding("unreadable", "problem", f"cannot read {layout.root}: {exc}", "try again")
    else:
        yield from _counts(layout, store)
        yield from _accounting(store, is_whole=not any(each.level == "problem" for each in found))


def _damages(layout: Layout, command: str) -> Iterator[Finding]:
    """What of the store is damaged, once every byte of its data files has been looked at."""
    if layout.catalogue.exists() and (fault := damage.catalogue_fault(layout)):
        yield Finding(
            "catalogue-damaged", "problem", f"{layout.catalogue} is damaged ({fault})", command
        )
    manifest = layout.read_manifest()
    found = damage.look(layout, manifest, is_thorough=True)
    damage.avoid(layout, found)
    manifest = layout.read_manifest()
    rows = {file.name: file.rows for file in manifest.live_files}
    for name in sorted(damage.avoided(layout)):
        lacking = f"{rows.get(name, 0)} spans in it cannot be read"
        why = found.get(name, "it cannot be read")
        yield Finding("file-damaged", "problem", f"{name} is damaged ({why}): {lacking}", command)
    for file in damage.missing(layout, manifest):
        yield Finding(
            "file-missing",
            "problem",
            f"data file {file.name} is missing: {file.rows} spans in it cannot be read",
            f"restore it in {layout.data}, or give it up with: {command}",
        )
    yield from _quarantined(layout, command)


def _quarantined(layout: Layout, command: str) -> Iterator[Finding]:
    """What was put aside, and what became of it."""
    aside = quarantine.notes(layout)
    for note in aside:
        if note.is_open:
            text = f"{note.noun} {note.name} is damaged ({note.why}): {note.missing} of its "
            yield Finding(
                "quarantined", "problem", f"{text}{note.rows} spans cannot be read", command
            )
        elif note.gone:
            text = f"{note.gone} of {note.rows} spans are gone with {note.name} ({note.why})"
            yield Finding("spans-gone", "note", text)
    healed = [n for n in aside if n.noun != "lines" and not n.is_open and not n.gone]
    for note in healed[-_FEW_NOTES:]:
        yield Finding(
            "healed", "note", f"{note.noun} {note.name}: {note.why}; no span is missing for it"
        )
    if aside:
        text = f"damaged parts in {layout.quarantine}, each with a note: {len(aside)}"
        yield Finding("quarantine", "note", text)


def _counts(layout: Layout, store: Store) -> Iterator[Finding]:
    try:
        (row,) = store.sql("SELECT count(*) AS n, count(end_ns) AS ended FROM spans")
    except LightningOtelError as exc:
        yield Finding("store-refused", "problem", exc.what, exc.remedy)
        return
    manifest = layout.read_manifest()
    files = len(manifest.live_files)
    segments = len(layout.unsettled(manifest))
    yield Finding(
        "store",
        "ok",
        f"{layout.catalogue}: {row['n']} spans, of which incomplete: {row['n'] - row['ended']}; "
        f"data files: {files}, segments: {segments}",
    )
    damaged = sum(segment.damaged for segment in manifest.segments)
    if damaged:
        yield Finding("damaged-lines", "note", f"damaged lines that were stepped over: {damaged}")


def _accounting(store: Store, *, is_whole: bool) -> Iterator[Finding]:
    """Why spans are not stored, which were at risk, and whether every one is accounted for."""
    try:
        found = store.accounting()
    except LightningOtelError:
        return  # as was said of what cannot be read
    for reason, count in found.reasons():
        level: Literal["ok", "note"] = "ok" if reason in MEANT else "note"
        yield Finding("not-stored", level, f"not stored: {counted(count, 'span')}: {reason}")
    if found.pending:
        text = f"waiting in memory for the disk: {counted(found.pending, 'span')}"
        yield Finding("waiting", "note", text)
    if found.slow_writes:
        yield Finding(
            "slow-disk",
            "note",
            f"the disk hung {found.slow_writes} times; {found.slow_held} spans waited in memory, "
            "where a kill would have lost them",
        )
    notes = quarantine.notes(store.layout) if store.layout else []
    gone = sum(note.gone for note in notes if note.noun == "data file")
    if found.missing > gone and is_whole:
        yield Finding(
            "missing-spans",
            "problem",
            f"the numbers do not add up: {found.sentence()}",
            "put back the segments or data files that were taken out of the store",
        )
