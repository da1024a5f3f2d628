"""The baseline of least noise under another rule's weights, in place of the group's mean.

Of all baselines b of a group, b = E[|g|^2 r] / E[|g|^2] gives the gradient g (r - b) the least mean
square, where g is the gradient of log pi. A b without the rollout's own reward leaves the
gradient's mean as it is, so its variance is least, too; here b contains that reward, except with
`others`. The norm of g is not known without a backward pass for each rollout; the sum over its
tokens of `salience.logit_gradients` stands for |g|^2. A rule with the token weights w has the
gradient sum_t w_t g_t, for which w_t^2 |g_t|^2 counts. Weights that depend on the rollout give
w_t g_t a mean, and b then changes the expected gradient as well.

With `of=grpo`, whose weights are 1, it is OPO's baseline of a sequence (arXiv 2505.23585) with
gradient norms where OPO takes lengths.

Left out: the division by the group's standard deviation, as in the sources, and the correlation of
a rollout's tokens.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from base.errors import BadInput
from credit.batch import Batch, Context, effective_weights
from credit.rules import find, rule
from lab.tools.salience import logit_gradients

if TYPE_CHECKING:
    from harness.run import Loaded


def prepare_inner(run: "Loaded", folder: Path, *, of: str = "shear", **options: object) -> None:
    """Prepare the rule whose weights are used; raises BadInput for one without weights."""
    inner = find(of)
    if not inner.weighs:
        raise BadInput(f"--method own-baseline: {of} has no weights; choose another rule")
    if inner.prepare:
        inner.prepare(run, folder)


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
