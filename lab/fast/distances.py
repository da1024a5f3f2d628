"""Eq. (3) between all tokens of a group by one matrix product: the hook `cost` of `shear`.

    token_distances(x, y) -> (N+, N-) float32, as `shear.token_distances`

On a CPU it is about twenty times as fast as that function. |x|^2 + |y|^2 - 2<x, y> cancels between
near points, and equal points, as in prefixes that rollouts share, must be at distance 0. So
distances between near points are computed from differences.

Token distances take most of SHEAR's memory: N+ x N- floats of a group, three times over while they
are made.
"""

from collections import defaultdict

import torch
from torch import Tensor

from shear import token_distances as by_differences

# The matrix product's rounding, some 1e-6 of |x|^2 + |y|^2 at worst, is within 1e-4 of a distance
# whose square is above NEAR of that sum. Taking differences costs two to three times as much per
# pair of tokens as `cdist`, hence MANY.
NEAR, MANY = 0.01, 0.25
# Entries that a block of differences or of costs has at most, by device; on a CPU they should stay
# in cache.
CHUNK_ENTRIES = defaultdict(lambda: 2**19, cuda=2**26)


def token_distances(x: Tensor, y: Tensor) -> Tensor:
    """Eq. (3), ||x - y|| between all tokens, each to 1e-4 of itself.

    x (N+, d), y (N-, d) -> (N+, N-) float32.
    """
    if x.is_cuda and x.dtype == y.dtype == torch.bfloat16:
        u = x.float()
        v = y.float()
        product = torch.mm(x, y.T, out_dtype=torch.float32)
    else:
        # moving all points alike changes no distance, and less cancels
        middle = torch.cat([x.float(), y.float()]).mean(0)
        u = x.float() - middle
        v = y.float() - middle
        product = u @ v.T
    u_squares = u.square().sum(1)[:, None]  # (N+, 1)
    v_squares = v.square().sum(1)  # (N-,)
    squares = product.mul_(-2).add_(u_squares).add_(v_squares)  # (N+, N-)
    near = squares < NEAR * (u_squares + v_squares)
    if near.sum() > MANY * near.numel():
        return by_differences(x, y)
    distances = squares.clamp_min_(0.0).sqrt_()
    at_once = max(1, CHUNK_ENTRIES[x.device.type] // x.shape[1])
    for pairs in near.nonzero().split(at_once):
        i, j = pairs.unbind(1)
        distances[i, j] = (x.index_select(0, i).float() - y.index_select(0, j).float()).norm(dim=1)
    return distances
