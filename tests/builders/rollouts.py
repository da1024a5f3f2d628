"""Rollouts and batches: written down, random, or sampled."""

import torch

from credit.batch import Batch
from grpo import Rollouts, group_advantages, pad_left, rollout


def batch_of(rewards, rollouts, group_size: int, **parts) -> Batch:
    """A `Batch` of these rewards (B,), with the advantages of Eq. (1).

    `parts` are its other fields.
    """
    usual = dict(problems=[{}] * (len(rewards) // group_size), reasons=["drawn"] * len(rewards))
    return Batch(
        rollouts, rewards, group_advantages(rewards, group_size), group_size, **usual | parts
    )


def rollouts_of(tokenizer, prompts: list[str], texts: list[str]) -> Rollouts:
    """`Rollouts` of these texts as if they had been sampled, each with its stop token."""
    ids, mask = pad_left(tokenizer(prompts)["input_ids"], 0, "cpu")
    rows = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    response, inside = pad_left([row[::-1] for row in rows], 0, "cpu")
    return Rollouts(
        ids, mask, response.flip(1), inside.flip(1), torch.zeros(len(texts)).bool(), texts
    )


def rollouts_like(mask) -> Rollouts:
    """`Rollouts` of which only the mask (B, T) matters; each token is its rollout's number."""
    ids = torch.arange(len(mask))[:, None].expand(mask.shape)
    return Rollouts(None, None, ids, mask, torch.ones(len(mask)).bool(), [""] * len(mask))


def sample_rollouts(tiny, group_size=4) -> Rollouts:
    """Rollouts of the untrained model, which stops at random; of two prompts one is padded."""
    prompts = ["a=3-6;b=3+a;b?\n", "a=1*7;a?\n"]
    return rollout(
        tiny[0], tiny[1], prompts, group_size, max_tokens=24, temperature=1.0, batch_tokens=125
    )
