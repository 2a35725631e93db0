"""Counts of ended spans by reason, such as ``rejected.conflict``; they add up name by name."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

ENDED: Final = "ended"
STORED: Final = "stored"
PENDING: Final = "pending"
FOREIGN: Final = "rejected.foreign"
DUPLICATE: Final = "rejected.duplicate"
CONFLICT: Final = "rejected.conflict"
DAMAGED: Final = "rejected.damaged"
INVALID_ID: Final = "rejected.invalid_id"
UNFIT: Final = "rejected.unfit"
DISK: Final = "dropped.disk"
REMOVED: Final = "dropped.removed"
FAULT: Final = "dropped.fault"
AGE: Final = "dropped.age"
SIZE: Final = "dropped.size"
ROLLOUT: Final = "dropped.rollout"
TRANSFORM: Final = "dropped.transform"
TRANSFORM_FAILED: Final = "failed.transforms"
"""Spans kept without their content, because a transform raised."""
SLOW_WRITES: Final = "slow.writes"
"""Writes that hung, after which the disk was left alone for a while."""
SLOW_HELD: Final = "slow.held"
"""Spans that waited in memory meanwhile."""

REASONS: Final[Mapping[str, str]] = {
    FOREIGN: "their start is not this process's: begun before a fork, or an id used twice",
    DUPLICATE: "the same span was kept already",
    CONFLICT: "their id was taken by a different span",
    DAMAGED: "their line is damaged",
    INVALID_ID: "invalid trace or span id",
    UNFIT: "what the receiver was sent is no span that can be kept",
    DISK: "the disk refused them",
    REMOVED: "somebody removed their segment",
    FAULT: "a fault of lightning-otel",
    TRANSFORM: "a transform dropped them",
    AGE: "older than is kept",
    SIZE: "the oldest beyond the size that is kept",
    ROLLOUT: "their rollout was taken out",
}
INTENDED: Final = frozenset(REASONS[name] for name in (TRANSFORM, AGE, SIZE, ROLLOUT))
"""Reasons that somebody asked for: no loss."""
_REJECTED: Final = "rejected."
_DROPPED: Final = "dropped."


@dataclass(frozen=True, slots=True)
class Accounting:
    """The accounts of all ended spans: ``ended = stored + pending + rejected + dropped``.

    Attributes:
        ended: Spans handed to a writer, as writers counted; of a killed process, as segments say.
        stored: Spans that can be read.
        pending: Spans in memory that wait for the disk; known of this process only.
        rejected: Spans that could not be kept for what they are, by reason.
        dropped: Spans that were lost on their way or taken out of the store, by reason.
        slow_writes: How often the disk hung, and was left alone for a while.
        slow_held: Spans that waited in memory meanwhile.
    """

    ended: int
    stored: int
    pending: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    slow_writes: int = 0
    slow_held: int = 0

    @property
    def missing(self) -> int:
        """Spans that ended and are nowhere; 0 where the store keeps its promise."""
        losses = sum(self.rejected.values()) + sum(self.dropped.values())
        return self.ended - self.stored - self.pending - losses

    @property
    def is_balanced(self) -> bool:
        """True if every ended span is accounted for, and no other."""
        return self.missing == 0

    def sentence(self) -> str:
        """The sum in words: ``12 ended = 11 stored + 1 rejected``."""
        parts = {
            "pending": self.pending,
            "rejected": sum(self.rejected.values()),
            "dropped": sum(self.dropped.values()),
            "missing": self.missing,
        }
        more = [f"{count} {word}" for word, count in parts.items() if count]
        return " + ".join([f"{self.ended} ended = {self.stored} stored", *more])

    def reasons(self) -> list[tuple[str, int]]:
        """List the reasons for which spans are not stored, in words, with their counts."""
        return [
            (REASONS.get(prefix + reason, reason), count)
            for prefix, counts in ((_REJECTED, self.rejected), (_DROPPED, self.dropped))
            for reason, count in counts.items()
        ]


def make_accounting(counts: Mapping[str, int], *, stored: int) -> Accounting:
    """Return the accounting that counts amount to, with the number of spans that can be read."""
    rejected, dropped = (
        {
            name.removeprefix(prefix): n
            for name, n in counts.items()
            if n and name.startswith(prefix)
        }
        for prefix in (_REJECTED, _DROPPED)
    )
    return Accounting(
        counts.get(ENDED, 0),
        stored,
        counts.get(PENDING, 0),
        rejected,
        dropped,
        counts.get(SLOW_WRITES, 0),
        counts.get(SLOW_HELD, 0),
    )


def sum_counts(*counts: Mapping[str, int]) -> dict[str, int]:
    """The sums, name by name, without those that are 0."""
    totals: Counter[str] = Counter()
    for part in counts:
        totals.update(part)
    return {name: count for name, count in sorted(totals.items()) if count}


def count_unstored(counts: Mapping[str, int]) -> int:
    """Count the rejected and dropped spans."""
    return sum(count for name, count in counts.items() if name.startswith((_REJECTED, _DROPPED)))
