"""Rollouts and batches: written down, random, or sampled."""

from dataclasses import replace

import torch

from credit.batch import Batch
from grpo import Policy, Rollouts, group_advantages, pad_left, rollout


def batch_of(rewards, rollouts, group_size: int, **parts) -> Batch:
    """A `Batch` of these rewards (B,), with the advantages of Eq. (1).

    `parts` are its other fields.
    """
    usual = dict(problems=[{}] * (len(rewards) // group_size), reasons=["drawn"] * len(rewards))
    return Batch(
        rollouts, rewards, group_advantages(rewards, group_size), group_size, **usual | parts
    )


def random_batch(rewards: list[list[float]], *, shared: int = 0) -> Batch:
    """Groups of 5 to 10 tokens of random probabilities, entropies and states.

    The rollouts of a group share the first `shared` states.
    """
    generator = torch.Generator().manual_seed(0)
    rewards = torch.tensor(rewards)  # (groups, G), NaN for no verdict and no token
    groups, size = rewards.shape
    # (B, T)
    mask = torch.arange(10) < torch.randint(5, 11, (groups * size, 1), generator=generator)
    mask &= ~rewards.view(-1, 1).isnan()
    log_probs = -6 * torch.rand(mask.shape, generator=generator)
    entropies = torch.rand(mask.shape, generator=generator)
    hidden = torch.rand(groups, size, 10, 6, generator=generator)
    hidden[:, :, :shared] = hidden[:, :1, :shared]
    parts = dict(log_probs=log_probs, entropies=entropies, hidden=hidden.flatten(0, 1)[mask])
    return batch_of(rewards.flatten(), rollouts_like(mask), size, **parts)


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


def pad_more(rollouts: Rollouts, left: int, right: int) -> Rollouts:
    """The same rollouts with more padding on both sides; what stands in it must not matter."""
    pad = torch.nn.functional.pad
    masks = dict(
        prompt_mask=pad(rollouts.prompt_mask, (left, 0)), mask=pad(rollouts.mask, (0, right))
    )
    prompt_ids = torch.cat(
        [torch.randint(0, 20, (len(rollouts.texts), left)), rollouts.prompt_ids], 1
    )
    ids = torch.cat([rollouts.ids, torch.randint(0, 20, (len(rollouts.texts), right))], 1)
    return replace(rollouts, prompt_ids=prompt_ids, ids=ids, **masks)


def random_prompts(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of these lengths, padded left with random tokens.

    There are two columns more than needed.
    """
    width = max(lengths) + 2
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return torch.randint(0, 40, mask.shape), mask


def unlike_rollouts() -> Rollouts:
    """Eight rollouts of unlike lengths, of which the last is emptied.

    What stands in the padding must not matter.
    """
    prompt_ids, prompt_mask = random_prompts([3, 9, 1, 12, 5, 2, 7, 4])
    mask = torch.arange(33) < torch.tensor([17, 1, 30, 8, 23, 2, 11, 0])[:, None]
    ids = torch.randint(0, 40, mask.shape)
    return Rollouts(prompt_ids, prompt_mask, ids, mask, torch.zeros(8).bool(), [""] * 8)


def gradients(policy: Policy, rollouts: Rollouts, pulls: torch.Tensor, at_once: int) -> tuple:
    """Log-probabilities (B, T), and the gradients of their sum weighted by `pulls`.

    Each pass takes `at_once` rollouts.
    """
    logp = torch.zeros_like(pulls)
    policy.zero_grad()
    for rows in torch.arange(len(rollouts.texts)).split(at_once):
        part = rollouts.take(rows)
        width = part.ids.shape[1]
        values = policy(part, 0.7).log_probs
        (values * pulls[rows, :width]).sum().backward()
        logp[rows, :width] = values.detach()
    trained = [weights.grad for weights in policy.parameters() if weights.requires_grad]
    return logp, torch.cat([gradient.flatten() for gradient in trained])


def sample_rollouts(tiny, group_size=4) -> Rollouts:
    """Rollouts of the untrained model, which stops at random; of two prompts one is padded."""
    prompts = ["a=3-6;b=3+a;b?\n", "a=1*7;a?\n"]
    return rollout(
        tiny[0], tiny[1], prompts, group_size, max_tokens=24, temperature=1.0, batch_tokens=125
    )
