"""Prompts as the search sees them, and the model that writes new ones.

A prompt is its template; examples are a second text, a JSON list of chat messages. Calls of the
writing model are recorded as those of the agent ``apo`` in rollouts of their own.
"""

import json
import random
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.adapter.conversations import make_conversations
from lightning_otel.errors import TrainingError
from lightning_otel.rewards.chat_model import ChatModel, Model
from lightning_otel.tracing import auto_trace
from lightning_otel.tracing.emitters import emit_object
from lightning_otel.types import Conversation, Prompt, Resource, Trajectory
from lightning_otel.types.rollouts import brace_names

if TYPE_CHECKING:
    from lightning_otel.dataset import Store

EXAMPLES: Final = "#examples"
"""What comes after a prompt's name in the name of its examples."""
AGENT: Final = "apo"
PATIENCE: Final = 3
"""Answers in a row without a usable text, after which the model is given up."""
_TRIES: Final = 8
_KEEP: Final = (
    "The instructions are a template: {names} stand for what is filled in later. Write each of "
    "them exactly so, once at least, and no other name in single braces."
)

Candidate = dict[str, str]
"""Texts by name: what is tried together."""
Pair = tuple[dict[str, Any], dict[str, Any]]
"""A question of a user, and the last answer."""
Records = Mapping[str, Sequence[Mapping[str, Any]]]
"""For each text what the agent was given with it, answered, and was told about that."""


@dataclass(frozen=True, slots=True)
class TaskSet:
    """The tasks of one category; of all where there are none."""

    category: str  # empty if there are none
    train: Sequence[Any]
    val: Sequence[Any]  # empty to choose by those one learns from

    @property
    def place(self) -> str:
        """The name in messages."""
        return f" of {self.category}" if self.category else ""

    def name_resource(self, name: str) -> str:
        """Return the name of the resource that its tasks have in place of another."""
        return f"{name}[{self.category}]" if self.category else name

    def prefix_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics by names that no other category has."""
        prefix = f"{self.category}/" if self.category else ""
        return {f"{prefix}{name}": value for name, value in metrics.items()}


class Texts:
    """The prompts that a run changes; ``seed`` are the texts to begin with."""

    def __init__(self, seeds: Sequence[Resource], *, with_examples: bool) -> None:
        self._bodies = {seed.name: seed.body for seed in seeds}
        self._with_examples = with_examples
        self.names = list(self._bodies)
        self.seed: Candidate = {}
        for name, body in self._bodies.items():
            self.seed[name] = str(body["template"])
            if with_examples:
                self.seed[name + EXAMPLES] = write_examples(body.get("examples") or ())

    def bodies(self, candidate: Candidate) -> dict[str, dict[str, Any]]:
        """Return the bodies of resources with a candidate's texts."""
        bodies = {}
        for name, seed in self._bodies.items():
            bodies[name] = {**seed, "template": candidate[name]}
            if self._with_examples:
                bodies[name]["examples"] = json.loads(candidate[name + EXAMPLES])
        return bodies

    def changed_bodies(self, candidate: Candidate) -> dict[str, dict[str, Any]]:
        """Return the bodies that differ from before."""
        new = {key for key, text in self.seed.items() if candidate[key] != text}
        bodies = self.bodies(candidate)
        return {name: bodies[name] for name in self.names if {name, name + EXAMPLES} & new}

    def placeholders(self, name: str) -> tuple[str, ...]:
        """Return the names that the agent fills into a prompt."""
        return Prompt(self.seed[name]).placeholders

    def find_fault(self, name: str, template: str) -> str:
        """Return the reason to reject a template, such as a new placeholder; empty if none."""
        if not template.strip():
            return "the text is empty"
        if any("\ud800" <= letter <= "\udfff" for letter in template):
            return "the text has half a letter (a lone surrogate) in it"
        return Prompt(self.seed[name]).compare_placeholders(template)


def is_examples(name: str) -> bool:
    """Return whether a text is a prompt's examples, rather than its template."""
    return name.endswith(EXAMPLES)


def write_examples(examples: Iterable[Mapping[str, Any]]) -> str:
    """Return chat messages as the text that the search sees."""
    return json.dumps(list(examples), ensure_ascii=False, sort_keys=True)


