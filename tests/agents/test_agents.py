"""Agents of whatever a user has: functions, classes, routers; sync, async, pickled."""

import asyncio
import functools
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import lightning_otel as lo
from lightning_otel import LitAgent, Router, Store, rollout
from lightning_otel.errors import ConfigError
from lightning_otel.runner.agents import FunctionAgent, agent_of
from lightning_otel.runner.agents.agent import cancel_agent
from lightning_otel.runner.agents.functions import by_value
from lightning_otel.types import Mode, Resource, Rollout
from lightning_otel.types import conventions as c

PROMPT = {"prompt": Resource("prompt", 2, "prompt", {"template": "x"})}


def asked(task: Any = "task", *, mode: Mode = "train", agent: str | None = None) -> Rollout:
    """A rollout to act for."""
    return Rollout("r1", task, mode=mode, agent=agent)


def answer(given: object, task: Any = "task", **how: Any) -> Any:
    """What an agent gives back."""
    return agent_of(given).run(task, PROMPT, asked(task, **how))


class Called:
    """An object that can be called."""

    def __call__(self, task: str, resources: Mapping[str, Resource]) -> tuple[str, int]:
        """What it was given."""
        return task, len(resources)


async def later(task: str, resources: Mapping[str, Resource]) -> tuple[str, int]:
    """What it was given, after a while."""
    await asyncio.sleep(0)
    return task, len(resources)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda task: task, "task"),
        (lambda task, resources: (task, len(resources)), ("task", 1)),
        (lambda task, given, whole: (task, len(given), whole.rollout_id), ("task", 1, "r1")),
        (lambda task, rollout: (task, rollout.rollout_id), ("task", "r1")),
        (lambda task, rollout, resources: (rollout.rollout_id, len(resources)), ("r1", 1)),
        (lambda task, *, resources: (task, len(resources)), ("task", 1)),
        (lambda task, temperature=0.5: (task, temperature), ("task", 0.5)),
        (functools.partial(lambda own, task: (own, task), "own"), ("own", "task")),
        (str.upper, "TASK"),
        (len, 4),
        (Called(), ("task", 1)),
        (later, ("task", 1)),
    ],
)
def test_function_is_given_what_it_takes(function: Callable[..., Any], expected: object) -> None:
    """The task; and what it names, or has place for; its own defaults are left to it."""
    assert answer(function) == expected


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (lambda: 1, "takes no task"),
        (lambda task, a, b, c: 1, r"more than \(task, resources, rollout\)"),
        (3, "int is no agent"),
        (LitAgent, r"the class LitAgent; give LitAgent\(\)"),
        ([], "list is no agent"),
    ],
)
def test_what_cannot_act_is_refused(given: object, why: str) -> None:
    """Before anything is run."""
    with pytest.raises(ConfigError, match=why):
        agent_of(given)


@rollout
def decorated(task: str) -> str:
    """An agent at the top of a module."""
    return f"{task}!"


@rollout(name="planner", track_only="plan*")
async def planner(task: str) -> str:
    """An agent with a name of its own."""
    return f"{task}?"


def test_decorated_function_is_still_the_function() -> None:
    """It can be called, has its name and documentation, and pickles by its name or its value."""
    assert decorated("a") == "a!"
    assert decorated.__doc__ == "An agent at the top of a module."
    assert (decorated.name, planner.name, planner.track_only) == ("decorated", "planner", "plan*")
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert answer(planner, "b") == "b?"
    copied = pickle.loads(pickle.dumps(agent_of(Called())))
    assert answer(copied) == ("task", 1)
    with by_value():
        made, given = decorated.__reduce__()
    assert made(*given).run("a", {}, asked()) == "a!"


class Both(LitAgent[str]):
    """Learns in one way and is judged in another."""

    def training_rollout(self, task: str, resources: Any, rollout: Rollout) -> str:
        """As to learn."""
        return f"train {task}"

    async def validation_rollout_async(self, task: str, resources: Any, rollout: Rollout) -> str:
        """As to be judged."""
        return f"val {task}"


class One(LitAgent[str]):
    """Does the same whatever it is for."""

    def __init__(self) -> None:
        """Forget to call the base's."""

    async def rollout(self, task: str, resources: Any, rollout: Rollout) -> str:
        """Act."""
        return f"{rollout.mode} {task}"


class TrainingOnly(LitAgent[str]):
    """Has one way."""

    def training_rollout(self, task: str, resources: Any, rollout: Rollout) -> str:
        """Act."""
        return f"only {task}"


def unwritten(self: object, *given: object) -> None:
    """Say that it is not written, as Agent Lightning's own base does in each method."""
    raise NotImplementedError


BASE: Any = type("LitAgent", (), {"rollout": unwritten, "rollout_async": unwritten})
FOREIGN: Any = type("Solver", (BASE,), {"rollout": lambda self, task, *given: f"its {task}"})


