"""sinkhorn.py: Eq. (10) against POT, what its iteration promises, and what it refuses."""

import doctest
import itertools
import math

import ot
import pytest
import torch
from torch.nn.functional import pad
from torch.testing import assert_close

import sinkhorn as module
from sinkhorn import sinkhorn

TO_1E6 = dict(atol=1e-6, rtol=0)
TO_ROUNDING = dict(atol=1e-12, rtol=0)


def costs(*shape: int) -> torch.Tensor:
    """Distances (*batch, n, m) float64 between two Gaussian clouds, whose means are apart."""
    *batch, n, m = shape
    x = torch.randn(*batch, n, 3, dtype=torch.float64)
    y = torch.randn(*batch, m, 3, dtype=torch.float64) + 0.5
    return torch.cdist(x, y)


def masses(*shape: int) -> torch.Tensor:
    """Unequal masses (*batch, n) float64 that sum to 1."""
    mass = torch.rand(shape, dtype=torch.float64) + 0.1
    return mass / mass.sum(-1, keepdim=True)


@pytest.mark.parametrize("eps", [0.1, 0.5, 2.0])
def test_value_cost_and_plan_agree_with_pot(eps, must_fail):
    """Eq. (10) is POT's `solve` with KL regularisation, and <P, C> is its `sinkhorn2`."""
    cost = costs(12, 9)
    a = masses(12)
    b = masses(9)
    # comparisons to 1e-6 need a converged solve
    ours = sinkhorn(cost, a, b, eps=eps, max_iters=20_000, tol=1e-11)
    theirs = ot.solve(cost, a, b, reg=eps, reg_type="KL", max_iter=100_000, tol=1e-13)
    assert_close(ours.value, theirs.value, **TO_1E6)
    assert_close(ours.plan, theirs.plan, **TO_1E6)
    cost_of_plan = ot.sinkhorn2(
        a, b, cost, eps, method="sinkhorn_log", numItermax=100_000, stopThr=1e-13
    )
    assert_close(ours.value_linear, cost_of_plan, **TO_1E6)
    with must_fail("the cost of the plan, without the KL term"):
        assert_close(ours.value_linear, theirs.value, **TO_1E6)


def test_value_is_a_lower_bound_after_any_number_of_iterations(must_fail):
    """After an exact g-update <a, f> + <b, g> is at most W_eps; with over-relaxation it may fall."""
    cost = costs(4, 10, 8)
    exact = sinkhorn(cost, eps=0.05, max_iters=20_000, tol=1e-12).value
    solved = [sinkhorn(cost, eps=0.05, max_iters=count, tol=0.0) for count in range(1, 60)]
    values = torch.stack([ours.value for ours in solved])  # (59, 4)
    assert (values <= exact + 1e-12).all() and (values[0] < exact - 1e-3).all()
    assert (values[:4].diff(dim=0) >= -1e-12).all()  # plain iterations raise it
    with must_fail("it only grows"):
        assert (values.diff(dim=0) >= -1e-12).all()


def test_a_batch_equals_a_loop():
    """Problems stop on their own, so solving 6 at once is solving each alone."""
    cost = costs(2, 3, 7, 6)
    a = masses(2, 3, 7)
    b = masses(2, 3, 6)
    together = sinkhorn(cost, a, b, eps=0.1)
    assert together.iterations.unique().numel() > 1  # they do stop at different times
    for at in itertools.product(range(2), range(3)):
        alone = sinkhorn(cost[at], a[at], b[at], eps=0.1)
        assert_close(alone.value, together.value[at], **TO_ROUNDING)
        assert_close(alone.plan, together.plan[at], **TO_ROUNDING)


def windows_of_walks(count: int, size: int) -> tuple[torch.Tensor, float]:
    """Distances between windows of two noisy copies of a random walk, and the mean norm."""
    walk = torch.randn(size * count, 8).double().cumsum(0)
    copies = walk + 0.3 * torch.randn(2, *walk.shape)  # (2, T, 8)
    x, y = copies.unfold(1, size, size).mT  # (count, size, 8) each
    return torch.cdist(x, y), copies.norm(dim=-1).mean().item()


def test_over_relaxation_takes_at_most_half_of_the_iterations(monkeypatch, must_fail):
    """All problems converge at SHEAR's default eps and below, to the values of plain iterations."""
    cost, nbar = windows_of_walks(12, 24)
    assert (sinkhorn(cost, eps=0.05 * nbar).error <= 1e-3).all()
    ours = sinkhorn(cost, eps=0.02 * nbar)
    assert (ours.error <= 1e-3).all()
    monkeypatch.setattr(module, "RELAX", 1.0)
    plain = sinkhorn(cost, eps=0.02 * nbar)
    assert (plain.error <= 1e-3).all()
    assert_close(ours.value, plain.value, atol=1e-4 * nbar, rtol=0)
    assert ours.iterations.sum() <= plain.iterations.sum() / 2
    with must_fail("plain iterations"):
        assert plain.iterations.sum() <= plain.iterations.sum() / 2


