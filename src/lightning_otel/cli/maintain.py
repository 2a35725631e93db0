"""``compact``, ``redact``, ``facts``: stores merged and masked, and what they tell made anew."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

import click

from lightning_otel.cli.names import ID
from lightning_otel.cli.options import Form, find_rollout_id, format_option, store_option
from lightning_otel.cli.output import (
    count_noun,
    format_leftover,
    format_size,
    print_data,
    print_json,
    print_line,
    print_note,
    print_rows,
    progress_bar,
    suggest,
)  # fmt: skip
from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, StateError, StoreDamagedError
from lightning_otel.types.instants import age_s
from lightning_otel.types.text import parse_size

if TYPE_CHECKING:
    from lightning_otel.store.compact import CompactResult
    from lightning_otel.store.redact import RedactResult

_WAIT_S: Final = 300.0
_REASONS: Final = {
    "pattern": "matched a pattern",
    "key": "stood under a key",
    "secret": "had the shape of a secret",
    "whole": "were all that was said",
    "tokens": "spelt a text that changed: token ids and logprobs",
}
_COLUMNS: Final = (
    "redaction_id", "began_ns", "user", "reason", "rules", "spans", "rollouts", "state",
)  # fmt: skip
_FACTS: Final = """
SELECT count(*) FILTER (kind = 'attempt') AS attempts, count(*) FILTER (kind = 'step') AS steps,
  count(*) FILTER (kind = 'call') AS calls, count(*) FILTER (kind = 'reward') AS rewards
