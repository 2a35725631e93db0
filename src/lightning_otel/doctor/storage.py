"""A store on disk: its place, permissions, files, sums, and the feedback that waits for it."""

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from lightning_otel.dataset import Store
from lightning_otel.doctor.finding import Finding, note, ok, problem
from lightning_otel.errors import LightningOtelError, NotInstalledError, StoreDamagedError
from lightning_otel.store import damage, quarantine
from lightning_otel.store.catalogue import find_catalogue_fault
from lightning_otel.store.counts import MEANT
from lightning_otel.store.layout import Layout
from lightning_otel.types.wording import count_noun

_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "lustre", "fuse.sshfs", "afs")
_FEW_NOTES = 5
_LONG_S = 3600.0
_FEW = 3


def storage(layout: Layout, store: Store) -> Iterator[Finding]:
    """Look at the place of a store, its permissions and its contents."""
    if not layout.exists():
        yield note(
            "no-store",
            f"no store at {layout.catalogue} yet",
            "lightning-otel run -- python your_agent.py",
        )
        yield from _check_place(layout)
        return
    filesystem = _filesystem_type(layout.root)
    if filesystem in _NETWORK_FILESYSTEMS:
        yield problem(
            "network-disk",
            f"{layout.root} lies on {filesystem}, where file locks cannot be relied on",
            "move the store to a local disk",
        )
    yield from _check_permissions(layout)
    yield from _check_contents(layout, store)


def _check_place(layout: Layout) -> Iterator[Finding]:
    """Look at the folder where a store is to be made."""
    folder = layout.catalogue.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        yield problem("no-place", f"{folder} is no folder", "name another place with --store")
    elif not os.access(folder, os.W_OK):
        yield problem("no-place", f"{folder} is not writable", "name another place with --store")


def _filesystem_type(path: Path) -> str:
    """Return the type of a path's file system; empty where the kernel does not list it."""
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


def _check_permissions(layout: Layout) -> Iterator[Finding]:
    mode = stat.S_IMODE(layout.root.stat().st_mode)
    if mode & 0o077:
        yield problem(
            "open-to-others",
            f"others may read {layout.root} (mode {mode:o})",
            f"chmod 700 {layout.root}",
        )
    parent = layout.catalogue.parent
    mode = parent.stat().st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        yield problem(
            "open-parent",
            f"others may put another store in this one's place: they may write in {parent} "
            f"(mode {stat.S_IMODE(mode):o})",
            f"chmod go-w {parent}",
        )
    for folder in (layout.root, layout.new, layout.live, layout.data):
        if folder.exists() and (owner := folder.lstat().st_uid) != os.geteuid():
            yield problem(
                "other-owner",
                f"{folder} belongs to another user (uid {owner}), who may read and change it",
                "name a store of your own with --store",
            )
    for folder in (layout.new, layout.live, layout.data):
        if not os.access(folder, os.W_OK):
            yield problem(
                "not-writable", f"{folder} is not writable: spans are lost", f"chmod u+rwx {folder}"
            )


def _check_contents(layout: Layout, store: Store) -> Iterator[Finding]:
    command = damage.repair_command(layout)
    try:
        whole = layout.whole_manifest()
        if whole != layout.manifest_path:
            text = f"{layout.manifest_path} is damaged or missing, its copy is whole"
            yield problem("manifest-damaged", text, command)
            return
        found = list(_check_damage(layout, command))
        yield from found
    except StoreDamagedError as exc:
        yield problem("store-damaged", exc.what, command)
    except LightningOtelError as exc:
        yield problem("store-refused", exc.what, exc.remedy)
    except OSError as exc:
        yield problem("unreadable", f"cannot read {layout.root}: {exc}", "try again")
    else:
        yield from _check_counts(layout, store)
        yield from _check_accounts(
            store, is_whole=not any(each.level == "problem" for each in found)
        )


def _check_damage(layout: Layout, command: str) -> Iterator[Finding]:
    """Look for damage in every byte of the data files."""
    if layout.catalogue.exists() and (fault := find_catalogue_fault(layout)):
        yield problem("catalogue-damaged", f"{layout.catalogue} is damaged ({fault})", command)
    found = damage.exclude_damage(layout, is_thorough=True)
    manifest = layout.read_manifest()
    rows = {file.name: file.rows for file in manifest.live_files}
    for name in sorted(damage.list_excluded(layout)):
        lacking = f"{rows.get(name, 0)} spans in it cannot be read"
        why = found.get(name, "it cannot be read")
        yield problem("file-damaged", f"{name} is damaged ({why}): {lacking}", command)
    for file in damage.list_missing_files(layout, manifest):
        yield problem(
            "file-missing",
            f"data file {file.name} is missing: {file.rows} spans in it cannot be read",
            f"restore it in {layout.data}, or give it up with: {command}",
        )
    yield from _check_quarantine(layout, command)


