"""SHEAR: span-level Wasserstein credit for GRPO (Algorithm 1 of arXiv 2604.23318).

How it differs from plain GRPO, in full:
  1. The rollouts of a group are split by verdict into right and wrong ones.
  2. Every window of tokens ("span") becomes the set of its last-layer hidden states, and gets its Sinkhorn
     distance to the closest span of the *opposing* side.
  3. A token's weight omega is the largest such distance among the spans that cover it, in units of the
     group's mean hidden-state norm.
  4. The token's advantage is A * omega. The sign of A stays; omega is a constant for autograd.
A group whose verdicts are all equal has no opposing side and keeps weight 1 (its advantage is 0 anyway).

    paper                              | here
    -----------------------------------+-----------------------------------------------------------
    G, T_i, A_i, h_t                   | `hidden` (G, T, d), `mask` (G, T), `advantages` (B,); h_t is after the
                                       | final norm, at the position of y_t, in any float dtype
    w, s, eps                          | `window`, `stride` in tokens; `eps` in units of nbar
    Eq. (2)  S_k = [a_k, b_k], K_i     | span_bounds
    Phat_k                             | Spans.mass
    Eq. (3)  the cost ||x - y||        | token_distances
    Eq. (10) W_eps(P, Q)               | sinkhorn.sinkhorn
    Eq. (4)  opposing set O_i          | two_sides
    Alg. 1 line 5   d_k, Step 1        | race.race; every pair solved: opposing_distances
    Alg. 1 line 10  nbar, Step 2       | mean_norm
    Alg. 1 line 14  omega_t, Step 3    | token_weights
    Alg. 1 line 16  omega_t = 1        | shear_weights, `omega = mask.float()`
    Alg. 1 line 18  A omega, Step 4    | shear_advantages

Where the paper is silent (eps, iterations, the stopping rule), the choices are the arguments' defaults.
`reading="value"` is Eq. (10); at eps = 0.05 it carries a floor of up to 0.05 ln(window), even between equal
spans whose points lie far apart. `reading="cost"` has no such floor and vanishes on shared prefixes.

omega is not 1 on average, so SHEAR also changes the size of the step: mind that when comparing.

What the theory does not promise: the theorems' rate n^(-1/d) is 0.9987 at n = 100 and d = 3584, so they are
tested in low dimension (tests/test_theory.py). Theorem 2 (ii), (iii) and Prop. F.1 (ii) as printed have a gap:
they bound the minimum over J opposing spans by the expectation for one of them, and fail for large J; subtracting
M sqrt(2 ln J / n) repairs them. Max pooling spreads a span's distance over up to window - 1 tokens before
the first one that differs (App. H.1).

`first_weights` is ours, for comparison: the same distances, used only to find where a wrong rollout goes wrong.

Token distances take most memory: N+ x N- floats, twice over, of a group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from race import race
from sinkhorn import sinkhorn
from sinkhorn_triton import fused_race

READINGS = ("value", "cost")
DISTANCES = ("w1", "cosine", "chamfer", "mmd")
NORMALIZATIONS = ("group", "rollout")
POOLINGS = ("max", "mean")
SCALE_FREE = ("cosine", "mmd")  # distances without a unit, not divided by nbar

# Entries of the cost blocks that are solved together: 64 MB a buffer on a GPU, of which the solver holds about
# six; on a CPU small chunks win because they stay in cache.
CHUNK_ENTRIES = {"cuda": 2**24, "cpu": 2**19}

# The matrix product's rounding, some 1e-6 of |x|^2 + |y|^2 at worst, is within 1e-4 of a distance whose square is above
# NEAR of that sum. Taking differences costs two to three times as much a pair of tokens as `cdist`, hence MANY.
NEAR, MANY = 0.01, 0.25


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


@dataclass(frozen=True)
class GroupDistances:
    """Of one group: each span's distance to the closest opposing span, in units of nbar."""

    right: Tensor  # (G, T) bool, tokens of right rollouts
    wrong: Tensor  # (G, T) bool
    right_spans: Spans
    wrong_spans: Spans
    of_right: Tensor  # (K+,) float32
    of_wrong: Tensor  # (K-,) float32
    solved: dict[str, Tensor]  # iterations (pairs,), error (pairs solved to the end,); empty if nothing was solved


