"""A Qwen3 of a hundred thousand weights with a tokenizer and a chat template, made on the spot."""

from pathlib import Path
from typing import Any, Final

TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL: Final = ("<pad>", "<|im_end|>", "<|im_start|>")
VOCABULARY: Final = len(SPECIAL) + 256


def tokenizer() -> Any:
    """A tokenizer of bytes that writes ChatML and marks what the assistant said."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *letters])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<|im_end|>"
    )
    found.chat_template = TEMPLATE
    return found


def model(seed: int = 0, sharpness: float = 1.0) -> Any:
    """The model; the same one for the same seed.

    Args:
        seed: Decides the weights.
        sharpness: How far its answers are from pure chance: an adapter, which leaves the head as it
            is, can only choose among what the head can say.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    found = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    with torch.no_grad():
        found.lm_head.weight.mul_(sharpness)
    return found


def saved(folder: Path, seed: int = 0, sharpness: float = 1.0) -> Path:
    """A folder that holds both, as ``from_pretrained`` reads them."""
    model(seed, sharpness).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
