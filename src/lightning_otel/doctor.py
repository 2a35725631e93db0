"""What could keep spans from being captured or read here, each with the command that mends it."""

import os
import re
import resource
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

from lightning_otel import config
from lightning_otel.errors import LightningOtelError, StoreDamagedError
from lightning_otel.store import Store, damage, quarantine
from lightning_otel.store.layout import Layout

_FOREIGN: Final = re.compile(
    r"openinference-instrumentation-.+|opentelemetry-instrumentation-(?:genai-.+|openai(?:-v2)?"
    r"|openai-agents(?:-v2)?|langchain|crewai|ag2|autogen|agno|anthropic|bedrock|cohere|google-.+"
    r"|groq|haystack|litellm|llamaindex|mistralai|ollama|replicate|together|vertexai|watsonx)"
)
"""Distributions whose instrumentors record agents and models too: of three families."""
_VERSIONS = ("duckdb", "opentelemetry-sdk", "opentelemetry-instrumentation", "openai")
_DISABLED_ENV = "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"
_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "lustre", "fuse.sshfs", "afs")
_FEW_FILES = 1024
_FEW_NOTES = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        level: ``ok``; ``note`` for what may be meant so; ``problem`` for what is not.
        text: What was found.
        remedy: What to do about it; empty where nothing is to be done.
    """

    level: Literal["ok", "note", "problem"]
    text: str
    remedy: str = ""


def examine(store: Store) -> list[Finding]:
    """Every finding, in the order a person would check."""
    return [
        *_versions(),
        *_instrumentors(),
        *_settings(),
        *(_store(store.layout, store) if store.layout is not None else ()),
    ]


def _versions() -> Iterator[Finding]:
    found = [f"python {'.'.join(map(str, sys.version_info[:3]))}"]
    found += [f"{name} {version}" for name in _VERSIONS if (version := _version(name))]
    yield Finding("ok", ", ".join(found))
    if _version("openai") is None:
        yield Finding("note", "openai is not installed here", "pip install openai")
    httpx = _version("httpx")
    if httpx is not None and httpx.startswith("1.0") and "dev" in httpx:
        yield Finding(
            "problem",
            f"httpx {httpx} is a pre-release: every openai call fails once it is imported",
            "pip install 'httpx<1'",
        )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _instrumentors() -> Iterator[Finding]:
    ours, foreign = [], []
    for entry in metadata.entry_points(group="opentelemetry_instrumentor"):
        package = entry.dist.name.lower().replace("_", "-") if entry.dist is not None else "?"
        if package == "lightning-otel":
            ours.append(entry.name)
        elif _FOREIGN.fullmatch(package):
            foreign.append((package, entry))
    if ours:
        yield Finding("ok", f"instrumentors: {', '.join(sorted(ours))}")
    else:
        yield Finding(
            "problem",
            "lightning-otel's entry points are not installed, so opentelemetry-instrument cannot "
            "find it",
            "pip install --force-reinstall lightning-otel",
        )
    for package, entry in sorted(foreign, key=lambda found: found[0]):
        yield _foreign(package, entry)


def _foreign(package: str, entry: metadata.EntryPoint) -> Finding:
    """What another family's instrumentor does here, and how its spans are treated."""
    known = f"{package} {_version(package)}"
    was_imported = entry.module in sys.modules
    try:
        instrumentor = entry.load()
    except (ImportError, AttributeError, TypeError) as exc:
        return Finding(
            "problem",
            f"{known} cannot be imported ({exc}); opentelemetry-instrument says nothing of that",
            f"pip uninstall {package}",
        )
    treated = "its spans are read, and a request that ours recorded too stays one transition"
    if was_imported and _is_active(instrumentor):
        return Finding("note", f"{known} is active in this process: {treated}")
    return Finding(
        "note",
        f"{known} is installed, and active under opentelemetry-instrument: {treated}",
        f"to record each request once: {_DISABLED_ENV}={entry.name}",
    )


def _is_active(instrumentor: Any) -> bool:
    """Whether an instrumentor has been switched on.

    An instrumentor is one object whose constructor may reset its settings, so it is not called.
    """
    try:
        return bool(instrumentor.__new__(instrumentor).is_instrumented_by_opentelemetry)
    except (AttributeError, TypeError):
        return False


def _settings() -> Iterator[Finding]:
    if not config.is_enabled():
        yield Finding(
            "problem",
            "recording is switched off by LIGHTNING_OTEL or OTEL_SDK_DISABLED",
            f"unset {config.ENABLED_ENV} OTEL_SDK_DISABLED",
        )
    if not config.is_collect_enabled():
        yield Finding(
            "problem",
            "no span is kept, as the environment asks",
            f"unset {config.COLLECT_ENV}",
        )
    content = config.content()
    if not content.is_kept:
        yield Finding(
            "problem",
            f"{config.CONTENT_ENV} keeps messages out of the store: transitions will be empty",
            f"unset {config.CONTENT_ENV}",
        )
    elif content.is_exported:
        yield Finding("note", "messages are sent out with spans, as the environment asks")
    if config.has_otlp_endpoint():
        yield Finding("ok", f"spans are also sent out by OTLP ({config.otlp_protocol()})")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FEW_FILES:
        yield Finding(
            "note",
            f"only {soft} files may be open at once; large stores need more",
            "ulimit -n 4096",
        )


