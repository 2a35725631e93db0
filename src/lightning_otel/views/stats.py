"""Counts of a store: its funnel, its files, and every loss."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from lightning_otel.dataset import Store
from lightning_otel.dataset.batches import list_unfinished
from lightning_otel.store.damage import count_missing_spans
from lightning_otel.store.layout import total_bytes
from lightning_otel.store.quarantine import read_notes


def store_stats(store: Store) -> dict[str, Any]:
    """Return the funnel, the files, and every counted loss; of a store elsewhere the funnel."""
    report = store.report()
    funnel = asdict(report)
    funnel.pop("dropped")
    found: dict[str, Any] = {"store": store.name, "funnel": funnel, "left_out": report.reasons()}
    if "://" in store.name:
        return found  # the rest is not counted here, and so not 0
    attempts = {(rollout_id, status) for rollout_id, _, status in list_unfinished(store.source)}
    counts = Counter(status for _, status in attempts)
    accounting = store.accounting()
    found |= {name: counts[name] for name in ("running", "incomplete")}
    found["accounting"] = {**asdict(accounting), "missing": accounting.missing}
    if store.layout is None:
        return {**found, **dict.fromkeys(("files", "segments", "bytes", "missing", "gone"), 0)}
    manifest = store.layout.read_manifest()
    segments = store.layout.list_unsettled(manifest)
    files = [store.layout.data / file.name for file in manifest.live_files]
    return {
        **found,
        "files": len(files),
        "segments": len(segments),
        "bytes": total_bytes([*files, *segments]),
        "missing": sum(count_missing_spans(store.layout).values()),
        "gone": sum(note.gone for note in read_notes(store.layout)),
    }
