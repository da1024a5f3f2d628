"""Hidden states of a group for SHEAR."""

import torch

from shear import Weighed, closest_spans, shear_weights
from sinkhorn import sinkhorn


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


def solved_within(max_iters: int = 500, tol: float = 1e-3):
    """`shear.w_eps` with other limits of the solver."""

    def measure(costs, a, b, eps):
        return sinkhorn(costs, a, b, eps=eps, max_iters=max_iters, tol=tol).value.clamp_min(0.0)

    return measure


def weigh(
    hidden,
    mask,
    correct,
    *,
    closest=closest_spans,
    max_iters: int = 500,
    tol: float = 1e-3,
    **options,
) -> Weighed:
    """`shear_weights`, with another hook `closest` or other limits of the solver."""
    measure = solved_within(max_iters, tol)
    return shear_weights(hidden, mask, correct, closest=closest, measure=measure, **options)


def weights(hidden, mask, correct, **options):
    """(G, T), the weights of `weigh`."""
    return weigh(hidden, mask, correct, **options).omega
