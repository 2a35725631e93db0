"""Names that users bring along from Agent Lightning, and from what is written about it.

Each works, or is refused with what it is called here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

import lightning_otel as lo
from lightning_otel import Store, algorithms
from lightning_otel.algorithms import Batch, StepResult
from lightning_otel.types import Endpoint, Prompt, Resource, Rollout

MODEL: dict[str, Any] = {"model": "path/to/model"}
PUBLIC = [
    "Trainer", "LitAgent", "rollout", "llm_rollout", "prompt_rollout", "auto_trace", "context",
    "emit_action", "emit_observation", "emit_reward", "emit_message", "emit_object",
    "emit_exception", "wrap_langchain", "plot_training_metrics", "analyze_episode",
    "BaseAlgorithm", "TripletAdapter", "Hook",
]  # fmt: skip
MADE: dict[str, Callable[[], Any]] = {
    "PPO": lambda: algorithms.PPO(**MODEL, learning_rate=3e-4, gradient_accumulation_steps=4),
    "SFT": lambda: algorithms.SFT(**MODEL, num_train_epochs=3, learning_rate=2e-5),
    "SupervisedFineTuning": lambda: algorithms.SupervisedFineTuning(**MODEL),
    "APO": lambda: algorithms.APO(model="gpt-4", optimization_target="system_prompt"),
    "APO of an agent": lambda: algorithms.APO(
        model="gpt-4", optimization_target="retriever.search_strategy", num_candidates=5,
        evaluation_metric="task_success_rate",
    ),
    "GRPO KTO DPO": lambda: [getattr(algorithms, each)(**MODEL) for each in ("GRPO", "KTO", "DPO")],
    "by name": lambda: algorithms.made("SupervisedFineTuning", **MODEL),
}  # fmt: skip
OTHERWISE: dict[str, tuple[Callable[[Store], Any], str]] = {
    "LightningStore": (lambda _: lo.LightningStore, "here it is Store"),
    "ParallelConfig": (lambda _: lo.ParallelConfig, r"Trainer\(workers="),
    "Tracer": (lambda _: lo.Tracer, "auto_trace"),
    "LLM": (lambda _: lo.LLM, "base_url"),
    "PromptTemplate": (lambda _: lo.PromptTemplate, "here it is Prompt"),
    "TraceAdapter": (lambda _: lo.TraceAdapter, "here it is TripletAdapter"),
    "LitAgentRunner": (lambda _: lo.LitAgentRunner, "here it is Runner"),
    "VERL": (lambda _: algorithms.VERL, r"algorithms\.verl\.register"),
    "verl": (lambda store: lo.Trainer(store=store, algorithm="verl"), r"algorithms\.verl\.reg"),
    "base_model": (lambda _: algorithms.SFT(base_model="llama"), "it is model="),
    "epochs": (lambda _: algorithms.SFT(**MODEL, epochs=3), "num_train_epochs"),
    "batch_size": (lambda _: algorithms.PPO(**MODEL, batch_size=64), "min_batch_size"),
    "gamma": (lambda _: algorithms.PPO(**MODEL, gamma=0.99), "credit='discounted'"),
    "reward_shaping": (lambda _: algorithms.PPO(**MODEL, reward_shaping=True), "apply_rewards"),
    "no model": (lambda _: algorithms.PPO(), "model='path/to/model'"),
    "parallelization": (lambda store: lo.Trainer(store=store, parallelization=4), "workers=4"),
    "fixes": (lambda store: lo.Trainer(store=store, fixes=[]), "enable_retokenization_fix=True"),
    "n_runners": (lambda store: lo.Trainer(store=store, n_runners=8), "workers=…"),
    "set_store": (
        lambda store: algorithms.get("baseline")().set_store(store),  # type: ignore[attr-defined]  # is not there
        r"Trainer\(store=",
    ),
    "no llm": (lambda _: lo.llm_rollout(lambda task: 1.0), r"\(task, llm\)"),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_name_is_here(name: str) -> None:
    """Under the package, as there."""
    assert name in lo.__all__
    assert callable(getattr(lo, name))


@pytest.mark.parametrize("name", MADE)
def test_algorithm_is_made_by_the_name_users_know(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With the options that the library which trains has, by their own names."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    assert MADE[name]()


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_called_otherwise_says_how(store: Store, name: str) -> None:
    """Nothing is taken and left unread."""
    asked, said = OTHERWISE[name]

    with pytest.raises((lo.ConfigError, AttributeError), match=said):
        asked(store)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda batch: batch["rewards"], "batch.rewards"),
        (lambda batch: batch["spans"], r"each\.transitions"),
        (lambda batch: {"resource_update": "better"}, r"gave back a dict; give StepResult\("),
    ],
)
def test_step_written_for_dictionaries_is_told(
    store: Store, answer: Callable[[Any], Any], said: str
) -> None:
    """A batch is a list, and a step gives back a StepResult."""

    class Custom(lo.BaseAlgorithm):
        def train_step(self, batch: Batch) -> StepResult:
            return answer(batch)  # type: ignore[no-any-return]  # which is what is refused

    def act(task: int) -> float:
        lo.emit_action("said", task)
        return 1.0

    with pytest.raises(lo.ConfigError, match=said):
        lo.Trainer(act, Custom(), store=store).fit([1])


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
