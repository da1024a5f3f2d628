"""Tokenizers and small models, untrained, some with the layout of a large one."""

from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
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


def save_model(folder, model, tokenizer=None) -> str:
    """The name of a folder with the model and its tokenizer.

    The tokenizer is the embedded task's if none is given.
    """
    model.save_pretrained(folder)
    (tokenizer or toy.make_tokenizer()).save_pretrained(folder)
    return str(folder)


def family_model(family="qwen2", spread=0.5, **options):
    """A small model with weights far from zero, whose choices depend on every position and mask."""
    sizes = dict(vocab_size=40, max_position_embeddings=128, initializer_range=spread)
    sizes |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    sizes |= SMALL | {"intermediate_size": 48}
    config = AutoConfig.for_model(family, **sizes | options)
    return AutoModelForCausalLM.from_config(config).eval()
