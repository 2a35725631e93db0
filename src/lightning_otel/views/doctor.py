"""Diagnosis: whatever keeps spans from being captured or read here, and how to mend it."""

import os
import re
import resource
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Final, Literal

from lightning_otel import config
from lightning_otel.capture.frameworks import FRAMEWORKS
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, LightningOtelError, StoreDamagedError
from lightning_otel.exporters.forwarding.senders import Disposition, sender_for
from lightning_otel.provider.sdk_settings import NO_SDK, SAMPLER, sampler_fault
from lightning_otel.store import damage, quarantine
from lightning_otel.store.catalogue import find_catalogue_fault
from lightning_otel.store.counts import INTENDED
from lightning_otel.store.facts import count_unsound
from lightning_otel.store.files import find_filesystem
from lightning_otel.store.layout import Layout
from lightning_otel.store.sql import CALL_OPERATIONS, ROLLOUT, attribute_sql, quote_text
from lightning_otel.types import conventions as c
from lightning_otel.types.text import count_noun
from lightning_otel.views.waiting import find_waits

Code = Literal[
    "setting", "versions", "no-openai", "httpx-pre-release", "instrumentors", "no-entry-points",
    "foreign-broken", "foreign", "recording-off", "content-off",
    "content-exported", "otlp", "few-files", "no-store", "network-disk", "no-place",
    "open-to-others", "open-parent", "other-owner", "not-writable", "manifest-damaged",
    "store-damaged", "store-refused", "unreadable", "catalogue-damaged", "file-damaged",
    "file-missing", "quarantined", "spans-gone", "healed", "quarantine", "store", "damaged-lines",
    "not-stored", "waiting", "slow-disk", "missing-spans", "feedback-waits", "training-waits",
    "canary-waits", "state-unreadable", "no-calls", "unnamed-agents",
    "facts-unsound",
]  # fmt: skip
"""Subject of a finding, for good: each has a paragraph in ``docs/settings.md``."""
_FOREIGN: Final = re.compile(
    r"openinference-instrumentation-.+|opentelemetry-instrumentation-(?:genai-.+|openai(?:-v2)?"
    r"|openai-agents(?:-v2)?|langchain|crewai|ag2|autogen|agno|anthropic|bedrock|cohere|google-.+"
    r"|groq|haystack|litellm|llamaindex|mistralai|ollama|replicate|together|vertexai|watsonx)"
)
"""Distributions whose instrumentors record agents and models too: of three families."""
_VERSIONS = ("duckdb", "opentelemetry-sdk", "opentelemetry-instrumentation", "openai")
_DISABLED_ENV = "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"
_FEW_FILES = 1024
_PATIENCE_S = 2.0
_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "lustre", "fuse.sshfs", "afs")
_FEW_NOTES = 5


@dataclass(frozen=True, slots=True)
class Check:
    """A thing looked at.

    Attributes:
        code: Its subject; the same in every version.
        level: ``ok``; ``note`` for what may be meant so; ``problem`` for what is not.
        remedy: A command or advice; empty where nothing is to be done.
    """

    code: Code
    level: Literal["ok", "note", "problem"]
    text: str
    remedy: str = ""


def ok(code: Code, text: str) -> Check:
    """Return a passed check."""
    return Check(code, "ok", text)


def note(code: Code, text: str, remedy: str = "") -> Check:
    """Say something that may be meant so."""
    return Check(code, "note", text, remedy)


def problem(code: Code, text: str, remedy: str = "") -> Check:
    """Say that something is wrong."""
    return Check(code, "problem", text, remedy)


def examine(store: Store) -> list[Check]:
    """Return every finding, in the order a person would check."""
    return [
        *_check_versions(),
        *_check_instrumentors(),
        *_check_settings(),
        *(_check_storage(store.layout, store) if store.layout is not None else ()),
        *_check_waits(store),
    ]


