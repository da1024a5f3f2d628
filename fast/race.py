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
from typing import NamedTuple

import torch
from torch import Tensor

# Entries of cost blocks at a time; on a CPU they should stay in cache.
CHUNK_ENTRIES = {"cuda": 2**26, "cpu": 2**19}
LEAD = 0.05  # in eps: pairs this close to the lowest bound move along with it, for fewer and larger rounds
SMALL = 400  # entries of a tile below which a CPU's products are torch's own loops, slow across the columns of K
LOWEST = -87.0  # exp of less is no normal float32: those make CPUs ten times slower


class GroupCosts(NamedTuple):
    """Of a group, Eq. (3) between its two sides and their spans. The tokens of a column span follow each other."""

    costs: Tensor  # (N+, N-) float32
    x_tokens: Tensor  # (K+, n) int64
    x_mass: Tensor  # (K+, n) float32, uniform on a span's tokens and 0 on padding
    y_tokens: Tensor  # (K-, m)
    y_mass: Tensor  # (K-, m)
    eps: float  # in the units of the costs


@dataclass(frozen=True)
class Minima:
    """What `race` found in a group, in the units of its costs."""

    of_rows: Tensor  # (K+,) float32
    of_columns: Tensor  # (K-,) float32
    iterations: Tensor  # (K+ K-,) int64, after which each pair was solved or left
    error: Tensor  # (solved,) float32 marginal errors of the solved pairs


@dataclass(frozen=True)
class Blocks:
    """C / eps between all tokens of each group, laid out so that the columns of a span are one run of memory."""

    costs: Tensor  # (entries,) matrices (N+, N- + padding), end to end
    rows: Tensor  # (all K+, n) int64, where the row of each token of a span begins
    columns: Tensor  # (all K-,) int64, where in a row each span begins
    size: int  # m, columns of a span

    def of(self, k: Tensor, l: Tensor) -> Tensor:  # noqa: E741 - the paper's letters
        """Spans k (P,) and l (P,), counted through all groups -> (P, n, m), a copy: the costs of these pairs."""
        runs = self.costs.unfold(0, self.size, 1)  # (.., m) a view; to gather entries is 20 times slower
        first = self.rows[k] + self.columns[l][:, None]  # (P, n)
        return runs.index_select(0, first.flatten()).view(*first.shape, self.size)


