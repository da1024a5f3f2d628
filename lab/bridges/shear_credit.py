"""SHEAR's token weights for a trainer of your own: Algorithm 1 of arXiv 2604.23318, its fast path.

    omega = shear_omega(hidden, mask, correct)                                  # one prompt
    credit = token_advantages(advantages, hidden, mask, correct, group_size=G)  # a batch of them

`credit` (B, T) takes the place of GRPO's advantages (B,) in the policy loss. `trl_shear` and
`verl_shear` do all of this in TRL's and in verl's trainer. `shear_credit.shear` has the plain
functions, which solve every pair of spans: `shear_weights` there returns these weights with what
they were made of, and takes 8 to 23 times as long on random walks and real text. An edit of it
changes nothing here, unless its function is given as `cost` or `closest`.

What stays: the names below with their arguments, defaults and shapes, in all versions 0.2.x.
Weights that change by more than rounding (1e-4 of them) raise the minor version. All other names
may change with any version; the trainers' follow TRL and verl.
"""

import warnings
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lab.fast.distances import token_distances
from lab.fast.race import race
from shear import EPS, STRIDE, WINDOW, ClosestHook, Cost, shear_advantages, shear_weights

__all__ = ["race", "shear_omega", "token_advantages", "token_distances"]
__version__ = "0.2.0"


def shear_omega(
    hidden: Tensor,
    mask: Tensor,
    correct: Tensor,
    *,
    window: int = WINDOW,
    stride: int = STRIDE,
    eps: float = EPS,
    eps_unit: Literal["nbar", "raw"] = "nbar",
    mean1: bool = False,
    cost: Cost = token_distances,
    closest: ClosestHook = race,
) -> Tensor:
    """The token weights omega (G, T) float32 of one prompt's G rollouts; constants for autograd.

    hidden (G, T, d): the last layer's states at the response tokens, after the final norm, in any
    float dtype; mask (G, T): 1 on response tokens, padding on any side; correct (G,): true for
    right rollouts. `window` and `stride` are in tokens.

    `eps`, Sinkhorn's regularisation, is in units of nbar, or with `eps_unit` "raw" in that of the
    states, as the paper may mean it. nbar is the mean Euclidean norm of the group's hidden states,
    over all response tokens of all its rollouts. A weight is a distance divided by
    nbar. It is 1 where no rollout has the opposite verdict, and 0 where the mask is 0. With `mean1`
    the weights are divided by their mean, so that SHEAR's steps are as large as GRPO's.

    `cost` and `closest` are hooks, described in `shear_credit.shear`. Warns where no response
    is longer than the window. Raises ValueError for a bad window, stride or eps, for a state that
    is not finite, and for a verdict in `correct` that is neither bool nor 0 or 1.
    """
    warn_of_one_span(mask, window)
    omega = shear_weights(
        hidden,
        mask,
        correct,
        window=window,
        stride=stride,
        eps=eps,
        eps_unit=eps_unit,
        cost=cost,
        closest=closest,
    ).omega
    return with_mean1(omega, mask) if mean1 else omega


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
    eps_unit: Literal["nbar", "raw"] = "nbar",
    mean1: bool = False,
) -> Tensor:
    """A omega (B, T) for a batch of whole groups, from GRPO's advantages A (B,).

    The `group_size` rollouts of a prompt are adjacent; hidden (B, T, d), mask (B, T), correct (B,)
    and the options are those of `shear_omega`. Groups do not see each other, so a batch may come
    in parts. States on another device, such as the CPU, are moved to the mask's device group by
    group. Warns and raises ValueError as `shear_omega` does, of the batch; raises it for an
    incomplete group, too.
    """
    if len(mask) % group_size:
        raise ValueError(f"{len(mask)} rollouts cannot be split into groups of {group_size}")
    warn_of_one_span(mask, window)
    sizes = partial(shear_weights, window=window, stride=stride, eps=eps, eps_unit=eps_unit)
    weights_of = partial(sizes, cost=token_distances, closest=race)
    omega = []
    for start in range(0, len(mask), group_size):
        group = slice(start, start + group_size)
        states = hidden[group].to(mask.device)
        weights = weights_of(states, mask[group], correct[group]).omega
        omega.append(with_mean1(weights, mask[group]) if mean1 else weights)
    return shear_advantages(advantages, torch.cat(omega))


def warn_of_one_span(mask: Tensor, window: int) -> None:
    """Warn where no response is longer than the window.

    The warning's place is the line that calls the caller, which Python warns of once.
    """
    if 1 < mask.sum(1).max() <= window:
        warnings.warn(
            f"no response is longer than the window of {window} tokens, so each is one span, whose "
            "tokens have equal weights; give a smaller window and stride",
            stacklevel=3,
        )


def with_mean1(omega: Tensor, mask: Tensor) -> Tensor:
    """A group's weights divided by their mean, if that is not 0."""
    mean = omega.sum() / mask.sum().clamp_min(1)
    return torch.where(mean > 0, omega / mean, omega)
