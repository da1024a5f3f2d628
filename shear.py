"""SHEAR: span-level Wasserstein credit for GRPO, Algorithm 1 of arXiv 2604.23318, for one group.

    shear_weights(hidden, mask, correct)  -> Weighed: omega (G, T), lines 1-16
    shear_advantages(advantages, omega)   -> A omega (G, T), line 18, for the loss
    algorithm_1(states, advantages, ...)  -> the same as plain loops, to read and to test by

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
    G, T_i, h_t                        | `hidden` (N, d) or (G, T, d) of any float dtype, `mask`
    w, s, eps                          | `window`, `stride` in tokens; `eps` in units of nbar
    Eq. (2)  S_k = [a_k, b_k], Phat_k  | span_bounds, spans_of
    Eq. (4)  opposing set O_i          | two_sides
    Eq. (3)  the cost ||x - y||        | token_distances
    Eq. (10) W_eps(P, Q)               | w_eps, by sinkhorn.sinkhorn
    Alg. 1 line 10  nbar, Step 2       | mean_norm; first, as eps is in its units
    Alg. 1 line 5   d_k, Step 1        | closest_spans
    Alg. 1 line 14  omega_t, Step 3    | token_weights
    Alg. 1 line 16  omega_t = 1        | shear_weights, `omega = mask.float()`
    Alg. 1 line 18  A omega, Step 4    | shear_advantages

The line numbers are the published listing's. The paper's prose cites lines 4, 10 and 13 of it, for
what are lines 5, 14 and 14 here.

h_t is the last layer's state after the final norm, at the position of y_t itself.

`shear_weights` has four hooks, each for a function of its default's signature: `cost` of two
tokens, `measure` of two spans, `closest` span and `pool`. Training passes these defaults: what
stands here is what runs. Another distance of two spans is another `measure`, and nothing else.
`--use lab.fast` replaces `cost` and `closest` by functions that find the same numbers sooner.

At eps = 0.05 Eq. (10) carries a floor of up to 0.05 ln(window), even between equal spans whose
points lie far apart. The paper prints eps log n = 20.8 and not eps; n = 100 in raw units makes it
4.52, which is 0.03 on states of Qwen2.5-Coder, where nbar is 145 to 173 (`docs/recipe.md`). omega
is not 1 on average. A constant factor of all advantages cancels in AdamW, but omega's mean also
differs between groups, sides and steps: mind that when comparing.

What the theory does not promise: the theorems' rate n^(-1/d) is 0.9987 at n = 100 and d = 3584, so
they are tested in low dimension (tests/test_theory.py). Theorem 2 (ii), (iii) and Prop. F.1 (ii) as
printed have a gap: they bound the minimum over J opposing spans by the expectation for one of them,
and fail for large J; subtracting M sqrt(2 ln J / n) repairs them. Max pooling spreads a span's
distance over up to window - 1 tokens before the first that differs (H.1).

Left out: the paper's ablations (`lab/rules/ablations.py`) and many groups at once
(`credit/rules.py`).
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sinkhorn import sinkhorn

WINDOW = 100  # w, tokens
STRIDE = 25  # s, tokens
EPS = 0.05  # in units of nbar
# Costs that are solved together, at most. The solver holds about six buffers of this size: on a CPU
# they should stay in cache, on a GPU they take 64 MB each.
TILE = {"cpu": 2**19, "cuda": 2**24}
TINY = 1e-30  # nbar of states that are all zero


class Spans(NamedTuple):
    """The spans of one side's rollouts, whose N tokens lie end to end."""

    tokens: Tensor  # (K, n) int64, indices into the N tokens; padding repeats the span's last token
    mass: Tensor  # (K, n) float32, Phat_k: uniform on the span's tokens, 0 on padding


class Side(NamedTuple):
    """The right or the wrong rollouts of a group."""

    mask: Tensor  # (G, T) bool, their tokens
    states: Tensor  # (N, d), of these tokens, end to end
    spans: Spans


class Closest(NamedTuple):
    """Alg. 1 line 5 of a group: the closest opposing span of each span, and how far it is."""

    of_right: Tensor  # (K+,) distances
    right_to: Tensor  # (K+,) int64, which wrong span
    of_wrong: Tensor  # (K-,) distances
    wrong_to: Tensor  # (K-,) int64, which right span


Cost = Callable[[Tensor, Tensor], Tensor]  # as `token_distances`
Measure = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # as `w_eps`
ClosestHook = Callable[[Tensor, Side, Side, float, Measure], Closest]  # as `closest_spans`
Pool = Callable[[Tensor, Spans], Tensor]  # as `token_weights`


class Weighed(NamedTuple):
    """A group's token weights, and what they come from."""

    omega: Tensor  # (G, T) float32
    nbar: float  # the mean norm of its hidden states
    closest: Closest | None  # distances in the costs' unit; None without two sides