def _check_versions() -> Iterator[Check]:
    python = f"python {'.'.join(map(str, sys.version_info[:3]))}"
    versions = [f"{name} {version}" for name in _VERSIONS if (version := _installed_version(name))]
    yield ok("versions", ", ".join([python, *versions]))
    if _installed_version("openai") is None:
        yield note("no-openai", "openai is not installed here", "pip install openai")
    httpx = _installed_version("httpx")
    if httpx is not None and httpx.startswith("1.0") and "dev" in httpx:
        text = f"httpx {httpx} is a pre-release: every openai call fails once it is imported"
        yield problem("httpx-pre-release", text, "pip install 'httpx<1'")


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_instrumentors() -> Iterator[Check]:
    ours, foreign = [], []
    for entry in metadata.entry_points(group="opentelemetry_instrumentor"):
        package = entry.dist.name.lower().replace("_", "-") if entry.dist is not None else "?"
        if package == "lightning-otel":
            ours.append(entry.name)
        elif _FOREIGN.fullmatch(package):
            foreign.append((package, entry))
    if ours:
        yield ok("instrumentors", f"instrumentors: {', '.join(sorted(ours))}")
    else:
        text = "lightning-otel's entry points are not installed, so opentelemetry-instrument cannot"
        remedy = "pip install --force-reinstall lightning-otel"
        yield problem("no-entry-points", f"{text} find it", remedy)
    for package, entry in sorted(foreign, key=lambda item: item[0]):
        yield _check_foreign(package, entry)


def _check_foreign(package: str, entry: metadata.EntryPoint) -> Check:
    name = f"{package} {_installed_version(package)}"
    was_imported = entry.module in sys.modules
    try:
        instrumentor = entry.load()
    except (ImportError, AttributeError, TypeError) as exc:
        return problem(
            "foreign-broken",
            f"{name} cannot be imported ({exc}); opentelemetry-instrument says nothing of that",
            f"pip uninstall {package}",
        )
    treated = "its spans are read, and a request that ours recorded too stays one transition"
    if was_imported and _is_active(instrumentor):
        return note("foreign", f"{name} is active in this process: {treated}")
    return note(
        "foreign",
        f"{name} is installed, and active under opentelemetry-instrument: {treated}",
        f"to record each request once: {_DISABLED_ENV}={entry.name}",
    )


def _is_active(instrumentor: Any) -> bool:
    try:
        # It is one object whose constructor may reset its settings, so that is not called.
        return bool(instrumentor.__new__(instrumentor).is_instrumented_by_opentelemetry)
    except (AttributeError, TypeError):
        return False


def _check_settings() -> Iterator[Check]:
    if not config.is_enabled():
        text = "recording is switched off by LIGHTNING_OTEL or OTEL_SDK_DISABLED"
        yield problem("recording-off", text, f"unset {config.ENABLED.name} OTEL_SDK_DISABLED")
    if fault := sampler_fault():
        yield problem("recording-off", fault, f"unset {SAMPLER.name}")
    content = config.content()
    if not content.is_kept:
        text = f"{config.CONTENT.name} keeps messages out of the store: transitions will be empty"
        yield problem("content-off", text, f"unset {config.CONTENT.name}")
    elif content.is_exported:
        yield note("content-exported", "messages are sent out with spans, as the environment asks")
    if config.wants_otlp():
        yield from _check_sending()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FEW_FILES:
        text = f"only {soft} files may be open at once; large stores need more"
        yield note("few-files", text, "ulimit -n 4096")


def _check_sending() -> Iterator[Check]:
    has_sdk = any(metadata.entry_points(group="opentelemetry_configurator"))
    exporters = config.exporters()
    if "otlp" in exporters and "duckdb" not in exporters and not has_sdk:
        yield problem(
            "otlp",
            f"opentelemetry-instrument sends no span: without duckdb among its exporters {NO_SDK}",
            "export OTEL_TRACES_EXPORTER=otlp,duckdb",
        )
    endpoint = config.otlp_endpoint()
    if endpoint is None:
        return
    try:
        quick = replace(endpoint, timeout_s=min(endpoint.timeout_s, _PATIENCE_S))
        answer = sender_for(quick).send(b"")
    except ConfigError as exc:
        yield problem("otlp", f"no span is sent by OTLP: {exc.what}", exc.remedy)
        return
    where = f"by OTLP ({endpoint.protocol}) to {endpoint.url}"
    if answer.verdict is Disposition.DELIVERED:
        yield ok("otlp", f"spans are also sent out {where}")
    else:
        remedy = "lightning-otel export otlp --once"
        yield problem("otlp", f"no span is sent {where}: {answer.reason}", remedy)


