"""Analysis of one rollout: steps, rewards, tokens, time and cost, and what stands out."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_otel.errors import ConfigError
from lightning_otel.messages import plain_text
from lightning_otel.store.prices import Price, Prices, add_costs, read_prices, read_usage
from lightning_otel.types import Transition
from lightning_otel.types import conventions as c
from lightning_otel.types.text import format_duration, format_number, one_line
from lightning_otel.types.transitions import distinct
from lightning_otel.views.analysis.findings import Finding, list_findings
from lightning_otel.views.trace import Row, SpanKey, Trace, make_trace

if TYPE_CHECKING:
    from lightning_otel.adapter.advantages import Advantage
    from lightning_otel.dataset import Store
    from lightning_otel.types import Estimator

__all__ = [
    "Analysis",
    "CallTotals",
    "CreditedReward",
    "Finding",
    "Step",
    "analyze",
    "analyze_episode",
]
_SHORT: Final = 200
_COPIED: Final = (
    "attempt_id", "agent", "step", "reward", "model", "capture", "inexact", "finish_reason",
    "span_id", "trace_id",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One step of it.

    Attributes:
        label: A short name, such as ``planner #3``.
        observation: The last that the agent saw before it acted, in short.
        reward: Its credit; None without any.
        credit: The value and the rule of each reward in that.
        advantage: Its rollout against its group; None if not asked for, or none.
        duration_s: Seconds that the model took; None if not recorded.
        cost: None where no price or no count of tokens is known.
    """

    label: str
    attempt_id: str
    agent: str
    branch: int
    step: int
    observation: str
    action: str
    reward: float | None
    credit: tuple[str, ...]
    advantage: float | None
    model: str | None
    capture: str
    inexact: str
    input_tokens: int | None
    output_tokens: int | None
    duration_s: float | None
    cost: float | None
    finish_reason: str | None
    span_id: str
    trace_id: str


@dataclass(frozen=True, slots=True)
class CreditedReward:
    """A reward as recorded, and the steps a rule credited it to, or why to none."""

    name: str
    value: Any
    steps: tuple[str, ...]
    by: str
    left_out: str
    span_id: str

    def __str__(self) -> str:
        where = f"→ {', '.join(self.steps)} by {self.by}" if self.steps else self.left_out
        return " ".join(filter(None, (self.name, _word_number(self.value), where)))


class CallTotals(NamedTuple):
    """Sums over the calls to models, those that are in no step as well.

    Attributes:
        calls: Their number; what two instrumentors recorded counts once.
        uncounted: Calls without a count of tokens.
        duration_s: From the first start to the last end of anything but rewards, seconds.
        model_s: Seconds of the calls, each by itself.
        cost: Of those with a price; None if none has one.
        unpriced: Calls without a price or a count of tokens: they are not in ``cost``.
    """

    calls: int
    input_tokens: int
    output_tokens: int
    uncounted: int
    duration_s: float
    model_s: float
    cost: float | None
    unpriced: int


