"""SHEAR's settings: the paper's own and its ablations, made of the same pieces as `shear.py`.

    group_weights(hidden, mask, correct, settings) -> omega (G, T); with the paper's settings `shear.shear_weights`
    span_distances, span_matrix                    -> what weights are made of, also of all pairs (Fig. 11)
    closest_of                                     -> of each span, which opposing one is closest
    first_weights                                  -> not the paper's: the same distances, used once

The paper names its ablations of W1 without formulas; ours are 1 - cos of the mean states, the symmetric Chamfer
distance, and the MMD of a Gaussian kernel whose width is a median: the lower one of all distances between a token of a
right and a token of a wrong rollout of the group. "cosine" and "mmd" have no unit and are not divided by nbar.

The reading "cost" of Eq. (10), <P, C>, has no floor and vanishes on shared prefixes. It has no bounds to race with, so
every pair is solved.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fast.distances import token_distances
from fast.kernel import fused_race
from fast.race import race, race_matrix
from shear import EPS, STRIDE, WINDOW, Side, Spans, mean_norm, shear_weights, span_bounds, token_weights, two_sides
from sinkhorn import sinkhorn

CHOICES = {
    "eps_unit": ("nbar", "raw"),
    "reading": ("value", "cost"),
    "distance": ("w1", "cosine", "chamfer", "mmd"),
    "normalize": ("group", "rollout"),
    "pool": ("max", "mean"),
}
DUST = 1e-6  # of a group's mean weight: below, a rollout's is float32's rounding of 0
# Entries of the cost blocks that are solved together: 64 MB a buffer on a GPU, of which the solver holds about
# six; on a CPU small chunks win because they stay in cache.
CHUNK_ENTRIES = {"cuda": 2**24, "cpu": 2**19}


@dataclass(frozen=True)
class Settings:
    """The options of SHEAR, with the defaults of `shear_weights`. Raises ValueError for a bad window or choice."""

    window: int = WINDOW  # w, tokens
    stride: int = STRIDE  # s, tokens
    eps: float = EPS
    eps_unit: str = "nbar"  # or "raw": that of the distances, which is the paper's
    reading: str = "value"  # of Eq. (10), with the distance "w1"
    distance: str = "w1"  # of two spans
    normalize: str = "group"  # "rollout": every rollout's mean weight becomes the group's
    pool: str = "max"  # over the spans that cover a token
    max_iters: int = 100  # of Sinkhorn, a pair
    tol: float = 1e-3  # marginal error at which a pair stops
    fused: bool = False  # the Triton kernel, on a GPU

    def __post_init__(self):
        span_bounds(0, self.window, self.stride)  # raises for these, also where nothing is to be solved
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    def eps_over(self, nbar: float) -> float:
        """eps in units of nbar, as `shear_weights` takes it: W_eps(C) / nbar = W_{eps / nbar}(C / nbar)."""
        return self.eps if self.eps_unit == "nbar" else self.eps / nbar


def settings_of(args: argparse.Namespace) -> Settings:
    """SHEAR's settings, from the flags."""
    return Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})


@torch.no_grad()
def group_weights(
    hidden: Tensor, mask: Tensor, correct: Tensor, settings: Settings, stats: dict[str, list] | None = None
) -> Tensor:
    """Token weights (G, T) float32 of one group; shapes and errors are those of `shear.shear_weights`.

    A `defaultdict(list)` given as `stats` receives tensors: "nbar" and "eps_over_nbar" (1,); of a group that is solved
    also "sinkhorn_iterations" (pairs,) and "sinkhorn_error" (solved pairs,).
    """
    mask, correct = mask.bool(), correct.bool()
    if not mask.any():
        return mask.float()  # (G, T)
    nbar = mean_norm(hidden[mask])
    eps = settings.eps_over(nbar)
    if stats is not None:
        stats["nbar"].append(torch.tensor([nbar]))
        stats["eps_over_nbar"].append(torch.tensor([eps]))
    sizes = dict(window=settings.window, stride=settings.stride)
    if settings.distance == "w1" and settings.pool == "max":
        hooks = dict(closest=solver_of(settings, stats), distances=token_distances)
        omega = shear_weights(hidden, mask, correct, **sizes, eps=eps, **hooks)
    else:
        omega = mask.float()  # (G, T)
        right, wrong = two_sides(hidden, mask, correct, **sizes)
        if right is not None:
            of_right, of_wrong = span_distances(right, wrong, settings, stats)
            pool = token_weights if settings.pool == "max" else mean_weights
            omega[right.inside] = pool(of_right, right.spans)
            omega[wrong.inside] = pool(of_wrong, wrong.spans)
    return evened_out(omega, mask) if settings.normalize == "rollout" else omega


def span_distances(
    right: Side, wrong: Side, settings: Settings, stats: dict[str, list] | None = None
) -> tuple[Tensor, Tensor]:
    """Alg. 1 line 5, over nbar: each span's distance to the closest opposing one, (K+,) and (K-,)."""
    if settings.distance != "w1":
        matrix = span_matrix(right, wrong, settings)
        return matrix.amin(1), matrix.amin(0)
    nbar = mean_norm(torch.cat([right.states, wrong.states]))
    costs = token_distances(right.states, wrong.states)  # (N+, N-)
    of_right, of_wrong = solver_of(settings, stats)(costs, right.spans, wrong.spans, settings.eps_over(nbar) * nbar)
    return of_right / nbar, of_wrong / nbar


