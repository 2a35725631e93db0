"""A chat model behind the ``openai`` client, for those who ask one: prompt writers and judges."""

import logging
from collections.abc import Callable
from typing import Any, Final

from lightning_otel.errors import ConfigError, NotInstalledError, install_command

Model = Callable[[str], str | None]
"""Takes a prompt; returns the answer's text, None if it has none."""
_CHECK_S: Final = 10.0
log = logging.getLogger(__name__)


class ChatModel:
    """A model of a server that speaks OpenAI's chat API; ``noun`` is its role in messages."""

    def __init__(self, noun: str, model: str, client: Any) -> None:
        self._noun, self._model, self._client = noun, model, client

    def check_key(self) -> None:
        """Raise ConfigError if the server refuses the key; it is asked before agents run."""
        import openai

        try:
            self._client.with_options(max_retries=0, timeout=_CHECK_S).models.list()
        except openai.AuthenticationError as exc:
            raise ConfigError(
                f"the server of the {self._noun} {self._model!r} refuses the key: {exc}; "
                "export the right OPENAI_API_KEY"
            ) from exc
        except openai.OpenAIError:  # it lists no models, or is down for now: the first call tells
            log.debug("the key of the %s cannot be checked", self._noun, exc_info=True)

    def __call__(self, prompt: str) -> str | None:
        """Return the model's answer to a prompt."""
        reply = self._client.chat.completions.create(
            model=self._model, messages=[{"role": "user", "content": prompt}]
        )
        return reply.choices[0].message.content if reply.choices else None


def connect_chat(noun: str, model: str, base_url: str | None, timeout_s: float) -> ChatModel:
    """Return a model behind the ``openai`` client, which reads its key from the environment."""
    try:
        import openai
    except ModuleNotFoundError as exc:
        raise NotInstalledError(
            f"the {noun} {model!r} is reached through the openai client, which is not installed; "
            f"{install_command('openai')}, or give a function in its place"
        ) from exc
    try:
        return ChatModel(noun, model, openai.OpenAI(base_url=base_url, timeout=timeout_s))
    except openai.OpenAIError as exc:
        if base_url is None:
            raise ConfigError(
                f"the {noun} {model!r} has no key ({exc}); export OPENAI_API_KEY, or give the "
                "base URL of a server of your own"
            ) from exc
        # A server of one's own asks for none, but the client does.
        client = openai.OpenAI(base_url=base_url, api_key="none-needed", timeout=timeout_s)
        return ChatModel(noun, model, client)
