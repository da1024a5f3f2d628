"""SHEAR's token weights for a trainer of your own: Algorithm 1 of arXiv 2604.23318, its fast path.

    omega = shear_weights(hidden, mask, correct)                                # one prompt
    credit = token_advantages(advantages, hidden, mask, correct, group_size=G)  # a batch of them

`credit` (B, T) takes the place of GRPO's advantages (B,) in the policy loss. `trl_shear` and
`verl_shear` do all of this in TRL's and in verl's trainer. `shear_credit.shear` has the plain
functions, which solve every pair of spans: their weights are equal, and they took up to 57 times as
long in our benchmarks.

What stays: the names below with their arguments, defaults and shapes, in all versions 0.1.x.
Weights that change by more than rounding (1e-4 of them) raise the minor version. All other names
may change with any version; the trainers' follow TRL and verl.
"""

import torch
from torch import Tensor

from lab.fast.distances import token_distances
from lab.fast.race import race
from shear import EPS, STRIDE, WINDOW, ClosestHook, Distances, shear_advantages
from shear import shear_weights as weigh

__all__ = ["race", "shear_weights", "token_advantages", "token_distances"]
__version__ = "0.2.0"


def shear_weights(
    hidden: Tensor,
    mask: Tensor,
    correct: Tensor,
    *,
    window: int = WINDOW,
    stride: int = STRIDE,
    eps: float = EPS,
    mean1: bool = False,
    distances: Distances = token_distances,
    closest: ClosestHook = race,
) -> Tensor:
    """The token weights omega (G, T) float32 of one prompt's G rollouts; constants for autograd.

    hidden (G, T, d): the last layer's states at the response tokens, after the final norm, in any
    float dtype; mask (G, T): 1 on response tokens, padding on any side; correct (G,): true for
    right rollouts. `window` and `stride` are in tokens.

    `eps`, Sinkhorn's regularisation, is in units of nbar: the mean Euclidean norm of the group's
    hidden states, over all response tokens of all its rollouts. A weight is a distance divided by
    nbar. It is 1 where no rollout has the opposite verdict, and 0 where the mask is 0. With `mean1`
    the weights are divided by their mean, so that SHEAR's steps are as large as GRPO's.

    `distances` and `closest` are hooks, described in `shear_credit.shear`. Raises ValueError for a
    bad window, stride or eps, and for a state that is not finite.
    """
    omega = weigh(
        hidden,
        mask,
        correct,
        window=window,
        stride=stride,
        eps=eps,
        distances=distances,
        closest=closest,
    ).omega
    if mean1:
        mean = omega.sum() / mask.sum().clamp_min(1)
        omega = torch.where(mean > 0, omega / mean, omega)
    return omega


def token_advantages(
    advantages: Tensor,
    hidden: Tensor,
    mask: Tensor,
    correct: Tensor,
    *,
    group_size: int,
    window: int = WINDOW,
    stride: int = STRIDE,
    eps: float = EPS,
    mean1: bool = False,
) -> Tensor:
    """A omega (B, T) for a batch of whole groups, from GRPO's advantages A (B,).

    The `group_size` rollouts of a prompt are adjacent; hidden (B, T, d), mask (B, T), correct (B,)
    and the options are those of `shear_weights`. Groups do not see each other, so a batch may come
    in parts. States on another device, such as the CPU, are moved to the mask's device group by
    group. Raises ValueError for an incomplete group, and as `shear_weights` does.
    """
    if len(mask) % group_size:
        raise ValueError(f"{len(mask)} rollouts cannot be split into groups of {group_size}")
    omega = []
    for start in range(0, len(mask), group_size):
        group = slice(start, start + group_size)
        states = hidden[group].to(mask.device)
        weights = shear_weights(
            states, mask[group], correct[group], window=window, stride=stride, eps=eps, mean1=mean1
        )
        omega.append(weights)
    return shear_advantages(advantages, torch.cat(omega))
