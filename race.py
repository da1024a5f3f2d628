"""Alg. 1 line 5 without solving every pair: row and column minima of Eq. (10) between two sides' spans, by a race.

After every g-update the dual value <a, f> + <b, g> is below what the pair will be worth when it stops, and only
grows. So a pair whose running value has passed a solved value in its row and one in its column wins neither, and
never moves again:

    1. one iteration for all pairs at once gives each its first bound                                first_bounds
    2. the pairs with the lowest bound of each row and column take a few more iterations             advance
    3. again, until in every row and column no bound is below the lowest solved value

Every pair that moves starts from f = g = 0 and stops as in `sinkhorn`, so what comes out are the minima of solving all
pairs, to rounding. Only the reading `value` has such bounds; `cost` may fall and has no race.

`advance` runs the same iteration as `sinkhorn` on K = exp((f + g - C) / eps), where an update is a product of K and a
vector; K is made anew, with the potentials so far inside, before numbers can leave float32's range.

Left out: TF32. Where it is switched on for float32 products on a GPU, bounds and values are good to 1e-4 only.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Entries of cost blocks at a time; on a CPU they should stay in cache.
CHUNK_ENTRIES = {"cuda": 2**26, "cpu": 2**19}
LEAD = 0.05  # in eps: pairs this close to the lowest bound move along with it, for fewer and larger rounds
LOWEST = -87.0  # exp of less is no normal float32: those make CPUs ten times slower


@dataclass(frozen=True)
class Minima:
    """What `race` found, in the units of its costs."""

    of_rows: Tensor  # (K+,) float32
    of_columns: Tensor  # (K-,) float32
    iterations: Tensor  # (K+ K-,) int64, after which each pair was solved or left
    error: Tensor  # (solved,) float32 marginal errors of the solved pairs


@dataclass(frozen=True)
class Blocks:
    """C / eps between all tokens, laid out so that the columns of a span are one run of memory."""

    costs: Tensor  # (N+, N- + padding)
    starts: Tensor  # (K-,) int64, the column at which each span begins
    size: int  # m, columns of a span

    def of(self, rows: Tensor, spans: Tensor) -> Tensor:
        """rows (P, n), spans (P,) -> (P, n, m), a copy: costs between these tokens and these spans' tokens."""
        runs = self.costs.view(-1).unfold(0, self.size, 1)  # (.., m) a view; to gather entries is 20 times slower
        first = rows * self.costs.shape[1] + self.starts[spans][:, None]  # (P, n)
        return runs.index_select(0, first.flatten()).view(*rows.shape, self.size)