def _check_quarantine(layout: Layout, command: str) -> Iterator[Finding]:
    """Look at what was put aside."""
    aside = quarantine.read_notes(layout)
    for each in aside:
        if each.is_open:
            text = f"{each.noun} {each.name} is damaged ({each.why}): {each.missing} of its "
            yield problem("quarantined", f"{text}{each.rows} spans cannot be read", command)
        elif each.gone:
            text = f"{each.gone} of {each.rows} spans are gone with {each.name} ({each.why})"
            yield note("spans-gone", text)
    healed = [n for n in aside if n.noun != "lines" and not n.is_open and not n.gone]
    for each in healed[-_FEW_NOTES:]:
        yield note("healed", f"{each.noun} {each.name}: {each.why}; no span is missing for it")
    if aside:
        text = f"damaged parts in {layout.quarantine}, each with a note: {len(aside)}"
        yield note("quarantine", text)


def _check_counts(layout: Layout, store: Store) -> Iterator[Finding]:
    try:
        (row,) = store.sql("SELECT count(*) AS n, count(end_ns) AS ended FROM spans")
    except LightningOtelError as exc:
        yield problem("store-refused", exc.what, exc.remedy)
        return
    manifest = layout.read_manifest()
    files = len(manifest.live_files)
    segments = len(layout.unsettled(manifest))
    yield ok(
        "store",
        f"{layout.catalogue}: {row['n']} spans, of which incomplete: {row['n'] - row['ended']}; "
        f"data files: {files}, segments: {segments}",
    )
    damaged = sum(segment.damaged for segment in manifest.segments)
    if damaged:
        yield note("damaged-lines", f"damaged lines that were stepped over: {damaged}")


def _check_accounts(store: Store, *, is_whole: bool) -> Iterator[Finding]:
    """Look at spans that are not stored, and account for each."""
    try:
        found = store.accounting()
    except LightningOtelError:
        return  # as was said of what cannot be read
    for reason, count in found.reasons():
        level: Literal["ok", "note"] = "ok" if reason in MEANT else "note"
        yield Finding("not-stored", level, f"not stored: {count_noun(count, 'span')}: {reason}")
    if found.pending:
        text = f"waiting in memory for the disk: {count_noun(found.pending, 'span')}"
        yield note("waiting", text)
    if found.slow_writes:
        yield note(
            "slow-disk",
            f"the disk hung {found.slow_writes} times; {found.slow_held} spans waited in memory, "
            "where a kill would have lost them",
        )
    notes = quarantine.read_notes(store.layout) if store.layout else []
    gone = sum(each.gone for each in notes if each.noun == "data file")
    if found.missing > gone and is_whole:
        yield problem(
            "missing-spans",
            f"the numbers do not add up: {found.sentence()}",
            "put back the segments or data files that were taken out of the store",
        )


def feedback(store: Store) -> Iterator[Finding]:
    """Look at feedback that waits for what it judges."""
    try:
        from lightning_otel.rewarding.pending import Pending
        from lightning_otel.state import State
    except NotInstalledError:  # without SQLAlchemy there is no state to look into
        return
    try:
        state = State.beside(store)
        if not state.is_made:
            return
        pending = Pending(state)
        waiting = pending.waiting()
        if waiting.oldest_ns is None:
            return
        few = [f"{each.noun} {each.target}" for each in pending.all(_FEW)]
    except LightningOtelError as exc:
        yield problem("state-unreadable", exc.what, exc.remedy)
        return
    age_s = (time.time_ns() - waiting.oldest_ns) / 1e9
    counted = f"{waiting.count} pieces of feedback wait" if waiting.count > 1 else (
        "1 piece of feedback waits"
    )  # fmt: skip
    more = ", …" if waiting.count > len(few) else ""
    yield note(
        "feedback-waits",
        f"{counted} for what it judges, the oldest for {age_s:.0f} s: {', '.join(few)}{more}",
        "is it this store that the agent records into?" if age_s > _LONG_S else "",
    )
