"""Entropic optimal transport, from scratch: the paper's Eq. (10), for a batch of problems at once.

    W_eps(P, Q) = min over couplings gamma of  <gamma, C> + eps KL(gamma || P x Q)     Eq. (10)

The log-domain iteration starts from f = g = 0 and alternates two "softmins" over the cost matrix:

    f_i = -eps log sum_j b_j exp((g_j - C_ij) / eps)
    g_j = -eps log sum_i a_i exp((f_i - C_ij) / eps)

and the plan is P_ij = a_i b_j exp((f_i + g_j - C_ij) / eps).

Two numbers are called "the Sinkhorn distance" in the wild. Both are here, by POT's names:

    value           <a, f> + <b, g>    Eq. (10) itself, the paper's. A lower bound of W_eps after
                    every g-update.
    value_linear    <P, C>             the cost of the plan, "sharp", POT's `sinkhorn2`. It leaves
                    the KL term out.

At the optimum W1 <= value <= W1 + eps log n and 0 <= value_linear - W1 <= eps log n (Lemma 1).

**Over-relaxation** (Thibault, Chizat, Dossal, Papadakis 2017, arXiv 1711.01851): from the fifth
iteration on f and g move RELAX times as far as these updates say, which takes a half to a fifth of
the iterations. A fixed factor can diverge, so a problem whose error grew takes plain updates until
the next test of convergence. f and g are returned after a plain g-update, so `value` is the bound
that it is for plain iterations; over the iterations it need not grow.

Left out: gradients (SHEAR's weights are constants for autograd, so everything runs under no_grad),
debiasing, and eps-scaling or warm starts (every problem starts from 0, so results do not depend on
the order of solving).

    >>> import torch
    >>> round(sinkhorn(torch.tensor([[3.0]]), eps=0.1).value.item(), 6)   # two Diracs at distance 3
    3.0
"""

from dataclasses import dataclass

import torch
from torch import Tensor

RELAX = 1.8  # steps of f and g, as multiples of the plain updates'
CHECK = 4  # iterations between two tests of convergence, after those of the first and the second


@dataclass(frozen=True)
class Transport:
    """What `sinkhorn` found. Leading dimensions `...` are those of its argument C."""

    C: Tensor  # (..., n, m) the cost matrix, 0 where a mass is 0
    a: Tensor  # (..., n)
    b: Tensor  # (..., m)
    eps: float
    potentials: tuple[Tensor, Tensor]  # f (..., n), g (..., m), 0 where the mass is 0
    error: Tensor  # (...,) L1 distance of the plan's row sums from a; its column sums are exact
    iterations: Tensor  # (...,) int64, an iteration is one f-update and one g-update

    @property
    def value(self) -> Tensor:
        """(...,) Eq. (10), read as <a, f> + <b, g> where the iteration stopped."""
        f, g = self.potentials
        return (self.a * f).sum(-1) + (self.b * g).sum(-1)

    @property
    def value_linear(self) -> Tensor:
        """(...,) <P, C>, the cost of the plan without the KL term."""
        return (self.plan * self.C).sum((-2, -1))

    @property
    def plan(self) -> Tensor:
        """(..., n, m) the coupling P, computed when asked for."""
        f, g = self.potentials
        log_density = (f[..., :, None] + g[..., None, :] - self.C) / self.eps
        plan = (log_density + self.a.log()[..., :, None] + self.b.log()[..., None, :]).exp()
        # No entry of P exceeds its column's mass b, except by rounding at a tiny eps.
        return torch.minimum(plan, self.b[..., None, :])


@torch.no_grad()
def sinkhorn(
    C: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    eps: float,
    max_iters: int = 500,
    tol: float = 1e-3,
) -> Transport:
    """Solve Eq. (10) for every cost matrix of a batch.

    C (..., n, m), the costs; masses a (..., n) and b (..., m), uniform if not given, each summing
    to 1; a mass of 0 is padding and contributes exactly nothing, whatever its costs are. `eps` is
    absolute, in units of C. A problem stops at marginal error `tol` (L1, relative to the total mass
    1) or after `max_iters` iterations, and no longer changes from then on. So what converges does
    not depend on its batch beyond `tol`: rounding may move the iteration at which it stops. float64
    stays float64, every other dtype becomes float32; the device is the input's. Where eps is below
    the rounding of the costs (1e-7 of their size in float32) `value` still holds, but the plan is
    mere rounding. Raises ValueError for an eps that is not positive and finite, max_iters < 1,
    masses that are negative or do not sum to 1, and costs that are not finite between two points
    with mass.
    """
    if not 0 < eps < float("inf"):
        raise ValueError(f"eps must be positive and finite, got {eps}")
    if max_iters < 1:
        raise ValueError(f"max_iters must be at least 1, got {max_iters}")
    dtype = torch.float64 if C.dtype == torch.float64 else torch.float32
    *batch, n, m = C.shape
    a = _masses(a, (*batch, n), C.device, dtype)
    b = _masses(b, (*batch, m), C.device, dtype)
    support = (a[..., :, None] > 0) & (b[..., None, :] > 0)
    C = C.to(dtype).masked_fill(~support, 0.0)  # (..., n, m)
    # The problems lie along the last dimension, because reductions over short rows are slow.
    scaled = (C.reshape(-1, n, m).permute(1, 2, 0) / eps).contiguous()  # (n, m, N) C / eps
    if not scaled.isfinite().all():
        raise ValueError(f"cost / eps is not finite between two points with mass (eps = {eps})")
    rows = a.reshape(-1, n).T
    columns = b.reshape(-1, m).T
    if (scaled.abs() < 0.01).all():  # float32 would round away costs that are far below eps
        scaled = scaled.double()
        rows = rows.double() / rows.double().sum(0)
        columns = columns.double() / columns.double().sum(0)
    f, g, error, iterations = _iterate(scaled, rows, columns, max_iters, tol)
    count(error, tol)
    f = (eps * f.T).to(dtype).reshape(a.shape).masked_fill(a == 0, 0.0)
    g = (eps * g.T).to(dtype).reshape(b.shape).masked_fill(b == 0, 0.0)
    error = error.to(dtype).reshape(batch)
    return Transport(C, a, b, eps, (f, g), error, iterations.reshape(batch))


