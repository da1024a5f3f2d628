"""Five functions of the paper to write yourself, in the order of the method: spans first.

    python -m lab.learn.check                     # what is right, wrong, not written
    python -m lab.learn.check span_bounds --hint  # one of them, and a hint

The first command copies this file to mine/exercises.py, which git ignores: write there, and replace
each `raise NotImplementedError` by code. All tensors are on the CPU; only token indices and masks
are not float32. Use torch's sums, minima and softmaxes; loops are allowed, speed does not matter.
Write yours before you open shear.py, sinkhorn.py and grpo.py, where these functions are.
"""

import torch  # noqa: F401  # for your code
from torch import Tensor

from shear import Side, Spans
from sinkhorn import sinkhorn  # noqa: F401  # for closest_distances


def span_bounds(length: int, window: int, stride: int) -> list[tuple[int, int]]:
    """Eq. (2): the spans of a response of `length` tokens, as pairs (start, end).

    Tokens are counted from 0, and `end` is the token after the span's last one. The k-th span,
    k = 0, 1, ..., starts at k * stride and has `window` tokens, fewer if the response ends before.
    The first span that reaches the response's end is the last. No tokens have no spans.
    1 <= stride <= window.
    """
    raise NotImplementedError


def sinkhorn_potentials(
    C: Tensor, a: Tensor, b: Tensor, eps: float, iterations: int
) -> tuple[Tensor, Tensor]:
    """Eq. (10) in the log domain: the potentials f (n,) and g (m,) after some iterations.

    C (n, m) are costs, a (n,) and b (m,) masses that sum to 1. Start from g = 0. One iteration
    updates f, then g:

        f_i = -eps log sum_j b_j exp((g_j - C_ij) / eps)
        g_j = -eps log sum_i a_i exp((f_i - C_ij) / eps)

    eps may be a thousandth of the costs, where exp(-C / eps) is 0 in float32. A mass may be 0; that
    point's own potential is then ignored.
    """
    raise NotImplementedError


def closest_distances(costs: Tensor, right: Side, wrong: Side, eps: float) -> tuple[Tensor, Tensor]:
    """Alg. 1 line 5: each span's distance to its closest opposing span.

    Returns of_right (K+,) and of_wrong (K-,):

        of_right_k = min over wrong spans l of W_eps(right span k, wrong span l)
        of_wrong_l = min over right spans k of W_eps(right span k, wrong span l)

    costs (N+, N-) are the distances between the right side's tokens and the wrong side's. Of a side
    only `spans` is needed: `spans.tokens` (K, n) are the rows or columns of `costs` that belong to
    each span, and `spans.mass` (K, n) their masses, 0 on padding. For C (n, m), a (n,) and b (m,),
    W_eps is `sinkhorn(C, a, b, eps=eps).value`.
    """
    raise NotImplementedError


def token_weights(distances: Tensor, spans: Spans) -> Tensor:
    """Alg. 1 line 14: each token's weight (N,), the largest distance among the spans that cover it.

        omega_t = max over spans k that cover token t of d_k

    distances d (K,) are those of a side's spans, already divided by nbar; `spans.tokens` (K, n) are
    the tokens of each span, numbers from 0 to N - 1, and `spans.mass` (K, n) is 0 on padding, which
    covers nothing. Every token is covered by a span.
    """
    raise NotImplementedError


def clipped_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    n_tokens: int,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """The clipped policy-gradient loss, averaged over tokens: a scalar, differentiable in `logp`.

        rho = exp(logp - old_logp)
        loss = -(1 / n_tokens) sum over tokens of
               min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    logp, old_logp, advantages A and mask are (b, T); mask is True on response tokens. Elsewhere the
    other three may hold anything, even NaN, and count for nothing. `n_tokens` is the number of
    response tokens of the whole optimizer step, of which these rollouts may be a part.
    """
    raise NotImplementedError