def span_bounds(length: int, window: int, stride: int) -> list[tuple[int, int]]:
    """Eq. (2): the spans of a response, 0-based and half-open; stops at the first one that reaches its end."""
    if window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    if not 1 <= stride <= window:
        raise ValueError(f"stride must be between 1 and the window ({window}), or tokens go uncovered; got {stride}")
    starts = range(0, max(length - window, 0) + stride, stride) if length else ()
    return [(start, min(start + window, length)) for start in starts]


def shear_advantages(
    advantages: Tensor, hidden: Tensor, mask: Tensor, correct: Tensor, group_size: int, **options
) -> Tensor:
    """Alg. 1 for a batch of groups: advantages (B,), hidden (B, T, d), mask (B, T), correct (B,) -> (B, T).

    Rollouts of a group are adjacent; `options` are those of `shear_weights`. `hidden` may rest on the CPU: a
    group at a time visits the device of `mask`.
    """
    groups = zip(*(part.split(group_size) for part in (hidden, mask, correct)), strict=True)
    weights = [shear_weights(*group, **options) for group in groups]
    return advantages[:, None] * torch.cat(weights)  # Alg. 1 line 18, Step 4


@torch.no_grad()
def shear_weights(
    hidden: Tensor,
    mask: Tensor,
    correct: Tensor,
    *,
    window: int = 100,
    stride: int = 25,
    eps: float = 0.05,
    reading: str = "value",
    distance: str = "w1",
    normalize: str = "group",
    pool: str = "max",
    max_iters: int = 100,
    tol: float = 1e-3,
    fused: bool = False,
    stats: list[dict] | None = None,
) -> Tensor:
    """Alg. 1 lines 1-16 for one group: the token weights omega (G, T) float32.

    hidden (G, T, d); mask (G, T), 1 on response tokens; correct (G,), true for right rollouts. omega is 1 where
    the opposing set is empty and 0 where the mask is 0; a rollout whose mask is all 0 is in neither set.
    eps is in units of nbar; `max_iters` and `tol` are those of `sinkhorn`. Ablations: `reading` of Eq. (10)
    ("value" or "cost", w1 only), `distance` of two spans ("w1", "cosine", "chamfer", "mmd"), `normalize`
    ("group", or "rollout": every rollout's mean weight becomes the group's), `pool` of the spans that cover a
    token ("max", "mean"). `fused` takes the Triton kernel, on a GPU. A list given as `stats` receives
    {"iterations": (pairs,), "error": (solved,)} of a group: the iterations spent on each pair, the marginal errors
    of those solved to the end. Raises ValueError for an option that is not one of these, or a state that is not
    finite.
    """
    check_options(window, stride, reading, distance, normalize, pool)
    mask, correct = mask.bool(), correct.bool()
    omega = mask.float()  # (G, T), Alg. 1 line 16
    solver = dict(eps=eps, max_iters=max_iters, tol=tol)
    found = group_distances(hidden, mask, correct, window, stride, distance, reading, solver, fused)
    if found is None:
        return omega
    omega[found.right] = token_weights(found.of_right, found.right_spans, pool)
    omega[found.wrong] = token_weights(found.of_wrong, found.wrong_spans, pool)
    if stats is not None and found.solved:
        stats.append(found.solved)
    return _even_out(omega, mask) if normalize == "rollout" else omega


