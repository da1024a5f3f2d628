"""Rollouts of unlike lengths, and groups of their states."""

import torch

from grpo import Policy, Rollouts


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


def random_group(seed: int = 0, lengths=(17, 12, 4, 20, 9), dim: int = 5, shared: int = 0):
    """Hidden states (G, T, d), mask (G, T) and correct (G,) of a group.

    Rollouts 1 and 3 are right; the first `shared` states are equal.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = 3 * torch.randn(len(lengths), max(lengths), dim, generator=generator)
    hidden[:, :shared] = hidden[:1, :shared]
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    rollouts = torch.arange(len(lengths))
    return hidden, mask, (rollouts == 1) | (rollouts == 3)
