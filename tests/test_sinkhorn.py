"""sinkhorn.py against POT, exact optimal transport, and itself."""

import doctest
import itertools
import math

import numpy as np
import ot
import pytest
import torch
from builders.near import assert_near
from torch.nn.functional import pad

import sinkhorn as module
from sinkhorn import sinkhorn


def clouds(seed: int, n: int, m: int, batch: tuple = ()) -> torch.Tensor:
    """Euclidean costs (*batch, n, m) float64 between two Gaussian point clouds."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*batch, n, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(*batch, m, 3, generator=generator, dtype=torch.float64) + 0.5
    return torch.cdist(x, y)


def random_masses(seed: int, *shape: int) -> torch.Tensor:
    """Masses (*shape) float64 that sum to 1."""
    mass = (
        torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    )
    return mass / mass.sum(-1, keepdim=True)


@pytest.mark.parametrize("eps", [0.1, 0.5, 2.0])
def test_value_cost_and_plan_agree_with_pot(eps):
    """Eq. (10) is POT's `solve` with KL regularisation, and <P, C> is its `sinkhorn2`.

    Both agree to 1e-6, with any masses.
    """
    cost = clouds(0, 12, 9)
    a = random_masses(1, 12)
    b = random_masses(2, 9)
    # comparisons to 1e-6 need a converged solve
    ours = sinkhorn(cost, a, b, eps=eps, max_iters=20_000, tol=1e-11)
    theirs = ot.solve(
        cost.numpy(), a.numpy(), b.numpy(), reg=eps, reg_type="KL", max_iter=100_000, tol=1e-13
    )
    sharp = ot.sinkhorn2(a, b, cost, eps, method="sinkhorn_log", numItermax=100_000, stopThr=1e-13)
    assert ours.value.item() == pytest.approx(float(theirs.value), abs=1e-6)
    assert ours.value_linear.item() == pytest.approx(float(sharp), abs=1e-6)
    assert np.abs(ours.plan.numpy() - theirs.plan).max() < 1e-6


def test_value_is_a_lower_bound_that_only_grows():
    """After every g-update <a, f> + <b, g> is below W_eps and not below its last value.

    That certifies bounds.
    """
    cost = clouds(4, 10, 8)
    counts = 1, 2, 3, 10, 100, 500
    values = [sinkhorn(cost, eps=0.05, max_iters=k, tol=0.0).value for k in counts]
    steps = torch.stack(values).diff()
    assert (steps >= -1e-12).all() and steps.sum() > 0


def test_a_batch_equals_a_loop():
    """Problems stop on their own, so solving 6 at once is solving each alone, to rounding."""
    cost = clouds(5, 7, 6, batch=(2, 3)).float()
    a = random_masses(6, 2, 3, 7).float()
    b = random_masses(7, 2, 3, 6).float()
    together = sinkhorn(cost, a, b, eps=0.1)
    assert together.iterations.unique().numel() > 1  # they do stop at different times
    for at in itertools.product(range(2), range(3)):
        alone = sinkhorn(cost[at], a[at], b[at], eps=0.1)
        assert alone.iterations == together.iterations[at]
        assert_near(alone.value, together.value[at], 2e-6)
        assert_near(alone.plan, together.plan[at], 2e-6)


@pytest.mark.parametrize("fill", [0.0, 1e9, math.inf, math.nan])
def test_points_without_mass_contribute_nothing(fill):
    """A padded problem is the unpadded one to rounding, whatever stands in the padding.

    Plan and potentials are 0 there.
    """
    cost = clouds(8, 5, 4)
    padded = pad(cost, (0, 5, 0, 3), value=fill)
    a = pad(torch.ones(5).double(), (0, 3))
    b = pad(torch.ones(4).double(), (0, 5))
    plain = sinkhorn(cost, eps=0.1)
    ours = sinkhorn(padded, a / a.sum(), b / b.sum(), eps=0.1)
    assert_near(ours.value, plain.value, 1e-12)
    assert_near(ours.value_linear, plain.value_linear, 1e-12)
    assert_near(ours.plan, pad(plain.plan, (0, 5, 0, 3)), 1e-12)
    assert not ours.plan[5:].any() and not ours.plan[:, 4:].any()
    for potential, without, more in zip(ours.potentials, plain.potentials, (3, 5), strict=True):
        assert_near(potential, pad(without, (0, more)), 1e-12)
        assert not potential[-more:].any()


@pytest.mark.parametrize("eps", [1e-2, 1e-6, 1e-12, 1e-30])
def test_a_tiny_eps_gives_no_nan(eps):
    """In the log domain all stays finite, also beside padding.

    The value stays below the exact distance.
    """
    cost = clouds(11, 6, 5).float()
    a = torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2, 0.0])
    for ours, points in ((sinkhorn(cost, eps=eps), 6), (sinkhorn(cost, a, eps=eps), 5)):
        exact = ot.emd2([], [], cost[:points].double().numpy())
        for tensor in (ours.value, ours.value_linear, ours.error, ours.plan, *ours.potentials):
            assert tensor.isfinite().all()
        assert ours.value.item() <= exact + eps * math.log(6) + 1e-5


def test_reported_error_and_iterations_are_the_plan_s():
    """`error` is the L1 distance of the row sums, and columns are exact.

    `tol` is met unless the cap was hit.
    """
    cost = clouds(12, 10, 10, batch=(6,))
    ours = sinkhorn(cost, eps=0.05, max_iters=30, tol=1e-2)
    plan = ours.plan
    assert_near(plan.sum(-2), ours.b, 1e-12)
    assert_near((plan.sum(-1) - ours.a).abs().sum(-1), ours.error, 1e-12)
    assert ((ours.error <= 1e-2) | (ours.iterations == 30)).all()
    assert (ours.iterations < 30).any() and (ours.iterations == 30).any()


@pytest.mark.parametrize("given, inside", [("bfloat16", "float32"), ("float64", "float64")])
def test_dtype_inside_and_out(given, inside):
    """float64 stays, all else is float32; results carry no gradient."""
    cost = clouds(13, 4, 4).to(getattr(torch, given)).requires_grad_()
    ours = sinkhorn(cost, eps=0.1)
    assert ours.value.dtype == ours.plan.dtype == getattr(torch, inside)
    assert not ours.value.requires_grad


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(eps=0.0), "eps"), (dict(eps=math.nan), "eps"), (dict(eps=0.1, max_iters=0), "max_iters"),
        (dict(eps=0.1, a=torch.ones(3)), "sum to 1"), (dict(eps=0.1, a=torch.tensor([1.5, -0.5, 0.0])), "non-negative"),
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
