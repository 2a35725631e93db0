"""``queue``: what waits, runs and is over; pause, resume, cancel."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, get_args

import click

from lightning_otel.cli import SuggestingGroup
from lightning_otel.cli.names import QUEUED
from lightning_otel.cli.options import COUNT, Form, format_option, store_option
from lightning_otel.cli.output import (
    count_noun,
    print_aged,
    print_json,
    print_note,
    print_rows,
    suggest,
)  # fmt: skip
from lightning_otel.dataset import Store
from lightning_otel.errors import NotFoundError, StoreMissingError
from lightning_otel.types import Mode, RolloutStatus

if TYPE_CHECKING:
    from lightning_otel.state.queue import Queue

_MODES: Final = click.Choice(get_args(Mode))
_STATUSES: Final = click.Choice(get_args(RolloutStatus))
_COLUMNS: Final = (
    "rollout_id", "status", "mode", "agent", "attempts", "reward", "created_ns", "reason",
)  # fmt: skip
_MORE: Final = ("task", "group_id")


@click.group(cls=SuggestingGroup, invoke_without_command=True)
@format_option
@store_option
@click.pass_context
def queue(ctx: click.Context, form: Form | None, store: str | None) -> None:
    """Count rollouts by status, and failed attempts by reason.

    Or run one of the commands.
    """
    if ctx.invoked_subcommand is not None:
        return
    opened = _open_queue(store)
    modes: dict[str, dict[str, int]] = {
        mode: {str(status): count for status, count in opened.counts(mode).items()}
        for mode in get_args(Mode)
    }
    reasons = [
        {"attempts": count, "status": status, "reason": reason}
        for (status, reason), count in opened.reasons().most_common()
    ]
    rows = [{"mode": mode, **counts} for mode, counts in modes.items() if any(counts.values())]
    columns = ("mode", *get_args(RolloutStatus))
    if form == "json":
        print_json({"is_paused": opened.is_paused, "modes": modes, "reasons": reasons})
        return
    print_rows(rows, columns, form=form)
    for line in reasons:
        attempts = count_noun(int(str(line["attempts"])), "attempt")
        print_note(f"{attempts} {line['status']}: {line['reason']}")
    if opened.is_paused:
        print_note("paused: no rollout is started")
    suggest("queue resume" if opened.is_paused else "queue ls", store)


@queue.command("ls")
@click.option("--status", type=_STATUSES, help="Only rollouts with this status.")
@click.option("--mode", type=_MODES, help="Only rollouts of this mode.")
@click.option("--limit", type=COUNT, default=50, show_default=True,
              help="Number of rows.")  # fmt: skip
@format_option
@store_option
def list_rollouts(
    store: str | None,
    status: RolloutStatus | None,
    mode: Mode | None,
    limit: int,
    form: Form | None,
) -> None:
    """List rollouts, the newest first."""
    rollouts = _open_queue(store).rollouts(status, mode)[::-1]
    columns = (*_COLUMNS, *_MORE)
    rows = [{name: getattr(rollout, name) for name in columns} for rollout in rollouts[:limit]]
    print_aged(rows, _COLUMNS, form, more=_MORE if form is not None else ())
    if len(rollouts) > limit:
        print_note(f"{len(rollouts) - limit} more; --limit {len(rollouts)} lists all")


@queue.command()
@store_option
def pause(store: str | None) -> None:
    """Pause the queue; running rollouts continue."""
    opened = _open_queue(store)
    opened.pause()
    counts = opened.counts()
    print_note(f"paused: {counts['queuing']} wait, {counts['running']} still run")
    suggest("queue resume", store)


@queue.command()
@store_option
def resume(store: str | None) -> None:
    """Resume the queue."""
    opened = _open_queue(store)
    opened.resume()
    print_note(f"resumed: {opened.counts()['queuing']} wait")


@queue.command()
@click.argument("rollout_ids", metavar="ROLLOUT…", type=QUEUED, nargs=-1, required=True)
@click.option("--reason", default="", help="Reason, kept with the rollout.")
@store_option
def cancel(store: str | None, rollout_ids: Sequence[str], reason: str) -> None:
    """Cancel queued or running rollouts.

    Their workers stop within seconds.
    """
    opened = _open_queue(store)
    ids = [rollout.rollout_id for rollout in opened.rollouts()]
    for rollout_id in [_find_rollout_id(ids, prefix) for prefix in rollout_ids]:
        is_new = opened.cancel(rollout_id, reason)
        state = "cancelled" if is_new else f"was over: {opened.get(rollout_id).status}"
        print_note(f"{rollout_id} {state}")


def _find_rollout_id(ids: Sequence[str], prefix: str) -> str:
    if (last := re.fullmatch(r"@last(?:~(\d{1,6}))?", prefix)) is not None:
        back = int(last[1] or 0)
        if back >= len(ids):
            raise NotFoundError(f"there is no {prefix}; see: lightning-otel queue ls")
        return ids[-1 - back]
    matches = [rollout_id for rollout_id in ids if rollout_id.startswith(prefix)]
    if prefix in matches or not matches:
        return prefix
    if len(matches) > 1:
        raise NotFoundError(f"{prefix!r} begins several ids: {', '.join(matches[:5])}; give more")
    return matches[0]


def _open_queue(store: str | None) -> "Queue":
    from lightning_otel.state import State
    from lightning_otel.state.queue import Queue

    state = State.beside(Store(store))
    if not state.is_made:
        raise StoreMissingError(
            f"nothing was ever queued in {state.name}; put rollouts in with Queue(…).put(tasks)"
        )
    return Queue(state)
