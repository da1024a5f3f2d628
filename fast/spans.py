"""A group as its two sides: spans of tokens, Eqs. (2) and (4) of arXiv 2604.23318, and the distances between tokens.

    two_sides(hidden, mask, correct, window, stride) -> Sides: states, spans, nbar; None where one side is empty
    token_distances(x, y)                            -> Eq. (3), of which all span costs are blocks

Token distances take most of SHEAR's memory: N+ x N- floats of a group, three times over while they are made.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# The matrix product's rounding, some 1e-6 of |x|^2 + |y|^2 at worst, is within 1e-4 of a distance whose square is above
# NEAR of that sum. Taking differences costs two to three times as much a pair of tokens as `cdist`, hence MANY.
NEAR, MANY = 0.01, 0.25
ENTRIES = 2**19  # of a difference of states, at a time


@dataclass(frozen=True)
class Spans:
    """The spans of one side's rollouts, whose tokens lie end to end in one (N, d) tensor."""

    tokens: Tensor  # (K, w) int64, indices into the N tokens; padding repeats the span's last token
    inside: Tensor  # (K, w) bool, False on padding (a rollout's last span may be shorter)

    @property
    def mass(self) -> Tensor:
        """(K, w) float32: the uniform measure Phat_k on each span's tokens."""
        return self.inside / self.inside.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Sides:
    """Of one group: the tokens and spans of its right and of its wrong rollouts, Eq. (4)."""

    right: Tensor  # (G, T) bool, tokens of right rollouts
    wrong: Tensor  # (G, T) bool
    x: Tensor  # (N+, d) the right rollouts' states, end to end
    y: Tensor  # (N-, d) the wrong ones'
    x_spans: Spans
    y_spans: Spans
    nbar: float


def span_bounds(length: int, window: int, stride: int) -> list[tuple[int, int]]:
    """Eq. (2): the spans of a response, 0-based and half-open; stops at the first one that reaches its end."""
    if window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    if not 1 <= stride <= window:
        raise ValueError(f"stride must be between 1 and the window ({window}), or tokens go uncovered; got {stride}")
    starts = range(0, max(length - window, 0) + stride, stride) if length else ()
    return [(start, min(start + window, length)) for start in starts]


def two_sides(hidden: Tensor, mask: Tensor, correct: Tensor, window: int, stride: int) -> Sides | None:
    """hidden (G, T, d), mask (G, T) bool, correct (G,) bool -> both sides, or None where one of them is empty.

    Raises ValueError for a state that is not finite.
    """
    right, wrong = mask & correct[:, None], mask & ~correct[:, None]  # (G, T), Eq. (4)
    if not right.any() or not wrong.any():
        return None
    hidden = hidden.to(mask.device)
    x, y = hidden[right], hidden[wrong]  # (N+, d), (N-, d)
    nbar = mean_norm(x, y)  # Alg. 1 line 10 first: eps is in its units
    if not math.isfinite(nbar):
        raise ValueError("the hidden states hold a value that is not finite, or is too large for float32")
    x_spans, y_spans = (_spans(side.sum(1).tolist(), window, stride, mask) for side in (right, wrong))
    return Sides(right, wrong, x, y, x_spans, y_spans, nbar)


def token_distances(x: Tensor, y: Tensor) -> Tensor:
    """Eq. (3), ||x - y|| between all tokens: x (N+, d), y (N-, d) -> (N+, N-) float32.

    By one matrix product, |x|^2 + |y|^2 - 2<x, y>, except where that cancels: between near points (equal ones, of
    prefixes that rollouts share, must be at distance 0) by differences.
    """
    if x.is_cuda and x.dtype == y.dtype == torch.bfloat16:
        u, v, product = x.float(), y.float(), torch.mm(x, y.T, out_dtype=torch.float32)
    else:
        middle = torch.cat([x.float(), y.float()]).mean(0)  # a move changes no distance, and less cancels
        u, v = x.float() - middle, y.float() - middle
        product = u @ v.T
    sizes = u.square().sum(1), v.square().sum(1)  # (N+,), (N-,)
    squares = product.mul_(-2).add_(sizes[0][:, None]).add_(sizes[1])  # (N+, N-)
    near = squares < NEAR * (sizes[0][:, None] + sizes[1])
    if near.sum() > MANY * near.numel():
        return torch.cdist(x.float(), y.float(), compute_mode="donot_use_mm_for_euclid_dist")
    distances = squares.clamp_min_(0.0).sqrt_()
    at_once = max(1, ENTRIES // x.shape[1])
    for i, j in (part.unbind(1) for part in near.nonzero().split(at_once)):
        distances[i, j] = (x.index_select(0, i).float() - y.index_select(0, j).float()).norm(dim=1)
    return distances


def mean_norm(*states: Tensor) -> float:
    """Alg. 1 line 10, Step 2: nbar, the mean Euclidean norm of the group's hidden states, each (N, d)."""
    nbar = torch.cat([side.float().norm(dim=-1) for side in states]).mean().item()
    return max(nbar, 1e-30)  # all-zero states have all-zero distances; do not divide 0 by 0


def _spans(lengths: list[int], window: int, stride: int, mask: Tensor) -> Spans:
    """The spans of rollouts of these lengths, laid end to end. They are as wide in all groups under a mask (G, T)."""
    bounds, offset = [], 0
    for length in lengths:
        bounds += [(offset + start, offset + end) for start, end in span_bounds(length, window, stride)]
        offset += length
    starts, ends = (torch.tensor(each, device=mask.device) for each in zip(*bounds, strict=True))  # (K,), (K,)
    tokens = starts[:, None] + torch.arange(min(window, mask.shape[1]), device=mask.device)  # (K, w)
    return Spans(torch.minimum(tokens, ends[:, None] - 1), tokens < ends[:, None])
