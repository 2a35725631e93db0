"""Names that users bring along from Agent Lightning, and from what is written about it.

Each works, or is refused with what it is called here.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

import lightning_otel as lo
import lightning_otel.agl as agl
from lightning_otel import Store, algorithms
from lightning_otel.algorithms import Batch
from lightning_otel.types import Endpoint, Prompt, Resource, Rollout

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
        "unknown options speed",
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
        """One step."""
        return {"better": "prompt"}


def recorded(store: Store) -> Store:
    """The store, with a rewarded rollout."""
    with lo.auto_trace(store=store):
        lo.emit_action("said", "hi")
        lo.emit_reward(1.0)
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
