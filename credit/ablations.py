"""Alg. 1 line 5, every pair of spans solved: the reference for `race.py`, the reading "cost", and other distances.

    opposing_distances(sides, distance, reading, solver) -> the whole (K+, K-) matrix

The paper names its ablations of W1 without formulas; ours are 1 - cos of the mean states, the symmetric Chamfer
distance, and the MMD of a Gaussian kernel whose width is the median distance of the group's opposing tokens.
"""

import torch
from torch import Tensor

from fast.spans import Sides, Spans, token_distances
from sinkhorn import sinkhorn

SCALE_FREE = ("cosine", "mmd")  # distances without a unit, not divided by nbar

# Entries of the cost blocks that are solved together: 64 MB a buffer on a GPU, of which the solver holds about
# six; on a CPU small chunks win because they stay in cache.
CHUNK_ENTRIES = {"cuda": 2**24, "cpu": 2**19}


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
