"""Queries of a store for transitions: how they are made, and which are wanted.

Another adapter is an object or function, or the name of an entry point of the group
``lightning_otel.adapters``. It is somebody else's code: whatever it raises comes out with its name.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    NamedTuple,
    Protocol,
    TypeAlias,
    cast,
    runtime_checkable,
)

from lightning_otel.adapter import Adaptation, Advantage, TripletAdapter
from lightning_otel.adapter.advantages import AttemptOutcome
from lightning_otel.adapter.attempts import AttemptKey
from lightning_otel.adapter.linear import count_steps
from lightning_otel.adapter.rewards import add_decimals
from lightning_otel.adapter.selection import SelectionKeywords, StepSelection
from lightning_otel.adapter.triplet import Matcher
from lightning_otel.dataset.registry import Registry
from lightning_otel.dataset.selections import read_version
from lightning_otel.errors import AdapterError, ConfigError
from lightning_otel.types import (
    Compose,
    Credit,
    CreditRule,
    Estimator,
    Report,
    Span,
    Trajectory,
    Transition,
)
from lightning_otel.types.transitions import (
    TRANSITION_BODIES,
    JudgedTrajectory,
    distinct_steps,
)
from lightning_otel.types.values import check_names, check_types

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

_REGISTRY: Final = Registry("adapter", "lightning_otel.adapters", error=AdapterError)

Incomplete: TypeAlias = Collection[tuple[str, str]]
"""Rollout and attempt ids of attempts that broke off."""


@runtime_checkable
class ReportingAdapter(Protocol):
    """An adapter that says what became of every span, as :class:`TripletAdapter` does."""

    def explain(self, spans: Iterable[Span], *, incomplete: Incomplete = ()) -> Adaptation:
        """Trajectories, and the funnel that led to them; of what broke off, none."""


@runtime_checkable
class PlainAdapter(Protocol):
    """An adapter that only makes trajectories."""

    def adapt(self, spans: Iterable[Span]) -> Iterable[Trajectory]:
        """The trajectories of whole rollouts."""


Adapter: TypeAlias = (
    ReportingAdapter | PlainAdapter | Callable[[Iterable[Span]], Iterable[Trajectory]]
)
"""What turns the spans of whole rollouts into trajectories."""


def resolve_adapter(choice: Adapter | str | None, ours: TripletAdapter) -> ReportingAdapter:
    """Return the adapter that an object, a function or a registered name stands for, else ours."""
    if choice is None:
        return ours
    adapter: Any = _REGISTRY.load(choice) if isinstance(choice, str) else choice
    name = choice if isinstance(choice, str) else _name_of(choice)
    if adapter is TripletAdapter:
        return ours
    if ours != TripletAdapter():
        raise ConfigError(
            f"credit and the like mean nothing to the adapter {name}; "
            "make it with options of its own"
        )
    if isinstance(adapter, type):
        with _naming_errors(name, "cannot be made"):
            adapter = adapter()
    if isinstance(adapter, TripletAdapter) and type(adapter).explain is TripletAdapter.explain:
        if type(adapter).adapt is TripletAdapter.adapt:
            return adapter
        adapter = adapter.adapt  # the inherited ``explain`` does not know of it
    if not isinstance(adapter, (ReportingAdapter, PlainAdapter)) and not callable(adapter):
        raise AdapterError(
            f"the adapter {name} is a {type(adapter).__name__}; it needs a method "
            "adapt(spans) -> trajectories, or to be a function that does that"
        )
    return _ForeignAdapter(name, adapter)


def _name_of(choice: object) -> str:
    kind = choice if isinstance(choice, type) or callable(choice) else type(choice)
    return str(getattr(kind, "__qualname__", None) or type(choice).__qualname__)


@contextmanager
def _naming_errors(name: str, fault: str) -> Iterator[None]:
    try:
        yield
    except Exception as exc:  # somebody else's code may raise anything
        raise AdapterError(f"the adapter {name} {fault}: {type(exc).__name__}: {exc}") from exc


class _ForeignAdapter:
    """An adapter of one's own, whose errors name it."""

    def __init__(self, name: str, adapter: Any) -> None:
        self._name = name
        self._adapter = adapter

    def explain(self, spans: Iterable[Span], *, incomplete: Incomplete = ()) -> Adaptation:
        """Adapt spans, with the adapter's own report, or what can be counted."""
        if isinstance(self._adapter, ReportingAdapter):
            with _naming_errors(self._name, "failed"):
                answer: Any = self._adapter.explain(spans, incomplete=incomplete)
            if not (isinstance(answer, tuple) and isinstance((*answer, 0, 0)[1], Report)):
                raise AdapterError(
                    f"the adapter {self._name} gave {type(answer).__name__} from explain(); "
                    "it must give an Adaptation: trajectories and a report"
                )
            return _sum_rewards(self._check_trajectories(answer[0]), answer[1])
        all_spans = list(spans)
        whole = [span for span in all_spans if (span.rollout_id, span.attempt_id) not in incomplete]
        adapt = self._adapter.adapt if isinstance(self._adapter, PlainAdapter) else self._adapter
        with _naming_errors(self._name, "failed"):
            result = adapt(whole)
        paths = self._check_trajectories(result)
        steps = distinct_steps(paths)
        report = count_steps(
            steps,
            spans=len(all_spans),
            rollouts=len({span.rollout_id for span in all_spans}),
            calls=len(steps),
        )
        return _sum_rewards(paths, report)

    def _check_trajectories(self, result: Iterable[Any]) -> list[Trajectory]:
        with _naming_errors(self._name, "failed"):
            paths = list(result)
        for path in paths:
            if not isinstance(path, Trajectory):
                raise AdapterError(
                    f"the adapter {self._name} gave a {type(path).__name__} among its trajectories"
                )
        return paths


