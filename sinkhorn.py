"""Entropic optimal transport, from scratch: the paper's Eq. (10), for a batch of problems at once.

    W_eps(P, Q) = min over couplings gamma of  <gamma, C> + eps KL(gamma || P x Q)              Eq. (10)

The log-domain iteration starts from f = g = 0 and alternates two "softmins" over the cost matrix:

    f_i = -eps log sum_j b_j exp((g_j - C_ij) / eps)
    g_j = -eps log sum_i a_i exp((f_i - C_ij) / eps)         plan  P_ij = a_i b_j exp((f_i + g_j - C_ij) / eps)

Two numbers are called "the Sinkhorn distance" in the wild. Both are here, each under its own name:

    value   <a, f> + <b, g>    Eq. (10) itself, the paper's. A lower bound of W_eps after every g-update.
    cost    <P, C>             the "sharp" reading, POT's `sinkhorn2`. It leaves the KL term out.

At the optimum W1 <= value <= W1 + eps log n and 0 <= cost - W1 <= eps log n (Lemma 1).

What is left out: gradients (SHEAR's weights are constants for autograd, so everything runs under no_grad),
debiasing, and eps-scaling or warm starts (every pair starts from 0, so results do not depend on an order).

    >>> import torch
    >>> round(sinkhorn(torch.tensor([[3.0]]), eps=0.1).value.item(), 6)   # two Diracs at distance 3
    3.0
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Transport:
    """What `sinkhorn` found. Leading dimensions `...` are those of its `cost` argument."""

    matrix: Tensor  # (..., n, m) the cost matrix C, 0 where a mass is 0
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
    def cost(self) -> Tensor:
        """(...,) <P, C>, the transport cost of the plan without the KL term."""
        return (self.plan() * self.matrix).sum((-2, -1))

    def plan(self) -> Tensor:
        """(..., n, m) the coupling P, computed when asked for."""
        f, g = self.potentials
        density = ((f[..., :, None] + g[..., None, :] - self.matrix) / self.eps).exp()
        return self.a[..., :, None] * self.b[..., None, :] * density


@torch.no_grad()
def sinkhorn(
    cost: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    eps: float,
    max_iters: int = 100,
    tol: float = 1e-3,
) -> Transport:
    """Solve Eq. (10) for every cost matrix of a batch.

    cost (..., n, m); masses a (..., n) and b (..., m), uniform if not given, each summing to 1; a mass of 0
    is padding and contributes exactly nothing, whatever its costs are. `eps` is absolute, in units of `cost`.
    A problem stops at marginal error `tol` (L1, relative to the total mass 1) or after `max_iters`
    iterations; from then on it no longer changes, so a result does not depend on its batch beyond rounding.
    float64 stays float64, every other dtype becomes float32; the device is the input's. Where eps is below
    the rounding of the costs (1e-7 of their size in float32) `value` still holds, but the plan is rounding.
    Raises ValueError for eps <= 0, max_iters < 1, masses that are negative or do not sum to 1, and costs that
    are not finite between two points with mass.
    """
    if not eps > 0:
        raise ValueError(f"eps must be positive, got {eps}")
    if max_iters < 1:
        raise ValueError(f"max_iters must be at least 1, got {max_iters}")
    dtype = torch.float64 if cost.dtype == torch.float64 else torch.float32
    *batch, n, m = cost.shape
    a, b = (_masses(mass, (*batch, size), cost.device, dtype) for mass, size in ((a, n), (b, m)))
    support = (a[..., :, None] > 0) & (b[..., None, :] > 0)
    matrix = cost.to(dtype).masked_fill(~support, 0.0)  # (..., n, m)
    if not matrix.isfinite().all():
        raise ValueError("cost is not finite between two points with mass")

    f, g, error, iterations = _iterate(
        matrix.reshape(-1, n, m), a.reshape(-1, n), b.reshape(-1, m), eps, max_iters, tol
    )
    f, g = f.reshape(a.shape).masked_fill(a == 0, 0.0), g.reshape(b.shape).masked_fill(b == 0, 0.0)
    return Transport(matrix, a, b, eps, (f, g), error.reshape(batch), iterations.reshape(batch))


def _iterate(C: Tensor, a: Tensor, b: Tensor, eps: float, max_iters: int, tol: float):
    """C (N, n, m), a (N, n), b (N, m) -> f (N, n), g (N, m), error (N,), iterations (N,)."""
    all_f, all_g, all_error = torch.zeros_like(a), torch.zeros_like(b), a.new_zeros(len(a))
    all_iterations = torch.zeros(len(a), dtype=torch.long, device=a.device)
    live = torch.arange(len(a), device=a.device)  # the problems that have not converged
    f = _softmin(C, torch.zeros_like(b), b, eps, dim=-1)
    for iteration in range(1, max_iters + 1):
        g = _softmin(C, f, a, eps, dim=-2)
        next_f = _softmin(C, g, b, eps, dim=-1)
        # Row sums of the plan cost nothing extra: they are a * exp((f - next_f) / eps). The true ones are at
        # most 1; the clamp keeps rounding at a tiny eps from making 0 * inf.
        row_sums = a * ((f - next_f) / eps).clamp(max=30.0).exp()  # (N, n)
        error = (row_sums - a).abs().sum(-1)  # (N,)
        all_f[live], all_g[live], all_error[live], all_iterations[live] = f, g, error, iteration
        going = error > tol
        if not going.any():
            break
        f = next_f
        if not going.all():
            live, C, a, b, f = live[going], C[going], a[going], b[going], f[going]
    return all_f, all_g, all_error, all_iterations


def _softmin(C: Tensor, potential: Tensor, mass: Tensor, eps: float, dim: int) -> Tensor:
    """-eps log sum_k mass_k exp((potential_k - C_k) / eps) along `dim`, in units of C, without overflow.

    Subtracting the smallest gap before dividing by eps keeps every exponent <= 0 and at least one equal to 0,
    so neither a tiny eps nor a zero mass gives NaN.
    """
    other = -1 if dim == -2 else -2
    blocked = torch.where(mass > 0, potential, -math.inf)
    gap = C - blocked.unsqueeze(other)  # (N, n, m)
    low = gap.amin(dim, keepdim=True)
    total = torch.sub(low, gap, out=gap).div_(eps).exp_().mul_(mass.unsqueeze(other)).sum(dim)
    return low.squeeze(dim) - eps * total.log()


def _masses(mass: Tensor | None, shape: tuple, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`mass` checked and broadcast to `shape`; uniform if None."""
    if mass is None:
        return torch.full(shape, 1.0 / shape[-1], device=device, dtype=dtype)
    mass = mass.to(device, dtype).expand(shape)
    if (mass < 0).any() or ((mass.sum(-1) - 1).abs() > 1e-3).any():
        raise ValueError("masses must be non-negative and sum to 1")
    return mass
