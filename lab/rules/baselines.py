"""Baselines of least noise in place of the group's mean; token advantages (B, T).

    opo-length    r minus one baseline per group, the mean reward weighted by the rollouts' lengths
    opo-energy    the same, weighted by squared gradient norms
    otb           r minus one baseline per token, weighted by the norms of the tokens so far
    own-baseline  another rule's weights times r minus the baseline of least noise for these weights
    opo-shear     SHEAR's weights times opo-energy
    otb-shear     SHEAR's weights times otb

Of all baselines b of a group, b = E[|g|^2 r] / E[|g|^2] gives the gradient g (r - b) the least mean
square, where g is the gradient of log pi. No b changes the gradient's mean, so the variance is
least, too. The norm of g is not known without a backward pass for each rollout; the sum over its
tokens of `salience.logit_gradients` stands for |g|^2. A rule with the token weights w has the
gradient sum_t w_t g_t, for which w_t^2 |g_t|^2 counts: the baseline of `opo-energy` is not the best
one under SHEAR's weights, and so `opo-shear` is a control. Weights that depend on the rollout give
w_t g_t a mean, and b then changes the expected gradient as well.

Left out: the division by the group's standard deviation, as in the sources, and the correlation of
a rollout's tokens.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from credit.batch import Batch, Context, effective_weights
from credit.rules import find, rule, weigh
from lab.tools.salience import logit_gradients
from tasks.errors import BadInput

if TYPE_CHECKING:
    from harness.run import Run


@rule("opo-length", "the reward minus the group's mean, weighted by length", weighs=False)
def opo_length(batch: Batch, context: Context) -> Tensor:
    """A_t = r - b with b = sum_i T_i r_i / sum_i T_i: OPO (arXiv 2505.23585).

    T_i is the rollout's number of tokens; where all are equal, b is the plain mean.
    """
    return above_baseline(batch, batch.lengths.expand_as(batch.mask))


@rule("opo-energy", "the same, weighted by squared gradient norms", weighs=False)
def opo_energy(batch: Batch, context: Context) -> Tensor:
    """A_t = r - b with b = sum_i W_i r_i / sum_i W_i, W_i the squared norms of all tokens; ours.

    It is the sequence's baseline that OPO derives, with OTB's estimate of norms where OPO takes
    lengths.
    """
    norms = logit_gradients(batch.rollouts, context)  # (B, T)
    return above_baseline(batch, norms.sum(1, keepdim=True).expand_as(norms))


@rule("otb", "the same with a baseline for each token, by the norms up to it", weighs=False)
def otb(batch: Batch, context: Context) -> Tensor:
    """A_t = r - b_t, weighted by the norms of the tokens up to t: OTB (arXiv 2602.07078).

    W_t is the sum of the squared gradient norms of tokens 1 to t. A rollout that has ended before t
    does not count, as in verl's `compute_optimal_token_baseline_advantage`.
    """
    norms = logit_gradients(batch.rollouts, context)  # (B, T)
    return above_baseline(batch, norms.cumsum(1) * batch.mask)


def prepare_inner(run: "Run", *, of: str = "shear", **options: object) -> None:
    """Prepare the rule whose weights are used; raises BadInput for one without weights."""
    inner = find(of)
    if inner.drops_uncredited or not inner.weighs:
        raise BadInput(
            f"--method own-baseline: {of} has no weights, or counts tokens otherwise; choose "
            "another rule"
        )
    if inner.prepare:
        inner.prepare(run)


@rule(
    "own-baseline",
    "another rule's weights, with the baseline that gives them the least noise",
    needs_states=True,
    weighs=False,
    prepare=prepare_inner,
)
def own_baseline(
    batch: Batch, context: Context, *, of: str = "shear", others: bool = False
) -> Tensor:
    """A_t = w_t (r - b) with b = sum_i W_i r_i / sum_i W_i, W_i = sum_t w_t^2 |g_t|^2; ours.

    w_t is the weight of the rule `of`, its token advantage over A. With `others` b is a mean over
    the group's other rollouts.
    """
    credit = torch.where(batch.mask, find(of).credit(batch, context), 0.0)  # (B, T)
    weights = effective_weights(credit, batch.advantages, batch.mask)  # (B, T)
    norms = weights.square() * logit_gradients(batch.rollouts, context)  # (B, T)
    energy = norms.sum(1, keepdim=True).expand_as(norms)  # (B, T)
    return weights * above_baseline(batch, energy, others)


@rule("opo-shear", "control: shear's weights times opo-energy", needs_states=True, weighs=False)
def opo_shear(batch: Batch, context: Context) -> Tensor:
    """A_t = omega_t (r - b) with the baseline of `opo-energy`, which ignores omega; ours."""
    return shear_omega(batch, context) * opo_energy(batch, context)


@rule("otb-shear", "control: shear's weights times otb", needs_states=True, weighs=False)
def otb_shear(batch: Batch, context: Context) -> Tensor:
    """A_t = omega_t (r - b_t) with the baselines of `otb`, which ignore omega; ours."""
    return shear_omega(batch, context) * otb(batch, context)


def above_baseline(batch: Batch, norms: Tensor, others: bool = False) -> Tensor:
    """Rewards minus their group's mean, weighted by norms (B, T), for each token, (B, T).

    With `others` a rollout's own reward does not count in its mean. Rollouts without a verdict have
    no tokens, so their norms are 0. Where all norms are 0 the difference is 0.
    """
    rewards = batch.rewards.nan_to_num(0.0).view(-1, batch.group_size, 1)  # (groups, G, 1)
    # float64, as `others` subtracts
    of_groups = norms.view(*rewards.shape[:2], -1).double()  # (groups, G, T)
    weighted = of_groups * rewards
    numerator = weighted.sum(1, keepdim=True)  # (groups, 1, T)
    denominator = of_groups.sum(1, keepdim=True)
    if others:
        numerator = numerator - weighted  # (groups, G, T)
        denominator = denominator - of_groups
    gaps = torch.where(denominator > 0, rewards - numerator / denominator, 0.0)
    return gaps.float().flatten(0, 1)


def shear_omega(batch: Batch, context: Context) -> Tensor:
    """SHEAR's weights with the run's settings, (B, T)."""
    omega = []
    for _, hidden, mask, correct in batch.groups():
        omega.append(weigh(context, hidden, mask, correct).omega)  # (G, T)
    return torch.cat(omega)