@torch.no_grad()
def race(
    costs: Tensor,
    x_tokens: Tensor,
    x_mass: Tensor,
    y_tokens: Tensor,
    y_mass: Tensor,
    *,
    eps: float,
    max_iters: int = 100,
    tol: float = 1e-3,
) -> Minima:
    """Minima over rows and columns of the (K+, K-) matrix of Eq. (10) between spans.

    costs (N+, N-) float32 between tokens; tokens (K+, n), (K-, m) int64, of which those of a column span follow each
    other, padding apart; mass the same shapes, uniform on a span's tokens and 0 on padding. `eps`, `max_iters` and
    `tol` are those of `sinkhorn`, and so is every value: the minima are those of solving all pairs, up to rounding
    (1e-6 of them).
    Raises ValueError for costs that are not finite in units of eps.
    """
    (n, m), entries = (x_tokens.shape[1], y_tokens.shape[1]), CHUNK_ENTRIES.get(costs.device.type, 2**19)
    steps, at_once = max(1, int(42.5 / math.log(max(n, m, 2)))), max(1, entries // (n * m))  # steps: see `advance`
    blocks = _lay_out(costs, eps, y_tokens, y_mass)
    bounds = first_bounds(blocks.costs, x_tokens, x_mass, y_tokens, y_mass, entries)  # (K+, K-), inf once solved
    values, error = torch.full_like(bounds, math.inf), torch.zeros_like(bounds)  # (K+, K-), inf until solved
    iterations = torch.zeros_like(bounds, dtype=torch.long)
    potentials = bounds.new_zeros(*bounds.shape, m)  # (K+, K-, m) g, all that a pair needs to go on
    while len(pairs := _leading(bounds, values).nonzero()):
        for k, l in (part.unbind(1) for part in pairs.split(at_once)):  # noqa: E741 - the paper's letters
            state = potentials[k, l], max_iters - iterations[k, l]
            found = advance(blocks.of(x_tokens[k], l), x_mass[k], y_mass[l], *state, steps, tol)
            value, potentials[k, l], error[k, l], taken, stopped = found
            iterations[k, l] += taken
            bounds[k, l] = value.masked_fill(stopped, math.inf)
            values[k, l] = value.masked_fill(~stopped, math.inf)
    of_rows, of_columns = ((eps * values.amin(dim)).clamp_min(0.0) for dim in (1, 0))  # rounding can leave -1e-9
    return Minima(of_rows, of_columns, iterations.clamp_min(1).flatten(), error[values.isfinite()])


def _leading(bounds: Tensor, values: Tensor) -> Tensor:
    """(K+, K-) bool: the lowest bounds of each row and column, as long as they are below its lowest solved value."""
    leading = torch.zeros_like(bounds, dtype=torch.bool)
    for dim in (0, 1):
        lowest = bounds.amin(dim, keepdim=True)
        leading |= (bounds <= lowest + LEAD) & (bounds < values.amin(dim, keepdim=True))
    return leading


def first_bounds(
    costs: Tensor, x_tokens: Tensor, x_mass: Tensor, y_tokens: Tensor, y_mass: Tensor, entries: int
) -> Tensor:
    """The value of every pair after one iteration, (K+, K-), in units of eps as `costs` (N+, ..) are.

    From g = 0 a token's f depends on itself and on the opposing span only: spans that share it share the work.
    """
    at_once, bounds = max(1, entries // (x_mass.numel() * y_mass.shape[1])), []
    for tokens, b in zip(y_tokens.split(at_once), y_mass.split(at_once), strict=True):  # (L, m)
        gap = costs.index_select(1, tokens.flatten()).view(-1, *b.shape)  # (N+, L, m)
        low = gap.amin(2, keepdim=True)  # (N+, L, 1)
        K = torch.sub(low, gap, out=gap).clamp_min_(LOWEST).exp_()
        total = (K * b).sum(2, keepdim=True)
        f = (low - total.log()).squeeze(2)  # (N+, L) f-update
        K = K.div_(total).flatten(1).index_select(0, x_tokens.flatten()).view(*x_mass.shape, -1)  # (K+, n, L m)
        g = -(x_mass[:, None] @ K).view(-1, *b.shape).log_()  # (K+, L, m) g-update
        bounds.append((x_mass[:, None] @ f[x_tokens]).squeeze(1) + (g * b).sum(2))
    return torch.cat(bounds, 1)


def advance(C: Tensor, a: Tensor, b: Tensor, g: Tensor, left: Tensor, steps: int, tol: float):
    """`steps` more iterations of P problems, or as many as `left` (P,) >= 1 or `tol` allow; all in units of eps.

    C (P, n, m), overwritten; a (P, n), b (P, m), g (P, m) -> value (P,), g (P, m), error (P,), iterations taken (P,),
    stopped (P,) bool. K is at most 1 and each of its rows and columns holds a 1, so u and v begin between 1/w and w,
    w = max(n, m), and change by at most a factor of w^2 an iteration, less each time (updates do not expand): they stay
    within float32 while 2 steps ln w <= 85.
    """
    a, b, g = a[:, None], b[:, None], g[:, None]  # (P, 1, n), (P, 1, m), (P, 1, m)
    f = (C - g).amin(2)[:, None]  # (P, 1, n)
    C = C.sub_(f.mT)
    h = C.amin(1, keepdim=True)  # (P, 1, m) >= g
    K = torch.sub(h, C, out=C).clamp_min_(LOWEST).exp_()  # (P, n, m) exp(f + h - C)
    v = b * (g - h).exp_()
    KT, rows, columns = K.mT, C.new_empty(steps + 1, *a.shape), C.new_empty(steps, *b.shape)  # all K v, all K^T u
    for row, column in zip(rows, columns, strict=False):
        torch.bmm(v, KT, out=row)
        torch.bmm(a / row, K, out=column)  # f-update: u = a / (K v)
        v = b / column  # g-update
    torch.bmm(v, KT, out=rows[-1])
    error = (a * (rows[1:] / rows[:-1] - 1)).abs().sum((2, 3))  # (steps, P) the row sums are u (K v)
    ends = error <= tol
    ends |= torch.arange(1, steps + 1, device=left.device)[:, None] == left
    stopped = ends.any(0)
    last = torch.where(stopped, ends.int().argmax(0), steps - 1)  # (P,) the first that ends
    each = torch.arange(len(last), device=last.device)
    f, g = f - rows[last, each].log(), h - columns[last, each].log()  # (P, 1, n), (P, 1, m)
    return (a * f).sum((1, 2)) + (b * g).sum((1, 2)), g.squeeze(1), error[last, each], last + 1, stopped


def _lay_out(costs: Tensor, eps: float, tokens: Tensor, mass: Tensor) -> Blocks:
    """`Blocks` of costs (N+, N-). A span with padding, which would run into the next, gets columns at the end."""
    padded, starts, size = (mass == 0).any(1), tokens[:, 0].clone(), tokens.shape[1]
    starts[padded] = costs.shape[1] + size * torch.arange(int(padded.sum()), device=costs.device)
    costs = torch.cat([costs, costs[:, tokens[padded].flatten()]], 1).div_(eps)
    if not costs.isfinite().all():
        raise ValueError(f"cost / eps is not finite between two points with mass (eps = {eps})")
    return Blocks(costs, starts, size)
