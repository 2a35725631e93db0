"""A language model of a few thousand weights and its tokenizer, made here: no hub is asked."""

from typing import Any

TEMPLATE = (
    "{%- if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif -%}"
    "{%- for message in messages -%}"
    "<|{{ message.role }}|>"
    "{%- if message.role == 'assistant' -%}"
    "{%- generation -%}{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    "<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>"
    "{%- endfor -%}<|end|>{%- endgeneration -%}"
    "{%- else -%}{{ message.content }}<|end|>{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
SPECIAL = ("<pad>", "<|end|>", "<|tools|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")


def tokenizer() -> Any:
    """A tokenizer of bytes with a chat template that shows tools and marks what is generated."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *letters])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    found = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<|end|>")
    found.chat_template = TEMPLATE
    return found


def model() -> Any:
    """A Qwen3 of two small layers, the same one every time."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer()),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=2048,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
