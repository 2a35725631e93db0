"""New texts of prompts, written by a chat model that reads failures or by a function.

What it is asked and answers is recorded like any call, as that of the agent ``apo`` in rollouts of
its own, and is training data of nobody.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from lightning_otel.algorithms.apo.texts import Candidate, Texts
from lightning_otel.dataset import Store
from lightning_otel.emitters import emit_object
from lightning_otel.errors import ConfigError, NotInstalledError, TrainingError
from lightning_otel.tracing import auto_trace

AGENT: Final = "apo"
PATIENCE: Final = 3
"""Answers in a row without a usable text, after which the model is given up."""

Model = Callable[[str], str | None]
"""Answers a prompt."""
Records = Mapping[str, Sequence[Mapping[str, Any]]]
"""For each text what the agent was given with it, answered, and was told about that."""

_KEEP: Final = (
    "The instructions are a template: {names} stand for what is filled in later. Write each of "
    "them exactly so, once at least, and no other name in single braces."
)


class Writer:
    """Writes templates anew.

    Attributes:
        reasons: Why the latest answers were of no use, in a row; empty after one that was.
    """

    def __init__(
        self,
        model: Model,
        texts: Texts,
        store: Store,
        template: str | Mapping[str, str] | None = None,
    ) -> None:
        """Name who writes.

        Args:
            model: Answers what it is asked.
            texts: The prompts that are changed.
            store: Where its calls are recorded.
            template: What the model is asked, by text if it differs, with ``<curr_param>`` and
                ``<side_info>``; None is GEPA's own.
        """
        self._model = model
        self._texts = texts
        self._store = store
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

    def rewrite(self, candidate: Candidate, records: Records) -> Candidate:
        """Return new texts for those of a candidate that there are records of, where usable."""
        found = {}
        for name, held in records.items():
            try:
                answer = self._ask(name, candidate[name], held)
            except Exception as exc:  # noqa: BLE001  # who writes costs one proposal, not the run
                self.reasons.append(f"{type(exc).__name__}: {exc}")
                continue
            text, fault = self._read_answer(name, answer)
            if fault:
                self.reasons.append(fault)
                continue
            self.reasons.clear()
            if text != candidate[name]:
                found[name] = text
        return found

    def _ask(self, name: str, current: str, records: Sequence[Mapping[str, Any]]) -> object:
        from gepa.strategies.instruction_proposal import InstructionProposalSignature as Signature

        template = self._template
        if isinstance(template, Mapping):
            template = template.get(name, template.get(name.partition("[")[0]))
        prompt = str(
            Signature.prompt_renderer(
                {
                    "current_instruction_doc": current,
                    "dataset_with_feedback": list(records),
                    "prompt_template": template,
                }
            )
        )
        if placeholders := self._texts.placeholders(name):
            names = ", ".join(f"{{{each}}}" for each in placeholders)
            prompt = f"{prompt}\n\n{_KEEP.format(names=names)}"
        with auto_trace(
            store=self._store,
            name="reflection",
            agent=AGENT,
            rollout_id=f"reflection-{secrets.token_hex(8)}",
            track_only=[],
            apply=False,  # what is tuned is the agent's, and not for who tunes it
        ):
            answer = self._model(prompt)
            if not isinstance(self._model, _Chat):
                emit_object({"prompt": prompt, "answer": answer})
        return answer

    def _read_answer(self, name: str, answer: object) -> tuple[str, str]:
        """Return the text in an answer, and why it is of no use."""
        from gepa.strategies.instruction_proposal import InstructionProposalSignature as Signature

        if answer is not None and not isinstance(answer, str):
            return "", f"it answered with a {type(answer).__name__}, which is no text"
        if not answer or not answer.strip():
            return "", "it answered nothing"
        text = Signature.output_extractor(answer.strip())["new_instruction"]
        return text, self._texts.fault(name, text)


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
    """Return a model behind the ``openai`` client, which reads its key from the environment.

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
