"""Values against those of their group: of its tokens, or of its other rollouts."""

import torch
from torch import Tensor


def group_moments(values: Tensor, mask: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """The mean and standard deviation of values over all tokens of each rollout's group.

    Values and mask are (B, T), the results (B, 1) float32.
    """
    # float64: the mean of equal values is then, in float32, that value. Otherwise `standardise`
    # would blow up the rounding error.
    group_tokens = group_size * values.shape[1]  # G T
    values = values.double().reshape(-1, group_tokens)  # (groups, G T)
    mask = mask.reshape(-1, group_tokens)  # (groups, G T)
    count = mask.sum(1, keepdim=True).clamp_min(1)  # (groups, 1)
    mean = torch.where(mask, values, 0.0).sum(1, keepdim=True) / count
    std = (torch.where(mask, values - mean, 0.0).square().sum(1, keepdim=True) / count).sqrt()
    mean = mean.float().repeat_interleave(group_size, 0)  # (B, 1)
    std = std.float().repeat_interleave(group_size, 0)  # (B, 1)
    return mean, std


def standardise(values: Tensor, mask: Tensor, group_size: int) -> Tensor:
    """Values (B, T) minus the mean over their group's tokens, divided by the standard deviation."""
    mean, std = group_moments(values, mask, group_size)
    return (values - mean) / std.clamp_min(1e-8)


def above_others(values: Tensor, group_size: int) -> Tensor:
    """Values of rollouts (B,) minus the mean of their group's others, (B,).

    NaN does not count, and becomes 0, as does a value without others.
    """
    groups = values.view(-1, group_size)  # (groups, G)
    count = groups.isfinite().sum(1, keepdim=True)  # (groups, 1)
    gaps = groups - groups.nanmean(1, keepdim=True)  # from the mean of all, the own one included
    return (gaps * count / (count - 1)).nan_to_num(0.0).flatten()
