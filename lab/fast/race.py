"""Alg. 1 line 5 without solving every pair, by a race: for the hook `closest` of `shear`.

After every g-update the dual value <a, f> + <b, g> is at most the pair's value when it stops, and
it never falls. So a pair whose running value has passed a solved value in its row and one in its
column wins neither, and never moves again:

    1. `first_bounds`: one iteration for all pairs at once gives each its first bound
    2. `advance`: the pairs with the lowest bound of each row and column take more iterations
    3. repeat 2 until in every row and column no bound is below the lowest solved value

Every pair that moves starts from f = g = 0 and stops at the tolerance of `sinkhorn`, so the results
are the minima of solving all pairs, up to that tolerance. Only `w_eps` has such bounds: another
`measure` has no race.

`advance` takes plain updates, as the bounds of over-relaxed ones may fall. It works on
K = exp((f + g - C) / eps), where an update is a product of K and a vector; K is computed again,
with the potentials so far inside, before numbers can leave float32's range.

Left out: TF32. Where it is switched on for float32 products on a GPU, bounds and values are good to
1e-4 only.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lab.fast.distances import CHUNK_ENTRIES
from shear import Closest, Measure, Side, Spans, closest_of, closest_spans, w_eps
from sinkhorn import count

TOL = 1e-3  # marginal error at which a pair stops, `sinkhorn`'s
MAX_ITERS = 1000  # plain ones, of which it takes several times as many as over-relaxed ones

# In units of eps: pairs this close to the lowest bound advance with it, for fewer, larger rounds.
LEAD = 0.05
# Entries of a tile below which a CPU's products are torch's loops, slow across the columns of K.
SMALL = 400
LOWEST = -87.0  # exp of less is no normal float32: those make CPUs ten times slower
RANGE = 85.0  # log of the factor by which u and v may change in `advance`, within float32's e^87


@torch.no_grad()
def race(
    costs: Tensor,
    right: Side,
    wrong: Side,
    eps: float,
    measure: Measure = w_eps,
) -> Closest:
    """The closest opposing span of each span, as `shear.closest_spans` finds them.

    costs (N+, N-) between the tokens of the right and of the wrong side; eps in their units.
    The tokens of a wrong span must be consecutive. Every value is the one that `sinkhorn` would
    give, up to the tolerance of both (1e-4 nbar). A measure that is not `w_eps` has no such bounds:
    every pair is measured. Raises ValueError for eps <= 0 and costs that are not finite in units of
    eps.
    """
    if measure is not w_eps:
        return closest_spans(costs, right, wrong, eps, measure)
    if not eps > 0:
        raise ValueError(f"eps must be positive, got {eps}")
    x_mass = right.spans.mass
    y_mass = wrong.spans.mass
    n = x_mass.shape[1]
    m = y_mass.shape[1]
    entries = CHUNK_ENTRIES[costs.device.type]
    at_once = max(1, entries // (n * m))
    steps = max(1, int(RANGE / 2 / math.log(max(n, m, 2))))  # see `advance`
    blocks = lay_out(costs, right.spans, wrong.spans, eps)
    bounds = first_bounds(costs, right.spans, wrong.spans, eps, entries)  # (K+, K-) inf once solved
    values = torch.full_like(bounds, math.inf)  # (K+, K-) inf until solved
    iterations = torch.zeros_like(bounds, dtype=torch.int64)  # (K+, K-)
    error = torch.zeros_like(bounds)  # (K+, K-)
    potentials = bounds.new_zeros((*bounds.shape, m))  # (K+, K-, m) g, all it needs to continue
    while True:
        leading = (
            _leads(bounds, values, dim=0) | _leads(bounds, values, dim=1)
        ).nonzero()  # (pairs, 2)
        if not len(leading):
            break
        for pairs in leading.split(at_once):
            k, l = pairs.unbind(1)  # noqa: E741 - the paper's letters
            left = MAX_ITERS - iterations[k, l]
            found = advance(
                blocks.of(k, l), x_mass[k], y_mass[l], potentials[k, l], left, steps=steps, tol=TOL
            )
            potentials[k, l] = found.g
            error[k, l] = found.error
            iterations[k, l] += found.iterations
            bounds[k, l] = found.value.masked_fill(found.stopped, math.inf)
            values[k, l] = found.value.masked_fill(~found.stopped, math.inf)
    count(error[values.isfinite()], TOL)
    return closest_of(eps * values.clamp_min(0.0))  # rounding can leave -1e-9


def _leads(bounds: Tensor, values: Tensor, dim: int) -> Tensor:
    """Which pairs (K+, K-) have about the lowest bound along `dim`.

    Only bounds below the lowest solved value count.
    """
    lowest = bounds.amin(dim, keepdim=True)
    return (bounds <= lowest + LEAD) & (bounds < values.amin(dim, keepdim=True))


@dataclass(frozen=True)
class Blocks:
    """C / eps between all tokens, laid out so that the columns of a span are one run of memory."""

    costs: Tensor  # (entries,) a matrix (N+, N- + padding), flat
    rows: Tensor  # (K+, n) int64, where the row of each token of a span begins
    columns: Tensor  # (K-,) int64, where in a row each span begins
    size: int  # m, columns of a span

    def of(self, k: Tensor, l: Tensor) -> Tensor:  # noqa: E741 - the paper's letters
        """Spans k (P,) and l (P,) -> (P, n, m), a copy: the costs of these pairs."""
        # a view; to gather entries is 20 times slower
        runs = self.costs.unfold(0, self.size, 1)  # (.., m)
        first = self.rows[k] + self.columns[l][:, None]  # (P, n)
        return runs.index_select(0, first.flatten()).unflatten(0, first.shape)


def lay_out(costs: Tensor, right_spans: Spans, wrong_spans: Spans, eps: float) -> Blocks:
    """Make the `Blocks` of a group.

    Where the padding of a short wrong span would be, the next rollout's columns follow: such a span
    gets columns of its own at the end. Raises ValueError if a cost is not finite in units of eps.
    """
    padded = (wrong_spans.mass == 0).any(1)  # (K-,)
    tokens = wrong_spans.tokens
    size = tokens.shape[1]
    starts = tokens[:, 0].clone()
    starts[padded] = costs.shape[1] + size * torch.arange(int(padded.sum()), device=costs.device)
    matrix = torch.cat([costs, costs[:, tokens[padded].flatten()]], 1).div_(eps)
    if not torch.stack(matrix.aminmax()).isfinite().all():  # NaN passes through
        raise ValueError(f"cost / eps is not finite between two points with mass (eps = {eps})")
    return Blocks(matrix.flatten(), right_spans.tokens * matrix.shape[1], starts, size)


def first_bounds(
    costs: Tensor, right_spans: Spans, wrong_spans: Spans, eps: float, entries: int
) -> Tensor:
    """The value of every pair after one iteration, (K+, K-), in units of eps.

    From g = 0 a token's f depends on itself and on the opposing span only: spans that share it
    share the work. As many wrong spans are taken at a time as have about `entries` costs.
    """
    (x_tokens, x_mass), (y_tokens, y_mass) = right_spans, wrong_spans
    at_once = max(1, entries // (x_mass.numel() * y_mass.shape[1]))
    bounds = []
    for start in range(0, len(y_mass), at_once):
        tokens, b = y_tokens[start : start + at_once], y_mass[start : start + at_once]  # (L, m)
        gap = costs.index_select(1, tokens.flatten()).div_(eps).unflatten(1, b.shape)  # (N+, L, m)
        low = gap.amin(2, keepdim=True)  # (N+, L, 1)
        K = torch.sub(low, gap, out=gap).clamp_min_(LOWEST).exp_()
        total = (K * b).sum(2, keepdim=True)
        f = (low - total.log()).squeeze(2)  # (N+, L) f-update
        K = K.div_(total).flatten(1).index_select(0, x_tokens.flatten())  # (K+ n, L m)
        K = K.unflatten(0, x_mass.shape)  # (K+, n, L m)
        g = -(x_mass[:, None] @ K).squeeze(1).unflatten(1, b.shape).log_()  # (K+, L, m) g-update
        bounds.append((x_mass[:, None] @ f[x_tokens]).squeeze(1) + (g * b).sum(2))
    return torch.cat(bounds, 1)


class Advanced(NamedTuple):
    """P problems after some more iterations, in units of eps."""

    value: Tensor  # (P,) <a, f> + <b, g>
    g: Tensor  # (P, m)
    error: Tensor  # (P,) marginal error
    iterations: Tensor  # (P,) int64, taken now
    stopped: Tensor  # (P,) bool, within `tol` or after the last iteration that was left


def advance(
    C: Tensor, a: Tensor, b: Tensor, g: Tensor, left: Tensor, *, steps: int, tol: float
) -> Advanced:
    """Take `steps` more iterations of P problems, or as many as `left` or `tol` allow.

    All is in units of eps: C (P, n, m), overwritten; a (P, n), b (P, m), g (P, m), left (P,) >= 1.
    K is at most 1 and each of its rows and columns holds a 1. So, with w = max(n, m), u and v begin
    between 1/w and w, and change by at most a factor of w^2 per iteration, less each time (updates
    do not expand): they stay within float32 while 2 steps ln w <= RANGE.
    """
    a, b, g = a[:, None], b[:, None], g[:, None]  # (P, 1, n), (P, 1, m), (P, 1, m)
    f = (C - g).amin(2)[:, None]  # (P, 1, n)
    C = C.sub_(f.mT)
    h = C.amin(1, keepdim=True)  # (P, 1, m) >= g
    K = torch.sub(h, C, out=C).clamp_min_(LOWEST).exp_()  # (P, n, m) exp(f + h - C)
    KT = K.mT  # (P, m, n)
    if K[0].numel() < SMALL:
        K = KT.contiguous().mT
    v = b * (g - h).exp_()
    rows = C.new_empty((steps + 1, *a.shape))  # K v before each iteration, and after the last
    columns = C.new_empty((steps, *b.shape))  # K^T u of each
    for step in range(steps):
        torch.bmm(v, KT, out=rows[step])
        torch.bmm(a / rows[step], K, out=columns[step])  # f-update: u = a / (K v)
        v = b / columns[step]  # g-update
    torch.bmm(v, KT, out=rows[-1])
    # the row sums are u (K v)
    error = (a * (rows[1:] / rows[:-1] - 1)).abs().sum((2, 3))  # (steps, P)
    ends = error <= tol
    ends |= torch.arange(1, steps + 1, device=left.device)[:, None] == left
    stopped, last = ends.int().max(0)  # (P,), (P,) the first that ends
    stopped = stopped.bool()
    last = last.where(stopped, steps - 1)
    each = torch.arange(len(last), device=last.device)
    f = f - rows[last, each].log()  # (P, 1, n)
    g = h - columns[last, each].log()  # (P, 1, m)
    value = (a * f).sum((1, 2)) + (b * g).sum((1, 2))
    return Advanced(value, g.squeeze(1), error[last, each], last + 1, stopped)
