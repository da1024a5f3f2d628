"""Variance-optimal baselines in place of the group's mean; token advantages (B, T).

    opo        r minus one baseline per group, the mean reward weighted by squared gradient norms
    otb        r minus one baseline per token, weighted by the norms of the tokens so far
    opo-shear  the first, times SHEAR's weights
    otb-shear  the second, times SHEAR's weights

Of all baselines b of a group, b = E[|g|^2 r] / E[|g|^2] gives the gradient g (r - b) the least
variance, where g is the gradient of log pi. The norm of g is not known without a backward pass for
each rollout; the sum over its tokens of `salience.logit_gradients` stands for |g|^2.

Left out: the division by the group's standard deviation, as in both sources.
"""

import torch
from torch import Tensor

from credit.batch import Batch, Context
from credit.rules import rule, weigh
from lab.tools.salience import logit_gradients


@rule(
    "opo",
    "the reward minus the group's mean reward, weighted by squared gradient norms",
    weighs=False,
)
def opo(batch: Batch, context: Context) -> Tensor:
    """A_t = r - b with b = sum_i W_i r_i / sum_i W_i over the group: OPO (arXiv 2505.23585).

    W_i is the rollout's sum of squared gradient norms. Deviates: the source takes the rollout's
    length for W_i, which would make b the plain mean where all lengths are equal.
    """
    norms = logit_gradients(batch.rollouts, context)  # (B, T)
    totals = norms.sum(1, keepdim=True).expand_as(norms)  # (B, T)
    return above_baseline(batch, totals)


@rule(
    "otb",
    "the same with a baseline for each token, weighted by the norms up to it",
    weighs=False,
)
def otb(batch: Batch, context: Context) -> Tensor:
    """A_t = r - b_t, weighted by the norms of the tokens up to t: OTB (arXiv 2602.07078).

    W_t is the sum of the squared gradient norms of tokens 1 to t. Inferred: a rollout that has
    ended keeps its reward, and the sum of all its tokens.
    """
    return above_baseline(batch, logit_gradients(batch.rollouts, context).cumsum(1))


@rule("opo-shear", "opo times shear's weights", needs_states=True, weighs=False)
def opo_shear(batch: Batch, context: Context) -> Tensor:
    """A_t = omega_t (r - b) with the baseline of `opo`; ours."""
    return shear_omega(batch, context) * opo(batch, context)


@rule("otb-shear", "otb times shear's weights", needs_states=True, weighs=False)
def otb_shear(batch: Batch, context: Context) -> Tensor:
    """A_t = omega_t (r - b_t) with the baselines of `otb`; ours."""
    return shear_omega(batch, context) * otb(batch, context)


def above_baseline(batch: Batch, norms: Tensor) -> Tensor:
    """Rewards minus their group's mean, weighted by norms (B, T), for each token, (B, T).

    Rollouts without a verdict have no tokens, so their norms are 0.
    """
    rewards = batch.rewards.nan_to_num(0.0).view(-1, batch.group_size, 1)  # (groups, G, 1)
    of_groups = norms.view(*rewards.shape[:2], -1)  # (groups, G, T)
    sums = of_groups.sum(1, keepdim=True).clamp_min(1e-12)  # (groups, 1, T)
    baselines = (of_groups * rewards).sum(1, keepdim=True) / sums  # (groups, 1, T)
    return (rewards - baselines).flatten(0, 1)


def shear_omega(batch: Batch, context: Context) -> Tensor:
    """SHEAR's weights with the run's settings, (B, T)."""
    omega = []
    for _, hidden, mask, correct in batch.groups():
        omega.append(weigh(context, hidden, mask, correct).omega)  # (G, T)
    return torch.cat(omega)
