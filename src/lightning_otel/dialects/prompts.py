"""A prompt of a resource put into a request, in place of the agent's own.

Source: OpenAI's, Anthropic's and Google's API references: which fields hold instructions.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_otel.errors import ConfigError
from lightning_otel.messages import RULES, content_parts
from lightning_otel.types import Prompt
from lightning_otel.types.values import dump

LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Names of the limit of an answer's tokens."""


def prompt_text(prompt: Prompt, system: object, task: object) -> str:
    """The prompt's text; ``{system_prompt}`` in it is the agent's own, ``{task}`` the task."""
    values: dict[str, Any] = {}
    if task is not None:
        values["task"] = task if isinstance(task, str) else dump(task)
    if "system_prompt" in prompt.placeholders:
        parts = content_parts(system)
        values["system_prompt"] = "\n".join(str(part.get("content", "")) for part in parts)
    return prompt.format(**values)


def replace_prompt(
    prompt: Prompt, items: Sequence[Any], task: object, examples: list[Any], *, is_needed: bool
) -> list[Any]:
    """Messages with another system message and examples after what leads.

    Args:
        prompt: The prompt.
        items: The agent's messages.
        task: The rollout's task, for the prompt.
        examples: What comes before the conversation.
        is_needed: Whether the prompt stands among the messages.
    """
    lead = next((i for i, item in enumerate(items) if role_of(item) not in RULES), len(items))
    leading: list[Any] = list(items[:lead])
    if is_needed and leading:
        system = leading[0]
        leading[0] = {**system, "content": prompt_text(prompt, system.get("content"), task)}
    elif is_needed:
        leading = [{"role": "system", "content": prompt_text(prompt, None, task)}]
    return [*leading, *copy.deepcopy(examples), *items[lead:]]


def role_of(message: object) -> object:
    """Return the role that a message states."""
    return message.get("role") if isinstance(message, Mapping) else None


def text_example(example: Mapping[str, Any]) -> dict[str, Any]:
    """Return an example of text, which every API takes alike."""
    role, content = example.get("role"), example.get("content")
    if role not in ("user", "assistant") or not isinstance(content, str) or len(example) > 2:
        raise ConfigError(
            "its examples hold tools or media, which the API writes otherwise; "
            "publish examples of text"
        )
    return {"role": role, "content": content}