def span_bounds(length: int, window: int, stride: int) -> list[tuple[int, int]]:
    """Eq. (2): the spans of a response, 0-based and half-open.

    The last one is the first that reaches the end. Raises ValueError for a window or stride that
    leaves tokens uncovered.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    if not 1 <= stride <= window:
        raise ValueError(
            f"stride must be between 1 and the window ({window}), or tokens go uncovered; got "
            f"{stride}"
        )
    # 1 + ceil((length - window) / stride) spans, or 1 if the response is no longer than the window
    starts = range(0, max(length - window, 0) + stride, stride) if length else ()
    return [(start, min(start + window, length)) for start in starts]


def spans_of(mask: Tensor, window: int, stride: int) -> Spans:
    """The spans of all rollouts of a side, mask (G, T) bool; none crosses into the next rollout."""
    bounds = []
    offset = 0  # tokens of the rollouts before
    for length in mask.sum(1).tolist():
        for start, end in span_bounds(length, window, stride):
            bounds.append((offset + start, offset + end))
        offset += length
    starts, ends = torch.tensor(bounds, device=mask.device).split(1, dim=1)  # (K, 1) each
    tokens = starts + torch.arange(min(window, mask.shape[1]), device=mask.device)  # (K, n)
    mass = (tokens < ends) / (ends - starts)  # (K, n)
    return Spans(torch.minimum(tokens, ends - 1), mass)


def two_sides(
    states: Tensor, mask: Tensor, correct: Tensor, window: int, stride: int
) -> tuple[Side, Side] | None:
    """Eq. (4): right and wrong rollouts oppose each other; None without both.

    states (N, d) of the mask's tokens, end to end; mask (G, T) and correct (G,) must be bool here.
    """
    sides = []
    for members in (correct, ~correct):
        own = mask & members[:, None]  # (G, T)
        if not own.any():
            return None
        sides.append(Side(own, states[own[mask]], spans_of(own, window, stride)))
    return sides[0], sides[1]


def token_distances(x: Tensor, y: Tensor) -> Tensor:
    """Eq. (3), the cost: ||x - y|| between all tokens, x (N+, d), y (N-, d) -> (N+, N-) float32."""
    # The usual |x|^2 + |y|^2 - 2<x, y> cancels: at norm 90 equal states could be .06 apart.
    return torch.cdist(x.float(), y.float(), compute_mode="donot_use_mm_for_euclid_dist")


def mean_norm(states: Tensor) -> float:
    """Alg. 1 line 10, Step 2: nbar, the mean norm of all hidden states (N, d) of the group.

    Raises ValueError for a state that is not finite.
    """
    if not len(states):
        return TINY
    nbar = states.float().norm(dim=-1).mean().item()
    if not math.isfinite(nbar):
        raise ValueError(
            "the hidden states hold a value that is not finite, or is too large for float32"
        )
    return max(nbar, TINY)  # all-zero states have all-zero distances; do not divide 0 by 0


def w_eps(costs: Tensor, a: Tensor, b: Tensor, eps: float) -> Tensor:
    """Eq. (10): the distances (P,) of P pairs of spans, in the unit of the costs.

    costs (P, n, m); masses a (P, n) and b (P, m), 0 on padding; eps in the unit of the costs.
    """
    return sinkhorn(costs, a, b, eps=eps).value.clamp_min(0.0)  # rounding can leave -1e-9


def closest_spans(
    costs: Tensor, right: Side, wrong: Side, eps: float, measure: Measure = w_eps
) -> Closest:
    """Alg. 1 line 5, Step 1: the closest opposing span of each span, every pair measured.

    costs (N+, N-) are between the tokens of the right and the wrong side; `eps` and the distances
    returned have their unit.
    """
    return closest_of(every_pair(costs, right.spans, wrong.spans, eps, measure))


def every_pair(costs: Tensor, right: Spans, wrong: Spans, eps: float, measure: Measure) -> Tensor:
    """The distances of each right span from each wrong one, (K+, K-), a tile of pairs at a time."""
    rows = len(right.mass)
    columns = len(wrong.mass)
    size = right.mass.shape[1] * wrong.mass.shape[1]  # costs of a pair
    at_once = max(1, TILE.get(costs.device.type, TILE["cpu"]) // size)  # pairs
    # one allocation: growing lists would fragment a GPU's memory
    distances = costs.new_empty(rows * columns)
    for pairs in torch.arange(rows * columns, device=costs.device).split(at_once):
        k = pairs // columns  # (P,)
        l = pairs % columns  # (P,)  # noqa: E741 - the paper's letters
        blocks = costs[right.tokens[k][:, :, None], wrong.tokens[l][:, None]]  # (P, n, m)
        distances[pairs] = measure(blocks, right.mass[k], wrong.mass[l], eps)
    return distances.view(rows, columns)


def closest_of(distances: Tensor) -> Closest:
    """The minima of a matrix (K+, K-). W_eps is symmetric, so one matrix serves both sides."""
    of_right, right_to = distances.min(1)
    of_wrong, wrong_to = distances.min(0)
    return Closest(of_right, right_to, of_wrong, wrong_to)


def token_weights(distances: Tensor, spans: Spans) -> Tensor:
    """Alg. 1 line 14, Step 3: a token's largest distance among its spans, (K,) -> (N,).

    Distances are in units of nbar already.
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
    eps_unit: Literal["nbar", "raw"] = "nbar",
    cost: Cost = token_distances,
    measure: Measure = w_eps,
    closest: ClosestHook = closest_spans,
    pool: Pool = token_weights,
) -> Weighed:
    """Alg. 1 lines 1-16: the token weights omega (G, T) of one group, and what they come from.

    mask (G, T), 1 on response tokens; hidden (N, d), the states of these N tokens end to end, or
    (G, T, d); correct (G,), true for right rollouts. omega is 1 where the opposing set is empty and
    0 where the mask is 0; a rollout whose mask is all 0 is in neither set. `eps` is in units of
    nbar, or, with `eps_unit` "raw", in the costs' unit, as in the paper. The hooks have the
    signatures of their defaults; `pool` takes distances in units of nbar. Raises ValueError for a
    bad window or stride, another `eps_unit`, a verdict that is neither bool nor 0 or 1, a state
    that is not finite, and, where distances are computed, for eps <= 0.
    """
    if eps_unit not in ("nbar", "raw"):
        raise ValueError(f'eps_unit must be "nbar" or "raw", got {eps_unit!r}')
    span_bounds(0, window, stride)  # raises for a bad window or stride, also without two sides
    others = correct[(correct != 0) & (correct != 1)]  # NaN is among them
    if len(others):
        raise ValueError(f"correct must be bool, or 0 and 1; it has {others[0].item()}")
    mask = mask.bool()
    correct = correct.bool()
    states = hidden[mask] if hidden.dim() == 3 else hidden  # (N, d)
    omega = mask.float()  # (G, T), Alg. 1 line 16
    nbar = mean_norm(states)  # Alg. 1 line 10, Step 2
    sides = two_sides(states, mask, correct, window, stride)  # Eqs. (2), (4)
    if sides is None:
        return Weighed(omega, nbar, None)
    right, wrong = sides
    costs = cost(right.states, wrong.states)  # (N+, N-), Eq. (3)
    unit = nbar if eps_unit == "nbar" else 1.0
    nearest = closest(costs, right, wrong, eps * unit, measure)  # Alg. 1 line 5, Step 1
    omega[right.mask] = pool(nearest.of_right / nbar, right.spans)  # Alg. 1 line 14, Step 3
    omega[wrong.mask] = pool(nearest.of_wrong / nbar, wrong.spans)
    return Weighed(omega, nbar, nearest)


