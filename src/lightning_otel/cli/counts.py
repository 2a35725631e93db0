"""Counts of what a run recorded, for its last lines."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.cli.output import count_noun, print_note, suggest

if TYPE_CHECKING:
    from lightning_otel.dataset import Store
    from lightning_otel.tracing import Recording

_COUNTS: Final = (
    "spans", "outside", "rewards", "calls", "others", "named", "exact", "ended",
)  # fmt: skip


def count_records(
    records: Iterable[Mapping[str, Any]], recording: "Recording", since_ns: int
) -> Mapping[str, Any]:
    """Count what the records of a run since a time tell of, and name what they come from."""
    from lightning_otel.types import conventions as c

    counts: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))
    rollouts, frameworks, response_ids = set[str](), set[str](), set[str]()
    for record in records:
        get, is_root = record.get, record["span_id"] == recording.span_id
        rollout_id = get("rollout_id") or record["trace_id"]
        # By trace too: the program may name rollouts of its own beneath the run's root span.
        is_own = record["trace_id"] == recording.trace_id or rollout_id == recording.rollout_id
        if not is_own or record["start_ns"] < since_ns:
            continue
        counts["spans"] += not is_root
        counts["outside"] += not is_root and rollout_id == recording.rollout_id
        counts["rewards"] += get("reward") is not None
        is_call = get("operation") in c.CALL_OPERATIONS
        counts["calls"] += is_call
        counts["others"] += (is_call and get("scope") != c.SCOPE) or get("name") == c.SPAN_ACTION
        if is_call and (response_id := get("response_id")):
            counts["others"] += response_id in response_ids  # of a request that was passed on
            response_ids.add(response_id)
        counts["named"] += get("agent") is not None
        rollouts.add(rollout_id)
        attributes = get("attributes") or {c.FRAMEWORK: get("framework")}
        if framework := attributes.get(c.FRAMEWORK):
            frameworks.add(framework)
        counts["exact"] += None not in (get("prompt_token_ids"), get("response_token_ids"))
        counts["ended"] += not is_root and record["end_ns"] is not None
    return {
        **counts,
        "rollouts": rollouts,
        "frameworks": frameworks if not counts["named"] else set[str](),
    }


def tell_unnamed(counts: Mapping[str, Any]) -> None:
    """Say what names the agents of the frameworks that were recorded without."""
    from lightning_otel.capture.frameworks import FRAMEWORKS

    for name in sorted(counts["frameworks"] & FRAMEWORKS.keys()):
        print_note(f"  agents without names; {name} tells them with: {FRAMEWORKS[name]}")


def tell_losses(store: "Store", since_ns: int) -> None:
    """Say which spans of a run since a time are not stored, and why."""
    from lightning_otel.store.counts import INTENDED

    for loss in store.accounting_by_process(since_ns=since_ns).values():
        for reason, count in loss.reasons():
            if reason not in INTENDED:
                print_note(f"  {count_noun(count, 'span')} not stored: {reason}")
        if loss.pending:
            print_note(
                f"  {count_noun(loss.pending, 'span')} not stored: the disk did not take them"
            )
        if loss.missing:
            print_note(f"  a process's numbers do not add up: {loss.sentence()}")
            suggest("doctor", store.name)