def _check_storage(layout: Layout, store: Store) -> Iterator[Check]:
    if not layout.exists():
        text = f"no store at {layout.catalogue} yet"
        yield note("no-store", text, "lightning-otel run -- python your_agent.py")
        folder = next(parent for parent in layout.catalogue.parents if parent.exists())
        fault = "" if os.access(folder, os.W_OK) else "is not writable"
        fault = fault if folder.is_dir() else "is no folder"
        if fault:
            yield problem("no-place", f"{folder} {fault}", "name another place with --store")
        return
    filesystem = find_filesystem(layout.root)
    if filesystem in _NETWORK_FILESYSTEMS:
        text = f"{layout.root} lies on {filesystem}, where file locks cannot be relied on"
        yield problem("network-disk", text, "move the store to a local disk")
    yield from _check_permissions(layout)
    yield from _check_contents(layout, store)


def _check_permissions(layout: Layout) -> Iterator[Check]:
    mode = stat.S_IMODE(layout.root.stat().st_mode)
    if mode & 0o077:
        text = f"others may read {layout.root} (mode {mode:o})"
        yield problem("open-to-others", text, f"chmod 700 {layout.root}")
    parent = layout.catalogue.parent
    mode = parent.stat().st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        text = f"others may put another store in this one's place: they may write in {parent} "
        text += f"(mode {stat.S_IMODE(mode):o})"
        yield problem("open-parent", text, f"chmod go-w {parent}")
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


def _check_contents(layout: Layout, store: Store) -> Iterator[Check]:
    command = damage.repair_command(layout)
    try:
        whole = layout.find_manifest()[0]
        if whole != layout.manifest_path:
            text = f"{layout.manifest_path} is damaged or missing, its copy is whole"
            yield problem("manifest-damaged", text, command)
            return
        if not layout.is_copy_whole():
            text = f"{layout.manifest_copy} is damaged, the manifest is whole"
            yield problem("manifest-damaged", text, command)
        findings = list(_check_damage(layout, command))
        yield from findings
    except StoreDamagedError as exc:
        yield problem("store-damaged", exc.what, command)
    except LightningOtelError as exc:
        yield problem("store-refused", exc.what, exc.remedy)
    except OSError as exc:
        yield problem("unreadable", f"cannot read {layout.root}: {exc}", "try again")
    else:
        yield from _check_counts(layout, store)
        yield from _check_accounts(
            store, is_whole=not any(finding.level == "problem" for finding in findings)
        )


def _check_damage(layout: Layout, command: str) -> Iterator[Check]:
    if layout.catalogue.exists() and (fault := find_catalogue_fault(layout)):
        yield problem("catalogue-damaged", f"{layout.catalogue} is damaged ({fault})", command)
    damaged = damage.exclude_damage(layout, is_thorough=True)
    manifest = layout.read_manifest()
    rows = {file.name: file.rows for file in manifest.live_files}
    for name in sorted(damage.list_excluded(layout)):
        lacking = f"{rows.get(name, 0)} spans in it cannot be read"
        why = damaged.get(name, "it cannot be read")
        yield problem("file-damaged", f"{name} is damaged ({why}): {lacking}", command)
    for file in damage.list_missing_files(layout, manifest):
        yield problem(
            "file-missing",
            f"data file {file.name} is missing: {file.rows} spans in it cannot be read",
            f"restore it in {layout.data}, or give it up with: {command}",
        )
    if count := count_unsound(layout.facts):
        text = f"files of facts that are damaged or of another version, and not read: {count}"
        yield note("facts-unsound", text)
    yield from _check_quarantine(layout, command)


