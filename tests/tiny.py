"""What the small models of several test files have in common. (No import of transformers before a test needs it.)"""

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64)


def byte_tokenizer(*special: str, more=(), merges=(), eos_token="<|endoftext|>", extra_special_tokens=()):
    """Qwen2's: <|endoftext|>, the `special` tokens, a token a byte, and `more` that `merges` make."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    symbols = ["<|endoftext|>", *special, *sorted(ByteLevel.alphabet()), *more]
    tokens = dict(eos_token=eos_token, pad_token="<|endoftext|>", extra_special_tokens=list(extra_special_tokens))
    return Qwen2Tokenizer(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=list(merges), **tokens)
