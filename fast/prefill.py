"""A group's prompt is read once, not once for each of its rollouts: a hook of `grpo.rollout`.

    rollout(..., generate=partial(shared_prefill, hf_generate))

The keys and values of each different prompt, but for its last token, are computed once and handed
to as many rows as begin with it; transformers' own loop continues from there. Tokens are drawn from
the same logits, up to rounding.

Left out: prompts that begin alike and end differently, and families that `fast.packing` does not
know.
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
    **limits: object,
) -> Tensor:
    """Sample as `generate` does, (b, P) -> (b, T) ids, but read adjacent equal prompts once."""
    rows = torch.stack([prompt_ids, prompt_mask.long()], 1)  # (b, 2, P)
    # (prompts, 2, P), and the number of each row's prompt: 0, 0, 1, ...
    prompts, of_row = rows.unique_consecutive(dim=0, return_inverse=True)
    all_differ = len(prompts) == len(rows)
    if all_differ or prompt_ids.shape[1] < SHORT or not attends_fully(model.config):
        return generate(model, prompt_ids, prompt_mask, **limits)
    ids, mask = prompts[:, :, :-1].unbind(1)  # (prompts, P - 1), (prompts, P - 1)
    places = (mask.cumsum(1) - 1).clamp_min(0)  # (prompts, P - 1) as `generate` counts them
    cache = model.base_model(
        ids, attention_mask=mask, position_ids=places, use_cache=True
    ).past_key_values
    cache.reorder_cache(of_row)
    return generate(model, prompt_ids, prompt_mask, past_key_values=cache, **limits)