@dataclass(frozen=True, slots=True)
class Analysis:
    """Steps, rewards, totals and findings of one rollout.

    Attributes:
        task: Its task as recorded; empty if it was not.
        steps: In the order of its trajectories; a step that several share stands once.
        findings: What stands out, errors first.
    """

    rollout_id: str
    task: str
    steps: tuple[Step, ...]
    rewards: tuple[CreditedReward, ...]
    totals: CallTotals
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        """Return all of it for programs."""
        return {
            "rollout_id": self.rollout_id,
            "task": self.task,
            **self.totals._asdict(),
            "steps": list(map(asdict, self.steps)),
            "rewards": list(map(asdict, self.rewards)),
            "findings": [finding._asdict() for finding in self.findings],
        }

    def __str__(self) -> str:
        lines = [self.headline()]
        for step in self.steps:
            reward = "" if step.reward is None else f" · reward {format_number(step.reward, 6)}"
            advantage = "" if step.advantage is None else f" · advantage {step.advantage:.3g}"
            line = f"{step.observation} → {step.action}"
            lines.append(f"{one_line(step.label, 60)} {line}{reward}{advantage}")
        lines += [f"reward {one_line(reward, _SHORT)}" for reward in self.rewards]
        return "\n".join([*lines, *(f"! {finding.text}" for finding in self.findings)])

    def headline(self) -> str:
        """Return its name and totals in one line."""
        totals = self.totals
        words = [
            one_line(self.rollout_id, 80),
            f"{len(self.steps)} step{'' if len(self.steps) == 1 else 's'}",
            f"{totals.calls} call{'' if totals.calls == 1 else 's'}",
            f"{totals.input_tokens}→{totals.output_tokens} tokens",
            f"{format_duration(totals.duration_s)}, "
            f"{format_duration(totals.model_s)} of it in models",
        ]
        return " · ".join(words + ([] if totals.cost is None else [f"cost {totals.cost:.6g}"]))


def analyze_episode(
    episode_id: str = "@last",
    store: "Store | str | None" = None,
    *,
    prices: Mapping[str, Sequence[float]] | None = None,
    advantage: "Advantage | Estimator | None" = None,
) -> Analysis:
    """Analyze one rollout: its steps, rewards and credit, and what stands out.

    Args:
        episode_id: The beginning of the id of a rollout, or of a trace, span or response in it;
            ``@last`` is the newest.
        store: By default the one that is used where none is named.
        prices: Prices as :func:`analyze` takes them, above those of ``LIGHTNING_OTEL_PRICES`` and
            those that are known here.
        advantage: Also how much better it did than others of its task, such as ``grpo``.

    Raises:
        NotFoundError: Nothing has that id, or several do.
        ConfigError: A price or the advantage cannot be used.
        StoreMissingError: There is no store.
    """
    from lightning_otel.dataset import Store
    from lightning_otel.store.selection import list_incomplete
    from lightning_otel.store.source import at_moment

    # Before anything is read.
    table = Prices((*_check_prices(prices).rows, *read_prices().rows))
    opened = at_moment(store if isinstance(store, Store) else Store(store))
    rollout_id = opened.rollout_of(*opened.find(episode_id))
    spans = opened.spans(rollout_id=rollout_id).rows()
    trace = make_trace(spans, incomplete=list_incomplete(opened.source))
    if advantage is None:
        return analyze(trace, prices=table)
    steps = opened.transitions(rollout_id=rollout_id, advantage=advantage, bodies=False)
    advantages = {(step.trace_id, step.span_id): step.advantage for step in steps}
    result = analyze(trace, prices=table, advantages=advantages)
    keys = {(span.trace_id, span.span_id) for span in spans}
    lacking = dict.fromkeys(
        drop.reason
        for drop in steps.report().dropped
        if drop.noun == "advantage" and (drop.trace_id, drop.span_id) in keys
    )
    more = (Finding("no_advantage", reason) for reason in lacking)
    return replace(result, findings=(*result.findings, *more))


