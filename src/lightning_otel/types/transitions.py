"""Calls and rewards, and the transitions and rows made of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache
from typing import Any, Final, Literal, TypeAlias, TypeVar

from lightning_otel.types.spans import Message, Span

_SHOWN: Final = 20
CaptureLevel: TypeAlias = Literal["exact", "text"]
"""``exact``: the server's own token ids, which passed every check; ``text``: messages only."""

RowCause: TypeAlias = Literal["start", "drift", "shared", "model", "logprobs", "capture", "gap"]
"""Why a training row begins: the trajectory starts; the prompt does not continue the row; the
steps before are in another row; another model, logprobs or capture level; or a step without ids.
"""

BranchCause: TypeAlias = Literal[
    "start", "parallel", "sub_agent", "retry", "hand_off", "compaction", "rewind"
]
"""Why a trajectory of its own begins where it does; see ``docs/transitions.md`` for the rules."""

Credit: TypeAlias = Literal["previous", "last", "discounted", "step", "agents"]
"""The rule by which a reward without a link reaches a call."""

CreditRule: TypeAlias = Callable[["Reward", Sequence["Call"]], "Call | Iterable[Call] | str | None"]
"""A user's rule: a reward, and the calls it may judge, to the one or those it does judge.

The calls had ended before the reward, in order of their end: of the agent it was given in, or of
every agent where it was given outside any. Text says why none is judged.
"""

Estimator: TypeAlias = Literal["grpo", "rloo", "dr_grpo"]
"""How the rewards of a group become advantages."""

Compose: TypeAlias = Callable[[Mapping[str, float]], float | None]
"""Makes one number of named rewards, the primary one first; None where a part is missing."""


_T = TypeVar("_T")


@cache
def fast_constructor(kind: Callable[..., _T]) -> Callable[..., _T]:
    """Return a constructor of a frozen class with slots that takes 1.8 µs and not 4.5.

    A frozen class sets each field through ``object.__setattr__``. Here a class with the same slots
    that is not frozen is filled, and its instance then given the frozen class, which the language
    allows; no ``__post_init__`` runs.
    """
    source: Any = kind
    anew: Any = field
    described = [
        (field.name, field.type, anew(default=field.default, default_factory=field.default_factory))
        for field in fields(source)
    ]
    twin = make_dataclass("Twin", described, slots=True)

    def make(*values: Any) -> _T:
        instance: Any = twin(*values)
        instance.__class__ = kind
        return instance  # type: ignore[no-any-return]  # it is one now

    return make


@dataclass(frozen=True, slots=True)
class Call:
    """A span that is a request to a model, read into messages, token ids and usage.

    Attributes:
        observation: Messages the model was given, system instructions first.
        action: Messages the model answered, one per choice.
        tools: Tool definitions the model was offered.
        prompt_ids: Token ids the model was given, [P]; empty if the server did not say.
        response_ids: Token ids the model sampled in its first choice, [R]; empty likewise.
        logprobs: Log-probability of each sampled token, [R]; empty if the server did not say.
        ending: The observation after it, if known and no call follows.
        inexact: Why its tokens are not exact; empty where they are.
    """

    span: Span
    agent: str
    observation: tuple[Message, ...]
    action: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt_ids: Sequence[int] = ()
    response_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    ending: tuple[Message, ...] | None = None
    inexact: str = ""

    @property
    def capture(self) -> CaptureLevel:
        """The exactness of the call's capture."""
        return "exact" if len(self.prompt_ids) and len(self.response_ids) else "text"


@dataclass(frozen=True, slots=True)
class Reward:
    """A number, or named numbers with one primary, given to what an agent did.

    Attributes:
        values: Every named number; the primary's name comes first.
        value: The primary number; of a sequence their sum.
        links: Key and value that the judged span has, by link.
        steps: The primary number of each step of a sequence; None for a step without one.
    """

    span: Span
    values: Mapping[str, float]
    value: float
    links: tuple[tuple[str, str], ...] = ()
    steps: tuple[float | None, ...] = ()


