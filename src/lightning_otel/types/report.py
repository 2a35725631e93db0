"""The funnel from spans to transitions, with its reasons."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal, TypeAlias

Dimension: TypeAlias = Literal["agent", "model", "version", "tool"]
"""What a store can be broken down by; a version is one of a resource."""
_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Dropped:
    """Something that did not make it into a trajectory, and why.

    Attributes:
        noun: Its kind; a ``record`` is one more of a call, a ``composition`` is missing on the call
            named, an ``advantage`` on the rollout that begins with it.
    """

    span_id: str
    trace_id: str
    noun: Literal["call", "record", "reward", "mark", "composition", "advantage"]
    reason: str


@dataclass(frozen=True, slots=True)
class Credited:
    """A credited reward: its targets and its rule.

    Attributes:
        span_id: The reward's span.
        calls: Span ids of its targets, in order.
        by: ``link``, ``parent``, ``sequence``, the rule's name, or ``custom``.
    """

    span_id: str
    trace_id: str
    calls: tuple[str, ...]
    by: str


@dataclass(frozen=True, slots=True)
class Repair:
    """A span that was moved in its tree, or left out for its ids; see docs/transitions.md."""

    span_id: str
    trace_id: str
    rule: str


@dataclass(frozen=True, slots=True)
class Report:
    """The funnel from spans to transitions, with a reason for everything left behind.

    ``calls`` is ``transitions`` plus the dropped calls; ``rewards`` is ``rewards_placed`` plus the
    dropped rewards.

    Attributes:
        calls: Requests to a model, and actions marked by hand that stand for them.
        transitions: Number of distinct transitions (a shared one counts once).
        exact: Transitions captured with the server's own token ids.
        rewards: Reward spans, damaged ones too.
        rewards_placed: Rewards credited to a transition.
        rewarded: Transitions that carry a reward.
        dropped: One entry for each unused call, reward and mark, and for each missing composed
            reward and advantage.
        repairs: One entry for each span moved in its tree, or left out for its ids.
        inexact: Number of transitions that were not captured exactly, by reason.
        notes: Number of transitions by what a trainer should know of them.
    """

    spans: int = 0
    rollouts: int = 0
    calls: int = 0
    transitions: int = 0
    exact: int = 0
    rewards: int = 0
    rewards_placed: int = 0
    rewarded: int = 0
    dropped: tuple[Dropped, ...] = ()
    repairs: tuple[Repair, ...] = ()
    inexact: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        counts |= {"dropped": self.reasons(), "repairs": len(self.repairs)}
        text = ", ".join(f"{name}={value!r}" for name, value in counts.items() if value)
        return f"Report({text})"

    def _repr_html_(self) -> str:
        from lightning_otel.types import html

        lost = self.calls - self.transitions
        rows: list[tuple[str, int, str]] = [
            ("spans", self.spans, ""),
            ("rollouts", self.rollouts, ""),
            ("calls", self.calls, f"{self.transitions:,} in a transition, {lost:,} left out"),
            ("exact", self.exact, f"of {self.transitions:,} transitions have exact token ids"),
            ("rewards", self.rewards, f"{self.rewards_placed:,} placed"),
            ("rewarded", self.rewarded, f"of {self.transitions:,} transitions have a reward"),
        ]
        repairs = Counter(repair.rule for repair in self.repairs)
        for what, reasons in (
            ("left out", self.reasons()),
            ("not exact", self.inexact),
            ("moved", repairs),
            ("note", self.notes),
        ):
            most = Counter(reasons).most_common()
            rows += [(what, number, reason) for reason, number in most[:_SHOWN]]
            if hidden := most[_SHOWN:]:
                number = sum(number for _, number in hidden)
                rows.append((what, number, f"for {len(hidden):,} further reasons"))
        cells = [(what, f"{number:,}", reason) for what, number, reason in rows]
        return html.render_table(("", "", ""), cells, title="from spans to transitions", cells=200)

    def reasons(self) -> dict[str, int]:
        """Count each reason for leaving something out, the most frequent first."""
        return dict(Counter(dropped.reason for dropped in self.dropped).most_common())

    @classmethod
    def total(cls, reports: Iterable["Report"]) -> "Report":
        """One report of disjoint parts; every rollout must lie in one of them."""
        counts = {field.name: 0 for field in fields(cls) if field.type is int}
        dropped: list[Dropped] = []
        repairs: list[Repair] = []
        inexact: Counter[str] = Counter()
        notes: Counter[str] = Counter()
        for report in reports:
            for name in counts:
                counts[name] += getattr(report, name)
            dropped += report.dropped
            repairs += report.repairs
            inexact.update(report.inexact)
            notes.update(report.notes)
        return cls(
            **counts,
            dropped=tuple(dropped),
            repairs=tuple(repairs),
            inexact=dict(inexact.most_common()),
            notes=dict(notes.most_common()),
        )