class Shots:
    """Conversations of training tasks with their rewards, and sets drawn of the good ones.

    Source: bootstrapped demonstrations, Khattab et al. 2023 (arXiv 2310.03714, section 4).
    """

    def __init__(self, count: int, *, perfect_score: float | None, seed: int) -> None:
        self._count, self._perfect_score, self._seed = count, perfect_score, seed
        self._state: dict[str, Any] = {"known": {}, "drawn": 0, "sum": 0.0, "taken": 0}

    def add_answers(self, trajectories: Iterable[Trajectory], reward: float | None) -> None:
        """Note what an agent did and earned; of one question the best answer is kept."""
        if reward is None:
            return
        state, task_ids = self._state, self._state["known"]
        state["sum"] += reward
        state["taken"] += 1
        for pair in filter(None, map(_find_pair, make_conversations(trajectories))):
            key = json.dumps(pair[0], sort_keys=True)
            if key not in task_ids or task_ids[key][0] < reward:
                task_ids[key] = (reward, pair)

    def draw_examples(self, current: str) -> str | None:
        """Return other examples of above-mean or perfect reward, as text; None without any."""
        state, top = self._state, self._perfect_score
        if not state["taken"]:
            return None
        mean = state["sum"] / state["taken"]
        good = [
            pair
            for reward, pair in state["known"].values()
            if reward > mean or (top is not None and reward >= top)
        ]
        for _ in range(_TRIES):
            chance = random.Random(f"{self._seed}/{state['drawn']}")
            state["drawn"] += 1
            drawn = chance.sample(good, min(self._count, len(good)))
            text = write_examples(message for pair in drawn for message in pair)
            if drawn and text != current:
                return text
        return None

    def state(self) -> dict[str, Any]:
        """Return the state to resume from."""
        return {**self._state, "known": dict(self._state["known"])}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with what was known."""
        self._state = {**state, "known": dict(state["known"])}


def _find_pair(conversation: Conversation) -> Pair | None:
    first = next((message for message in conversation.messages if message["role"] == "user"), None)
    answer = conversation.messages[-1]
    content = answer.get("content")
    if first is None or answer["role"] != "assistant" or not isinstance(content, str):
        return None
    question = {"role": "user", "content": first["content"]}
    return (question, {"role": "assistant", "content": content}) if content.strip() else None


class Writer:
    """Writes templates anew by a model, or a function in its place."""

    def __init__(
        self,
        model: Model,
        texts: Texts,
        store: "Store",
        template: str | Mapping[str, str] | None = None,
    ) -> None:
        from gepa.strategies.instruction_proposal import InstructionProposalSignature

        self._model, self._texts, self._store = model, texts, store
        self._template = template
        self._signature = InstructionProposalSignature
        self.reasons: list[str] = []  # why the latest answers in a row were of no use

    @property
    def is_given_up(self) -> bool:
        """True once too many unusable answers came in a row."""
        return len(self.reasons) >= PATIENCE

    def check(self, *, is_needed: bool = False) -> None:
        """Raise TrainingError if it was given up, or if a text is needed and the latest is none."""
        if self.is_given_up or (is_needed and self.reasons):
            count = len(self.reasons)
            times = f"{count} times in a row, the last time" if count > 1 else "the one time"
            raise TrainingError(
                f"the reflection model proposed nothing usable {times} as {self.reasons[-1]}; try "
                f"a larger model, or see what it answered in the calls of the agent {AGENT}"
            )

    def rewrite(self, candidate: Candidate, records: Records) -> Candidate:
        """Return usable new texts for those of a candidate with records."""
        texts = {}
        for name, entries in records.items():
            try:
                text, fault = self._read_answer(name, self._ask(name, candidate[name], entries))
            except Exception as exc:  # noqa: BLE001  # who writes costs one proposal, not the run
                text, fault = "", f"{type(exc).__name__}: {exc}"
            if fault:
                self.reasons.append(fault)
                continue
            self.reasons.clear()
            if text != candidate[name]:
                texts[name] = text
        return texts

    def _ask(self, name: str, current: str, records: Sequence[Mapping[str, Any]]) -> object:
        template = self._template
        if isinstance(template, Mapping):
            template = template.get(name, template.get(name.partition("[")[0]))
        request = {
            "current_instruction_doc": current,
            "dataset_with_feedback": list(records),
            "prompt_template": template,
        }
        prompt = str(self._signature.prompt_renderer(request))
        if placeholders := self._texts.placeholders(name):
            prompt = f"{prompt}\n\n{_KEEP.format(names=brace_names(placeholders))}"
        with auto_trace(
            store=self._store,
            name="reflection",
            agent=AGENT,
            rollout_id=f"reflection-{secrets.token_hex(8)}",
            track_only=[],
            apply=False,  # what is tuned is the agent's, and not for who tunes it
        ):
            answer = self._model(prompt)
            if not isinstance(self._model, ChatModel):
                emit_object({"prompt": prompt, "answer": answer})
        return answer

    def _read_answer(self, name: str, answer: object) -> tuple[str, str]:
        if answer is not None and not isinstance(answer, str):
            return "", f"it answered with a {type(answer).__name__}, which is no text"
        if not answer or not answer.strip():
            return "", "it answered nothing"
        text = self._signature.output_extractor(answer.strip())["new_instruction"]
        return text, self._texts.find_fault(name, text)