def span_matrix(right: Side, wrong: Side, settings: Settings) -> Tensor:
    """The distance of every pair of opposing spans, (K+, K-); "w1" and "chamfer" over nbar."""
    nbar = mean_norm(torch.cat([right.states, wrong.states]))
    if settings.distance == "cosine":
        return cosine_distances(right, wrong)
    costs = token_distances(right.states, wrong.states)  # (N+, N-)
    if settings.distance == "mmd":
        return mmd_distances(right, wrong, costs)
    measure = chamfer
    if settings.distance == "w1":
        limits = dict(max_iters=settings.max_iters, tol=settings.tol)
        measure = partial(solve, reading=settings.reading, eps=settings.eps_over(nbar) * nbar, **limits)
    return every_pair(costs, right.spans, wrong.spans, measure) / nbar


class Closest(NamedTuple):
    """A span of a rollout, and the opposing span closest to it; places are tokens, the second after the last."""

    start: int
    end: int
    distance: float  # as the weights have it
    rollout: int  # of the group, the one that the opposing span belongs to
    other_start: int
    other_end: int


def closest_of(hidden: Tensor, mask: Tensor, correct: Tensor, settings: Settings) -> list[list[Closest]]:
    """Of each rollout of a group its spans, none where nothing opposes. Shapes are those of `shear_weights`."""
    found = [[] for _ in mask]
    sizes = dict(window=settings.window, stride=settings.stride)
    right, wrong = two_sides(hidden, mask, correct, **sizes)
    if right is None:
        return found
    if settings.distance == "w1" and settings.reading == "value":
        nbar = mean_norm(torch.cat([right.states, wrong.states]))
        costs = token_distances(right.states, wrong.states)  # (N+, N-)
        limits = dict(max_iters=settings.max_iters, tol=settings.tol)
        matrix = race_matrix(costs, right.spans, wrong.spans, settings.eps_over(nbar) * nbar, **limits) / nbar
    else:
        matrix = span_matrix(right, wrong, settings)  # (K+, K-)
    for own, opposing, distances in ((right, wrong, matrix), (wrong, right, matrix.T)):
        lowest, closest = distances.min(1)
        lowest, closest = lowest.tolist(), closest.tolist()  # one wait for the device, not one a span
        others = places(opposing.inside, **sizes)
        for k, (row, start, end) in enumerate(places(own.inside, **sizes)):
            found[row].append(Closest(start, end, lowest[k], *others[closest[k]]))
    return found


def places(inside: Tensor, window: int, stride: int) -> list[tuple[int, int, int]]:
    """Rollout, first token and token after the last of each span of `shear.spans_of`, in its order."""
    found = []
    for row, length in enumerate(inside.sum(1).tolist()):
        for start, end in span_bounds(length, window, stride):
            found.append((row, start, end))
    return found


def solver_of(settings: Settings, stats: dict[str, list] | None = None) -> Callable:
    """The hook `closest` of `shear_weights`."""
    solver = fused_race if settings.fused else race
    if settings.reading == "cost":
        solver = closest_by_cost
    return partial(solver, max_iters=settings.max_iters, tol=settings.tol, stats=stats)


def closest_by_cost(
    costs: Tensor, right_spans: Spans, wrong_spans: Spans, eps: float, **options
) -> tuple[Tensor, Tensor]:
    """`shear.closest_spans` by the reading "cost"; `options` are max_iters and tol of `sinkhorn`, and stats."""
    matrix = every_pair(costs, right_spans, wrong_spans, partial(solve, reading="cost", eps=eps, **options))
    return matrix.amin(1), matrix.amin(0)


def solve(
    blocks: Tensor, a: Tensor, b: Tensor, *, reading: str, stats: dict[str, list] | None = None, **options
) -> Tensor:
    """Eq. (10) of P pairs of spans, (P,), by a reading; `options` are those of `sinkhorn`."""
    solved = sinkhorn(blocks, a, b, **options)
    if stats is not None:
        stats["sinkhorn_iterations"].append(solved.iterations)
        stats["sinkhorn_error"].append(solved.error)
    return getattr(solved, reading).clamp_min(0.0)  # rounding can leave -1e-9


