"""Rollouts of unlike lengths end to end in one row, without padding.

    packing_of(model)        -> a layout of the two hooks below, or the padded one
    pack_rollouts(rollouts)  replaces grpo.end_to_end: ids (1, N), is_response (1, N), arguments
    pack(rows, ...)          replaces grpo.pack: as few micro-batches as can be, equally full

Padded to its longest rollout, a micro-batch computes with 1.1 to 2.9 times as many tokens as there
are (lab/records/speed.md). Packed, it computes with these alone. Positions restart at each
rollout, and each attends to itself: the attention that is registered with transformers as "packed"
runs on CUDA in half precision in one kernel, `varlen_attn`, and elsewhere by SDPA over one rollout
after the other, or over several of one length. No mask over all pairs of tokens ever exists.

On CPUs a prompt stands before the first of its rollouts alone, and the others attend to it there: a
micro-batch computes with each prompt once. A prompt's last token, which predicts a response's first
one, stays with each rollout.

Left out: sliding windows, rotary positions that depend on the longest row, and families other than
`FAMILIES`, which the tests compare with single rollouts.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo import PADDED, Layout, Rollouts

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
HALF = (torch.float16, torch.bfloat16)
PADDED_ATTENTION: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward
CAUSAL = (-1, 0)  # the window of `varlen_attn`: everything before a token, nothing after it
# Prompts of fewer tokens, such as the embedded task's, are read again for each rollout.
SHORT = 48


class Segments(NamedTuple):
    """Where in a packed row its rollouts lie."""

    starts: Tensor  # (b + 1,) int32, on the device: where each begins, and where the last one ends
    lengths: list[int]  # b numbers of tokens
    # b pairs: where the prompt that stands before an earlier rollout begins and ends; 0, 0: its own
    shared: list[tuple[int, int]]


def attends_fully(config: PreTrainedConfig) -> bool:
    """Whether a model is of one of FAMILIES, and each token sees all before it, in every layer."""
    return (
        config.model_type in FAMILIES
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and getattr(config, "sliding_window", None) is None
        # these two look at the longest row
        and config.rope_parameters["rope_type"] not in ("dynamic", "longrope")
    )


def packing_of(model: PreTrainedModel) -> Layout:
    """Set the model's attention and return the packed layout, or PADDED where padding is needed."""
    if not attends_fully(model.config):
        return PADDED
    # Never set back: recomputed layers look it up again in the backward pass.
    model.set_attn_implementation("packed")
    return Layout(pack_rollouts, pack)