def analyze(
    trace: Trace,
    *,
    prices: Prices | Mapping[str, Sequence[float]] | None = None,
    advantages: Mapping[SpanKey, float | None] | None = None,
) -> Analysis:
    """Analyze a rollout by its trace, each row with its whole span.

    Args:
        trace: Its rows.
        prices: A table of prices; or those of a million tokens in and of a million out, by name or
            glob of a model. The first that fits counts.
        advantages: By trace and span id of a step.

    Raises:
        ConfigError: A price is negative, or no pair of numbers.
    """
    priced = _check_prices(prices)
    places: dict[SpanKey, int] = {}
    credit: dict[int, list[str]] = {}
    rewards = []
    for position, row in enumerate(trace.rows):
        get = row.span.attributes.get
        value, name = get(c.REWARD_VALUE), str(get(c.REWARD_NAME) or c.PRIMARY_REWARD)
        if row.step is not None:
            places[row.step.trace_id, row.step.span_id] = position
        for target in row.credited:
            text = f"{value:g}" if isinstance(value, (int, float)) else one_line(value, 40)
            credit.setdefault(target, []).append(f"{text} by {row.by}")
        if row.kind == "reward" and row.name != "retraction":
            name = "" if name == c.PRIMARY_REWARD else name
            targets = tuple(trace.rows[target].label for target in row.credited)
            rewards.append(
                CreditedReward(name, value, targets, row.by, row.left_out, row.span.span_id)
            )
    steps: dict[SpanKey, Step] = {}
    for transition, _ in distinct(trace.trajectories):
        span = (transition.trace_id, transition.span_id)
        if (at := places.get(span)) is not None:
            steps[span] = _make_step(
                trace.rows[at], transition, priced, label=trace.rows[at].label,
                credit=tuple(credit.get(at, ())), advantage=(advantages or {}).get(span),
            )  # fmt: skip
    totals = sum_calls(trace, priced)
    rollout_id = trace.rows[0].span.rollout_id if trace.rows else ""
    tasks = (row.span.attributes.get(c.TASK) for row in trace.rows)
    task = one_line(str(next((candidate for candidate in tasks if candidate is not None), "")), 200)
    findings = tuple(list_findings(trace, steps, rewards, totals))
    return Analysis(rollout_id, task, tuple(steps.values()), tuple(rewards), totals, findings)


def _check_prices(prices: Prices | Mapping[str, Sequence[float]] | None) -> Prices:
    if isinstance(prices, Prices):
        return prices
    rows: list[tuple[str, Price]] = []
    for pattern, pair in (prices or {}).items():
        try:
            price_in, price_out = map(float, pair)
            rows.append((pattern, Price(price_in, price_out)))
        except (TypeError, ValueError, ConfigError) as exc:
            raise ConfigError(
                f"the price of {pattern!r} is {pair!r}; give two numbers from 0 on, of a million "
                "tokens in and out"
            ) from exc
    return Prices(rows)


def _make_step(row: Row, transition: Transition, prices: Prices, **more: Any) -> Step:
    models, tokens = read_usage(row.span, row.step)
    return Step(
        branch=row.branch,
        observation=one_line(plain_text(transition.observation[-1:]), _SHORT),
        action=one_line(plain_text(transition.action[:1]), _SHORT),
        input_tokens=tokens.input,
        output_tokens=tokens.output,
        duration_s=_duration_s(row) if row.kind == "call" else None,
        cost=prices.cost_of(models, tokens),
        **{name: getattr(transition, name) for name in _COPIED},
        **more,
    )


def sum_calls(trace: Trace, prices: Prices) -> CallTotals:
    """Sum up the calls of a trace."""
    calls = [row for row in trace.rows if row.is_call]
    usages = [read_usage(row.span, row.step) for row in calls]
    tokens = [(usage.input, usage.output) for _, usage in usages]
    costs = [prices.cost_of(*usage) for usage in usages]
    work = [row.span for row in trace.rows if row.kind != "reward"]
    ends = [max(span.start_ns, span.end_ns or 0) for span in work]
    started = min((span.start_ns for span in work), default=0)
    return CallTotals(
        calls=len(calls),
        input_tokens=sum(count or 0 for count, _ in tokens),
        output_tokens=sum(count or 0 for _, count in tokens),
        uncounted=tokens.count((None, None)),
        duration_s=(max(ends, default=0) - started) / 1e9,
        model_s=sum(_duration_s(row) or 0.0 for row in calls),
        cost=add_costs(costs),
        unpriced=costs.count(None) if prices.rows else 0,
    )


def _duration_s(row: Row) -> float | None:
    return None if row.duration_ns is None else row.duration_ns / 1e9


def _word_number(value: object) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:g}" if is_number else str(value)
