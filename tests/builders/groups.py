"""Hidden states of a group for SHEAR."""

import torch

from sinkhorn import sinkhorn


def random_group(*lengths: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states (G, T, 5), mask (G, T) and correct (G,); every second rollout is right."""
    longest = max(lengths)
    hidden = 3 * torch.randn(len(lengths), longest, 5)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return hidden, mask, torch.arange(len(lengths)) % 2 == 1


def solved_within(max_iters: int = 500, tol: float = 1e-3):
    """`shear.w_eps` with other limits of the solver."""

    def measure(costs, a, b, eps):
        return sinkhorn(costs, a, b, eps=eps, max_iters=max_iters, tol=tol).value.clamp_min(0.0)

    return measure