@torch.no_grad()
def first_weights(
    hidden: Tensor,
    mask: Tensor,
    correct: Tensor,
    *,
    threshold: float = 0.03,
    window: int = 100,
    stride: int = 25,
    eps: float = 0.05,
    max_iters: int = 100,
    tol: float = 1e-3,
) -> Tensor:
    """Not the paper's: the same distances, used once. Weights (G, T) float32 of 0 and 1 for one group.

    Right rollouts keep weight 1. A wrong one keeps it only around the onset of its first span whose distance (of the
    reading "cost", in units of nbar) exceeds `threshold`: the span's last `stride` tokens are what it does not share
    with the spans before it, and the weight is 1 from `stride` tokens before these to `stride` after. Without such a
    span all its weights are 0. Shapes, the other options and errors are those of `shear_weights`.
    """
    check_options(window, stride)
    mask, correct = mask.bool(), correct.bool()
    omega = mask.float()  # (G, T)
    solver = dict(eps=eps, max_iters=max_iters, tol=tol)
    found = group_distances(hidden, mask, correct, window, stride, "w1", "cost", solver)
    if found is None:
        return omega
    omega[found.wrong] = 0.0
    distances = iter(found.of_wrong.tolist())
    for row, length in enumerate(found.wrong.sum(1).tolist()):
        bounds = span_bounds(length, window, stride)
        far = [end for (_, end), distance in zip(bounds, distances, strict=False) if distance > threshold]
        if far:
            onset = far[0] - stride
            omega[row, max(0, onset - stride) : min(onset + 2 * stride, length)] = 1.0
    return omega


def check_options(
    window: int,
    stride: int,
    reading: str = "value",
    distance: str = "w1",
    normalize: str = "group",
    pool: str = "max",
) -> None:
    """Raises ValueError for an option of `shear_weights` that is not one of those that there are."""
    for name, choice, known in (
        ("reading", reading, READINGS),
        ("distance", distance, DISTANCES),
        ("normalize", normalize, NORMALIZATIONS),
        ("pool", pool, POOLINGS),
    ):
        if choice not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {choice!r}")
    span_bounds(0, window, stride)  # raises for a bad window or stride


def group_distances(
    hidden: Tensor,
    mask: Tensor,
    correct: Tensor,
    window: int,
    stride: int,
    distance: str,
    reading: str,
    solver: dict,
    fused: bool = False,
) -> GroupDistances | None:
    """Alg. 1 lines 1-10 for one group: hidden (G, T, d), mask (G, T) bool, correct (G,) bool; None for one side only.

    `solver` holds eps, max_iters and tol. Raises ValueError for a state that is not finite.
    """
    sides = two_sides(hidden, mask, correct, window, stride)
    if sides is None:
        return None
    if distance == "w1" and reading == "value":  # Alg. 1 line 5, Step 1
        spans = sides.x_spans.tokens, sides.x_spans.mass, sides.y_spans.tokens, sides.y_spans.mass
        find = fused_race if fused else race
        found = find(token_distances(sides.x, sides.y), *spans, **{**solver, "eps": solver["eps"] * sides.nbar})
        of_right, of_wrong = found.of_rows / sides.nbar, found.of_columns / sides.nbar
        solved = {"iterations": found.iterations, "error": found.error}
    else:
        matrix, solved = opposing_distances(sides, distance, reading, solver)
        of_right, of_wrong = matrix.amin(1), matrix.amin(0)
    return GroupDistances(sides.right, sides.wrong, sides.x_spans, sides.y_spans, of_right, of_wrong, solved)


def two_sides(hidden: Tensor, mask: Tensor, correct: Tensor, window: int, stride: int) -> Sides | None:
    """Shapes and errors are those of `group_distances`; None for one side only."""
    right, wrong = mask & correct[:, None], mask & ~correct[:, None]  # (G, T), Eq. (4)
    if not right.any() or not wrong.any():
        return None
    hidden = hidden.to(mask.device)
    x, y = hidden[right], hidden[wrong]  # (N+, d), (N-, d)
    if not (x.isfinite().all() and y.isfinite().all()):
        raise ValueError("the hidden states hold a value that is not finite")
    x_spans, y_spans = (
        _spans([n for n in side.sum(1).tolist() if n], window, stride, mask.device) for side in (right, wrong)
    )
    return Sides(right, wrong, x, y, x_spans, y_spans, mean_norm(x, y))  # Alg. 1 line 10 first: eps is in its units