def _check_quarantine(layout: Layout, command: str) -> Iterator[Check]:
    aside = quarantine.read_notes(layout)
    for entry in aside:
        if entry.is_open:
            text = f"{entry.noun} {entry.name} is damaged ({entry.why}): {entry.missing} of its "
            yield problem("quarantined", f"{text}{entry.rows} spans cannot be read", command)
        elif entry.gone:
            text = f"{entry.gone} of {entry.rows} spans are gone with {entry.name} ({entry.why})"
            yield note("spans-gone", text)
    healed = [n for n in aside if n.noun != "lines" and not n.is_open and not n.gone]
    for entry in healed[-_FEW_NOTES:]:
        yield note("healed", f"{entry.noun} {entry.name}: {entry.why}; no span is missing for it")
    if aside:
        text = f"damaged parts in {layout.quarantine}, each with a note: {len(aside)}"
        yield note("quarantine", text)


def _check_counts(layout: Layout, store: Store) -> Iterator[Check]:
    try:
        (row,) = store.sql("SELECT count(*) AS n, count(end_ns) AS ended FROM spans")
    except LightningOtelError as exc:
        yield problem("store-refused", exc.what, exc.remedy)
        return
    manifest = layout.read_manifest()
    files = len(manifest.live_files)
    segments = len(layout.list_unsettled(manifest))
    yield ok(
        "store",
        f"{layout.catalogue}: {row['n']} spans, of which incomplete: {row['n'] - row['ended']}; "
        f"data files: {files}, segments: {segments}",
    )
    yield from check_calls(store)
    if damaged := sum(segment.damaged for segment in manifest.segments):
        yield note("damaged-lines", f"damaged lines that were stepped over: {damaged}")


_CALLS: Final = f"""
SELECT count(*) AS spans, count(*) FILTER (operation IN ({CALL_OPERATIONS})) AS calls,
  count(*) FILTER (name = {quote_text(c.SPAN_ACTION)}) AS actions FROM spans"""
_UNNAMED: Final = f"""
SELECT DISTINCT {attribute_sql(c.FRAMEWORK)} AS framework FROM spans
WHERE operation IN ({CALL_OPERATIONS})
  AND contains(attributes::VARCHAR, {quote_text(c.FRAMEWORK)}) AND {ROLLOUT} NOT IN (
  SELECT {ROLLOUT} FROM spans WHERE agent IS NOT NULL)
ORDER BY 1"""


def check_calls(store: Store) -> Iterator[Check]:
    """Yield what keeps a store's spans from being calls, and its calls from having agents."""
    (counts,) = store.sql(_CALLS)
    if counts["spans"] and not counts["calls"] and not counts["actions"]:
        text = f"{count_noun(counts['spans'], 'span')}, but no request to a model was recorded"
        yield note("no-calls", text, "lightning-otel run --debug -- python your_agent.py")
    for row in store.sql(_UNNAMED) if counts["calls"] else ():
        if (name := row["framework"]) in FRAMEWORKS:
            text = f"calls of {name} name no agent: its own telemetry is off"
            yield note("unnamed-agents", text, FRAMEWORKS[name])


def _check_accounts(store: Store, *, is_whole: bool) -> Iterator[Check]:
    try:
        accounting = store.accounting()
    except LightningOtelError:
        return  # as was said of what cannot be read
    for reason, count in accounting.reasons():
        level: Literal["ok", "note"] = "ok" if reason in INTENDED else "note"
        yield Check("not-stored", level, f"not stored: {count_noun(count, 'span')}: {reason}")
    if accounting.pending:
        text = f"waiting in memory for the disk: {count_noun(accounting.pending, 'span')}"
        yield note("waiting", text)
    if accounting.slow_writes:
        yield note(
            "slow-disk",
            f"the disk hung {accounting.slow_writes} times; {accounting.slow_held} spans waited "
            "in memory, where a kill would have lost them",
        )
    notes = quarantine.read_notes(store.layout) if store.layout else []
    gone = sum(note.gone for note in notes if note.noun == "data file")
    if accounting.missing > gone and is_whole:
        yield problem(
            "missing-spans",
            f"the numbers do not add up: {accounting.sentence()}",
            "put back the segments or data files that were taken out of the store",
        )


def _check_waits(store: Store) -> Iterator[Check]:
    try:
        yield from (note(*wait) for wait in find_waits(store))
    except LightningOtelError as exc:
        yield problem("state-unreadable", exc.what, exc.remedy)