def _store(layout: Layout, store: Store) -> Iterator[Finding]:
    if not layout.exists():
        yield Finding(
            "note",
            f"no store at {layout.catalogue} yet",
            "lightning-otel run -- python your_agent.py",
        )
        yield from _place(layout)
        return
    filesystem = _filesystem(layout.root)
    if filesystem in _NETWORK_FILESYSTEMS:
        yield Finding(
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
        yield Finding("problem", f"{folder} is no folder", "name another place with --store")
    elif not os.access(folder, os.W_OK):
        yield Finding("problem", f"{folder} is not writable", "name another place with --store")


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
            "problem", f"others may read {layout.root} (mode {mode:o})", f"chmod 700 {layout.root}"
        )
    parent = layout.catalogue.parent
    mode = parent.stat().st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        yield Finding(
            "problem",
            f"others may put another store in this one's place: they may write in {parent} "
            f"(mode {stat.S_IMODE(mode):o})",
            f"chmod go-w {parent}",
        )
    for folder in (layout.root, layout.new, layout.live, layout.data):
        if folder.exists() and (owner := folder.lstat().st_uid) != os.geteuid():
            yield Finding(
                "problem",
                f"{folder} belongs to another user (uid {owner}), who may read and change it",
                "name a store of your own with --store",
            )
    for folder in (layout.new, layout.live, layout.data):
        if not os.access(folder, os.W_OK):
            yield Finding(
                "problem", f"{folder} is not writable: spans are lost", f"chmod u+rwx {folder}"
            )


def _contents(layout: Layout, store: Store) -> Iterator[Finding]:
    command = damage.repair_command(layout)
    try:
        whole = layout.whole_manifest()
        if whole != layout.manifest_path:
            text = f"{layout.manifest_path} is damaged or missing, its copy is whole"
            yield Finding("problem", text, command)
            return
        found = list(_damages(layout, command))
        yield from found
    except StoreDamagedError as exc:
        yield Finding("problem", exc.what, command)
    except LightningOtelError as exc:
        yield Finding("problem", exc.what, exc.remedy)
    except OSError as exc:
        yield Finding("problem", f"cannot read {layout.root}: {exc}", "try again")
    else:
        yield from _counts(layout, store)
        yield from _accounting(store, is_whole=not any(each.level == "problem" for each in found))


def _damages(layout: Layout, command: str) -> Iterator[Finding]:
    """What of the store is damaged, once every byte of its data files has been looked at."""
    if layout.catalogue.exists() and (fault := damage.catalogue_fault(layout)):
        yield Finding("problem", f"{layout.catalogue} is damaged ({fault})", command)
    for path in layout.segments():
        if quarantine.has_overlong_lines(path):
            yield Finding("problem", f"{path} has a line longer than any of ours", command)
    manifest = layout.read_manifest()
    found = damage.look(layout, manifest, is_thorough=True)
    damage.avoid(layout, found)
    manifest = layout.read_manifest()
    rows = {file.name: file.rows for file in manifest.live_files}
    for name in sorted(damage.avoided(layout)):
        lacking = f"{rows.get(name, 0)} spans in it cannot be read"
        why = found.get(name, "it cannot be read")
        yield Finding("problem", f"{name} is damaged ({why}): {lacking}", command)
    for file in damage.missing(layout, manifest):
        yield Finding(
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
            yield Finding("problem", f"{text}{note.rows} spans cannot be read", command)
        elif note.gone:
            text = f"{note.gone} of {note.rows} spans are gone with {note.name} ({note.why})"
            yield Finding("note", text)
    healed = [n for n in aside if n.noun != "lines" and not n.is_open and not n.gone]
    for note in healed[-_FEW_NOTES:]:
        yield Finding("note", f"{note.noun} {note.name}: {note.why}; no span is missing for it")
    if aside:
        text = f"damaged parts in {layout.quarantine}, each with a note: {len(aside)}"
        yield Finding("note", text)


def _counts(layout: Layout, store: Store) -> Iterator[Finding]:
    try:
        (row,) = store.sql("SELECT count(*) AS n, count(end_ns) AS ended FROM spans")
    except LightningOtelError as exc:
        yield Finding("problem", exc.what, exc.remedy)
        return
    manifest = layout.read_manifest()
    files = len(manifest.live_files)
    segments = len(layout.unsettled(manifest))
    yield Finding(
        "ok",
        f"{layout.catalogue}: {row['n']} spans, of which incomplete: {row['n'] - row['ended']}; "
        f"data files: {files}, segments: {segments}",
    )
    damaged = sum(segment.damaged for segment in manifest.segments)
    if damaged:
        yield Finding("note", f"damaged lines that were stepped over: {damaged}")


def _accounting(store: Store, *, is_whole: bool) -> Iterator[Finding]:
    """Why spans are not stored, which were at risk, and whether every one is accounted for."""
    try:
        found = store.accounting()
    except LightningOtelError:
        return  # as was said of what cannot be read
    for reason, count in found.reasons():
        yield Finding("note", f"{count} spans are not stored: {reason}")
    if found.pending:
        yield Finding("note", f"{found.pending} spans wait in memory for the disk")
    if found.slow_writes:
        yield Finding(
            "note",
            f"the disk hung {found.slow_writes} times; {found.slow_held} spans waited in memory, "
            "where a kill would have lost them",
        )
    gone = sum(note.gone for note in quarantine.notes(store.layout)) if store.layout else 0
    if found.missing > gone and is_whole:
        yield Finding(
            "problem",
            f"the numbers do not add up: {found.sentence()}",
            "put back the segments or data files that were taken out of the store",
        )
