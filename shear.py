"""SHEAR: span-level Wasserstein credit for GRPO. Algorithm 1 of arXiv 2604.23318, for one rollout
group.

    shear_weights(hidden, mask, correct)                 -> omega (G, T), lines 1-16
    shear_advantages(advantages, hidden, mask, correct)  -> A omega (G, T), line 18: what the policy
                                                         loss takes

How it differs from plain GRPO, in full:
  1. The rollouts of a group are split by verdict into right and wrong ones.
  2. Every window of tokens ("span") becomes the set of its last-layer hidden states, and gets its
     Sinkhorn distance to the closest span of the *opposing* side.
  3. A token's weight omega is the largest such distance among the spans that cover it, in units of
     the group's mean hidden-state norm.
  4. The token's advantage is A * omega. The sign of A stays; omega is a constant for autograd.
A group whose verdicts are all equal has no opposing side and keeps weight 1 (its advantage is 0
anyway).

    paper                              | here
    -----------------------------------+------------------------------------------------------------
    G, T_i, h_t                        | `hidden` (G, T, d), `mask` (G, T); h_t is after the final
                                       | norm, at the position of y_t, in any float dtype
    w, s, eps                          | `window`, `stride` in tokens; `eps` in units of nbar
    Eq. (2)  S_k = [a_k, b_k], Phat_k  | span_bounds, spans_of
    Eq. (4)  opposing set O_i          | two_sides
    Eq. (3)  the cost ||x - y||        | token_distances
    Eq. (10) W_eps(P, Q)               | sinkhorn.sinkhorn
    Alg. 1 line 10  nbar, Step 2       | mean_norm; first, as eps is in its units
    Alg. 1 line 5   d_k, Step 1        | closest_spans
    Alg. 1 line 14  omega_t, Step 3    | token_weights
    Alg. 1 line 16  omega_t = 1        | shear_weights, `omega = mask.float()`
    Alg. 1 line 18  A omega, Step 4    | shear_advantages

Three hooks take other functions of the same signature: `distances` (`fast.distances` takes one
matrix product), `closest` (`fast.race` finds line 5's minima without solving every pair; ablations
have other distances of two spans) and `pool` (an ablation's mean). Training passes the fast ones;
tests prove them equal.

At eps = 0.05 Eq. (10) carries a floor of up to 0.05 ln(window), even between equal spans whose
points lie far apart. The paper's eps is 4.52 in raw units, which is 0.05 where nbar is 90
(`docs/recipe.md`). omega is not 1 on average, so SHEAR also changes the size of the step: mind that
when comparing.

What the theory does not promise: the theorems' rate n^(-1/d) is 0.9987 at n = 100 and d = 3584, so
they are tested in low dimension (tests/test_theory.py). Theorem 2 (ii), (iii) and Prop. F.1 (ii) as
printed have a gap: they bound the minimum over J opposing spans by the expectation for one of them,
and fail for large J; subtracting M sqrt(2 ln J / n) repairs them. Max pooling spreads a span's
distance over up to window - 1 tokens before the first that differs (H.1).

Left out: the paper's ablations (`credit/ablations.py`), eps in raw units
(`credit/shear_settings.py`) and many groups at once (`credit/methods.py`).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sinkhorn import sinkhorn

WINDOW = 100  # w, tokens
STRIDE = 25  # s, tokens
EPS = 0.05  # in units of nbar


class Spans(NamedTuple):
    """The spans of one side's rollouts, whose N tokens lie end to end."""

    tokens: Tensor  # (K, n) int64, indices into the N tokens; padding repeats the span's last token
    mass: Tensor  # (K, n) float32, Phat_k: uniform on the span's tokens, 0 on padding


class Side(NamedTuple):
    """The right or the wrong rollouts of a group."""

    mask: Tensor  # (G, T) bool, their tokens
    states: Tensor  # (N, d), of these tokens, end to end
    spans: Spans