_counts = [0, 0]  # problems of this process that stopped above `tol`, and all


def count(error: Tensor, tol: float) -> None:
    """Count solved problems, with these marginal errors, for `take_counts`."""
    _counts[0] += int((~(error <= tol)).sum())
    _counts[1] += error.numel()


def take_counts() -> tuple[int, int]:
    """How many problems stopped above their tolerance, of how many, since this was last asked."""
    unconverged, solved = _counts
    _counts[:] = 0, 0
    return unconverged, solved


def _iterate(
    C: Tensor, a: Tensor, b: Tensor, max_iters: int, tol: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The iteration, for problems along the last dimension; all values are in units of eps.

    C (n, m, N), a (n, N), b (m, N) -> f (n, N), g (m, N), error (N,), iterations (N,).
    """
    log_a = a.log()  # -inf where there is no mass
    log_b = b.log()
    all_f = torch.zeros_like(log_a)
    all_g = torch.zeros_like(log_b)
    all_error = a.new_zeros(a.shape[1])
    all_iterations = torch.zeros_like(all_error, dtype=torch.long)
    live = torch.arange(a.shape[1], device=a.device)  # the problems that have not converged
    f = torch.zeros_like(log_a)
    g = torch.zeros_like(log_b)
    relax = torch.ones_like(all_error)  # plain updates at first
    last_error = torch.full_like(all_error, torch.inf)
    for iteration in range(1, max_iters + 1):
        f = f + relax * (_softmin(C, g + log_b, dim=1) - f)
        exact_g = _softmin(C, f + log_a, dim=0)
        g = g + relax * (exact_g - g)
        if iteration not in (1, 2, max_iters) and iteration % CHECK:
            continue
        # With the exact g-update <a, f> + <b, g> bounds Eq. (10) from below, and the plan's column
        # sums are b.
        error = (_row_sums(C, f, exact_g, log_a, log_b) - a).abs().sum(0)  # (N,)
        # a problem that over-relaxation took further away goes on plainly, which always converges
        if iteration >= CHECK:
            relax = torch.where(error < last_error, RELAX, 1.0)
        last_error = error
        stops = (error <= tol) | (iteration == max_iters)  # (N,)
        stopped = live[stops]
        all_f[:, stopped] = f[:, stops]
        all_g[:, stopped] = exact_g[:, stops]
        all_error[stopped] = error[stops]
        all_iterations[stopped] = iteration
        if stops.all():
            break
        if stops.any():
            going = (~stops).nonzero().flatten()
            live = live[going]
            C = C.index_select(2, going)  # twice as fast as C[..., going]
            f = f[:, going]
            g = g[:, going]
            a = a[:, going]
            log_a = log_a[:, going]
            log_b = log_b[:, going]
            relax = relax[going]
            last_error = last_error[going]
    return all_f, all_g, all_error, all_iterations


def _row_sums(C: Tensor, f: Tensor, g: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    """The row sums (n, N) of the plans with potentials f (n, N) and g (m, N)."""
    log_sums = f - _softmin(C, g + log_b, dim=1) + log_a
    return log_sums.exp().clamp(max=1.0)  # only rounding takes them above 1


def _softmin(C: Tensor, potential: Tensor, dim: int) -> Tensor:
    """-log sum_k exp(potential_k - C_k) along `dim`; the potential includes the log of the mass.

    Subtracting the smallest gap first keeps every exponent <= 0 and at least one equal to 0, so
    neither a tiny eps nor a zero mass gives NaN.
    """
    gap = C - potential.unsqueeze(1 - dim)  # (n, m, N)
    low = gap.amin(dim, keepdim=True)
    total = torch.sub(low, gap, out=gap).exp_().sum(dim)
    return low.squeeze(dim) - total.log()


def _masses(mass: Tensor | None, shape: tuple, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`mass` checked and broadcast to `shape`; uniform if None."""
    if mass is None:
        return torch.full(shape, 1.0 / shape[-1], device=device, dtype=dtype)
    mass = mass.to(device, dtype).expand(shape)
    if not ((mass >= 0).all() and ((mass.sum(-1) - 1).abs() <= 1e-3).all()):  # NaN is refused, too
        raise ValueError("masses must be non-negative and sum to 1")
    return mass
