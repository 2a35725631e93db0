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
from lightning_otel.errors import LightningOtelError
from lightning_otel.store import Store
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
_PARQUET_MARK = b"PAR1"


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
    for folder in (layout.new, layout.live, layout.data):
        if not os.access(folder, os.W_OK):
            yield Finding(
                "problem", f"{folder} is not writable: spans are lost", f"chmod u+rwx {folder}"
            )


def _contents(layout: Layout, store: Store) -> Iterator[Finding]:
    try:
        manifest = layout.read_manifest()
    except LightningOtelError as exc:
        yield Finding("problem", exc.what, exc.remedy)
        return
    damaged = [
        (file.name, fault)
        for file in manifest.live_files
        if (fault := _fault_of(layout.data / file.name))
    ]
    for name, fault in damaged:
        yield Finding("problem", f"data file {name} {fault}", f"restore it in {layout.data}")
    if not any(fault == "is damaged" for _, fault in damaged):
        yield from _counts(layout, store)
        yield from _accounting(store, is_whole=not damaged)


def _fault_of(path: Path) -> str:
    """What is wrong with a Parquet file, as far as its two ends show."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_PARQUET_MARK))
            file.seek(-len(_PARQUET_MARK), os.SEEK_END)
            tail = file.read()
    except FileNotFoundError:
        return "is missing"
    except OSError:
        return "is damaged"
    return "" if head == tail == _PARQUET_MARK else "is damaged"


def _counts(layout: Layout, store: Store) -> Iterator[Finding]:
    try:
        (row,) = store.sql("SELECT count(*) AS n, count(end_ns) AS ended FROM spans")
    except LightningOtelError as exc:
        yield Finding("problem", exc.what, exc.remedy)
        return
    manifest = layout.read_manifest()
    files = len(manifest.live_files)
    segments = len({path.name for path in layout.segments()} - {s.name for s in manifest.segments})
    yield Finding(
        "ok",
        f"{layout.catalogue}: {row['n']} spans, of which incomplete: {row['n'] - row['ended']}; "
        f"data files: {files}, segments: {segments}",
    )
    damaged = sum(segment.damaged for segment in manifest.segments)
    if damaged:
        yield Finding("note", f"{damaged} damaged lines were stepped over")


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
    if found.missing and is_whole:
        yield Finding(
            "problem",
            f"the numbers do not add up: {found.sentence()}",
            "put back the segments or data files that were taken out of the store",
        )