TRANSITION_COLUMNS: Final[Mapping[str, str]] = {
    "rollout_id": "VARCHAR",
    "attempt_id": "VARCHAR",
    "agent": "VARCHAR",
    "branch": "INTEGER",
    "step": "INTEGER",
    "observation": "JSON",
    "action": "JSON",
    "reward": "DOUBLE",
    "next_observation": "JSON",
    "done": "BOOLEAN",
    "rewards": "JSON",
    "is_shared": "BOOLEAN",
    "tools": "JSON",
    "prompt_ids": "INTEGER[]",
    "response_ids": "INTEGER[]",
    "logprobs": "DOUBLE[]",
    "capture": "VARCHAR",
    "resource_version": "VARCHAR",
    "resources": "JSON",
    "model": "VARCHAR",
    "response_id": "VARCHAR",
    "finish_reason": "VARCHAR",
    "trace_id": "VARCHAR",
    "span_id": "VARCHAR",
    "start_ns": "BIGINT",
    "end_ns": "BIGINT",
    "input_tokens": "BIGINT",
    "output_tokens": "BIGINT",
    "sampling": "JSON",
    "group_id": "VARCHAR",
    "advantage": "DOUBLE",
    "weight": "DOUBLE",
    "mode": "VARCHAR",
    "inexact": "VARCHAR",
}
"""The columns of a transition as a row of a table, and their types in SQL."""
TRANSITION_BODIES: Final = (
    "observation", "action", "next_observation", "tools", "prompt_ids", "response_ids", "logprobs",
)  # fmt: skip
"""Columns that hold what was said, each a tuple; all others are there without reading it."""
STEP_COLUMNS: Final = {
    name: kind for name, kind in TRANSITION_COLUMNS.items() if name not in TRANSITION_BODIES
}
"""The columns of a transition without its bodies."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of an agent: what it saw, what it did, what that was worth, what it saw next.

    Attributes:
        observation: Messages before acting.
        action: Messages of the act; the first is what was sampled first.
        reward: The primary reward credited to this step; None if there is none (never 0).
        rewards: Every named reward credited to this step.
        next_observation: What the agent saw before its next act; None if this was the last one. A
            conversation that was shortened after it begins another trajectory, and is seen here.
        done: Whether this is the last step of its trajectory.
        step: Position in its trajectory, from 0.
        is_shared: Whether several trajectories run through this step; train on it once.
        prompt_ids: Token ids the model was given, [P]; empty if the server did not say.
        response_ids: Token ids the model sampled, [R]; empty likewise.
        logprobs: Log-probability of each sampled token, [R]; empty likewise.
        capture: ``exact`` with the server's token ids, else ``text``.
        resource_version: Version of the prompt, model or weights that acted; None if not stamped.
        resources: Version of each resource that acted, by name, where they were named.
        sampling: What was asked of the sampler, such as ``temperature`` and ``top_p``; empty where
            nothing was.
        group_id: What advantages compare: rollouts of one task share it; empty if not computed.
        advantage: How much better its rollout did than its group; None where none was computed.
        weight: Weight of its loss, so that a rollout of many steps does not outvote a short one.
        mode: What the rollout was for, such as ``train``, ``val`` or ``test``; None if not stamped.
        inexact: Why it was not captured exactly; empty where it was.
    """

    rollout_id: str
    attempt_id: str
    agent: str
    step: int
    observation: tuple[Message, ...]
    action: tuple[Message, ...]
    reward: float | None
    next_observation: tuple[Message, ...] | None
    done: bool
    rewards: Mapping[str, float] = field(default_factory=dict)
    is_shared: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt_ids: Sequence[int] = ()
    response_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    capture: CaptureLevel = "text"
    resource_version: str | None = None
    model: str | None = None
    response_id: str | None = None
    finish_reason: str | None = None
    trace_id: str = ""
    span_id: str = ""
    start_ns: int = 0
    end_ns: int = 0
    input_tokens: int | None = None
    output_tokens: int | None = None
    resources: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    group_id: str = ""
    advantage: float | None = None
    weight: float = 1.0
    mode: str | None = None
    inexact: str = ""

    def _repr_html_(self) -> str:
        from lightning_otel.types import html
        from lightning_otel.types.text import plain_text

        names = ("rollout_id", "agent", "step", "model", "reward", "advantage", "done", "capture")
        pairs = [(name, getattr(self, name)) for name in (*names, "inexact", "finish_reason")]
        said = [("observation", message) for message in self.observation]
        said += [("action", message) for message in self.action]
        most = max(0, len(said) - _SHOWN)
        rows = [
            (what, message.get("role", ""), plain_text([message])) for what, message in said[most:]
        ]
        note = f"the last {_SHOWN} of {len(said):,} messages" if most else ""
        return html.render_facts(f"step {self.step}", pairs) + html.render_table(
            ("", "role", "text"), rows, note, cells=200
        )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The ordered transitions of one agent on one branch of one attempt.

    Attributes:
        is_guess: Whether only wall clocks say that some step of it came before the next one, or
            a step may belong to another conversation of the same identity.
        cause: Why it is a trajectory of its own: what is known of its first step that lies on no
            earlier trajectory of its agent.
        reward: What its attempt earned, all agents and branches together; a rollout's reward is
            that of its last attempt. None if it has none (never 0).
    """

    rollout_id: str
    attempt_id: str
    agent: str
    branch: int
    transitions: tuple[Transition, ...]
    is_guess: bool = False
    cause: BranchCause = "start"
    reward: float | None = None

    def __repr__(self) -> str:
        return f"<Trajectory of {self._told()}>"

    def _repr_html_(self) -> str:
        from lightning_otel.types import html
        from lightning_otel.types.text import step_row

        rows = [step_row(step) for step in self.transitions[:_SHOWN]]
        columns = [name for name in (rows[0] if rows else ()) if name not in ("rollout", "agent")]
        count = len(self.transitions)
        note = f"the first {_SHOWN} of {count:,} steps" if count > _SHOWN else ""
        cells = [[row[name] for name in columns] for row in rows]
        return html.render_table(columns, cells, note, title=f"trajectory of {self._told()}")

    def _told(self) -> str:
        from lightning_otel.types.text import format_number

        rewards = [step.reward for step in self.transitions if step.reward is not None]
        count = len(self.transitions)
        total = format_number(sum(rewards), 6)
        earned = f"{total} in {len(rewards)} rewards" if rewards else "no reward"
        earned = f"reward {rewards[0]:g}" if len(rewards) == 1 else earned
        return (
            f"{self.rollout_id}, attempt {self.attempt_id}, {self.agent or 'nobody named'}, "
            f"branch {self.branch}: {count:,} step{'' if count == 1 else 's'}, {earned}"
        )


class JudgedTrajectory(Trajectory):
    """A trajectory whose reward an adapter of the user's own gave as a whole, not by steps."""

    __slots__ = ()


