"""Ablations of SHEAR (Sec. 5.4.1 of arXiv 2604.23318): other functions for its hooks.

    transport_cost       hook `measure`: the reading "cost" of Eq. (10), <P, C>, `value_linear` in
                         sinkhorn.py. It has no floor, so it vanishes on shared prefixes
    chamfer_distance     the same hook: the symmetric Chamfer distance
    closest_by_centroid  hook `closest`: by the distance of the mean states, the lower bound of W1
                         in Prop. D.1 (a), which only sees that spans differ in the mean
    closest_by_cosine    by 1 - cos of the mean states
    closest_by_mmd       by the MMD of a Gaussian kernel
    mean_weights         hook `pool`: the mean over a token's spans instead of the largest
    even_out             normalisation over each rollout instead of the group

The kernel's width is a median: the lower one of all distances between a token of a right and a
token of a wrong rollout of the group.

The paper names its ablations of W1 without formulas; these are ours. All distances are divided by
nbar, as it says that the variants share the normalisation; "cosine" and "mmd" have no unit, so
there nbar only scales.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from credit.batch import Batch, Context
from credit.rules import log_distances, rule, shear, weigh
from shear import (
    Closest,
    Measure,
    Side,
    Spans,
    closest_of,
    every_pair,
    shear_advantages,
    token_distances,
    w_eps,
)
from sinkhorn import sinkhorn

DUST = 1e-6  # share of the group's mean weight; a rollout's mean below it is a rounded 0


# ---- other distances of two spans ----------------------------------------------------------------


def transport_cost(costs: Tensor, a: Tensor, b: Tensor, eps: float) -> Tensor:
    """<P, C> of the plan that `sinkhorn` finds, without the KL term."""
    return sinkhorn(costs, a, b, eps=eps).value_linear.clamp_min(0.0)  # rounding can leave -1e-9


def chamfer_distance(costs: Tensor, a: Tensor, b: Tensor, eps: float) -> Tensor:
    """(mean_x min_y ||x - y|| + mean_y min_x ||x - y||) / 2."""
    x, y = a > 0, b > 0  # (P, n), (P, m)
    to_y = costs.masked_fill(~y[:, None, :], torch.inf).amin(2)  # (P, n)
    to_x = costs.masked_fill(~x[:, :, None], torch.inf).amin(1)  # (P, m)
    return ((to_y * x).sum(1) / x.sum(1) + (to_x * y).sum(1) / y.sum(1)) / 2


def span_means(side: Side) -> Tensor:
    """The mean state of each span of a side, (K, d) float32."""
    states = side.states[side.spans.tokens].float()  # (K, n, d)
    return torch.einsum("kn,knd->kd", side.spans.mass, states)


def closest_by_centroid(
    costs: Tensor, right: Side, wrong: Side, eps: float, measure: Measure = w_eps
) -> Closest:
    """||mean_P - mean_Q||, from the states of both sides."""
    return closest_of(token_distances(span_means(right), span_means(wrong)))


def closest_by_cosine(
    costs: Tensor, right: Side, wrong: Side, eps: float, measure: Measure = w_eps
) -> Closest:
    """1 - cos(mean_P, mean_Q), from the states of both sides."""
    right_means = torch.nn.functional.normalize(span_means(right), dim=-1)  # (K+, d)
    wrong_means = torch.nn.functional.normalize(span_means(wrong), dim=-1)  # (K-, d)
    return closest_of((1 - right_means @ wrong_means.T).clamp_min(0.0))


def closest_by_mmd(
    costs: Tensor, right: Side, wrong: Side, eps: float, measure: Measure = w_eps
) -> Closest:
    """The square root of the biased MMD^2, with the kernel exp(-d^2 / (2 m^2)).

    m is the group's median distance, as the module's docstring says.
    """
    median = max(costs.median().item(), 1e-30)

    def kernel(blocks: Tensor, a: Tensor, b: Tensor, eps: float = 0.0) -> Tensor:
        return torch.einsum("pij,pi,pj->p", (-((blocks / median) ** 2) / 2).exp(), a, b)

    def own_kernels(side: Side) -> Tensor:
        """Each span's mean kernel with itself, (K,)."""
        points = side.states[side.spans.tokens]  # (K, n, d)
        return kernel(token_distances(points, points), side.spans.mass, side.spans.mass)

    cross = every_pair(costs, right.spans, wrong.spans, eps, kernel)
    own = own_kernels(right)[:, None] + own_kernels(wrong)
    return closest_of((own - 2 * cross).clamp_min(0.0).sqrt())


# ---- another pooling and another normalisation ---------------------------------------------------


def mean_weights(distances: Tensor, spans: Spans) -> Tensor:
    """`shear.token_weights` with the mean over the covering spans instead of the largest."""
    real = spans.mass > 0  # (K, n), no padding
    covering = distances[:, None].expand_as(real)[real]  # (M,)
    tokens = spans.tokens[real]  # (M,)
    return distances.new_zeros(int(tokens.max()) + 1).scatter_reduce(
        0, tokens, covering, "mean", include_self=False
    )


def even_out(omega: Tensor, mask: Tensor) -> Tensor:
    """Every rollout's mean weight scaled to the group's, (G, T); 0 where its mean is dust."""
    rollout_mean = omega.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)  # (G, 1)
    group_mean = omega.sum() / mask.sum().clamp_min(1)
    real = rollout_mean > DUST * group_mean  # (G, 1)
    return torch.where(real, omega / rollout_mean * group_mean, 0.0)


# ---- the rules -----------------------------------------------------------------------------------


def shear_with(**hooks: Callable) -> Callable[..., Tensor]:
    """SHEAR with other hooks, as a rule's function."""
    return partial(shear, **hooks)


cost = shear_with(measure=transport_cost)
rule("shear-cost", "shear, but of Eq. (10) only the transport cost", needs_states=True)(cost)

chamfer = shear_with(measure=chamfer_distance)
rule("shear-chamfer", "shear, but by the Chamfer distance of two spans", needs_states=True)(chamfer)

centroid = shear_with(closest=closest_by_centroid)
rule("shear-centroid", "shear, but by the distance of two spans' mean states", needs_states=True)(
    centroid
)

cosine = shear_with(closest=closest_by_cosine)
rule("shear-cosine", "shear, but by 1 - cos of two spans' mean states", needs_states=True)(cosine)

mmd = shear_with(closest=closest_by_mmd)
rule("shear-mmd", "shear, but by the MMD of two spans", needs_states=True)(mmd)

mean = shear_with(pool=mean_weights)
rule("shear-mean", "shear, but with the mean over the spans that cover a token", needs_states=True)(
    mean
)


@rule("shear-rollout", "shear, but with equal mean weights of all rollouts", needs_states=True)
def shear_rollout(batch: Batch, context: Context) -> Tensor:
    """A_t = A omega_t, every rollout's weights scaled to the group's mean weight."""
    omega = []
    for _, hidden, mask, correct in batch.groups():
        weighed = weigh(context, hidden, mask, correct)
        omega.append(even_out(weighed.omega, mask))
        log_distances(batch, context, weighed, mask)
    return shear_advantages(batch.advantages, torch.cat(omega))
