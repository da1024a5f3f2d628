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
    Eq. (2)  S_k = [a_k, b_k], K_i     | spans.span_bounds
    Phat_k                             | spans.Spans.mass
    Eq. (3)  the cost ||x - y||        | spans.token_distances
    Eq. (10) W_eps(P, Q)               | sinkhorn.sinkhorn
    Eq. (4)  opposing set O_i          | spans.two_sides
    Alg. 1 line 5   d_k, Step 1        | race.race; pairs.opposing_distances solves all
    Alg. 1 line 10  nbar, Step 2       | spans.mean_norm
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
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from credit.ablations import opposing_distances
from fast.kernel import fused_race
from fast.race import GroupCosts, race
from fast.spans import Sides, Spans, span_bounds, token_distances, two_sides

READINGS = ("value", "cost")
DISTANCES = ("w1", "cosine", "chamfer", "mmd")
NORMALIZATIONS = ("group", "rollout")
POOLINGS = ("max", "mean")
DUST = 1e-6  # of a group's mean weight: below, a rollout's is float32's rounding of 0
TOGETHER = 2**26  # squared tokens, padding included, of the groups that share a race: 64 MB of costs


@dataclass(frozen=True)
class GroupDistances:
    """Of one group: each span's distance to the closest opposing span, in units of nbar."""

    of_right: Tensor  # (K+,) float32
    of_wrong: Tensor  # (K-,) float32
    solved: dict[str, Tensor]  # iterations (pairs,), error (pairs solved to the end,); empty if nothing was solved


def shear_advantages(
    advantages: Tensor, hidden: Tensor, mask: Tensor, correct: Tensor, group_size: int, **options
) -> Tensor:
    """Alg. 1 for a batch of groups: advantages (B,), hidden (B, T, d), mask (B, T), correct (B,) -> (B, T).

    Rollouts of a group are adjacent; `options` are those of `shear_weights`. `hidden` may rest on the CPU: the
    groups of a race visit the device of `mask` together.
    """
    together = max(1, TOGETHER // max(1, mask[:group_size].numel()) ** 2)  # groups
    batches = zip(*(part.split(together * group_size) for part in (hidden, mask, correct)), strict=True)
    weights = [shear_weights(*batch, group_size=group_size, **options) for batch in batches]
    return advantages[:, None] * torch.cat(weights)  # Alg. 1 line 18, Step 4


@torch.no_grad()
def shear_weights(
    hidden: Tensor,
    mask: Tensor,
    correct: Tensor,
    group_size: int | None = None,
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
    """Alg. 1 lines 1-16: the token weights omega (B, T) float32 of groups of `group_size` adjacent rollouts, or of one.

    hidden (B, T, d); mask (B, T), 1 on response tokens; correct (B,), true for right rollouts. omega is 1 where
    the opposing set is empty and 0 where the mask is 0; a rollout whose mask is all 0 is in neither set.
    eps is in units of nbar; `max_iters` and `tol` are those of `sinkhorn`. Ablations: `reading` of Eq. (10)
    ("value" or "cost", w1 only), `distance` of two spans ("w1", "cosine", "chamfer", "mmd"), `normalize`
    ("group", or "rollout": every rollout's mean weight becomes the group's), `pool` of the spans that cover a
    token ("max", "mean"). `fused` takes the Triton kernel, on a GPU. A list given as `stats` receives
    {"iterations": (pairs,), "error": (solved,)} of each mixed group: the iterations spent on each pair, the
    marginal errors of those solved to the end. Raises ValueError for an option that is not one of these, a group that
    is not whole, or a state that is not finite.
    """
    check_options(window, stride, reading, distance, normalize, pool)
    if group_size and len(mask) % group_size:
        raise ValueError(f"group_size {group_size} does not divide the {len(mask)} rollouts; give whole groups")
    mask, correct = mask.bool(), correct.bool()
    omega = mask.float()  # (B, T), Alg. 1 line 16
    groups = zip(*(part.split(group_size or len(mask)) for part in (hidden, mask, correct, omega)), strict=True)
    mixed = [(sides, weights) for *group, weights in groups if (sides := two_sides(*group, window, stride))]
    solver = dict(eps=eps, max_iters=max_iters, tol=tol)
    found = group_distances([sides for sides, _ in mixed], distance, reading, solver, fused)
    for (sides, weights), distances in zip(mixed, found, strict=True):
        weights[sides.right] = token_weights(distances.of_right, sides.x_spans, pool)
        weights[sides.wrong] = token_weights(distances.of_wrong, sides.y_spans, pool)
        if normalize == "rollout":
            _even_out(weights, sides.right | sides.wrong)
        if stats is not None and distances.solved:
            stats.append(distances.solved)
    return omega


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
    sides = two_sides(hidden, mask, correct, window, stride)
    if sides is None:
        return omega
    [found] = group_distances([sides], "w1", "cost", solver)
    omega[sides.wrong] = 0.0
    distances = iter(found.of_wrong.tolist())
    for row, length in enumerate(sides.wrong.sum(1).tolist()):
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
    groups: list[Sides], distance: str, reading: str, solver: dict, fused: bool = False
) -> list[GroupDistances]:
    """Alg. 1 line 5, Step 1, of each group; `solver` holds eps in units of nbar, max_iters and tol."""
    if distance != "w1" or reading != "value":
        every = [opposing_distances(sides, distance, reading, solver) for sides in groups]
        return [GroupDistances(matrix.amin(1), matrix.amin(0), solved) for matrix, solved in every]
    eps, limits = solver["eps"], {name: limit for name, limit in solver.items() if name != "eps"}
    costs = [
        GroupCosts(
            token_distances(sides.x, sides.y),
            *(sides.x_spans.tokens, sides.x_spans.mass, sides.y_spans.tokens, sides.y_spans.mass),
            eps * sides.nbar,
        )
        for sides in groups
    ]
    every = [fused_race(group, **limits) for group in costs] if fused else race(costs, **limits)
    return [
        GroupDistances(
            found.of_rows / sides.nbar,
            found.of_columns / sides.nbar,
            {"iterations": found.iterations, "error": found.error},
        )
        for sides, found in zip(groups, every, strict=True)
    ]


def token_weights(distances: Tensor, spans: Spans, pool: str) -> Tensor:
    """Alg. 1 line 14, Step 3: (K,) span distances -> (N,) token weights, pooled over the covering spans."""
    tokens = spans.tokens[spans.inside]  # (M,) one entry for each token of each span
    values = distances[:, None].expand_as(spans.tokens)[spans.inside]  # (M,)
    pooled = distances.new_zeros(int(tokens.max()) + 1)
    return pooled.scatter_reduce(0, tokens, values, {"max": "amax", "mean": "mean"}[pool], include_self=False)


def _even_out(omega: Tensor, mask: Tensor) -> None:
    """normalize="rollout": scale every rollout's mean weight to the group's, in place; 0 where its mean is dust."""
    rollout_mean = omega.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)  # (G, 1)
    group_mean = omega.sum() / mask.sum()
    real = rollout_mean > DUST * group_mean  # (G, 1)
    omega.copy_(torch.where(real, omega / rollout_mean * group_mean, 0.0))