def pack(
    rows: Sequence[int], lengths: Sequence[int], tokens: int, multiple: int = 1
) -> list[Tensor]:
    """`grpo.pack` without padding: as few micro-batches as can be, equally full.

    Each rollout, the longest first, goes where fewest tokens are.
    """
    longest_first = sorted(rows, key=lambda row: -lengths[row])
    total = sum(lengths[row] for row in rows)
    count = multiple * max(1, -(-total // (multiple * tokens)))
    while True:
        micro_batches: list[list[int]] = [[] for _ in range(count)]
        sizes = [0] * count  # tokens
        for row in longest_first:
            emptiest = sizes.index(min(sizes))
            micro_batches[emptiest].append(row)
            sizes[emptiest] += lengths[row]
        if all(
            size <= tokens or len(rows) == 1
            for size, rows in zip(sizes, micro_batches, strict=True)
        ):
            break
        count += multiple
    fullest_first = sorted(range(count), key=lambda place: -sizes[place])
    return [torch.tensor(micro_batches[place]) for place in fullest_first if micro_batches[place]]


def pack_rollouts(rollouts: Rollouts) -> tuple[Tensor, Tensor, dict]:
    """Put prompt and response of one rollout after the other into one row.

    Returns what `grpo.end_to_end` does, with b = 1 and S = N.
    """
    prompt_mask = rollouts.prompt_mask  # (b, P)
    # positions 0, 1, ... in each rollout
    places = torch.cat([prompt_mask, rollouts.mask], 1).cumsum(1) - 1  # (b, P + T)
    leader = first_with_prompt(rollouts)  # (b,)
    follows = leader != torch.arange(len(leader), device=leader.device)  # (b,)
    kept = prompt_mask & ~follows[:, None]  # (b, P)
    kept[:, -1] = prompt_mask[:, -1]  # the token that predicts a response's first one
    used = torch.cat([kept, rollouts.mask], 1)  # (b, P + T)
    ids = torch.cat([rollouts.prompt_ids, rollouts.ids], 1)[used]  # (N,)
    is_response = torch.cat([torch.zeros_like(kept), rollouts.mask], 1)[used]  # (N,)
    lengths = used.sum(1)  # (b,)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()  # (b + 1,)
    start = starts[leader] * follows  # (b,)
    end = start + (prompt_mask.sum(1) - 1) * follows  # (b,)
    shared = list(zip(start.tolist(), end.tolist(), strict=True))
    model_kwargs = dict(
        position_ids=places[used][None],
        segments=Segments(starts, lengths.tolist(), shared),
        # A mask of four dimensions is taken as it is. Without one, transformers would make one of
        # N x N from the positions.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),
    )
    return ids[None], is_response[None], model_kwargs


def first_with_prompt(rollouts: Rollouts) -> Tensor:
    """For each rollout, the first one with its prompt: (b,).

    It is the rollout itself where prompts are short, or on CUDA.
    """
    rows = torch.arange(len(rollouts.mask), device=rollouts.mask.device)
    if rollouts.mask.is_cuda or rollouts.prompt_ids.shape[1] < SHORT:
        return rows
    prompts = torch.where(rollouts.prompt_mask, rollouts.prompt_ids, -1)  # (b, P)
    same = (prompts[:, None] == prompts).all(2)  # (b, b)
    return same.int().argmax(1)  # of equal values, it takes the first


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    segments: Segments | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention to packed or to padded rows, in the library's signature.

    query (b, H, S, w), key and value (b, kv, S, w) -> (b, S, H, w), None. With `segments`, b is 1,
    and each attends to itself and to a shared prompt, causally. Without, as while sampling, it is
    SDPA.
    """
    if segments is None:
        return PADDED_ATTENTION(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    if not (query.is_cuda and query.dtype in HALF):
        outputs = []
        start = 0
        # neighbours of one length and prompt go together
        alike = itertools.groupby(zip(segments.lengths, segments.shared, strict=True))
        for (length, (first, last)), neighbours in alike:
            rows = len(list(neighbours))
            tokens = slice(start, start + rows * length)
            q, k, v = (
                x[0, :, tokens].unflatten(1, (rows, length)).transpose(0, 1)
                for x in (query, key, value)
            )
            mask = None
            if last > first:
                prompts = (x[:, :, first:last].expand(rows, -1, -1, -1) for x in (key, value))
                k, v = (torch.cat(both, 2) for both in zip(prompts, (k, v), strict=True))
                mask = q.new_ones(length, k.shape[2], dtype=torch.bool).tril(last - first)
            output = scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
            outputs.append(output.transpose(0, 1).flatten(1, 2))  # (H, rows * length, w)
            start = tokens.stop
        return torch.cat(outputs, 1).transpose(0, 1)[None], None
    shared = query.shape[1] // key.shape[1]  # copied: torch 2.11 has no enable_gqa here
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, H or kv, w)
    k = k.repeat_interleave(shared, 1)  # (N, H, w)
    v = v.repeat_interleave(shared, 1)  # (N, H, w)
    starts = segments.starts
    longest = max(segments.lengths)
    attended = varlen_attn(
        q, k, v, starts, starts, longest, longest, scale=scaling, window_size=CAUSAL
    )
    assert isinstance(attended, Tensor)  # without statistics, which nobody asked for
    return attended[None], None


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", sdpa_mask)  # for `generate`, which pads its prompts