def distinct(trajectories: Iterable[Trajectory]) -> Iterator[tuple[Transition, Trajectory]]:
    """Yield each step once, with its first trajectory; those of an attempt come together."""
    attempt = ("", "")
    keys: set[tuple[str, str]] = set()
    for trajectory in trajectories:
        if attempt != (trajectory.rollout_id, trajectory.attempt_id):
            # Only branches of one attempt share steps: memory must not grow with the store.
            attempt = (trajectory.rollout_id, trajectory.attempt_id)
            keys = set()
        for step in trajectory.transitions:
            key = (step.trace_id, step.span_id)
            if not step.is_shared or key not in keys:
                yield step, trajectory
            if step.is_shared:
                keys.add(key)


def distinct_steps(trajectories: Iterable[Trajectory]) -> list[Transition]:
    """Return each step once, however many trajectories run through it."""
    return list({id(step): step for path in trajectories for step in path.transitions}.values())


@dataclass(frozen=True, slots=True)
class Conversation:
    """Consecutive steps of a trajectory, each of which continues the messages of the one before.

    Attributes:
        step: Position of its first step in the trajectory.
        messages: As the chat API writes them: what the agent was given and answered, in turn.
        tools: Tool definitions the model was offered in any of its steps, in the same form.
        answers: Positions in ``messages`` of what the agent answered, [S]; an answer that stands in
            several conversations is named in the first alone: train on it once.
        rewards: Reward of the step of each of these answers, [S]; None where there is none.
        reward: The latest reward of its steps; None if none has one (never 0).
        alternatives: Further choices the model gave: position in ``messages``, and message.
        span_ids: Span of each of the answers, [S].
        model: Model of its last step.
        resource_version: Version of the prompt, model or weights that acted in its last step.
    """

    rollout_id: str
    attempt_id: str
    agent: str
    branch: int
    step: int
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    answers: tuple[int, ...]
    rewards: tuple[float | None, ...]
    reward: float | None
    alternatives: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    span_ids: tuple[str, ...] = ()
    model: str | None = None
    resource_version: str | None = None


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """Consecutive steps of a trajectory as one token sequence: what a trainer takes a loss of.

    Attributes:
        transitions: The steps in it, in order.
        prompt_ids: Token ids before the first sampled one, [P].
        completion_ids: Token ids from the first sampled one on, [C].
        loss_mask: 1 where the model sampled the token, 0 where it was given it, [C].
        logprobs: Log-probability of each sampled token, 0.0 of each other, [C]; empty if the server
            did not say for all that were sampled.
        cause: Why it is a row of its own.
    """

    transitions: tuple[Transition, ...]
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    loss_mask: Sequence[int]
    logprobs: Sequence[float] = ()
    cause: RowCause = "start"
