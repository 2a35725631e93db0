"""The package as it is imported: its names, those of Agent Lightning, what it costs, its errors."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Any

import pytest
from tests.acting import act

import lightning_otel
import lightning_otel as lo
import lightning_otel.agl as agl
from lightning_otel import Store, algorithms, errors
from lightning_otel.algorithms import Batch
from lightning_otel.types import Endpoint, Prompt, Resource, Rollout, conventions

HEAVY = ("openai", "duckdb", "torch", "starlette", "opentelemetry.sdk", "wrapt", "rich", "click")
EXTRA = """
import sys; sys.modules['sqlalchemy'] = None; import lightning_otel
try: lightning_otel.{}
except lightning_otel.ConfigError as exc: print(str(exc).rpartition("; ")[2])
"""
SCRIPTS = {
    "the bare import pulls in nothing but the standard library, and none of our own rooms": (
        "import sys; before = set(sys.modules); import lightning_otel; "
        "new = set(sys.modules) - before; "
        "print([n for n in new if n.split('.')[0] not in sys.stdlib_module_names])",
        "['lightning_otel']",
    ),
    "what a traced program names at its start pulls in none of the heavy libraries": (
        "import sys; from lightning_otel import auto_trace, context, operation, emit_reward, "
        "Store, Recording, TripletAdapter, Span; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])",
        "[]",
    ),
    "where wrapt cannot be had, the program goes on without its calls": (
        "import sys, lightning_otel as l; from lightning_otel.provider import switch_on; "
        "switch_on('openai'); assert 'wrapt' not in sys.modules; sys.modules['wrapt'] = None; "
        "import logging; logging.disable(); import openai; print(openai.__name__)",
        "openai",
    ),
    "completion sees every public name from the start, and the version": (
        "import lightning_otel; print(dir(lightning_otel))",
        str(sorted([*lightning_otel.__all__, "__version__"])),
    ),
    "types and adapter do not import what shows them": (
        "import sys, lightning_otel.types, lightning_otel.adapter\n"
        "print('lightning_otel.types.html' in sys.modules)",
        "False",
    ),
    "without the extra, agents, bases of algorithms and Agent Lightning's stores are there": (
        "import sys; sys.modules['sqlalchemy'] = None; from lightning_otel import BaseAlgorithm, "
        "LitAgent, Router, StepResult, rollout; from lightning_otel.agl import LightningStore; "
        "print(LightningStore.__name__)",
        "LightningStore",
    ),
    **{
        f"without its extra, {name} says what to install": (
            EXTRA.format(name), errors.install_command("learn")
        )
        for name in ("Trainer", "Queue", "Resources", "State", "run_workers")
    },
}  # fmt: skip
ERRORS = [
    kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)
]


@pytest.mark.pain(11)
@pytest.mark.parametrize("name", SCRIPTS)
def test_import_is_light(run_python: Callable[..., str], name: str) -> None:
    """A script prints what it should, and nothing on stderr."""
    script, printed = SCRIPTS[name]

    assert run_python(script).strip() == printed


def test_every_public_name_resolves_to_its_home() -> None:
    """Each name of ``__all__`` is there, is one and the same each time, and has documentation."""
    found: dict[str, Any] = {}
    exec("from lightning_otel import *", found)

    assert sorted(found.keys() - {"__builtins__"}) == lightning_otel.__all__
    assert sorted(lightning_otel.__all__) == lightning_otel.__all__
    for name in lightning_otel.__all__:
        assert getattr(lightning_otel, name) is found[name]
        assert found[name].__name__ == name
        assert inspect.getdoc(found[name])
    with pytest.raises(AttributeError, match="'lightning_otel' has no attribute 'emit_rewards'"):
        lightning_otel.emit_rewards  # noqa: B018
    assert lightning_otel.__version__ == version("lightning-otel")


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_say_what_why_and_what_to_do(kind: type[errors.LightningOtelError]) -> None:
    """Each error is ours, and takes its message apart for a person to read."""
    error, bare = kind("cannot open /x: no such file; name another place; or make it"), kind("no")

    assert isinstance(error, errors.LightningOtelError)
    assert error.what == "cannot open /x: no such file"
    assert error.why == (
        "reading never creates a store" if kind is errors.StoreMissingError else ""
    )
    assert error.remedy == "name another place; or make it"
    assert (bare.what, bare.remedy) == ("no", "")


def test_convention_keys_are_each_named_once() -> None:
    """No two names stand for one attribute key or span name."""
    keys = {
        name: value
        for name, value in vars(conventions).items()
        if name.isupper() and isinstance(value, str) and "." in value
    }

    assert len(set(keys.values())) == len(keys)
    assert set(conventions.BODY_KEYS) <= conventions.CONTENT_KEYS <= set(keys.values())
    assert len(keys) > 80


MODEL: dict[str, Any] = {"model": "path/to/model"}
MADE: dict[str, Callable[[], Any]] = {
    "PPO": lambda: algorithms.PPO(
        learning_rate=3e-4, gamma=0.99, batch_size=64, reward_shaping=True
    ),
    "SFT": lambda: algorithms.SFT(**MODEL, num_train_epochs=3, learning_rate=2e-5),
    "SupervisedFineTuning": lambda: algorithms.SupervisedFineTuning(**MODEL),
    "APO": lambda: algorithms.APO(model="gpt-4", optimization_target="system_prompt"),
    "APO of an agent": lambda: algorithms.APO(
        model="gpt-4", optimization_target="retriever.search_strategy", num_candidates=5,
        evaluation_metric="task_success_rate",
    ),
    "GRPO KTO DPO": lambda: [getattr(algorithms, each)(**MODEL) for each in ("GRPO", "KTO", "DPO")],
    "by name": lambda: algorithms.make_algorithm("SupervisedFineTuning", **MODEL),
}  # fmt: skip
OTHERWISE: dict[str, tuple[Callable[[Store], Any], str]] = {
    "a name of theirs": (lambda _: lo.LightningStore, r"names are in lightning_otel\.agl"),
    "a name of nobody's": (lambda _: agl.Lightning, "no attribute 'Lightning'$"),
    "what nothing stands for": (lambda _: agl.LLMProxy, "here it is: none is needed"),
    "verl": (lambda store: lo.Trainer(store=store, algorithm="verl"), r"algorithms\.verl\.reg"),
    "no model": (
        lambda store: lo.Trainer(store=recorded(store), algorithm=algorithms.SFT()).fit(),
        "model='path/to/model'",
    ),
    "VERL, not installed": (
        lambda store: agl.Trainer(store=recorded(store), algorithm=agl.VERL()).fit(),
        "agentlightning is not installed",
    ),
    "an option of nobody's": (
        lambda store: lo.Trainer(store=store, algorithm=lo.BaseAlgorithm(), speed=4),
        "no option .speed.",
    ),
    "an update that is no number": (
        lambda store: lo.Trainer(store=recorded(store), algorithm=Odd()).fit(),
        "gave back better='prompt'",
    ),
    "no llm": (lambda _: lo.llm_rollout(lambda task: 1.0), r"\(task, llm\)"),
}


class Odd(lo.BaseAlgorithm):
    """Gives back what is neither a metric nor a resource."""

    def train_step(self, batch: Batch) -> Mapping[str, Any]:
        return {"better": "prompt"}


def recorded(store: Store) -> Store:
    act(store, reward=1.0)
    return store


@pytest.mark.parametrize("name", MADE)
def test_algorithm_is_made_by_the_name_users_know(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With the options that the library which trains has, by their own names."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    assert MADE[name]()


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_cannot_be_says_why(store: Store, name: str) -> None:
    """Nothing is taken and left unread."""
    asked, said = OTHERWISE[name]

    with pytest.raises((lo.ConfigError, AttributeError), match=said):
        asked(store)


@pytest.mark.parametrize("name", agl.__all__)
def test_name_of_theirs_is_here(name: str) -> None:
    """Each name of the room is there."""
    assert callable(getattr(agl, name))


def test_algorithm_brings_store_and_adapter(store: Store) -> None:
    """A trainer that is given none takes those that the algorithm was given."""
    seen: list[Any] = []

    class Look(lo.BaseAlgorithm):
        def train_step(self, batch: Batch) -> None:
            seen.append((len(batch), self.get_adapter().adapt(batch["spans"])))

    class Count(agl.TraceAdapter[int]):
        def adapt(self, spans: Iterable[lo.Span]) -> int:
            return len(list(spans))

    class Last(lo.TripletAdapter):
        def adapt(self, spans: Iterable[lo.Span | Any]) -> list[lo.Trajectory]:
            return super().adapt(spans)[-1:]

    for adapter in (Count(), Last()):
        algorithm = Look()
        algorithm.set_store(recorded(store))
        algorithm.set_adapter(adapter)
        lo.Trainer(algorithm=algorithm, consumer=type(adapter).__name__).fit()

    assert seen[0] == (1, 3)
    assert len(seen[1][1]) == 1


def test_decorated_functions_are_given_the_one_that_is_meant() -> None:
    """``llm`` is the endpoint among the resources, ``prompt_template`` the prompt."""
    resources: Mapping[str, Resource] = {
        "main": Resource("main", 1, "endpoint", {"base_url": "http://x/v1", "model": "m"}),
        "planner/text": Resource("planner/text", 1, "prompt", {"template": "another's"}),
        "text": Resource("text", 2, "prompt", {"template": "Do {task}."}),
    }

    @lo.llm_rollout
    def asks(task: str, llm: Endpoint) -> str:
        return f"{task} {llm.model} {llm.get_base_url()} {dict(llm.sampling_parameters)}"

    @lo.prompt_rollout(name="writer")
    async def writes(task: str, prompt_template: Prompt, rollout: Rollout) -> str:
        return prompt_template.format(task=task) + rollout.rollout_id

    @lo.rollout
    def both(task: str, llm: Endpoint, prompt_template: Prompt) -> str:
        return llm.endpoint + prompt_template.template

    run = Rollout("r1", "it")
    assert asks.run("it", resources, run) == "it m http://x/v1 {}"
    assert (writes.name, writes.run("it", resources, run)) == ("writer", "Do it.r1")
    assert both.run("it", resources, run) == "http://x/v1Do {task}."
    assert asks.takes_resources
    with pytest.raises(lo.ConfigError, match="takes llm, and of its resources none is of kind end"):
        asks.run("it", {}, run)
    with pytest.raises(lo.ConfigError, match=r"text, more are of kind prompt; .*\(task, resources"):
        writes.run("it", {**resources, "more": resources["text"]}, run)