def test_a_problem_whose_error_grew_takes_plain_iterations(monkeypatch):
    """With a factor of 2 no problem converges by over-relaxed iterations alone."""
    monkeypatch.setattr(module, "RELAX", 2.0)
    assert (sinkhorn(costs(20, 10, 8), eps=0.3).error <= 1e-3).all()


@pytest.mark.parametrize("fill", [0.0, math.inf, math.nan])
def test_points_without_mass_contribute_nothing(fill):
    """A padded problem is the unpadded one, whatever its padding costs; plan and potentials are 0."""
    cost = costs(5, 4)
    rows = (0, 3)
    columns = (0, 5)
    a = pad(torch.ones(5).double() / 5, rows)
    b = pad(torch.ones(4).double() / 4, columns)
    plain = sinkhorn(cost, eps=0.1)
    ours = sinkhorn(pad(cost, columns + rows, value=fill), a, b, eps=0.1)
    f, g = plain.potentials
    expected = plain.value, plain.value_linear, pad(plain.plan, columns + rows)
    assert_close((ours.value, ours.value_linear, ours.plan), expected, **TO_ROUNDING)
    assert_close(ours.potentials, (pad(f, rows), pad(g, columns)), **TO_ROUNDING)


@pytest.mark.parametrize("eps", [1e-2, 1e-12, 1e-30])
def test_a_tiny_eps_gives_no_nan(eps):
    """In the log domain all stays finite, also beside padding, and the value below Lemma 1's bound."""
    cost = costs(6, 5).float()
    a = torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2, 0.0])
    ours = sinkhorn(cost, a, eps=eps)
    for tensor in (ours.value, ours.value_linear, ours.error, ours.plan, *ours.potentials):
        assert tensor.isfinite().all()
    exact = ot.emd2([], [], cost[:5].double().numpy())
    assert ours.value.item() <= exact + eps * math.log(5) + 1e-5


@pytest.mark.parametrize("eps", [1e2, 1e4, 1e7])
def test_costs_far_below_eps_are_not_rounded_away(eps):
    """float32 has the value of float64, the mean cost in the limit."""
    cost = costs(2, 6, 7)
    a = torch.tensor([0.3, 0.3, 0.2, 0.1, 0.1, 0.0])
    b = torch.full((7,), 1.0005 / 7)  # within the tolerance of masses
    ours = sinkhorn(cost.float(), a, b, eps=eps)
    assert ours.value.dtype == ours.error.dtype == torch.float32
    assert_close(ours.value.double(), sinkhorn(cost, a.double(), eps=eps).value, rtol=2e-5, atol=0)
    assert_close(ours.value.double(), a.double() @ cost.mean(-1).T, rtol=1e2 / eps, atol=0)


def test_reported_error_and_iterations_are_the_plan_s(must_fail):
    """`error` is the L1 distance of the row sums; columns are exact; `tol` is met before the cap."""
    ours = sinkhorn(costs(6, 10, 10), eps=0.05, max_iters=24, tol=1e-2)
    rows = ours.plan.sum(-1)
    columns = ours.plan.sum(-2)
    assert_close(columns, ours.b, **TO_ROUNDING)
    assert_close((rows - ours.a).abs().sum(-1), ours.error, **TO_ROUNDING)
    with must_fail("exact rows"):
        assert_close(rows, ours.a, **TO_ROUNDING)
    at_cap = ours.iterations == 24
    assert at_cap.any() and not at_cap.all()
    assert ((ours.error <= 1e-2) | at_cap).all()


@pytest.mark.parametrize("given, inside", [("bfloat16", "float32"), ("float64", "float64")])
def test_dtype_inside_and_out(given, inside):
    """float64 stays, all else is float32; results carry no gradient."""
    cost = costs(4, 4).to(getattr(torch, given)).requires_grad_()
    ours = sinkhorn(cost, eps=0.1)
    assert ours.value.dtype == ours.plan.dtype == getattr(torch, inside)
    assert not ours.value.requires_grad


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(eps=0.0), "eps"), (dict(eps=math.nan), "eps"), (dict(eps=math.inf), "eps"), (dict(eps=0.1, max_iters=0), "max_iters"),
        (dict(eps=0.1, a=torch.ones(3)), "sum to 1"), (dict(eps=0.1, a=torch.ones(3) / 4), "sum to 1"), (dict(eps=0.1, a=torch.tensor([1.5, -0.5, 0.0])), "non-negative"),
        (dict(eps=0.1, C=torch.full((3, 3), math.nan)), "not finite"),
        (dict(eps=0.1, b=torch.tensor([math.nan, 0.5, 0.5])), "sum to 1"),
    ],
)  # fmt: skip
def test_bad_input_is_named(arguments, message):
    """An eps, costs or masses that solve nothing raise a ValueError that names them."""
    with pytest.raises(ValueError, match=message):
        sinkhorn(**{"C": torch.ones(3, 3), **arguments})


def test_the_docstring_s_example_runs():
    """An example that nobody runs goes stale."""
    assert doctest.testmod(module) == (0, 2)
