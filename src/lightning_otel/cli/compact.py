"""``compact``: files packed as tightly as they can be, and what is not to be kept taken out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from lightning_otel import config
from lightning_otel.cli.options import Id, rollout_id_of
from lightning_otel.cli.output import (
    count_noun,
    print_json,
    progress_bar,
    size,
    store_option,
    suggest,
    talk,
)
from lightning_otel.cli.waiting import give_waiting
from lightning_otel.errors import ConfigError
from lightning_otel.instants import age_s

if TYPE_CHECKING:
    from lightning_otel.store.compact import Compacted


@click.command()
@click.option("--older-than", metavar="AGE", help="Drop rollouts that ended before: 30d, 12h, 2w.")
@click.option("--max-size", metavar="SIZE", help="Drop the oldest rollouts beyond it: 10GB.")
@click.option(
    "--rollout", "rollouts", type=Id(), metavar="ID", multiple=True, help="Drop this rollout."
)
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Only say what would happen.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@store_option
def compact(
    older_than: str | None,
    max_size: str | None,
    rollouts: Sequence[str],
    is_dry_run: bool,
    as_json: bool,
    store: str | None,
) -> None:
    """Merge the store's files and drop what is not to be kept; by default everything is kept."""
    from lightning_otel.dataset import Store

    opened = Store(store)
    if opened.layout is None:
        raise ConfigError("compact needs a store on disk; name one with --store")
    if not is_dry_run:
        give_waiting(opened)
    with progress_bar("merging", is_quiet=is_dry_run) as progress:
        done = opened.compact(
            older_than_s=_parse_age(older_than),
            max_bytes=_parse_size(max_size),
            rollout_ids=[rollout_id_of(opened, each) for each in rollouts],
            is_dry_run=is_dry_run,
            progress=progress,
        )
    if as_json:
        print_json(_make_document(done, is_dry_run=is_dry_run))
        return
    for line in _word_results(done, is_dry_run=is_dry_run):
        click.echo(line)
    if is_dry_run and max_size is not None and done.segments:
        talk("segments shrink when they are settled: less may go to make room than this says")
    suggest("stats", store)


def _parse_age(age: str | None) -> float | None:
    if age is None:
        return None
    found = age_s(age)
    if found is None:
        raise ConfigError(f"{age!r} is no age; write it as 30d, 12h, 90min, 45s or 2w")
    return found


def _parse_size(text: str | None) -> int | None:
    if text is None:
        return None
    found = config.size_of(text)
    if found is None:
        raise ConfigError(f"{text!r} is no size; write it as 10GB, 500MB or 1.5GiB")
    return found


def _word_results(done: "Compacted", *, is_dry_run: bool) -> Iterator[str]:
    from lightning_otel.store.counts import REASONS

    would = "would be " if is_dry_run else ""
    if done.segments:
        yield f"settled    {count_noun(done.segments, 'segment')} {would}settled first"
    for reason, each in done.dropped.items():
        yield (
            f"dropped    {count_noun(each.rollouts, 'rollout')} with "
            f"{count_noun(each.spans, 'span')} {would}dropped: {REASONS[reason]}"
        )
    for reason, count in done.rejected.items():
        yield f"left out   {count_noun(count, 'span')}: {REASONS[reason]}"
    if done.unlinked:
        yield f"unlinked   {count_noun(done.unlinked, 'file')} {would}dropped whole"
    if done.merged:
        yield f"merged     {count_noun(done.merged, 'file')} {would}merged into {done.made}"
    if done.left:
        yield f"left       {count_noun(done.left, 'file')}: too wide for the memory allowed"
    if not any((done.segments, done.dropped, done.unlinked, done.merged, done.left)):
        yield "nothing to do: the files are packed, and everything is kept"
    if is_dry_run:
        yield f"on disk    {size(done.bytes_before)}; nothing was changed"
    else:
        yield f"on disk    {size(done.bytes_before)} before, {size(done.bytes_after)} after"


def _make_document(done: "Compacted", *, is_dry_run: bool) -> Mapping[str, Any]:
    return {
        "dry_run": is_dry_run,
        "segments": done.segments,
        "files_merged": done.merged,
        "files_made": done.made,
        "files_unlinked": done.unlinked,
        "files_left": done.left,
        "dropped": {
            reason.removeprefix("dropped."): {"rollouts": each.rollouts, "spans": each.spans}
            for reason, each in done.dropped.items()
        },
        "rejected": {
            reason.removeprefix("rejected."): count for reason, count in done.rejected.items()
        },
        "bytes_before": done.bytes_before,
        "bytes_after": None if is_dry_run else done.bytes_after,
    }
