"""A prompt as agents use it: text with placeholders, and examples that show how it is meant."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lightning_otel.errors import ConfigError

_PLACEHOLDER: Final = re.compile(r"\{\{([^\W\d]\w*)\}\}|\{([^\W\d]\w*)\}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A template with few-shot examples.

    ``{task}`` is a placeholder, ``{{task}}`` the text ``{task}``; braces around anything but one
    name, such as those of JSON, are text.

    Attributes:
        template: The text.
        examples: Chat messages that come after it and before what the agent is asked.
        name: What errors call it.
    """

    template: str
    examples: tuple[Mapping[str, Any], ...] = ()
    name: str = "the prompt"

    @property
    def placeholders(self) -> tuple[str, ...]:
        """The names to be filled in, each once, in order."""
        found = (match[2] for match in _PLACEHOLDER.finditer(self.template))
        return tuple(dict.fromkeys(name for name in found if name is not None))

    def format(self, /, **values: object) -> str:
        """The text with every placeholder filled in; values that it does not ask for are not used.

        Raises:
            ConfigError: A placeholder has no value.
        """
        missing = [name for name in self.placeholders if name not in values]
        if missing:
            raise ConfigError(
                f"{self.name} needs {', '.join(missing)}, and was given "
                f"{', '.join(sorted(values)) or 'nothing'}; format({missing[0]}=…), or write "
                f"{{{{{missing[0]}}}}} in it if that is meant as text"
            )
        return _PLACEHOLDER.sub(
            lambda match: f"{{{match[1]}}}" if match[1] else str(values[match[2]]), self.template
        )

    def messages(self, /, **values: object) -> list[dict[str, Any]]:
        """A system message with the text, then the examples, as the chat API takes them.

        Raises:
            ConfigError: A placeholder has no value.
        """
        system = {"role": "system", "content": self.format(**values)}
        return [system, *(dict(example) for example in self.examples)]
