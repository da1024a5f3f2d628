"""`grpo.rollout` with every hook of this folder.

    fast_rollout(model, tokenizer, prompts, ...)   the rollouts of `grpo.rollout`, sooner
    row_bytes(config, prompt, response, itemsize)  memory of one rollout while it is generated

A group's prompt is read once (`fast.prefill`), and rollouts that have ended leave the batch
(`fast.decode`).
"""

from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fast.decode import live_rows
from fast.prefill import shared_prefill
from grpo import AT_ONCE, Rollouts, hf_generate, rollout


def fast_rollout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | list[int]],
    group_size: int,
    *,
    max_tokens: int,
    temperature: float,
    generate_batch: int = AT_ONCE,
) -> Rollouts:
    """`grpo.rollout`, sooner; `generate_batch` rollouts are generated at a time."""
    return rollout(
        model,
        tokenizer,
        prompts,
        group_size,
        max_tokens=max_tokens,
        temperature=temperature,
        batch_size=generate_batch,
        generate=partial(shared_prefill, partial(hf_generate, loop=live_rows)),
    )


def row_bytes(config: PreTrainedConfig, prompt: int, response: int, itemsize: int) -> int:
    """Bytes per rollout in `generate`, with numbers of `itemsize` bytes.

    They are its cache for `prompt` and `response` tokens, four float32 copies of one token's
    logits, and the working memory of one layer. A layer works with the prompt's activations at
    first, then with keys and values that are copied for every query head; the larger of the two
    counts.
    """
    text = config.get_text_config()
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    head = 2 * (prompt + response) * head_width  # numbers in the keys and values of one head
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    cache = text.num_hidden_layers * kv_heads * head
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    prefill = prompt * (6 * text.hidden_size + 3 * wide)  # counted on Qwen2
    layer = max(prefill, text.num_attention_heads * head)
    return itemsize * (cache + layer) + 4 * 4 * text.vocab_size
