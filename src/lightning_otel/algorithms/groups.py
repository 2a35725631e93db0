"""Rollouts to learn from, in the groups that they are compared in."""

import hashlib
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_otel import conventions as c
from lightning_otel.errors import StoreMissingError
from lightning_otel.store.source import INDEX_COLUMNS
from lightning_otel.store.sql import ROLLOUT, attribute

if TYPE_CHECKING:
    from lightning_otel.adapter.selection import Selection
    from lightning_otel.dataset import Store
    from lightning_otel.state.queue import Queue
    from lightning_otel.types import Rollout

BROKE_OFF: Final = "broke off: its process died in it"
NO_REWARD: Final = "no reward"
NO_DIFFERENCE: Final = "no difference: all rollouts of its group earned the same"

_RECORDED: Final = f"""
SELECT rollout_id, attempt_id, status, reward, end_ns, task, mode FROM rollouts
LEFT JOIN (
  SELECT {ROLLOUT} AS rollout_id, any_value({attribute(c.MODE)}) AS mode FROM spans
  WHERE contains(attributes::VARCHAR, '{c.MODE}') GROUP BY 1
) USING (rollout_id)
WHERE (?::VARCHAR[] IS NULL OR list_contains(?::VARCHAR[], rollout_id))
  AND start_ns >= ? AND start_ns < ?
ORDER BY start_ns, rollout_id"""
_LATEST_NS: Final = (1 << 63) - 1


class Member(NamedTuple):
    """A rollout as far as it matters for learning.

    Attributes:
        rollout_id: Its id.
        attempt_id: The attempt that counts.
        reward: The rollout's reward; None if it has none.
        is_over: Whether nothing more is to come but rewards.
        ended_ns: When it ended; None if it is not over.
        lost: Why it never will be of use; empty if it may.
    """

    rollout_id: str
    attempt_id: str
    reward: float | None
    is_over: bool
    ended_ns: int | None
    lost: str = ""


class Group(NamedTuple):
    """Rollouts that are compared with each other; of one alone, nothing is compared.

    Attributes:
        group_id: Its id.
        members: Its rollouts, the oldest first.
        is_closed: Whether no others join it.
    """

    group_id: str
    members: tuple[Member, ...]
    is_closed: bool


class Recorded(NamedTuple):
    """A rollout as a store has it: of its attempts the one that counts, its task and its mode."""

    member: Member
    task: str
    mode: str | None


def recorded(store: "Store", wanted: "Selection") -> dict[str, Recorded]:
    """The selected rollouts of a store, the oldest first.

    Args:
        store: The store; one that is not there yet has none.
        wanted: Which rollouts.
    """
    ids = None if wanted.rollout_ids is None else list(wanted.rollout_ids)
    since_ns, until_ns = wanted.since_ns or 0, wanted.until_ns or _LATEST_NS
    found: dict[str, Recorded] = {}
    try:
        con = store.source.connect(("spans", "rollouts"), (*INDEX_COLUMNS, "attributes"))
    except StoreMissingError:
        return found
    given = [ids, ids, since_ns, until_ns]
    rows = con.execute(_RECORDED, given).fetchall()
    for rollout_id, attempt_id, status, reward, end_ns, task, mode in rows:
        # Of several attempts the last one counts.
        is_over = status != "running"
        lost = BROKE_OFF if status == "incomplete" and reward is None else ""
        ended_ns = end_ns if is_over else None
        member = Member(rollout_id, attempt_id, reward, is_over, ended_ns, lost)
        found[rollout_id] = Recorded(member, task or "", mode)
    return found


def queued(rollout: "Rollout") -> Member:
    """A rollout of the queue, as the queue knows it."""
    is_over = rollout.status in ("succeeded", "failed", "cancelled")
    lost = ""
    if rollout.status in ("failed", "cancelled"):
        lost = f"{rollout.status}: {rollout.reason}" if rollout.reason else rollout.status
    return Member(
        rollout.rollout_id,
        str(max(rollout.attempts, 1)),
        rollout.reward,
        is_over,
        rollout.ended_ns,
        lost,
    )