@torch.no_grad()
def race(groups: list[GroupCosts], *, max_iters: int = 100, tol: float = 1e-3) -> list[Minima]:
    """Of each group, the minima over rows and columns of the (K+, K-) matrix of Eq. (10) between its spans.

    The groups, all of the same n and m, move side by side, as a small one does not fill a processor. `max_iters` and
    `tol` are those of `sinkhorn`, and so is every value: the minima are those of solving all pairs, up to rounding
    (1e-6 of them), in whatever company.
    Raises ValueError for eps <= 0, max_iters < 1, and costs that are not finite in units of eps.
    """
    if not groups:
        return []
    if max_iters < 1 or not all(group.eps > 0 for group in groups):
        raise ValueError(f"eps must be positive and max_iters at least 1, got {[g.eps for g in groups]}, {max_iters}")
    x_mass, y_mass = (torch.cat([getattr(group, name) for group in groups]) for name in ("x_mass", "y_mass"))
    (n, m), entries = (x_mass.shape[1], y_mass.shape[1]), CHUNK_ENTRIES.get(x_mass.device.type, 2**19)
    steps, at_once = max(1, int(42.5 / math.log(max(n, m, 2)))), max(1, entries // (n * m))  # steps: see `advance`
    blocks, (k, l) = _lay_out(groups), _pairs(groups)  # noqa: E741 - the paper's letters
    bounds = torch.cat([first_bounds(group, entries).flatten() for group in groups])  # (P,) inf once solved
    of_rows, of_columns = (bounds.new_full((len(mass),), math.inf) for mass in (x_mass, y_mass))  # lowest solved values
    iterations, error = torch.zeros_like(k), torch.zeros_like(bounds)  # (P,)
    potentials = bounds.new_zeros(len(k), m)  # (P, m) g, all that a pair needs to go on
    while len(leading := (_leading(bounds, k, of_rows) | _leading(bounds, l, of_columns)).nonzero().flatten()):
        for pairs in leading.split(at_once):
            rows, columns, state = k[pairs], l[pairs], (potentials[pairs], max_iters - iterations[pairs])
            found = advance(blocks.of(rows, columns), x_mass[rows], y_mass[columns], *state, steps, tol)
            value, potentials[pairs], error[pairs], taken, stopped = found
            iterations[pairs] += taken
            bounds[pairs] = value.masked_fill(stopped, math.inf)
            value = value.masked_fill(~stopped, math.inf)
            of_rows.scatter_reduce_(0, rows, value, "amin")
            of_columns.scatter_reduce_(0, columns, value, "amin")
    return _by_group(groups, of_rows, of_columns, iterations.clamp_min(1), error, bounds.isinf())


def _by_group(groups: list[GroupCosts], of_rows: Tensor, of_columns: Tensor, *of_pairs: Tensor) -> list[Minima]:
    """Values (all K+,), (all K-,) in units of eps; iterations, error, whether solved, (P,) each."""
    of_rows, of_columns = of_rows.clamp_min(0.0), of_columns.clamp_min(0.0)  # rounding can leave -1e-9
    row_counts, column_counts = [len(group.x_mass) for group in groups], [len(group.y_mass) for group in groups]
    pair_counts = [rows * columns for rows, columns in zip(row_counts, column_counts, strict=True)]
    of_spans = of_rows.split(row_counts), of_columns.split(column_counts)
    parts = *of_spans, *(each.split(pair_counts) for each in of_pairs)
    return [
        Minima(group.eps * rows, group.eps * columns, iterations, error[solved])
        for group, rows, columns, iterations, error, solved in zip(groups, *parts, strict=True)
    ]


def _pairs(groups: list[GroupCosts]) -> tuple[Tensor, Tensor]:
    """k (P,) and l (P,): all pairs of opposing spans of a group, row by row; spans count through all groups."""
    pairs, row, column = [], 0, 0
    for group in groups:
        rows = torch.arange(row, row := row + len(group.x_mass), device=group.costs.device)
        columns = torch.arange(column, column := column + len(group.y_mass), device=group.costs.device)
        pairs.append(torch.cartesian_prod(rows, columns))  # (K+ K-, 2)
    return torch.cat(pairs).unbind(1)


def _leading(bounds: Tensor, spans: Tensor, solved: Tensor) -> Tensor:
    """(P,) bool: of each span's pairs those with the lowest bounds, as long as these are below its solved values.

    bounds (P,); spans (P,), the row or the column of each pair; solved (all K,), the lowest value of each.
    """
    lowest = torch.full_like(solved, math.inf).scatter_reduce(0, spans, bounds, "amin")
    return (bounds <= lowest.gather(0, spans) + LEAD) & (bounds < solved.gather(0, spans))


def first_bounds(group: GroupCosts, entries: int) -> Tensor:
    """The value of every pair after one iteration, (K+, K-), in units of eps.

    From g = 0 a token's f depends on itself and on the opposing span only: spans that share it share the work.
    """
    costs, x_tokens, x_mass, y_tokens, y_mass, eps = group
    at_once, bounds = max(1, entries // (x_mass.numel() * y_mass.shape[1])), []
    for tokens, b in zip(y_tokens.split(at_once), y_mass.split(at_once), strict=True):  # (L, m)
        gap = costs.index_select(1, tokens.flatten()).div_(eps).view(-1, *b.shape)  # (N+, L, m)
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
    if K[0].numel() < SMALL:
        K = KT.contiguous().mT
    for row, column in zip(rows, columns, strict=False):
        torch.bmm(v, KT, out=row)
        torch.bmm(a / row, K, out=column)  # f-update: u = a / (K v)
        v = b / column  # g-update
    torch.bmm(v, KT, out=rows[-1])
    error = (a * (rows[1:] / rows[:-1] - 1)).abs().sum((2, 3))  # (steps, P) the row sums are u (K v)
    ends = error <= tol
    ends |= torch.arange(1, steps + 1, device=left.device)[:, None] == left
    stopped, last = ends.int().max(0)  # (P,), (P,) the first that ends
    stopped, last = stopped.bool(), last.where(stopped > 0, steps - 1)
    each = torch.arange(len(last), device=last.device)
    f, g = f - rows[last, each].log(), h - columns[last, each].log()  # (P, 1, n), (P, 1, m)
    return (a * f).sum((1, 2)) + (b * g).sum((1, 2)), g.squeeze(1), error[last, each], last + 1, stopped


def _lay_out(groups: list[GroupCosts]) -> Blocks:
    """`Blocks` of all groups. A column span with padding, which would run into the next, gets columns at the end."""
    matrices, rows, columns, begin = [], [], [], 0
    for costs, x_tokens, _, tokens, mass, eps in groups:
        padded, starts, size = (mass == 0).any(1), tokens[:, 0].clone(), tokens.shape[1]
        starts[padded] = costs.shape[1] + size * torch.arange(int(padded.sum()), device=costs.device)
        matrix = torch.cat([costs, costs[:, tokens[padded].flatten()]], 1).div_(eps)
        if not torch.stack(matrix.aminmax()).isfinite().all():  # NaN passes through
            raise ValueError(f"cost / eps is not finite between two points with mass (eps = {eps})")
        matrices.append(matrix.flatten())
        rows.append(begin + x_tokens * matrix.shape[1])
        columns.append(starts)
        begin += matrix.numel()
    return Blocks(torch.cat(matrices), torch.cat(rows), torch.cat(columns), size)