def _sum_rewards(paths: Sequence[Trajectory], report: Report) -> Adaptation:
    attempts: dict[tuple[str, str], list[Trajectory]] = {}
    for path in paths:
        attempts.setdefault((path.rollout_id, path.attempt_id), []).append(path)
    outcomes = {
        key: AttemptOutcome(AttemptKey(*key), "", 0, {}, _sum_attempt(group))
        for key, group in attempts.items()
    }
    whole = [
        _state_reward(path, outcomes[key].value, _list_rewards(attempts[key]))
        for path in paths
        for key in [(path.rollout_id, path.attempt_id)]
    ]
    return Adaptation(whole, report, outcomes=tuple(outcomes.values()))


def _state_reward(path: Trajectory, reward: float | None, steps: Sequence[float]) -> Trajectory:
    """Return a trajectory with its attempt's reward; whether that was judged as a whole."""
    is_judged = reward is not None and not math.isclose(reward, math.fsum(steps))
    values = {field.name: getattr(path, field.name) for field in fields(path)}
    return (JudgedTrajectory if is_judged else Trajectory)(**{**values, "reward": reward})


def _list_rewards(paths: Iterable[Trajectory]) -> list[float]:
    """Return the rewards of the steps of some trajectories, each step's once."""
    return [step.reward for step in _steps_by_place(paths).values() if step.reward is not None]


def _steps_by_place(paths: Iterable[Trajectory]) -> dict[tuple[str, str, int], Transition]:
    return {
        (step.trace_id, step.span_id, step.step): step
        for path in paths
        for step in path.transitions
    }


def _sum_attempt(paths: Sequence[Trajectory]) -> float | None:
    """Return what trajectories of an attempt state that it earned, else the sum over its steps.

    The statement of our own adapter is out of date where somebody changed the steps' rewards since.
    """
    places, values = _steps_by_place(paths), _list_rewards(paths)
    credited = math.fsum(next(iter(step.rewards.values()), 0.0) for step in places.values())
    is_changed = not math.isclose(math.fsum(values), credited)
    for path in paths:
        if path.reward is not None and not (is_changed and math.isclose(path.reward, credited)):
            return path.reward
    return add_decimals(values) if values else None


