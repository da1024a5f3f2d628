"""transformers' `generate`, sooner: the hook `generate` of `grpo.rollout`.

    rollout(..., generate=fast_generate)

A group's prompt is read once, not once per rollout: the keys and values of its tokens, except those
of the last one, are computed once and copied for each rollout. Rollouts that have ended leave the
batch, and their keys and values the cache, as soon as they are an eighth of it; transformers' own
loop computes every row until the last one has ended. All else is `generate`'s: preparation,
processors, stopping criteria. Greedy output is the same; sampled tokens are drawn from the same
softmax, and are the same until rows leave.

Left out, and read once per rollout: prompts of fewer than `packing.SHORT` tokens, prompts of models
that do not pass `packing.attends_fully`, and a beginning that different prompts share.
Left out, and computed by transformers' loop: caches that cannot drop rows, such as the states of
linear attention, alone or beside keys and values. Refilling the batch with other prompts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from grpo import hf_generate
from lab.fast.packing import SHORT, attends_fully

# Rows leave when at least one in so many has ended, not sooner: each time the cache is copied.
LEAVING = 8


def fast_generate(
    model: PreTrainedModel, prompt_ids: Tensor, prompt_mask: Tensor, **options: Any
) -> Tensor:
    """Sample as `hf_generate` does, whose `options` these are: (b, P) -> (b, T) ids."""
    cache = read_prompts(model, prompt_ids, prompt_mask)
    return hf_generate(
        model, prompt_ids, prompt_mask, custom_generate=live_rows, past_key_values=cache, **options
    )


@torch.no_grad()
def read_prompts(
    model: PreTrainedModel, prompt_ids: Tensor, prompt_mask: Tensor
) -> DynamicCache | None:
    """Each row's keys and values of its prompt (b, P), but for the last token's.

    Adjacent equal prompts are read once. None where no two are equal, or prompts are left out.
    """
    prompts, prompt_of_row = distinct(prompt_ids, prompt_mask)
    all_differ = len(prompts) == len(prompt_ids)
    if all_differ or prompt_ids.shape[1] < SHORT or not attends_fully(model.config):
        return None
    cache = read(model, prompts)
    cache.batch_select_indices(prompt_of_row)  # to one row per rollout
    return cache


def distinct(prompt_ids: Tensor, prompt_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts (b, P) without the adjacent equal ones: ids and mask (n, 2, P).

    Also the number of each row's prompt, (b,): 0, 0, 1, ...
    """
    rows = torch.stack([prompt_ids, prompt_mask.long()], 1)  # (b, 2, P)
    return rows.unique_consecutive(dim=0, return_inverse=True)


def read(model: PreTrainedModel, prompts: Tensor) -> DynamicCache:
    """The keys and values of prompts, ids and mask (n, 2, P), but for the last token's."""
    ids, mask = prompts[:, :, :-1].unbind(1)  # (n, P - 1), (n, P - 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)  # (n, P - 1), as `generate` counts them
    return model.base_model(
        ids, attention_mask=mask, position_ids=positions, use_cache=True
    ).past_key_values


@torch.no_grad()
def live_rows(
    model: Any,  # PreTrainedModel, whose methods here are typed for another checker than mypy
    input_ids: Tensor,
    logits_processor: Callable[[Tensor, Tensor], Tensor],
    stopping_criteria: Callable[[Tensor, None], Tensor],
    generation_config: GenerationConfig,
    **kwargs: object,
) -> Tensor:
    """Sample responses to prompts (b, P): what `generate(custom_generate=...)` calls.

    Returns prompts and responses (b, P + T), padded after a stop token.
    """
    if not can_drop_rows(kwargs.get("past_key_values")):
        return type(model)._sample(
            model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
        )
    pad = generation_config.pad_token_id
    rows = torch.arange(len(input_ids), device=input_ids.device)  # (live,) those still computed
    ended = torch.zeros_like(rows, dtype=torch.bool)  # (live,)
    ids = input_ids  # (live, P + t)
    columns = []  # one per token of the responses, (b,) each
    outputs = model._prefill(input_ids, generation_config, kwargs)
    while True:
        kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
        scores = logits_processor(ids, outputs.logits[:, -1].float())  # (live, V)
        if generation_config.do_sample:
            drawn = torch.multinomial(scores.softmax(-1), 1).squeeze(1)  # (live,)
        else:
            drawn = scores.argmax(-1)  # (live,)
        drawn = drawn.masked_fill(ended, pad)
        columns.append(drawn.new_full((len(input_ids),), pad).index_copy(0, rows, drawn))
        ids = torch.cat([ids, drawn[:, None]], 1)
        ended = ended | stopping_criteria(ids, None)
        if ended.all():
            return torch.cat([input_ids, torch.stack(columns, 1)], 1)
        if LEAVING * ended.sum() >= len(ended):
            live = (~ended).nonzero().flatten()
            rows = rows[live]
            ids = ids[live]
            ended = ended[live]
            keep_rows(kwargs, live)
        inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
        del outputs  # logits of the prompt may be large
        outputs = model(**inputs, return_dict=True)


def can_drop_rows(cache: object) -> bool:
    """Whether every layer of a cache holds keys and values by row, and nothing else.

    Subclasses hold more, such as convolution states, which stay when rows are dropped.
    """
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    return type(cache) is DynamicCache and all(type(layer) in kinds for layer in cache.layers)


def keep_rows(kwargs: dict, live: Tensor) -> None:
    """Keep only the `live` rows (indices) of the cache and of the arguments that have such rows."""
    kwargs["past_key_values"].batch_select_indices(live)
    for name in ("attention_mask", "position_ids", "token_type_ids"):
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][live]