def shear_advantages(advantages: Tensor, omega: Tensor) -> Tensor:
    """Step 4: advantages (G,) of Eq. (1) and weights (G, T) -> token advantages (G, T)."""
    return advantages[:, None] * omega  # Alg. 1 line 18


# ---- the same, as the paper lists it -------------------------------------------------------------


@torch.no_grad()
def algorithm_1(
    states: list[Tensor],
    correct: list[bool],
    advantages: list[float],
    *,
    window: int = WINDOW,
    stride: int = STRIDE,
    eps: float = EPS,
    measure: Measure = w_eps,
) -> list[Tensor]:
    """Algorithm 1 with the loops of the paper's listing: the token advantages of each rollout.

    Takes the states (T_i, d), the verdict and A_i of each of G rollouts; returns (T_i,) each.
    Nothing trains by it: it solves every pair twice, one at a time. tests/test_shear.py compares
    the functions above with it. The numbers of the listing's lines stand beside what they say.
    """
    nbar = mean_norm(torch.cat(states))  # line 10, Step 2; first, as eps is in its units
    token_advantages = []
    for h, is_right, advantage in zip(states, correct, advantages, strict=True):
        opposing = []  # O_i, Eq. (4): the spans of all rollouts of the other verdict
        for other, other_is_right in zip(states, correct, strict=True):
            if other_is_right != is_right:
                for start, end in span_bounds(len(other), window, stride):
                    opposing.append(other[start:end])
        omega = torch.ones(len(h))  # line 16: no rollout opposes this one
        if opposing:
            omega = torch.zeros(len(h))
            for start, end in span_bounds(len(h), window, stride):  # S_k, Eq. (2)
                # line 5, Step 1: d_k, the distance of S_k from its closest opposing span
                d = min(span_distance(h[start:end], span, eps * nbar, measure) for span in opposing)
                for t in range(start, end):
                    omega[t] = max(omega[t], d / nbar)  # line 14, Step 3
        token_advantages.append(advantage * omega)  # line 18, Step 4
    return token_advantages


def span_distance(x: Tensor, y: Tensor, eps: float, measure: Measure) -> Tensor:
    """The distance () of two spans with states (n, d) and (m, d), each uniform on its tokens."""
    costs = token_distances(x, y)[None]  # (1, n, m), Eq. (3)
    a = costs.new_full((1, len(x)), 1 / len(x))
    b = costs.new_full((1, len(y)), 1 / len(y))
    return measure(costs, a, b, eps)[0]  # Eq. (10)
