"""APO: better prompts and few-shot examples, found by GEPA on the agent's own tasks.

Source: Agrawal et al. 2025, GEPA: Reflective Prompt Evolution (arXiv 2507.19457), as the library
``gepa`` 0.1.4 has it: which text is changed, which is kept and what the model is asked is its.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, Final, TypeAlias

from lightning_otel import errors
from lightning_otel.algorithms.apo import episodes
from lightning_otel.algorithms.apo.search import Search
from lightning_otel.algorithms.apo.texts import AGENT, Candidate, TaskSet, Texts
from lightning_otel.algorithms.base import BaseAlgorithm, unknown_option
from lightning_otel.algorithms.run import Run
from lightning_otel.dataset import Store
from lightning_otel.errors import (
    ConfigError,
    NotFoundError,
    NotInstalledError,
    TrainingError,
    install_command,
)
from lightning_otel.rewards.chat_model import ChatModel, Model, connect_chat
from lightning_otel.types import Resource

__all__ = ["APO"]

log = logging.getLogger(__name__)

_NOUN: Final = "reflection model"
_PASSED: Final = (
    "candidate_selection_strategy",
    "frontier_type",
    "module_selector",
    "use_merge",
    "max_merge_invocations",
    "merge_val_overlap_floor",
    "cache_evaluation",
    "acceptance_criterion",
    "sampling_strategy",
    "selection_strategy",
    "use_wandb",
    "wandb_init_kwargs",
    "wandb_attach_existing",
    "use_mlflow",
    "mlflow_tracking_uri",
    "mlflow_experiment_name",
    "mlflow_attach_existing",
    "tracking_key_prefix",
)
"""Parameters of ``gepa.optimize`` that nothing here decides."""

Category: TypeAlias = str | Callable[[Any], str]


class APO(BaseAlgorithm):
    """Search for better prompts: try a text on tasks, read what went wrong, write a new one.

    A text that does better on a few training tasks is tried on every validation task; the best so
    far is published. Without an agent it reads recorded runs: each ``fit`` publishes one text as
    the canary, or lets live traffic judge the canary that stands.
    """

    name: ClassVar[str] = "apo"
    extra = "apo"

    def __init__(
        self,
        *,
        optimization_target: str | Iterable[str] = "system_prompt",
        model: str | None = None,
        base_url: str | None = None,
        timeout_s: float = 120.0,
        reflection_lm: Model | None = None,
        candidates: Iterable[str | Mapping[str, str]] = (),
        few_shot: int = 0,
        category: Category | None = None,
        evaluation_metric: str | None = None,
        num_candidates: int = 10,
        max_metric_calls: int | None = None,
        perfect_score: float | None = 1.0,
        failure_score: float = 0.0,
        reflection_minibatch_size: int = 3,
        reflection_prompt_template: str | Mapping[str, str] | None = None,
        seed: int = 0,
        **gepa: Any,
    ) -> None:
        """Args:
            optimization_target: One resource, or several that are changed together; that of one
                agent is ``agent/name``, or ``agent.name``.
            model: The chat model that writes new texts; by default the one last recorded.
            base_url: Its server, such as ``http://localhost:8000/v1``; by default the client's.
            timeout_s: Limit of each try of an answer, seconds.
            reflection_lm: A function in the model's place: a prompt to an answer.
            candidates: Texts to try first; for several resources text by name.
            few_shot: The number of examples, drawn from the agent's own good training rollouts; 0
                leaves examples as they are.
            category: The key of a task, or a function, that names its category; each has a prompt.
            evaluation_metric: The named reward to raise; by default the primary one.
            num_candidates: The most new texts to try.
            max_metric_calls: The approximate number of rollouts; a trial is always finished.
            perfect_score: The highest reward; a text that earned it everywhere stays. None if
                rewards have no such number.
            failure_score: The reward of a run that raised.
            reflection_minibatch_size: Training tasks that a text is tried on first.
            reflection_prompt_template: The question to the model, with ``<curr_param>`` and
                ``<side_info>``; for several resources by name.
            **gepa: Further options of ``gepa.optimize``.

        Raises:
            ConfigError: The model cannot be asked, or an option is unknown.
        """
        if num_candidates < 1 or reflection_minibatch_size < 1 or few_shot < 0:
            raise ConfigError(
                f"num_candidates={num_candidates}, "
                f"reflection_minibatch_size={reflection_minibatch_size}, few_shot={few_shot}; "
                "the first two are at least 1, the third at least 0"
            )
        if model is not None and reflection_lm is not None:
            raise ConfigError(
                "APO has two writers, model=… and reflection_lm=…; leave one of them out"
            )
        _check_template(reflection_prompt_template)
        targets = optimization_target
        self._targets = [targets] if isinstance(targets, str) else list(targets)
        self._category = category
        self._candidates = list(candidates)
        self._searches: dict[str, Mapping[str, Any]] = {}
        self._goes_on = False
        self._server = (base_url, timeout_s)
        self.few_shot, self.num_candidates = few_shot, num_candidates
        self.metric, self.max_metric_calls = evaluation_metric, max_metric_calls
        self.perfect_score, self.failure_score = perfect_score, failure_score
        self.minibatch_size, self.seed = reflection_minibatch_size, seed
        self.template = reflection_prompt_template
        self.gepa = _check_options(gepa)
        self._model = (
            reflection_lm if model is None else connect_chat(_NOUN, model, base_url, timeout_s)
        )

    @property
    def writer(self) -> Model:
        """The model that writes new texts."""
        assert self._model is not None  # it was found before the search began
        return self._model

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of each search."""
        return {"searches": dict(self._searches)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with each search."""
        self._searches = dict(state.get("searches") or {})
        self._goes_on = True

    def run(self, context: Run) -> None:
        """Search until the budget is spent, nothing is left to learn, or it is to stop.

        Raises:
            TrainingError: There are no tasks, no rewards, or the model gives nothing usable.
            ConfigError: A resource or model is missing, or no prompt; or the budget is too small.
        """
        if self._model is None:
            self._model = connect_chat(_NOUN, _recorded_model(context.store), *self._server)
        if isinstance(self._model, ChatModel):
            self._model.check_key()
        if not self._goes_on:
            self._searches = {}  # of the run before, which is over
        self._goes_on = False
        if not context.train and context.config.agent is None and context.config.workers:
            self._learn_recorded(context)
            return
        seeds = [self._require_prompt(context, target) for target in self._targets]
        parts = self._split_tasks(context)
        for part in parts:
            self._check_part(part)
        first = self._check_candidates(seeds)
        for part in parts:
            if context.should_stop():
                return

            def keep(state: Mapping[str, Any], category: str = part.category) -> None:
                self._searches[category] = state
                context.commit(self.state_dict())

            prompts = [_category_prompt(context, seed, part) for seed in seeds]
            texts = [{part.name_resource(name): text[name] for name in text} for text in first]
            Search(context, prompts, part, self, texts, keep).run(self._searches.get(part.category))

    def _learn_recorded(self, context: Run) -> None:
        if self._category is not None or self.few_shot:
            raise ConfigError("category and few_shot try prompts on tasks; give Trainer(agent, …)")
        prompts = {target: _live_prompt(context, target) for target in self._targets}
        for seed in filter(None, prompts.values()):
            canary = context.resources.aliases(seed.name).get("canary")
            if canary is not None:
                context.versions[seed.name] = canary
        batch = None if context.versions else next(context.batches(), None)
        if batch is None:
            return
        seeds = [
            seed or episodes.publish_prompt(context, _candidate_names(target)[-1], batch)
            for target, seed in prompts.items()
        ]
        texts, first = Texts(seeds, with_examples=False), self._check_candidates(seeds)
        episodes.propose(context, batch, texts, self, first)

    @staticmethod
    def _require_prompt(context: Run, target: str) -> Resource:
        prompt = _live_prompt(context, target)
        if prompt is None:
            names = ", ".join(context.resources.names()) or "none"
            raise ConfigError(
                f"there is no resource {target!r} to make better; there are {names}: give "
                f"resources={{{target!r}: 'the text to begin with'}}, or another "
                "optimization_target"
            )
        return prompt

    def _check_candidates(self, seeds: Sequence[Resource]) -> list[Candidate]:
        texts = Texts(seeds, with_examples=self.few_shot > 0)
        return [_check_candidate(texts, candidate) for candidate in self._candidates]

    def _split_tasks(self, context: Run) -> list[TaskSet]:
        train, val = list(context.train), list(context.val)
        if not train:
            val_texts = {_task_text(task) for task in val}
            tasks = episodes.list_tasks(context.store)
            train = [task for task in tasks if _task_text(task) not in val_texts]
            if not val:
                train, val = episodes.split_tasks(train)
        if not train:
            raise TrainingError(
                "APO runs the agent on tasks, was given none to learn from, and none are recorded; "
                "fit(train, val), or record with auto_trace(task=…)"
            )
        if self._category is None:
            return [TaskSet("", train, val)]
        categories = dict.fromkeys(self._category_of(task) for task in train)
        for category in categories:
            if not category or set("/@,[]") & set(category):
                raise ConfigError(
                    f"the category {category!r} cannot be part of a resource's name; use words"
                )
        if strays := {self._category_of(task) for task in val} - categories.keys():
            log.warning("validation tasks of %s have no training tasks: left out", sorted(strays))
        return [
            TaskSet(
                category,
                [task for task in train if self._category_of(task) == category],
                [task for task in val if self._category_of(task) == category],
            )
            for category in categories
        ]

    def _category_of(self, task: Any) -> str:
        if callable(self._category):
            return str(self._category(task))
        if not isinstance(task, Mapping) or self._category not in task:
            raise ConfigError(
                f"a task has no {self._category!r} to tell its category by: {str(task)[:80]}; "
                "give category=… a key that every task has, or a function"
            )
        return str(task[self._category])

    def _check_part(self, part: TaskSet) -> None:
        if not part.val and self.few_shot:
            raise ConfigError(
                f"few_shot puts training tasks{part.place} into the prompt, and there are no "
                "others to judge it by; fit(train, val) with tasks kept apart"
            )
        if not part.val:
            log.warning(
                "no validation tasks%s: prompts are chosen by the tasks they were written for, "
                "which says little about others; fit(train, val)",
                part.place,
            )
        train_texts = {_task_text(task) for task in part.train}
        if shared := sum(_task_text(task) in train_texts for task in part.val):
            log.warning("%d validation tasks%s are training tasks, too", shared, part.place)
        tasks = len(part.val or part.train)
        least = 2 * tasks + 2 * min(self.minibatch_size, len(part.train))
        if self.max_metric_calls is not None and self.max_metric_calls < least:
            raise ConfigError(
                f"max_metric_calls={self.max_metric_calls} does not try a single new text: with "
                f"{tasks} tasks{part.place} to choose by that takes {least} runs of the agent; "
                "allow more, or give fewer validation tasks"
            )


def _recorded_model(store: Store) -> str:
    others = "model <> '' AND agent IS DISTINCT FROM ? ORDER BY start_ns DESC LIMIT 1"
    with contextlib.suppress(errors.StoreMissingError):
        for row in store.sql(f"SELECT model FROM calls WHERE {others}", [AGENT]):
            return str(row["model"])
    raise ConfigError(
        "APO has no model that writes new prompts, and no call is recorded; give model='…' (in a "
        "shell, -o model=…), with base_url='…' if it is your own, or reflection_lm=… a function"
    )


def _candidate_names(target: str) -> list[str]:
    is_agents = "/" not in target and "." in target
    return [target, target.replace(".", "/", 1)] if is_agents else [target]


def _live_prompt(context: Run, target: str) -> Resource | None:
    for name in _candidate_names(target):
        with contextlib.suppress(NotFoundError):
            prompt = context.resources.get(name)
            if prompt.kind != "prompt":
                raise ConfigError(
                    f"{prompt} is no prompt but {prompt.kind}; APO changes prompts alone"
                )
            return prompt
    return None


def _category_prompt(context: Run, seed: Resource, part: TaskSet) -> Resource:
    name = part.name_resource(seed.name)
    if name == seed.name:
        return seed
    try:
        return context.resources.get(name)
    except NotFoundError:
        return context.resources.publish(name, seed.body, alias="live")


def _check_candidate(texts: Texts, candidate: str | Mapping[str, str]) -> Candidate:
    if isinstance(candidate, str):
        if len(texts.names) > 1:
            raise ConfigError(
                f"a candidate is one text, but there are {', '.join(texts.names)}; "
                "give text by name"
            )
        candidate = {texts.names[0]: candidate}
    for name, text in candidate.items():
        if name not in texts.names:
            raise ConfigError(f"a candidate names {name!r}; there are {', '.join(texts.names)}")
        if fault := texts.find_fault(name, text):
            raise ConfigError(f"the candidate {text[:60]!r} for {name} cannot be used; {fault}")
    return dict(candidate)


def _check_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    if find_spec("gepa") is None:
        more = [] if find_spec("openai") else ["openai"]  # by which a model is reached
        raise NotInstalledError(
            f"APO needs {' and '.join(['gepa', *more])}; {install_command('apo', *more)}"
        )
    for name in options.keys() - set(_PASSED):
        raise unknown_option(APO, name, _PASSED, f"gepa's {', '.join(_PASSED)}")
    return options


def _check_template(value: str | Mapping[str, str] | None) -> None:
    texts = value.values() if isinstance(value, Mapping) else [value] if value is not None else []
    for text in texts:
        for place in ("<curr_param>", "<side_info>"):
            if place not in text:
                raise ConfigError(
                    f"reflection_prompt_template has no {place}; write it where the present text "
                    "(<curr_param>) and what came of it (<side_info>) are to stand"
                )


def _task_text(task: Any) -> str:
    return json.dumps(task, sort_keys=True, default=repr)
