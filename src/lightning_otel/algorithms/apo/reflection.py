"""Proposals of new texts, by a chat model that reads failures or by a function.

What it is asked and answers is recorded like any call, as that of the agent ``apo`` in rollouts of
its own, and is training data of nobody.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from lightning_otel.algorithms.apo.fault import Fault
from lightning_otel.algorithms.apo.memory import Memory
from lightning_otel.algorithms.apo.texts import Candidate, Texts, is_examples
from lightning_otel.dataset import Store
from lightning_otel.emitters import emit_object
from lightning_otel.errors import ConfigError, NotInstalledError, TrainingError
from lightning_otel.tracing import auto_trace

AGENT: Final = "apo"
PATIENCE: Final = 3
"""Proposals in a row without a usable text, after which the model is given up."""

Model = Callable[[str], str | None]
"""Answers a prompt."""

_KEEP: Final = (
    "The instructions are a template: {names} stand for what is filled in later. Write each of "
    "them exactly so, once at least, and no other name in single braces."
)


class Reflection:
    """Proposes texts, one after the other; GEPA's ``custom_candidate_proposer``.

    Attributes:
        reasons: Why the latest proposals came to nothing, in a row; empty after one that did not.
    """

    def __init__(
        self,
        model: Model,
        texts: Texts,
        memory: Memory,
        store: Store,
        fault: Fault,
        *,
        first: Sequence[Candidate] = (),
        template: str | Mapping[str, str] | None = None,
    ) -> None:
        """Prepare.

        Args:
            model: Answers what it is asked.
            texts: The prompts that are changed.
            memory: What was tried, and what examples are drawn from.
            store: Where its calls are recorded.
            fault: Notes what goes wrong.
            first: Texts that somebody wrote, which are tried before the model is asked.
            template: What the model is asked, by text if it differs, with ``<curr_param>`` and
                ``<side_info>``; None is GEPA's own.
        """
        self._model = model
        self._texts = texts
        self._memory = memory
        self._store = store
        self._fault = fault
        self._first = list(first)
        self._template = template
        self.reasons: list[str] = []

    @property
    def is_given_up(self) -> bool:
        """True once too many unusable answers came in a row."""
        return len(self.reasons) >= PATIENCE

    def check(self) -> None:
        """Say so if it was given up.

        Raises:
            TrainingError: It was.
        """
        if self.is_given_up:
            raise TrainingError(
                f"the reflection model proposed nothing usable {len(self.reasons)} times in a row, "
                f"the last time as {self.reasons[-1]}; try a larger model, or see what it answered "
                f"in the calls of the agent {AGENT}"
            )

    def __call__(
        self,
        candidate: Candidate,
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: Sequence[str],
    ) -> Candidate:
        """New texts for some of a candidate's; none if nothing usable was proposed."""
        with self._fault.noted():
            return self._propose_texts(candidate, reflective_dataset, components_to_update)

    def _propose_texts(
        self,
        candidate: Candidate,
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: Sequence[str],
    ) -> Candidate:
        if self._memory.tried < len(self._first):
            self._memory.tried += 1
            return self._first[self._memory.tried - 1]
        found = {}
        for name in components_to_update:
            if is_examples(name):
                text = self._draw_text(candidate[name])
            else:
                text = self._write_text(name, candidate[name], reflective_dataset[name])
            if text is not None:
                found[name] = text
        return found

    def _draw_text(self, current: str) -> str | None:
        shots = self._memory.shots
        return shots.draw(current) if shots is not None else None

    def _write_text(
        self, name: str, current: str, records: Sequence[Mapping[str, Any]]
    ) -> str | None:
        """The model's text for a template; None, with the reason noted, if it is of no use."""
        from gepa.strategies.instruction_proposal import InstructionProposalSignature as Signature

        template = self._template
        if isinstance(template, Mapping):
            template = template.get(name, template.get(name.partition("[")[0]))
        prompt = Signature.prompt_renderer(
            {
                "current_instruction_doc": current,
                "dataset_with_feedback": list(records),
                "prompt_template": template,
            }
        )
        placeholders = self._texts.placeholders(name)
        if placeholders:
            names = ", ".join(f"{{{each}}}" for each in placeholders)
            prompt = f"{prompt}\n\n{_KEEP.format(names=names)}"
        try:
            answer = self._ask_model(str(prompt))
        except Exception as exc:  # noqa: BLE001  # whoever writes costs one proposal, not the run
            self._refuse_text(f"{type(exc).__name__}: {exc}")
            return None
        if answer is not None and not isinstance(answer, str):
            self._refuse_text(f"it answered with a {type(answer).__name__}, which is no text")
            return None
        if not answer or not answer.strip():
            self._refuse_text("it answered nothing")
            return None
        text = Signature.output_extractor(answer.strip())["new_instruction"]
        fault = self._texts.fault(name, text)
        if fault:
            self._refuse_text(fault)
            return None
        self.reasons.clear()
        return None if text == current else text

    def _refuse_text(self, reason: str) -> None:
        self.reasons.append(reason)

    def _ask_model(self, prompt: str) -> str | None:
        named = f"reflection-{secrets.token_hex(8)}"
        with auto_trace(
            store=self._store,
            name="reflection",
            agent=AGENT,
            rollout_id=named,
            track_only=[],
            apply=False,  # what is tuned is the agent's, and not for who tunes it
        ):
            answer = self._model(prompt)
            if not isinstance(self._model, _Chat):
                emit_object({"prompt": prompt, "answer": answer})
        return answer


class _Chat:
    """A chat model behind the ``openai`` client."""

    def __init__(self, model: str, client: Any) -> None:
        self._model = model
        self._client = client

    def __call__(self, prompt: str) -> str | None:
        reply = self._client.chat.completions.create(
            model=self._model, messages=[{"role": "user", "content": prompt}]
        )
        return reply.choices[0].message.content if reply.choices else None


def chat(model: str, base_url: str | None, timeout_s: float) -> Model:
    """A model behind the ``openai`` client, which reads its key from the environment.

    Args:
        model: Its name.
        base_url: Where it is; None is the client's own.
        timeout_s: How long each try of an answer may take, seconds.

    Raises:
        ConfigError: The client is not installed, or has no key for a server that is not named.
    """
    try:
        import openai
    except ModuleNotFoundError as exc:
        raise NotInstalledError(
            f"the reflection model {model!r} is reached through the openai client, which is not "
            "installed; pip install 'lightning-otel[openai]', or give reflection_lm=… a function"
        ) from exc
    try:
        return _Chat(model, openai.OpenAI(base_url=base_url, timeout=timeout_s))
    except openai.OpenAIError as exc:
        if base_url is None:
            raise ConfigError(
                f"the reflection model {model!r} has no key ({exc}); export OPENAI_API_KEY, or "
                "give base_url=… a server of your own"
            ) from exc
        # A server of one's own asks for none, but the client does.
        client = openai.OpenAI(base_url=base_url, api_key="none-needed", timeout=timeout_s)
        return _Chat(model, client)
