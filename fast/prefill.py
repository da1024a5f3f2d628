"""Read a group's prompt once, not once per rollout: for the hook `generate` of `grpo.rollout`.

    rollout(..., generate=partial(shared_prefill, hf_generate))

The keys and values of a prompt, except those of its last token, are computed once and copied for
each of its rollouts; `generate` continues from there. Tokens are drawn from the same logits, up to
rounding.

Left out, and read once per rollout: prompts of fewer than `fast.packing.SHORT` tokens, prompts of
models that do not pass `fast.packing.attends_fully`, and a beginning that different prompts share.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fast.packing import SHORT, attends_fully


def shared_prefill(
    generate: Callable[..., Tensor],
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    **options: object,
) -> Tensor:
    """Sample as `generate` does, (b, P) -> (b, T) ids, but read adjacent equal prompts once."""
    rows = torch.stack([prompt_ids, prompt_mask.long()], 1)  # (b, 2, P)
    # (prompts, 2, P), and the number of each row's prompt, (b,): 0, 0, 1, ...
    prompts, prompt_of_row = rows.unique_consecutive(dim=0, return_inverse=True)
    all_differ = len(prompts) == len(rows)
    if all_differ or prompt_ids.shape[1] < SHORT or not attends_fully(model.config):
        return generate(model, prompt_ids, prompt_mask, **options)
    ids, mask = prompts[:, :, :-1].unbind(1)  # (prompts, P - 1), (prompts, P - 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)  # (prompts, P - 1), as `generate` counts them
    cache = model.base_model(
        ids, attention_mask=mask, position_ids=positions, use_cache=True
    ).past_key_values
    cache.reorder_cache(prompt_of_row)  # to one row per rollout
    return generate(model, prompt_ids, prompt_mask, past_key_values=cache, **options)