FROM facts"""
_GONE: Final = "gone       no file of the store holds it any more"
_TIMES: Final = ("began_ns", "ended_ns")


def settle_pending_feedback(opened: Store) -> None:
    """Give feedback that came before what it judges; an unreadable state is said, and no error."""
    try:
        # Without SQLAlchemy there is no state, and nothing can wait in it.
        from lightning_otel.rewards.pending import settle_pending
    except ConfigError:
        return
    try:
        settled = settle_pending(opened)
    except StateError as exc:
        print_note(f"feedback that waits was not given: {exc}")
        return
    if settled.given:
        print_note(f"{settled.given} × feedback given that had waited for what it judges")


@click.command()
@click.option("--older-than", metavar="AGE", help="Drop rollouts that ended before: 30d, 12h, 2w.")
@click.option("--max-size", metavar="SIZE", help="Drop the oldest rollouts beyond it: 10GB.")
@click.option(
    "--rollout", "rollouts", type=ID, metavar="ID", multiple=True, help="Drop this rollout."
)
@click.option(
    "--dry-run", "is_dry_run", is_flag=True, help="Print what would be done, and do nothing."
)
@click.option("--no-wait", is_flag=True,
              help="Do not wait for the text of dropped rollouts to leave the disk.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@store_option
def compact(
    older_than: str | None, max_size: str | None, rollouts: Sequence[str], is_dry_run: bool,
    no_wait: bool, as_json: bool, store: str | None,
) -> int:  # fmt: skip
    """Merge the store's files and drop old rollouts; by default nothing is dropped.

    What --rollout and --older-than drop has left the disk when this returns; it waits a minute for
    readers of the old files, and as long for a process that writes. The exit code is 1 if text of
    it is left. Exports, lakes and backups are not changed.
    """
    older_than_s = _parse(older_than, age_s, "is no age; write it as 30d, 12h, 90min, 45s or 2w")
    max_bytes = _parse(max_size, parse_size, "is no size; write it as 10GB, 500MB or 1.5GiB")
    opened = Store(store)
    if opened.layout is None:
        raise ConfigError("compact needs a store on disk; name one with --store")
    if not is_dry_run:
        settle_pending_feedback(opened)
    with progress_bar("merging", is_quiet=is_dry_run) as progress:
        result = opened.compact(
            older_than_s=older_than_s,
            max_bytes=max_bytes,
            rollout_ids=[find_rollout_id(opened, prefix) for prefix in rollouts],
            is_dry_run=is_dry_run,
            wait_s=0 if no_wait else _WAIT_S,
            progress=progress,
            waiting=None if no_wait or is_dry_run else _make_teller(),
        )
    if result.deleted and not is_dry_run:
        result = replace(result, queued=_delete_tasks(opened, result.deleted))
    code = int(result.is_text_left and not is_dry_run)
    if as_json:
        print_json(_describe_compaction(result, is_dry_run=is_dry_run))
        return code
    for line in _word_compaction(result, is_dry_run=is_dry_run):
        print_line(line)
    if is_dry_run and max_size is not None and result.segments:
        print_note("segments shrink when they are settled: less may go to make room than this says")
    suggest("stats", store)
    return code


def _delete_tasks(opened: Store, rollout_ids: Sequence[str]) -> int:
    try:
        # Without SQLAlchemy there is no queue.
        from lightning_otel.state import State
        from lightning_otel.state.rollouts import delete_rollouts
    except ConfigError:
        return 0
    state = State.beside(opened)
    is_file = state.is_made and not state.is_shared
    return delete_rollouts(state, rollout_ids) if is_file else 0


def _parse(text: str | None, read: Callable[[str], Any], fault: str) -> Any:
    value = None if text is None else read(text)
    if text is not None and value is None:
        raise ConfigError(f"{text!r} {fault}")
    return value


def _word_compaction(result: "CompactResult", *, is_dry_run: bool) -> Iterator[str]:
    from lightning_otel.store.counts import REASONS

    would = "would be " if is_dry_run else ""
    if result.segments:
        yield f"settled    {count_noun(result.segments, 'segment')} {would}settled first"
    for reason, number in result.dropped.items():
        yield (
            f"dropped    {count_noun(number.rollouts, 'rollout')} with "
            f"{count_noun(number.spans, 'span')} {would}dropped: {REASONS[reason]}"
        )
    for reason, count in result.rejected.items():
        yield f"left out   {count_noun(count, 'span')}: {REASONS[reason]}"
    if result.unlinked:
        yield f"unlinked   {count_noun(result.unlinked, 'file')} {would}dropped whole"
    if result.merged:
        yield f"merged     {count_noun(result.merged, 'file')} {would}merged into {result.made}"
    if result.left:
        yield f"left       {count_noun(result.left, 'file')}: too wide for the memory allowed"
    if result.segments_open:
        segments = count_noun(result.segments_open, "segment")
        yield f"open       {segments} {would}closed by the process that writes, with its next span"
    if not any((result.segments, result.dropped, result.unlinked, result.merged, result.left,
                result.segments_open)):  # fmt: skip
        yield "nothing to do: the files are packed, and everything is kept"
    size = format_size(result.bytes_after)
    after = "; nothing was changed" if is_dry_run else f" before, {size} after"
    yield f"on disk    {format_size(result.bytes_before)}{after}"
    if is_dry_run:
        return
    if result.queued:
        yield (
            f"queued     {count_noun(result.queued, 'task')} waits or runs in the queue, and "
            "stays; to have it gone: lightning-otel queue cancel ID, and compact again"
        )
    yield from _word_rest(result.open_spans, result.aside)
    if result.bytes_waiting:
        yield _word_waiting(result)
    if result.deleted and not result.is_text_left:
        yield _GONE


def _word_rest(spans: int, parts: int) -> Iterator[str]:
    if spans:
        yield (
            f"not yet    {count_noun(spans, 'span')} that a living process holds open, or in the "
            "file it writes; do it again when it has written on, or ended"
        )
    if parts:
        yield (
            f"unknown    {count_noun(parts, 'damaged part')} in quarantine cannot be looked "
            "into; remove them if they may hold it"
        )


def _word_waiting(result: "CompactResult | RedactResult") -> str:
    return f"waiting    {format_leftover(result.bytes_waiting, result.waiting_s)}"


def _describe_compaction(result: "CompactResult", *, is_dry_run: bool) -> Mapping[str, Any]:
    return {
        "dry_run": is_dry_run,
        "segments": result.segments,
        "files_merged": result.merged,
        "files_made": result.made,
        "files_unlinked": result.unlinked,
        "files_left": result.left,
        "dropped": {
            reason.removeprefix("dropped."): {"rollouts": count.rollouts, "spans": count.spans}
            for reason, count in result.dropped.items()
        },
        "rejected": {
            reason.removeprefix("rejected."): count for reason, count in result.rejected.items()
        },
        "bytes_before": result.bytes_before,
        "bytes_after": None if is_dry_run else result.bytes_after,
        "segments_open": result.segments_open,
        "open_spans": result.open_spans,
        "aside": result.aside,
        "queued": result.queued,
        "is_gone": bool(result.deleted) and not (is_dry_run or result.is_text_left),
        "bytes_waiting": result.bytes_waiting,
        "waiting_s": result.waiting_s,
    }


@click.command()
@click.option("--pattern", "patterns", multiple=True, metavar="REGEX",
              help="Mask every match of this regular expression.")  # fmt: skip
@click.option("--key", "keys", multiple=True, metavar="KEY",
              help="Mask the value of an attribute or field; globs work.")  # fmt: skip
@click.option("--secrets", is_flag=True, help="Mask API keys and tokens of known shapes.")
@click.option("--id", "ids", type=ID, multiple=True, metavar="ID",
              help="Only in this rollout, trace or span; alone: all of its content.")  # fmt: skip
@click.option("--reason", default="", help="Reason, kept with the record.")
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Count matches; change nothing.")
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask for confirmation.")
@click.option("--no-wait", is_flag=True,
              help="Do not wait for the old files to be deleted.")  # fmt: skip
@click.option("--list", "is_list", is_flag=True, help="List past redactions.")
@format_option
@store_option
def redact(
    is_dry_run: bool, is_sure: bool, no_wait: bool, is_list: bool, form: Form | None,
    store: str | None, **rules: Any,
) -> int:  # fmt: skip
    """Mask content in stored spans, in every file, and keep a record of it.

    A redaction cannot be undone. Spans, ids, times, counts and rewards stay; token ids that spell a
    masked text are removed. To remove whole rollouts, use compact --rollout. Exports,
    lakes and backups are not changed. The exit code is 1 if something could not be
    done yet.
    """
    opened = Store(store)
    if is_list:
        _list_redactions(opened, form)
        return 0
    if not is_dry_run and not is_sure:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ConfigError("what is redacted cannot be had back; add --yes, or try --dry-run")
        with progress_bar("reading") as progress:
            foretold = opened.redact(**rules, is_dry_run=True, progress=progress)
        for line in _word_redaction(foretold, is_dry_run=True):
            print_note(line)
        if not foretold.spans and not foretold.open_spans:
            return 0
        click.confirm("Mask it? It cannot be had back", err=True, abort=True)
    with progress_bar("reading") as progress:
        result = opened.redact(
            **rules,
            is_dry_run=is_dry_run,
            wait_s=0 if no_wait else _WAIT_S,
            progress=progress,
            waiting=None if no_wait or is_dry_run else _make_teller(),
        )
    row = {**asdict(result), "dry_run": is_dry_run}
    if not print_data(form, [row], document=row):
        for line in _word_redaction(result, is_dry_run=is_dry_run):
            print_line(line)
    if is_dry_run:
        return 0
    suggest("redact --list", store)
    return int(bool(result.open_spans or result.left or result.aside or not result.is_gone))


def _word_redaction(result: "RedactResult", *, is_dry_run: bool) -> Iterator[str]:
    would = "would be " if is_dry_run else ""
    yield (
        f"redacted   {count_noun(result.spans, 'span')} of "
        f"{count_noun(result.rollouts, 'rollout')} {would}changed"
    )
    for reason, count in sorted(result.values.items()):
        yield f"values     {count} {_REASONS.get(reason, reason)}"
    if result.files:
        yield f"files      {count_noun(result.files, 'file')} written anew"
    if result.in_ids:
        yield (
            f"in ids     {result.in_ids} × an id holds it, and stays: it tells what belongs "
            "together; to have the rollout gone: compact --rollout ID"
        )
    yield from _word_rest(result.open_spans, result.aside)
    if result.left:
        yield f"left       {count_noun(result.left, 'file')}: too wide for the memory allowed"
    if result.published:
        yield f"elsewhere  {count_noun(result.published, 'span')} may stand in a lake as they were"
    if is_dry_run:
        yield "nothing was changed"
    elif not result.is_gone:
        yield _word_waiting(result)
    elif not (result.open_spans or result.left or result.aside):
        yield _GONE


@click.command()
@click.option("--rebuild", "is_rebuilt", is_flag=True, help="Delete them, and compute all anew.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@store_option
def facts(*, is_rebuilt: bool, as_json: bool, store: str | None) -> None:
    """Compute the facts of attempts that changed: what lists, counts and curves are read from.

    They hold nothing that the spans do not tell, and may be deleted at any time.
    """
    opened = Store(store)
    if is_rebuilt:
        opened.source.delete_facts()
    (counts,) = opened.sql(_FACTS)
    if as_json:
        print_json(counts)
        return
    print_line(", ".join(count_noun(number, name[:-1]) for name, number in counts.items()))
    suggest("stats", store)


def _list_redactions(opened: Store, form: Form | None) -> None:
    from lightning_otel.store.redact import read_redactions

    if opened.layout is None:
        raise ConfigError("redact needs a store on this disk; name one with --store")
    opened.layout.require()
    with suppress(StoreDamagedError):  # the records are a file of their own
        opened.layout.read_manifest()
    redactions = read_redactions(opened.layout)
    names = list(dict.fromkeys(name for redaction in redactions for name in redaction))
    rows = []
    for row in redactions:
        rules = [f"{row['patterns']} × pattern"] if row["patterns"] else []
        rules += [*(f"key {key}" for key in row["keys"]), *["secrets"] * bool(row["secrets"])]
        state = "done" if "ended_ns" in row else "broken off: do it again"
        rows.append({**row, "rules": ", ".join(rules) or "all that was said", "state": state})
    if not print_data(form, redactions, names, times=_TIMES) and redactions:
        print_rows(rows, _COLUMNS, times=_TIMES)
    if not redactions:
        print_note("nothing was redacted here")


def _make_teller() -> Callable[[float], None]:
    is_said = False

    def tell(left_s: float) -> None:
        nonlocal is_said
        if not is_said:
            is_said = True
            print_note(
                f"waiting up to {left_s:.0f} s, for processes that write and for readers of old "
                "files (Ctrl-C leaves the rest to the next redact or compact)"
            )

    return tell
