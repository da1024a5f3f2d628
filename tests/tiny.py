"""What the small models of several test files have in common. (No import of transformers before a test needs it.)"""

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64)


def byte_tokenizer(*special: str, more=(), merges=(), eos_token="<|endoftext|>", extra_special_tokens=()):
    """Qwen2's: <|endoftext|>, the `special` tokens, a token a byte, and `more` that `merges` make."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    symbols = ["<|endoftext|>", *special, *sorted(ByteLevel.alphabet()), *more]
    tokens = dict(eos_token=eos_token, pad_token="<|endoftext|>", extra_special_tokens=list(extra_special_tokens))
    return Qwen2Tokenizer(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=list(merges), **tokens)


def made_batch(rewards, rollouts, group_size: int, **parts):
    """A `Batch` of these rewards (B,), with Eq. (1)'s advantages; `parts` are what it holds besides."""
    from credit.batch import Batch
    from grpo import group_advantages

    usual = dict(problems=[{}] * (len(rewards) // group_size), reasons=["drawn"] * len(rewards))
    return Batch(rollouts, rewards, group_advantages(rewards, group_size), group_size, **usual | parts)