def span_bounds(length: int, window: int, stride: int) -> list[tuple[int, int]]:
    """Eq. (2): the spans of a response, 0-based and half-open; stops at the first one that reaches
    its end.

    Raises ValueError for a window or stride that leaves tokens uncovered.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    if not 1 <= stride <= window:
        raise ValueError(
            f"stride must be between 1 and the window ({window}), or tokens go uncovered; got "
            f"{stride}"
        )
    starts = range(0, max(length - window, 0) + stride, stride) if length else ()
    return [(start, min(start + window, length)) for start in starts]


def spans_of(mask: Tensor, window: int, stride: int) -> Spans:
    """The spans of all rollouts of a side, mask (G, T) bool. No span crosses from one rollout into
    the next.
    """
    starts, ends, offset = [], [], 0
    for length in mask.sum(1).tolist():
        for start, end in span_bounds(length, window, stride):
            starts.append(offset + start)
            ends.append(offset + end)
        offset += length
    starts = torch.tensor(starts, device=mask.device)[:, None]  # (K, 1)
    ends = torch.tensor(ends, device=mask.device)[:, None]  # (K, 1)
    tokens = starts + torch.arange(min(window, mask.shape[1]), device=mask.device)  # (K, n)
    mass = (tokens < ends) / (ends - starts)  # (K, n)
    return Spans(torch.minimum(tokens, ends - 1), mass)


def two_sides(
    hidden: Tensor, mask: Tensor, correct: Tensor, window: int, stride: int
) -> tuple[Side, Side] | tuple[None, None]:
    """Eq. (4): right and wrong rollouts oppose each other. Shapes are those of `shear_weights`;
    None without both.
    """
    sides = []
    for members in (correct, ~correct):
        own = mask & members[:, None]  # (G, T)
        if not own.any():
            return None, None
        sides.append(Side(own, hidden[own], spans_of(own, window, stride)))
    return sides[0], sides[1]


def token_distances(x: Tensor, y: Tensor) -> Tensor:
    """Eq. (3), the cost: ||x - y|| between all tokens, x (N+, d), y (N-, d) -> (N+, N-) float32."""
    # By differences: the usual |x|^2 + |y|^2 - 2<x, y> cancels, and gives equal states a distance
    # of .06 at norm 90.
    return torch.cdist(x.float(), y.float(), compute_mode="donot_use_mm_for_euclid_dist")


def mean_norm(states: Tensor) -> float:
    """Alg. 1 line 10, Step 2: nbar, the mean Euclidean norm of all hidden states (N, d) of the
    group.

    Raises ValueError for a state that is not finite.
    """
    nbar = states.float().norm(dim=-1).mean().item()
    if not math.isfinite(nbar):
        raise ValueError(
            "the hidden states hold a value that is not finite, or is too large for float32"
        )
    return max(nbar, 1e-30)  # all-zero states have all-zero distances; do not divide 0 by 0


def closest_spans(
    costs: Tensor, right_spans: Spans, wrong_spans: Spans, eps: float, **limits
) -> tuple[Tensor, Tensor]:
    """Alg. 1 line 5, Step 1: each span's distance d_k to the closest opposing span, every pair
    solved.

    costs (N+, N-) between the tokens of the right and of the wrong side; eps in their units. W_eps
    is symmetric, so one (K+, K-) matrix serves both sides: returns its row minima (K+,) and its
    column minima (K-,). `limits` are max_iters and tol of `sinkhorn`.
    """
    rows = []
    for tokens, mass in zip(
        right_spans.tokens, right_spans.mass, strict=True
    ):  # one right span, all wrong ones
        blocks = costs[tokens][:, wrong_spans.tokens].movedim(1, 0)  # (K-, n, m)
        masses = mass.expand(len(blocks), -1)  # (K-, n)
        rows.append(sinkhorn(blocks, masses, wrong_spans.mass, eps=eps, **limits).value)  # Eq. (10)
    distances = torch.stack(rows).clamp_min(0.0)  # (K+, K-); rounding can leave -1e-9
    return distances.amin(1), distances.amin(0)


def token_weights(distances: Tensor, spans: Spans) -> Tensor:
    """Alg. 1 line 14, Step 3: the largest distance among the spans that cover a token, (K,) ->
    (N,).
    """
    real = spans.mass > 0  # (K, n), no padding
    tokens = spans.tokens[real]  # (M,) one entry for each token of each span
    covering = distances[:, None].expand_as(real)[real]  # (M,)
    omega = distances.new_zeros(int(tokens.max()) + 1)  # (N,)
    return omega.scatter_reduce(0, tokens, covering, "amax", include_self=False)


@torch.no_grad()
def shear_weights(
    hidden: Tensor,
    mask: Tensor,
    correct: Tensor,
    *,
    window: int = WINDOW,
    stride: int = STRIDE,
    eps: float = EPS,
    distances: Callable = token_distances,
    closest: Callable = closest_spans,
    pool: Callable = token_weights,
) -> Tensor:
    """Alg. 1 lines 1-16: the token weights omega (G, T) float32 of one group.

    hidden (G, T, d); mask (G, T), 1 on response tokens; correct (G,), true for right rollouts.
    omega is 1 where the opposing set is empty and 0 where the mask is 0; a rollout whose mask is
    all 0 is in neither set. `eps` is in units of nbar. The hooks have the signatures of their
    defaults. Raises ValueError for a bad window, stride or eps, and for a state that is not finite.
    """
    span_bounds(0, window, stride)  # raises for these, also where nothing is to be solved
    mask, correct = mask.bool(), correct.bool()
    omega = mask.float()  # (G, T), Alg. 1 line 16
    right, wrong = two_sides(hidden, mask, correct, window, stride)  # Eqs. (2), (4)
    if right is None:
        return omega
    nbar = mean_norm(hidden[mask])  # Alg. 1 line 10, Step 2
    costs = distances(right.states, wrong.states)  # (N+, N-), Eq. (3)
    of_right, of_wrong = closest(
        costs, right.spans, wrong.spans, eps * nbar
    )  # Alg. 1 line 5, Step 1
    omega[right.mask] = pool(of_right / nbar, right.spans)  # Alg. 1 line 14, Step 3
    omega[wrong.mask] = pool(of_wrong / nbar, wrong.spans)
    return omega


def shear_advantages(
    advantages: Tensor, hidden: Tensor, mask: Tensor, correct: Tensor, **options
) -> Tensor:
    """Alg. 1 for one group, advantages (G,) of Eq. (1) -> token advantages (G, T); the rest as in
    `shear_weights`.
    """
    return advantages[:, None] * shear_weights(
        hidden, mask, correct, **options
    )  # Alg. 1 line 18, Step 4