def find_groups(
    store: "Store",
    queue: "Queue",
    wanted: "Selection",
    *,
    is_grouped: bool,
    without: Collection[str],
) -> list[Group]:
    """The groups of everything a store holds and a queue knows, the oldest first.

    A rollout of the queue is in the group it was put into; another one in that of its task.

    Args:
        store: Where rollouts are recorded.
        queue: Where some of them come from.
        wanted: Which rollouts; without a mode, all but those for validation and testing.
        is_grouped: Whether rollouts are compared; if not, each is a group.
        without: Rollouts that are not to be looked at, such as those trained on.
    """
    here = recorded(store, wanted)
    known = {rollout.rollout_id: rollout for rollout in queue.rollouts()}
    groups: dict[str, tuple[bool, list[Member]]] = {}
    # Those that wait or were cancelled have no spans, and still belong to their groups.
    for rollout_id in dict.fromkeys([*here, *known] if wanted.rollout_ids is None else here):
        if rollout_id in without:
            continue
        rollout, seen = known.get(rollout_id), here.get(rollout_id)
        task, mode = (seen.task, seen.mode) if seen is not None else ("", None)
        if not _is_for(rollout.mode if rollout is not None else mode, wanted.mode):
            continue
        member = seen.member if seen is not None else None
        if rollout is not None:
            member = with_spans(queued(rollout), member)
        if member is None:
            continue
        group_id = _group_id(rollout, rollout_id, task, is_grouped=is_grouped)
        groups.setdefault(group_id, (rollout is not None, []))[1].append(member)
    return [Group(group_id, tuple(held), closed) for group_id, (closed, held) in groups.items()]


def with_spans(member: Member, recorded: Member | None) -> Member:
    """Return a queued rollout with the reward that the store has by now.

    Args:
        member: As the queue knows it.
        recorded: As the store does; None if it has no spans.
    """
    if recorded is None or recorded.reward is None or recorded.attempt_id != member.attempt_id:
        return member
    return member._replace(reward=recorded.reward)


def _is_for(mode: str | None, wanted: str | None) -> bool:
    return mode in (None, "train") if wanted is None else mode == wanted


def _group_id(rollout: "Rollout | None", rollout_id: str, task: str, *, is_grouped: bool) -> str:
    if not is_grouped:
        return rollout_id
    if rollout is not None:
        return rollout.group_id or rollout_id
    return f"task-{hashlib.sha256(task.encode()).hexdigest()[:16]}" if task else rollout_id


def ready(
    groups: Iterable[Group], *, size: int, needs_reward: bool, before_ns: int
) -> list[tuple[Group, tuple[Member, ...]]]:
    """The groups that can be learnt from, each with those of its rollouts that can.

    A group is whole when every rollout of it is over and has a reward, or never will have one.

    Args:
        groups: The groups.
        size: How many rollouts a group must have.
        needs_reward: Whether only those with a reward count.
        before_ns: A rollout that ended before this has waited for its reward for long enough.
    """
    found = []
    for group in groups:
        usable = tuple(
            each
            for each in group.members
            if each.is_over and not each.lost and (each.reward is not None or not needs_reward)
        )
        waits = any(
            _is_waiting(each, needs_reward, before_ns)
            for each in group.members
            # Of a task that comes again and again, one rollout or another always runs.
            if group.is_closed or each.is_over
        )
        if usable and len(usable) >= size and not waits:
            found.append((group, usable))
    return found


def _is_waiting(member: Member, needs_reward: bool, before_ns: int) -> bool:  # noqa: FBT001
    if member.lost:
        return False
    if not member.is_over:
        return True
    return needs_reward and member.reward is None and (member.ended_ns or 0) >= before_ns


def why_left(member: Member, *, needs_reward: bool) -> str:
    """The reason why a rollout of a group is in no batch."""
    if member.lost:
        return member.lost.partition(":")[0]
    if member.reward is None and needs_reward:
        return f"{NO_REWARD} in time"
    return "left alone: the others of its group cannot be used"
