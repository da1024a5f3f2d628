"""Credit from changes of V_t, the value of a prefix: the reward to be expected after t tokens.

    kgae    values by the group's other rollouts that pass near the prefix, without labels (ours)
    bipace  values by clusters of the group's states: the mean reward of a token's choice minus the
            mean reward of its state

Token advantages take the place of A here, as in `methods.pure`: a right rollout's bad step is
punished, and a wrong one's good step rewarded.
"""

from itertools import combinations

import torch
from torch import Tensor

from credit.batch import Batch, Context
from credit.rules import rule
from lab.fast.distances import token_distances
from shear import mean_norm

PRIOR = 1.0  # n0: the mean of the others' rewards counts as this many rollouts
DELTA = 1e-6  # of Eq. (1), as in `grpo.group_advantages`


@rule(
    "kgae",
    "changes of a value that nearby rollouts of the group estimate",
    needs_states=True,
    weighs=False,
)
def kgae(batch: Batch, context: Context, *, decay: float = 0.95, width: float = 0.05) -> Tensor:
    """A_t = sum_k decay^k (V_{t+k} - V_{t+k-1}) / std: generalized advantage estimation; ours.

    The estimate is that of Schulman et al. 2016. V_t = (n0 base + sum_j K_j r_j) / (n0 + sum_j K_j)
    over the other rollouts j of the group, base the mean of their rewards, K_j = exp(-d_j / width).
    d_j is how near rollout j ever comes to the last tokens of the prefix, in units of nbar, by
    `aligned_distances`. V_0 = base, and after the last token V is the rollout's own reward, so that
    at decay 1 all A_t would be r - V_{t-1}.
    """
    changes = torch.zeros_like(batch.log_probs)  # (B, T)
    for group, hidden, mask, _ in batch.groups():
        if batch.advantages[group].any():  # otherwise all rewards are equal
            rewards = batch.rewards[group]
            values = prefix_values(hidden, mask, rewards, context.shear.window, width)
            deviation = rewards[~rewards.isnan()].std() + DELTA
            changes[group] = torch.where(mask, values.diff(dim=1), 0.0) / deviation
    sums = torch.zeros_like(changes)
    later = torch.zeros_like(changes[:, 0])  # (B,)
    for t in reversed(range(changes.shape[1])):
        later = changes[:, t] + decay * later
        sums[:, t] = later
    return sums


def prefix_values(
    hidden: Tensor, mask: Tensor, rewards: Tensor, window: int, width: float
) -> Tensor:
    """V_0 to V_T of one group's rollouts by `kgae`, (G, T + 1).

    hidden is (G, T, d), mask (G, T), rewards (G,). Rollouts without a verdict are nobody's
    neighbours; their values mean nothing. At least two rollouts must have a verdict.
    """
    graded = (~rewards.isnan()).nonzero().flatten().tolist()
    states = [hidden[row][mask[row]] for row in range(len(mask))]  # (T_i, d) each
    nbar = mean_norm(hidden[mask])
    base = (rewards.nansum() - rewards) / (len(graded) - 1)  # (G,), leave one out
    near_rewards = PRIOR * base[:, None].repeat(1, mask.shape[1])  # (G, T)
    near = torch.full_like(near_rewards, PRIOR)  # (G, T), n0 + sum of K
    for i, j in combinations(graded, 2):
        distances = aligned_distances(states[i], states[j], window) / nbar  # (T_i, T_j)
        for own, other, closest in ((i, j, distances.amin(1)), (j, i, distances.amin(0))):
            kernel = (-closest / width).exp()  # (T_own,)
            near[own, : len(kernel)] += kernel
            near_rewards[own, : len(kernel)] += kernel * rewards[other]
    values = torch.cat([base[:, None], near_rewards / near], 1)
    for row in graded:
        values[row, len(states[row])] = rewards[row]
    return values


def aligned_distances(x: Tensor, y: Tensor, window: int) -> Tensor:
    """The distances of two rollouts' recent states: x (N, d), y (M, d) -> (N, M).

    The mean of ||x_{t-k} - y_{u-k}|| over k < min(w, t, u), t and u counted from 1.
    """
    n, m = len(x), len(y)
    window = min(window, n, m)
    # Sums over runs of 1, 2, 4, ... tokens of a diagonal; those of the window's binary digits are
    # put end to end.
    runs = token_distances(x, y)
    sums = torch.zeros_like(runs)
    length = 1
    covered = 0
    while length <= window:
        if window & length:
            sums[covered:, covered:] += runs[: n - covered, : m - covered]
            covered += length
        longer = runs.clone()
        longer[length:, length:] += runs[: n - length, : m - length]
        runs = longer
        length *= 2
    rows = torch.arange(1, n + 1, device=x.device)[:, None]
    columns = torch.arange(1, m + 1, device=x.device)
    return sums / torch.minimum(rows, columns).clamp_max(window)


@rule(
    "bipace",
    "the reward after this token minus that of all tokens in similar states",
    needs_states=True,
    weighs=False,
)
def bipace(batch: Batch, context: Context, *, radius: float = 0.1) -> Tensor:
    """A_t = Q - V, mean rewards of the group's tokens that were chosen in similar states: BiPACE.

    V is the mean over all tokens of a cluster of states, Q over those of them that are the same
    token (arXiv 2606.25556, which clusters late layers' states). A token that occurs once in its
    cluster has r minus the mean of the cluster's others; one that is alone in its cluster has 0.
    Inferred: the radius; Q includes the token's own reward; and the first tokens of all rollouts
    are one cluster, as they follow the same prompt. Deviates: the states are the last layer's.
    """
    credit = torch.zeros_like(batch.log_probs)  # (B, T)
    for group, hidden, mask, _ in batch.groups():
        first = (mask.cumsum(1) == 1)[mask]  # (N,), of N tokens
        states = hidden.roll(1, 1)[mask]  # (N, d), in which the tokens were chosen
        clusters = greedy_clusters(states, first, radius)
        tokens = batch.rollouts.ids[group][mask]
        rewards = batch.rewards[group, None].expand_as(mask)[mask].double()
        _, choices = torch.stack([clusters, tokens]).unique(dim=1, return_inverse=True)  # (N,)
        of_state, in_state = sums_and_counts(clusters, rewards)
        of_choice, in_choice = sums_and_counts(choices, rewards)
        alone = rewards - (of_state - rewards) / (in_state - 1)  # NaN in a cluster of one
        peers = of_choice / in_choice - of_state / in_state
        credit[group][mask] = torch.where(in_choice > 1, peers, alone.nan_to_num()).float()
    return credit


def greedy_clusters(states: Tensor, first: Tensor, radius: float) -> Tensor:
    """The number (N,) of the cluster of each state, states (N, d).

    States where `first` (N,) is true are cluster 0. Of the others, the earliest that is in no
    cluster leads the next one, and takes all that are in none and within `radius` of it.
    """
    states = torch.nn.functional.normalize(states.float(), dim=-1)
    clusters = torch.where(first, 0, -1)  # (N,)
    while (clusters < 0).any():
        free = clusters < 0
        leader = int(free.nonzero()[0])
        near = states @ states[leader] >= 1 - radius  # (N,)
        near[leader] = True  # a state of 0 is not even near itself
        clusters[free & near] = clusters.max() + 1
    return clusters


def sums_and_counts(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """For each key (N,), the sum of the values (N,) with that key, and their number."""
    return keys.bincount(values)[keys], keys.bincount()[keys]