class QueryKeywords(SelectionKeywords, total=False):
    """The options of transitions; :class:`TripletAdapter` says more of those that it has."""

    credit: Annotated[Credit | CreditRule, "Where a reward without a link goes."]
    gamma: Annotated[float, "Discount a step, for credit discounted."]
    reward: Annotated[str | None, "The name of the reward that counts.", "the first of a step"]
    compose: Annotated[Compose, "What makes the reward of several named ones."]
    advantage: Annotated[
        Advantage | Estimator | None, "Estimator of advantages; by default none.", "none"
    ]
    is_call: Annotated[Matcher | None, "Says of a span whether it is a call of a model."]
    is_reward: Annotated[Matcher | None, "Says of a span whether it is a reward."]
    adapter: Annotated[Adapter | str | None, "Another adapter; see docs/transitions.md."]
    include_incomplete: Annotated[bool, "Include rollouts whose process died.", "left out"]
    selection: Annotated[
        str | None, "The steps and rewards of this saved selection alone.", "NAME or NAME@2"
    ]


_OURS: Final = tuple(field.name for field in fields(TripletAdapter))


class TransitionQuery(NamedTuple):
    """The same, understood.

    Attributes:
        adapter: What makes trajectories of spans.
        wanted: Which of its transitions are wanted.
        include_incomplete: Whether attempts that broke off count.
    """

    adapter: ReportingAdapter
    wanted: StepSelection
    include_incomplete: bool

    @classmethod
    def of(cls, keywords: QueryKeywords, store: "Store | None" = None) -> "TransitionQuery":
        """Parse the keywords; the store tells of a saved selection."""
        types = QueryKeywords.__annotations__
        check_names("a query of transitions", keywords, types)
        options: dict[str, Any] = dict(keywords)
        if (reference := options.pop("selection", None)) is not None:
            return cls._of_selection(reference, options, store)
        include_incomplete = options.pop("include_incomplete", False)
        check_types({"include_incomplete": include_incomplete}, types)
        other = options.pop("adapter", None)
        ours = TripletAdapter(**{name: options.pop(name) for name in _OURS if name in options})
        selection = StepSelection.of(cast(SelectionKeywords, options))
        return cls(resolve_adapter(other, ours), selection, include_incomplete)

    @classmethod
    def _of_selection(
        cls, reference: str, options: Mapping[str, Any], store: "Store | None"
    ) -> "TransitionQuery":
        if store is None:
            raise ConfigError(f"selection {reference!r} cannot be used here; export it")
        version = read_version(store, reference)
        query = cls.of(cast(QueryKeywords, version.make_keywords(options)))
        wanted = replace(
            query.wanted,
            rollout_ids=tuple(version.rollouts),
            span_ids=frozenset(version.steps),
            as_of_ns=version.as_of_ns,
        )
        return query._replace(wanted=wanted)


def strip_bodies(step: Transition) -> Transition:
    """Return a transition without its bodies; no next observation stays None."""
    bodies: dict[str, Any] = {
        name: None if getattr(step, name) is None else () for name in TRANSITION_BODIES
    }
    return replace(step, **bodies)


def strip_adaptation(adaptation: Adaptation) -> Adaptation:
    """Return the adaptation with steps without bodies, a shared one still one object."""
    steps_by_id = {id(step): step for path in adaptation.trajectories for step in path.transitions}
    steps = {key: strip_bodies(step) for key, step in steps_by_id.items()}
    paths = [
        replace(path, transitions=tuple(steps[id(step)] for step in path.transitions))
        for path in adaptation.trajectories
    ]
    return adaptation._replace(trajectories=paths)


def split_options(
    store: "Store", options: Mapping[str, Any], name: str
) -> tuple[TransitionQuery, dict[str, Any]]:
    """Split the options into the store's and the format's."""
    from lightning_otel.dataset import formats

    names = QueryKeywords.__annotations__
    query_options = {name: value for name, value in options.items() if name in names}
    settings = {name: value for name, value in options.items() if name not in names}
    check_names(f"the format {name}", settings, [*formats.get(name).options(), *names])
    query = TransitionQuery.of(cast(QueryKeywords, query_options), store)
    if formats.get(name).is_by_task and isinstance(query.adapter, TripletAdapter):
        how = query.adapter.advantage or Advantage()
        query = query._replace(adapter=replace(query.adapter, advantage=how))
    elif formats.get(name).is_grouped and isinstance(query.adapter, TripletAdapter):
        compared = query.adapter.comparison()
        if compared is not None and compared.group_by is None:
            compared = replace(compared, group_by="prompt")
            query = query._replace(adapter=replace(query.adapter, advantage=compared))
    return query, settings