def every_pair(costs: Tensor, right_spans: Spans, wrong_spans: Spans, measure: Callable) -> Tensor:
    """`measure(blocks (P, n, m), a (P, n), b (P, m)) -> (P,)` of all pairs of spans, (K+, K-), some pairs at a time."""
    rows, columns = len(right_spans.mass), len(wrong_spans.mass)
    tile = right_spans.mass.shape[1] * wrong_spans.mass.shape[1]
    at_once = max(1, CHUNK_ENTRIES.get(costs.device.type, 2**19) // tile)
    matrix = torch.empty(rows * columns, device=costs.device)  # made once: growing lists fragment memory
    for pairs in torch.arange(len(matrix), device=costs.device).split(at_once):
        k, l = pairs // columns, pairs % columns  # noqa: E741 - the paper's letters
        # Gathered with the pairs last, the layout in which `sinkhorn` works, and viewed with the pairs first.
        blocks = costs[right_spans.tokens[k].T[:, None], wrong_spans.tokens[l].T[None]].permute(2, 0, 1)  # (P, n, m)
        matrix[pairs] = measure(blocks, right_spans.mass[k], wrong_spans.mass[l])
    return matrix.view(rows, columns)


# ---- other distances, poolings and normalisations -------------------------------------------------------------


def cosine_distances(right: Side, wrong: Side) -> Tensor:
    """1 - cos(mean_P, mean_Q), (K+, K-)."""
    means = []
    for side in (right, wrong):
        mean = torch.einsum("kn,knd->kd", side.spans.mass, side.states[side.spans.tokens].float())  # (K, d)
        means.append(torch.nn.functional.normalize(mean, dim=-1))
    return (1 - means[0] @ means[1].T).clamp_min(0.0)


def chamfer(blocks: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """(mean_x min_y ||x - y|| + mean_y min_x ||x - y||) / 2: blocks (P, n, m), masses (P, n), (P, m) -> (P,)."""
    x, y = a > 0, b > 0  # (P, n), (P, m)
    to_y = blocks.masked_fill(~y[:, None, :], torch.inf).amin(2)  # (P, n)
    to_x = blocks.masked_fill(~x[:, :, None], torch.inf).amin(1)  # (P, m)
    return ((to_y * x).sum(1) / x.sum(1) + (to_x * y).sum(1) / y.sum(1)) / 2


def mmd_distances(right: Side, wrong: Side, costs: Tensor) -> Tensor:
    """sqrt of the biased MMD^2, kernel exp(-d^2 / (2 m^2)), m the group's median, see above; (K+, K-)."""
    median = max(costs.median().item(), 1e-30)

    def kernel(blocks: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("pij,pi,pj->p", (-((blocks / median) ** 2) / 2).exp(), a, b)

    def own_kernels(side: Side) -> Tensor:
        """Each span's mean kernel with itself, (K,)."""
        kernels = []
        for k, tokens in enumerate(side.spans.tokens):
            points, mass = side.states[tokens].float(), side.spans.mass[k][None]  # (n, d), (1, n)
            block = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")[None]
            kernels.append(kernel(block, mass, mass))
        return torch.cat(kernels)

    cross = every_pair(costs, right.spans, wrong.spans, kernel)
    return (own_kernels(right)[:, None] + own_kernels(wrong) - 2 * cross).clamp_min(0.0).sqrt()


def mean_weights(distances: Tensor, spans: Spans) -> Tensor:
    """`shear.token_weights` with the mean over the covering spans in the place of the largest."""
    inside = spans.mass > 0  # (K, n)
    covering = distances[:, None].expand_as(inside)[inside]  # (M,)
    tokens = spans.tokens[inside]  # (M,)
    return distances.new_zeros(int(tokens.max()) + 1).scatter_reduce(0, tokens, covering, "mean", include_self=False)


def evened_out(omega: Tensor, mask: Tensor) -> Tensor:
    """Every rollout's mean weight scaled to the group's, (G, T); 0 where its mean is dust."""
    rollout_mean = omega.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)  # (G, 1)
    group_mean = omega.sum() / mask.sum().clamp_min(1)
    real = rollout_mean > DUST * group_mean  # (G, 1)
    return torch.where(real, omega / rollout_mean * group_mean, 0.0)


@torch.no_grad()
def first_weights(hidden: Tensor, mask: Tensor, correct: Tensor, settings: Settings, *, threshold: float) -> Tensor:
    """Not the paper's: the same distances, used once. Weights (G, T) float32 of 0 and 1 for one group.

    Right rollouts keep weight 1. A wrong one keeps it only around the onset of its first span whose distance (in units
    of nbar) exceeds `threshold`: the weight is 1 on the span's last `stride` tokens, which no span before it covers,
    on `stride` tokens before these and on `stride` after. Without such a span all its weights are 0.
    Shapes and errors are those of `group_weights`; the reading should be "cost".
    """
    window, stride = settings.window, settings.stride
    omega = mask.float()  # (G, T)
    right, wrong = two_sides(hidden, mask.bool(), correct.bool(), window, stride)
    if right is None:
        return omega
    distances = span_distances(right, wrong, settings)[1].tolist()  # K-
    omega[wrong.inside] = 0.0
    begin = 0  # of the rollout's spans
    for row, length in enumerate(wrong.inside.sum(1).tolist()):
        bounds = span_bounds(length, window, stride)
        far = [k for k in range(len(bounds)) if distances[begin + k] > threshold]
        begin += len(bounds)
        if far:
            onset = bounds[far[0]][1] - stride
            omega[row, max(0, onset - stride) : min(onset + 2 * stride, length)] = 1.0
    return omega
