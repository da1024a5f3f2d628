"""SHEAR's minima on a GPU: Eq. (10) for every pair of spans in one fused Triton kernel, with an exact race.

The numbers are those of sinkhorn.py, reading "value"; torch alone gives them too, so nothing needs this file: `--fused`
asks for it. **Not run on a GPU yet**: checked in Triton's interpreter against sinkhorn.py, and compiled for sm_90.

On chip. One program solves one pair of spans. It reads its tile of the token-token distances once and keeps, for all
iterations, K = exp((F_i + G_j - C_ij) / eps) in registers. With u = exp((f - F) / eps), v = exp((g - G) / eps),

    f-update   u_i = 1 / s_i,   s_i = sum_j b_j K_ij v_j
    g-update   v_j = 1 / t_j,   t_j = sum_i a_i K_ij u_i          dual  <a, F - eps log s> + <b, G - eps log t>

so an iteration is two products of a matrix and a vector, where the log domain takes an exponential an entry. The
shifts follow from any g:  F_i = min_j (C_ij - g_j),  G_j = min_i (C_ij - F_i) >= g_j. Then K <= 1 and every row and
every column holds an exact 1, a row's even where v = 1: neither sum of the next iteration can vanish, whatever eps
is. The first g is 0, as in sinkhorn.py; when a v leaves [1 / RANGE, RANGE], the shifts are made anew from its g.

The race. After each g-update the dual is a lower bound of the value at which this pair will stop. A pair leaves
when its dual exceeds a value already reached in its row *and* one in its column: it can set neither minimum. The
pairs that do set them never leave, so the minima do not depend on the order in which the GPU runs the programs;
only how many pairs leave early does. First every pair gets CHECK iterations, then the most promising one of each
row and column is solved, then whatever is still below a minimum that it could set.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    # One compilation (seconds) serves all groups: Triton would specialise on these being 1 or multiples of 16.
    jit = triton.jit(do_not_specialize=["stride", "columns", "last", "max_iters"])
    constexpr = tl.constexpr
except ImportError:
    triton, jit, constexpr = None, lambda kernel: kernel, int  # the kernels below are then mere text

LONGEST = 128  # tokens a span may have: a tile of 128 x 128 takes a quarter of an SM's registers
ENTRIES = 64  # of K that a thread holds in registers; it gets as many again for all else
CHECK = 5  # iterations between two looks at the race
RANGE = 1e9  # of the factor v on K
MARGIN = 1e-5  # by which a dual must exceed a minimum, as both are rounded


@dataclass(frozen=True)
class Race:
    """What `race_pairs` found of the (K+, K-) pairs: `bound.amin(1)` and `bound.amin(0)` are the exact minima."""

    bound: Tensor  # (K+, K-) float32: Eq. (10) where `stopped`; elsewhere below it, and above both minima
    stopped: Tensor  # (K+, K-) bool: solved to the tolerance or to the last iteration; the others left the race
    iterations: Tensor  # (K+, K-) int32, of the pair's last run
    error: Tensor  # (K+, K-) float32, the marginal error after them


def available() -> bool:
    """Whether `fused_race` can run on a GPU here."""
    return triton is not None and torch.cuda.is_available()


def fused_race(
    costs: Tensor, right_spans, wrong_spans, eps: float, *, stats: dict[str, list] | None = None, **limits
) -> tuple[Tensor, Tensor]:
    """`fast.race.race`, which says what all this is, on a GPU."""
    spans = []
    for tokens, mass in (right_spans, wrong_spans):
        spans += [tokens[:, 0], (mass > 0).sum(1)]
    found = race_pairs(costs, *spans, eps=eps, **limits)
    if stats is not None:
        stats["sinkhorn_iterations"].append(found.iterations.flatten())
        stats["sinkhorn_error"].append(found.error[found.stopped])
    return found.bound.amin(1), found.bound.amin(0)


@torch.no_grad()
def race_pairs(
    distances: Tensor,
    x_starts: Tensor,
    x_lengths: Tensor,
    y_starts: Tensor,
    y_lengths: Tensor,
    *,
    eps: float,
    max_iters: int = 100,
    tol: float = 1e-3,
) -> Race:
    """The smallest Eq. (10) of each row and each column of the (K+, K-) pairs of spans, uniform masses.

    distances (N+, N-) float32, >= 0 and, also over eps, finite. Span k of x is the x_lengths[k] >= 1 rows from
    x_starts[k] on, both (K+,) whole numbers; y's are columns likewise. eps, max_iters and tol are those of
    `sinkhorn`; the distances lie on the current CUDA device. Raises ValueError for a span of more than LONGEST
    tokens, for eps <= 0, and for max_iters < 1.
    """
    if not eps > 0 or max_iters < 1:
        raise ValueError(f"eps must be positive and max_iters at least 1, got {eps} and {max_iters}")
    longest = int(max(x_lengths.max(), y_lengths.max()))
    if longest > LONGEST:
        raise ValueError(f"the kernel holds spans of up to {LONGEST} tokens, got {longest}")
    distances, device, shape = distances.contiguous(), distances.device, (len(x_starts), len(y_starts))
    spans = [part.to(device, torch.int64).contiguous() for part in (x_starts, x_lengths, y_starts, y_lengths)]
    bound, error = (torch.zeros(shape, device=device) for _ in range(2))
    iterations = torch.zeros(shape, device=device, dtype=torch.int32)
    row_min, column_min = (torch.full((size,), torch.inf, device=device) for size in shape)
    block = max(16, triton.next_power_of_2(longest))

    def run(pairs: Tensor, last: int):
        """Up to `last` iterations for these pairs, in this order."""
        if len(pairs):
            _race[(len(pairs),)](
                *(distances, distances.shape[1], *spans, pairs, shape[1], eps, tol, last, max_iters),
                *(row_min, column_min, bound, error, iterations),
                *(block, block // 16, CHECK, RANGE, MARGIN),
                num_warps=max(1, block * block // (32 * ENTRIES)),
                maxnreg=min(255, 2 * ENTRIES),  # two tiles of 128 x 128 then fit on an SM
            )

    def going() -> Tensor:
        return (error > tol) & (iterations < max_iters)  # (K+, K-)

    run(torch.arange(bound.numel(), device=device), min(CHECK, max_iters))
    first = torch.zeros(shape, device=device, dtype=torch.bool)
    first.scatter_(1, bound.argmin(1, keepdim=True), True).scatter_(0, bound.argmin(0, keepdim=True), True)
    run((first & going()).flatten().nonzero()[:, 0], max_iters)
    limit = torch.maximum(row_min[:, None], column_min)  # (K+, K-)
    rest = (going() & ~first & (bound <= limit + MARGIN * (limit + eps))).flatten().nonzero()[:, 0]
    run(rest[bound.flatten()[rest].argsort()], max_iters)
    return Race(bound, ~going(), iterations, error)


@jit
def _race(
    distances,  # (N+, N-) float32
    stride,  # N-
    x_starts,  # (K+,) int64, with x_lengths, y_starts (K-,), y_lengths
    x_lengths,
    y_starts,
    y_lengths,
    pairs,  # (programs,) int64, k * K- + l
    columns,  # K-
    eps,
    tol,
    last,  # iterations of this launch
    max_iters,
    row_min,  # (K+,) float32, the smallest value reached so far; inf at first
    column_min,  # (K-,)
    bound,  # (K+, K-) float32, and error and iterations (int32): what is found
    error_out,
    iterations_out,
    BLOCK: constexpr,  # a power of two that holds the longest span
    CHUNKS: constexpr,  # BLOCK / 16
    CHECK: constexpr,
    RANGE: constexpr,
    MARGIN: constexpr,
):
    """One pair of spans, from f = g = 0 to its stop, to `last`, or to where it leaves the race.

    A tile is (BLOCK, CHUNKS, 16): its BLOCK columns in chunks of 16, so that half a warp lies along the columns and
    sums over rows and sums over columns cost about the same. Points beyond a span's end have K = 0 and a sum of 1:
    their logs and errors are 0, and nothing else needs to know of them. Costs and potentials are in units of eps.
    """
    pair = tl.load(pairs + tl.program_id(0))
    k, l = pair // columns, pair % columns  # noqa: E741 - the paper's letters
    n, m = tl.load(x_lengths + k), tl.load(y_lengths + l)
    i = tl.arange(0, BLOCK)  # (BLOCK,) rows
    j = tl.arange(0, CHUNKS)[:, None] * 16 + tl.arange(0, 16)[None, :]  # (CHUNKS, 16) columns
    corner = distances + tl.load(x_starts + k) * stride + tl.load(y_starts + l)
    beyond_rows, beyond_columns = tl.where(i < n, 0.0, 1.0), tl.where(j < m, 0.0, 1.0)
    a, b = 1.0 / n.to(tl.float32), 1.0 / m.to(tl.float32)
    g = tl.zeros((CHUNKS, 16), tl.float32)
    iteration, value, error, going = 0, 0.0, 0.0, True
    while going:
        K, F, G = _shifted(corner, stride, i, j, n, m, eps, g)
        base = a * tl.sum(F) + b * tl.sum(tl.sum(G, 0))  # <a, F> + <b, G>
        q = b * tl.exp(g - G)  # b v
        s = tl.sum(tl.sum(K * q[None], 1), 1) + beyond_rows  # s_i = sum_j b_j K_ij v_j
        steady = True
        while going & steady:
            p = a / s  # f-update: a u
            t = tl.sum(K * p[:, None, None], 0) + beyond_columns  # t_j = sum_i a_i K_ij u_i
            q = b / t  # g-update
            next_s = tl.sum(tl.sum(K * q[None], 1), 1) + beyond_rows
            error = tl.sum(tl.abs(p * next_s - a))  # p next_s are the plan's row sums
            iteration += 1
            going = (error > tol) & (iteration < last)
            if (iteration % CHECK == 0) | (not going):
                value = eps * (base - a * tl.sum(tl.log(s)) - b * tl.sum(tl.sum(tl.log(t), 0)))
                # An atomic, not a load: all threads of the program must see the same number, or they part ways.
                row = tl.atomic_min(row_min + k, float("inf"), sem="relaxed")
                column = tl.atomic_min(column_min + l, float("inf"), sem="relaxed")
                limit = tl.maximum(row, column)
                going = going & (value <= limit + MARGIN * (limit + eps))
            steady = tl.max(tl.max(tl.maximum(t, q * m), 0)) < RANGE
            s = next_s
        g = G + tl.log(q / b)
    value = tl.maximum(value, 0.0)  # rounding can leave -1e-9
    if (error <= tol) | (iteration == max_iters):
        tl.atomic_min(row_min + k, value, sem="relaxed")
        tl.atomic_min(column_min + l, value, sem="relaxed")
    tl.store(bound + pair, value)
    tl.store(error_out + pair, error)
    tl.store(iterations_out + pair, iteration)


@jit
def _shifted(corner, stride, i, j, n, m, eps, g):
    """K (BLOCK, CHUNKS, 16), F (BLOCK,) and G (CHUNKS, 16) for a g (CHUNKS, 16); all 0 beyond the spans' ends."""
    inside = (i < n)[:, None, None] & (j < m)[None]
    tile = corner + i.to(tl.int64)[:, None, None] * stride + j[None]
    gap = tl.load(tile, mask=inside, other=float("inf")) / eps - g[None]
    F = tl.where(i < n, tl.min(tl.min(gap, 1), 1), 0.0)
    gap -= F[:, None, None]  # >= 0, and 0 at each row's smallest
    rise = tl.where(j < m, tl.min(gap, 0), 0.0)
    return tl.exp(rise[None] - gap), F, tl.where(j < m, g + rise, 0.0)
