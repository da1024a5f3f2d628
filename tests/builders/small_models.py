"""Tokenizers and small models, untrained, some with the layout of a large one."""

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    Qwen2Tokenizer,
)

from tasks import toy

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
)


def small_config(kind: type[PreTrainedConfig], **settings) -> PreTrainedConfig:
    """A configuration of this kind, of two narrow layers."""
    return kind(**SMALL | settings)


def byte_tokenizer(
    *special: str, more=(), merges=(), eos_token="<|endoftext|>", extra_special_tokens=()
):
    """Qwen2's tokenizer, with a token per byte and no others but those asked for.

    These are <|endoftext|>, the `special` tokens, and `more` that `merges` make.
    """
    symbols = ["<|endoftext|>", *special, *sorted(ByteLevel.alphabet()), *more]
    return Qwen2Tokenizer(
        vocab={symbol: i for i, symbol in enumerate(symbols)},
        merges=list(merges),
        eos_token=eos_token,
        pad_token="<|endoftext|>",
        extra_special_tokens=list(extra_special_tokens),
    )


def small_llama():
    """A model of random weights, and its tokenizer with a token per byte and one merge."""
    tokenizer = byte_tokenizer(more=["in"], merges=[("i", "n")])
    torch.manual_seed(0)
    config = small_config(
        LlamaConfig,
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval(), tokenizer


def turns_tokenizer(*special: str, template: str | None = CHAT_TEMPLATE):
    """`byte_tokenizer` with the turns of Qwen's chat models, and further special tokens."""
    tokenizer = byte_tokenizer(
        "<|im_start|>",
        "<|im_end|>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>", *special],
    )
    tokenizer.chat_template = template
    return tokenizer


def small_gpt2():
    """A model whose positions are absolute."""
    return GPT2LMHeadModel(
        GPT2Config(
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            vocab_size=29,
            bos_token_id=1,
            eos_token_id=1,
        )
    ).eval()


def small_mixtral():
    """A model with experts, for the embedded task's vocabulary."""
    return MixtralForCausalLM(
        small_config(
            MixtralConfig, num_local_experts=4, vocab_size=29, bos_token_id=None, eos_token_id=None
        )
    ).eval()


def save_model(folder, model, tokenizer=None) -> str:
    """The name of a folder with the model and its tokenizer.

    The tokenizer is the embedded task's if none is given.
    """
    model.save_pretrained(folder)
    (tokenizer or toy.make_tokenizer()).save_pretrained(folder)
    return str(folder)


class NumberTokenizer:
    """A tokenizer whose tokens are numbers."""

    def decode(self, ids: list[int], **options: bool) -> str:
        return "".join(map(str, ids))


FAMILIES = {
    "qwen2": {},
    "llama": {},
    "qwen3": dict(head_dim=16),
    "mistral": dict(sliding_window=None),
}


def family_model(family="qwen2", spread=0.5, **options):
    """A small model with weights far from zero, whose choices depend on every position and mask."""
    sizes = dict(vocab_size=40, max_position_embeddings=128, initializer_range=spread)
    sizes |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    sizes |= SMALL | {"intermediate_size": 48} | FAMILIES.get(family, {})
    config = AutoConfig.for_model(family, **sizes | options)
    return AutoModelForCausalLM.from_config(config).eval()