def opposing_distances(sides: Sides, distance: str, reading: str, solver: dict) -> tuple[Tensor, dict]:
    """Alg. 1 line 5, Step 1, every pair solved: each right span's distance to each wrong one, (K+, K-), over nbar.

    W_eps is symmetric, so one matrix serves both sides: row minima the right rollouts, column minima the wrong.
    With them comes what `GroupDistances.solved` holds. `race` finds the minima alone, ten times faster and more.
    """
    if distance == "cosine":
        x_mean, y_mean = (
            torch.einsum("kw,kwd->kd", spans.mass, states[spans.tokens].float())
            for states, spans in ((sides.x, sides.x_spans), (sides.y, sides.y_spans))
        )
        normalized = torch.nn.functional.normalize  # 1 - cos(mean_P, mean_Q)
        return (1 - normalized(x_mean, dim=-1) @ normalized(y_mean, dim=-1).T).clamp_min(0.0), {}
    solver = {**solver, "eps": solver["eps"] * sides.nbar}
    matrix, solved = _span_distances(sides.x, sides.y, sides.x_spans, sides.y_spans, distance, reading, solver)
    return matrix / (1.0 if distance in SCALE_FREE else sides.nbar), solved


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
    at_once = max(1, CHUNK_ENTRIES.get(x.device.type, 2**19) // x.shape[1])
    for i, j in (part.unbind(1) for part in near.nonzero().split(at_once)):
        distances[i, j] = (x[i].float() - y[j].float()).norm(dim=1)
    return distances


def mean_norm(*states: Tensor) -> float:
    """Alg. 1 line 10, Step 2: nbar, the mean Euclidean norm of the group's hidden states, each (N, d)."""
    nbar = torch.cat([side.float().norm(dim=-1) for side in states]).mean().item()
    return max(nbar, 1e-30)  # all-zero states have all-zero distances; do not divide 0 by 0


def token_weights(distances: Tensor, spans: Spans, pool: str) -> Tensor:
    """Alg. 1 line 14, Step 3: (K,) span distances -> (N,) token weights, pooled over the covering spans."""
    tokens = spans.tokens[spans.inside]  # (M,) one entry for each token of each span
    values = distances[:, None].expand_as(spans.tokens)[spans.inside]  # (M,)
    pooled = distances.new_zeros(int(tokens.max()) + 1)
    return pooled.scatter_reduce(0, tokens, values, {"max": "amax", "mean": "mean"}[pool], include_self=False)


def _spans(lengths: list[int], window: int, stride: int, device: torch.device) -> Spans:
    """The spans of rollouts of these lengths, laid end to end."""
    bounds, offset = [], 0
    for length in lengths:
        bounds += [(offset + start, offset + end) for start, end in span_bounds(length, window, stride)]
        offset += length
    starts, ends = torch.tensor(bounds, device=device).unbind(-1)  # (K,), (K,)
    tokens = starts[:, None] + torch.arange(int((ends - starts).max()), device=device)  # (K, w)
    return Spans(torch.minimum(tokens, ends[:, None] - 1), tokens < ends[:, None])


def _span_distances(
    x: Tensor, y: Tensor, x_spans: Spans, y_spans: Spans, distance: str, reading: str, solver: dict
) -> tuple[Tensor, dict]:
    """The (K+, K-) matrix of span-span distances in the states' own units, and the solver's statistics.

    Span costs are blocks of one token-token matrix, gathered and solved CHUNK_ENTRIES at a time.
    """
    costs = token_distances(x, y)  # (N+, N-) float32, Eq. (3)
    kernel_width = max(costs.median().item(), 1e-30) if distance == "mmd" else None
    x_mass, y_mass = x_spans.mass, y_spans.mass  # (K+, w), (K-, w) float32
    shape = (len(x_mass), len(y_mass))
    matrix, error = torch.empty(2, shape[0] * shape[1], device=x.device)  # made once: growing lists fragment memory
    iterations = torch.empty_like(error, dtype=torch.long)
    pairs_at_once = max(1, CHUNK_ENTRIES.get(x.device.type, 2**19) // (x_mass.shape[1] * y_mass.shape[1]))
    for pairs in torch.arange(len(matrix), device=x.device).split(pairs_at_once):
        k, l = pairs // shape[1], pairs % shape[1]  # noqa: E741 - the paper's letters
        # Gathered with the pairs last, the layout in which `sinkhorn` works, and viewed with the pairs first.
        block = costs[x_spans.tokens[k].T[:, None], y_spans.tokens[l].T[None]].permute(2, 0, 1)  # (P, w, w)
        if distance == "w1":
            solved = sinkhorn(block, x_mass[k], y_mass[l], **solver)
            matrix[pairs] = getattr(solved, reading).clamp_min(0.0)  # rounding can leave -1e-9
            iterations[pairs], error[pairs] = solved.iterations, solved.error
        elif distance == "chamfer":
            matrix[pairs] = _chamfer(block, x_spans.inside[k], y_spans.inside[l])
        else:
            matrix[pairs] = _mean_kernel(block, x_mass[k], y_mass[l], kernel_width)
    matrix = matrix.view(shape)
    if distance == "mmd":
        # sqrt of the biased MMD^2, kernel exp(-d^2 / (2 m^2)), m the median of the group's cross distances
        x_self, y_self = _self_kernels(x, x_spans, kernel_width), _self_kernels(y, y_spans, kernel_width)
        matrix = (x_self[:, None] + y_self[None, :] - 2 * matrix).clamp_min(0.0).sqrt()
    return matrix, {"iterations": iterations, "error": error} if distance == "w1" else {}


def _chamfer(block: Tensor, x_inside: Tensor, y_inside: Tensor) -> Tensor:
    """(mean_x min_y ||x - y|| + mean_y min_x ||x - y||) / 2: block (P, w, w), inside (P, w) -> (P,)."""
    to_y = block.masked_fill(~y_inside[:, None, :], torch.inf).amin(2)  # (P, w)
    to_x = block.masked_fill(~x_inside[:, :, None], torch.inf).amin(1)  # (P, w)
    x_mean = (to_y * x_inside).sum(1) / x_inside.sum(1)
    y_mean = (to_x * y_inside).sum(1) / y_inside.sum(1)
    return (x_mean + y_mean) / 2


def _mean_kernel(block: Tensor, x_mass: Tensor, y_mass: Tensor, width: float) -> Tensor:
    """Mean of exp(-||x - y||^2 / (2 width^2)) over a pair of spans: block (P, w, w) -> (P,)."""
    return torch.einsum("pij,pi,pj->p", (-((block / width) ** 2) / 2).exp(), x_mass, y_mass)


def _self_kernels(states: Tensor, spans: Spans, width: float) -> Tensor:
    """Each span's mean kernel with itself, (K,): the two outer terms of the biased MMD^2."""
    kernels = []
    for tokens, mass in zip(spans.tokens, spans.mass, strict=True):
        points = states[tokens].float()
        block = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
        kernels.append(_mean_kernel(block[None], mass[None], mass[None], width))
    return torch.cat(kernels)


def _even_out(omega: Tensor, mask: Tensor) -> Tensor:
    """normalize="rollout": scale every rollout's mean weight to the group's; 0 where its mean is 0."""
    rollout_mean = omega.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)  # (G, 1)
    group_mean = omega.sum() / mask.sum()
    return torch.where(rollout_mean > 0, omega / rollout_mean * group_mean, 0.0)
