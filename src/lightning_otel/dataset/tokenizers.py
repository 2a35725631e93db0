"""The engine's tokenizer and chat template, loaded with ``transformers``: the extra ``drift``."""

import hashlib
import importlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_otel.errors import ConfigError, NotInstalledError, install_command
from lightning_otel.messages.chat import messages_of, tools_of
from lightning_otel.messages.media import to_text
from lightning_otel.types import Message
from lightning_otel.types.values import parse_json

_EXTRA = install_command("drift")
_RENDERER = "transformers.utils.chat_template_utils"
_PART = "{'type': 'text'"
"""Parts that a template of texts has written as they are."""
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TransformersTokenizer:
    """A tokenizer of ``transformers`` as the drift detector asks for it."""

    def __init__(self, tokenizer: Any) -> None:
        """Take a ``PreTrainedTokenizerBase`` that has a chat template."""
        self._tokenizer = tokenizer
        self._size = len(tokenizer)
        written = json.dumps(tokenizer.chat_template, sort_keys=True)
        self.chat_template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens_map)
        self.template = hashlib.sha256(written.encode()).hexdigest()[:8]

    def encode(self, text: str, /) -> Sequence[int]:
        """The ids of a text, special tokens in it read as such, none added around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int], /) -> str:
        """The text of ids, special tokens written out.

        Raises:
            ValueError: An id is not in the vocabulary.
        """
        # Unknown ids are left out in silence, and the rest looks like another text.
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._size:
            raise ValueError(f"a token id is not among the {self._size} of the vocabulary")
        return str(
            self._tokenizer.decode(
                token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]], /) -> str:
        """The prompt that messages and tools make, up to where the model goes on.

        Raises:
            ValueError: The template refuses them.
        """
        refused = importlib.import_module("jinja2").TemplateError
        conversation = messages_of(messages)
        # As engines hand them to templates. Source: vLLM's ``_postprocess_messages``.
        for call in (call for item in conversation for call in item.get("tool_calls", ())):
            call["function"]["arguments"] = parse_json(call["function"]["arguments"])
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=tools_of(tools) or None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except (refused, KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"the chat template refuses the messages: {exc}") from exc
        return str(text)


class ChatTemplate(NamedTuple):
    """A chat template in which rows are tried, and its tokenizer's special tokens by name."""

    text: str
    tokens: Mapping[str, str]

    def find_fault(self, row: Mapping[str, Any]) -> str:
        """Return why it cannot write prompt, completion and tools; empty if it writes all."""
        fault = self._try_row(row)
        if fault:  # templates of vision models want texts as parts: TRL makes them so
            names = ("prompt", "completion")
            parts = {name: list(map(_split_content, row[name])) for name in names}
            fault = fault if self._try_row({**row, **parts}) else ""
        return fault and f"the chat template {fault}; train with another one"

    def _try_row(self, row: Mapping[str, Any]) -> str:
        render = importlib.import_module(_RENDERER).render_jinja_template
        refused = importlib.import_module("jinja2").TemplateError
        options = {"tools": row["tools"] or None, "chat_template": self.text, **self.tokens}
        whole = [*row["prompt"], *row["completion"]]
        try:
            render([row["prompt"]], add_generation_prompt=True, **options)
            (text,), _ = render([whole], **options)
        except (refused, LookupError, TypeError, AttributeError, ValueError) as exc:
            return f"refuses it: {' '.join(str(exc).split())[:200].replace(';', ',')}"
        rules = [_split_content(turn)["content"] for turn in whole if turn["role"] == "system"]
        lines = "\n".join(to_text(part.get("text")) for parts in rules for part in parts)
        is_lost = _PART in text or any(line.strip() not in text for line in lines.splitlines())
        return "leaves instructions out" if is_lost else ""


def _split_content(turn: Mapping[str, Any]) -> dict[str, Any]:
    content = turn["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**turn, "content": parts}


def load_template(source: str) -> ChatTemplate:
    """Return the chat template of a tokenizer, or in a file that ends in ``.jinja``."""
    if not source.endswith(".jinja"):
        return load_tokenizer(source).chat_template
    try:
        importlib.import_module(_RENDERER)
        return ChatTemplate(Path(source).read_text(encoding="utf-8"), dict.fromkeys(_TOKENS, ""))
    except ImportError as exc:
        raise NotInstalledError(f"no template can be tried: {exc}; {_EXTRA}") from exc
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot read the template {source}: {exc}; name a file") from exc


def load_tokenizer(source: str) -> TransformersTokenizer:
    """Return the tokenizer in a folder, or of a model's name, fetched if it is not cached."""
    # It warns that torch is not there, which nothing here asks for.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        importlib.import_module("jinja2")  # without it a template fails at its first use
        tokenizers = importlib.import_module("transformers").AutoTokenizer
    except ImportError as exc:
        raise NotInstalledError(f"no tokenizer can be loaded: {exc}; {_EXTRA}") from exc
    try:
        tokenizer = tokenizers.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        why = " ".join(str(exc).split())[:200].replace(";", ",")
        raise ConfigError(
            f"no tokenizer at {source!r}: {why}; name a folder with a tokenizer.json, or a model"
        ) from exc
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer at {source!r} has no chat template; put the engine's into its folder "
            "as chat_template.jinja"
        )
    return TransformersTokenizer(tokenizer)
