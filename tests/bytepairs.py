"""A real tokenizer, built in a moment: byte-level BPE and ChatML; and calls in its ids."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.adapter.forest import Forest, token_attributes

from lightning_otel import Store
from lightning_otel.types import Message
from lightning_otel.types import conventions as c

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for t in m.tool_calls or [] %}<tool>{{ t.function.arguments | tojson }}</tool>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
POLITE = "<|im_start|>system\nYou are polite.<|im_end|>\n" + CHATML
REFUSING = "{{ raise_exception('system must come first') }}"
PROMPT = "<|im_start|>user\nwhat is the question<|im_end|>\n<|im_start|>assistant\n"
CORPUS = ["the answer is the answer", "what is the question of the answer", "seventeen times"] * 20


def built(folder: Path, template: str) -> Path:
    """A tokenizer on disk, as a model's folder has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    wrapped: Any = importlib.import_module("transformers").PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    whole = wrapped(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    if template:
        whole.chat_template = template
    whole.save_pretrained(folder)
    return folder


class Engine:
    """The tokenizer in a folder, as an inference engine uses it."""

    def __init__(self, folder: Path) -> None:
        self._own: Any = importlib.import_module("transformers").AutoTokenizer.from_pretrained(
            folder
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without any of the tokenizer's own."""
        return list(self._own.encode(text, add_special_tokens=False))

    def render(self, question: str) -> str:
        """Return the prompt of one question."""
        messages = [{"role": "user", "content": question}]
        return str(
            self._own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )


def spelled(tokenizer: Engine, text: str) -> list[int]:
    """The ids of a text letter by letter, as a model may sample it that was not trained on it."""
    return [token_id for letter in text for token_id in tokenizer.encode(letter)]


def record(
    store: Store,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    asked: str | Sequence[Message] = "what is the question",
) -> None:
    """Keep one call for each prompt and response."""
    forest = Forest()
    for prompt, sampled in zip(prompts, responses, strict=True):
        call = forest.open_call("the answer", asked)
        forest._made[call].attributes |= token_attributes(prompt, sampled)
        forest._made[call].attributes[c.RESPONSE_MODEL] = "tiny"
        forest.close(call)
    store.add(forest.spans)
