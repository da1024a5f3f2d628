"""Models of random weights in the shapes of Qwen2.5-Math, for what depends on shapes alone.

A model draws nearly every token with one probability. So as many stop tokens are named as give the
responses a median length, and one token in fifty is a boxed answer, which math-verify grades.
"""

import json
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2Tokenizer,
)

LARGE = Qwen2Config(
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    intermediate_size=18_944,
    hidden_size=3584,
    vocab_size=152_064,
    tie_word_embeddings=False,
)
SMALL = Qwen2Config(
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    intermediate_size=8960,
    hidden_size=1536,
    vocab_size=151_936,
    tie_word_embeddings=True,
)
TINY = Qwen2Config(  # to rehearse on a CPU
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    hidden_size=64,
    vocab_size=4096,
    tie_word_embeddings=True,
)
SHAPES = {"7B": LARGE, "1.5B": SMALL, "tiny": TINY}
EVERY = 50  # one token in so many is a boxed answer
ANSWERS = ("1", "2", "3")
LN_2 = 0.693  # a response of median length m ends at each token with probability ln 2 / m


def make_model(shape: str, device: torch.device, median: float) -> PreTrainedModel:
    """A model in bfloat16 whose responses end after `median` tokens in half of the cases."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=torch.bfloat16)
    words = [token for token in range(1000, model.config.vocab_size, 3) if token % EVERY]
    count = round(LN_2 / median * model.config.vocab_size)
    model.generation_config.eos_token_id = words[:count]
    return model.eval()


def make_tokenizer(shape: str) -> PreTrainedTokenizerBase:
    """A tokenizer of the model's size that reads prompts byte by byte."""
    symbols = ["<|endoftext|>", *sorted(ByteLevel.alphabet())]
    for token in range(len(symbols), SHAPES[shape].vocab_size):
        answer = ANSWERS[token // EVERY % len(ANSWERS)]
        symbols.append(f"\u0120w{token}" if token % EVERY else f"\u0120\\boxed{{{answer}}}w{token}")
    vocab = {symbol: token for token, symbol in enumerate(symbols)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=[], eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    return tokenizer


def write_problems(path: Path) -> None:
    """240 problems with prompts of about 200 tokens."""
    with open(path, "w", encoding="utf-8") as file:
        for number in range(240):
            problem = f"What is the sum of f(p) over all primes p below {number + 7}, in steps?"
            row = {"problem": problem, "answer": ANSWERS[number % len(ANSWERS)]}
            file.write(json.dumps(row) + "\n")