@pytest.mark.parametrize(
    ("agent", "train", "val", "track_only"),
    [
        (Both(), "train a", "val a", None),
        (One(), "train a", "val a", None),
        (TrainingOnly(trained_agents="^plan"), "only a", "only a", "re:^plan"),
        (FOREIGN(), "its a", "its a", None),
    ],
)
def test_class_has_a_method_for_each_mode(
    agent: Any, train: str, val: str, track_only: str | None
) -> None:
    """Sync or async, of ours or of Agent Lightning's; where one is not written, the other is."""
    assert (answer(agent, "a"), answer(agent, "a", mode="val")) == (train, val)
    assert agent_of(agent).name == type(agent).__name__
    assert agent_of(agent).track_only == track_only
    with pytest.raises(ConfigError, match=r"LitAgent has none of training_rollout.*write rollout"):
        answer(LitAgent())


def test_loop_goes_on_from_call_to_call() -> None:
    """An async client keeps its connections; what is left over when the agent returns is ended."""
    loops: list[asyncio.AbstractEventLoop] = []
    left: list[asyncio.Task[None]] = []

    async def agent(task: str) -> None:
        loops.append(asyncio.get_running_loop())
        left.append(asyncio.create_task(asyncio.sleep(60)))
        await asyncio.sleep(0)

    def work() -> None:
        answer(agent)
        answer(agent)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)

    assert loops[0] is loops[1]
    assert loops[0].is_closed()
    assert all(task.cancelled() for task in left)


def test_async_agent_can_be_interrupted_from_elsewhere() -> None:
    """It is cancelled where it waits; where nothing async runs, nothing is done."""
    started = threading.Event()
    seen: list[str] = []

    async def agent(task: str) -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    def work() -> None:
        with pytest.raises(asyncio.CancelledError):
            answer(agent)

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(10)
    assert cancel_agent(thread)
    thread.join(10)

    assert seen == ["cancelled"]
    assert not cancel_agent(threading.current_thread())


def test_interrupt_that_comes_early_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come before the loop runs."""
    run = asyncio.Runner.run

    def run_interrupted(*args: Any, **options: Any) -> Any:
        assert cancel_agent(threading.current_thread())
        return run(*args, **options)

    async def agent(task: str) -> None:
        await asyncio.sleep(60)

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.Runner, "run", run_interrupted)
        with pytest.raises(asyncio.CancelledError):
            answer(agent)
    answer(later)


def word(name: str) -> FunctionAgent:
    """An agent that answers with its name."""
    return FunctionAgent(lambda task: name, name=name)


def test_router_hands_over_by_name_glob_and_rule() -> None:
    """Who is named in the rollout goes before the rule; a name nobody has is refused."""
    router = Router(
        {"solver": lambda task: "solver", "planner-1": lambda task: "planner"},
        rule=lambda task: "planner-*" if task == "plan" else None,
        weights={"solver": 1, "planner-1": 1e-12},
    )

    assert answer(router, agent="solver") == "solver"
    assert answer(router, agent="planner-1") == "planner"
    assert answer(router, "plan") == "planner"
    assert answer(router, "plan", agent="router") == "planner"
    assert answer(router, "other") == "solver"
    assert router.names == ("router", "solver", "planner-1")
    with pytest.raises(ConfigError, match="no agent for 'critic'; there are solver, planner-1"):
        answer(router, agent="critic")


def test_router_draws_by_weight_and_sticks_to_it() -> None:
    """The same rollout always goes to the same agent; of many each gets its share."""
    router = Router([word("a"), word("b"), word("c")], weights={"a": 3, "b": 1})
    names = [
        router.choose(Rollout(f"r{number}", "task")).name for number in range(1000) for _ in "12"
    ]

    assert names[::2] == names[1::2]
    counts = Counter(names[::2])
    assert set(counts) == {"a", "b"}
    assert 650 < counts["a"] < 850


def test_router_answers_requests_under_the_agents_name(store: Store) -> None:
    """Called without a queue it gives the answer, and what is recorded names who gave it."""

    def solver(task: str) -> str:
        lo.emit_message("at work")
        return task.upper()

    router = Router([word("planner"), solver], rule=lambda task: "solver")
    with lo.auto_trace(store=store):
        assert router("a") == "A"

    spans = {span.name: span for span in store.spans()}
    assert spans[c.SPAN_MESSAGE].attributes[c.AGENT_NAME] == "solver"


def test_routers_can_stand_in_routers() -> None:
    """Each chooses among its own."""
    inner = Router([word("a"), word("b")], rule=lambda task: task, name="inner")
    outer = Router({"letters": inner, "c": word("c")}, rule=lambda task: "letters")
    plain = Router([inner, word("c")], rule=lambda task: "inner")

    assert answer(outer, "b") == "b"
    assert answer(outer, "b", agent="letters") == "b"
    assert answer(plain, "a", agent="inner") == "a"


@pytest.mark.parametrize(
    ("names", "weights", "why"),
    [
        ("", None, "has no agents"),
        ("aa", None, "two agents are called 'a'"),
        ("a", {"b": 1}, "weights name 'b'"),
        ("a", {"a": -1}, "weight of 'a' is -1"),
    ],
)
def test_router_that_makes_no_sense_is_refused(names: str, weights: Any, why: str) -> None:
    """When it is made."""
    with pytest.raises(ConfigError, match=why):
        Router(map(word, names), weights=weights)
