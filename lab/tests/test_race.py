"""lab/fast/race.py against solving every pair with sinkhorn.py, lab/fast/distances.py against float64."""

import math

import pytest
import torch
from torch.testing import assert_close

from lab.fast.distances import token_distances
from lab.fast.race import race
from shear import Side, Spans, every_pair, mean_norm, two_sides, w_eps
from sinkhorn import sinkhorn, take_counts


def race_problem(name: str, window: int, stride: int):
    """The inputs of `race` for a group that could mislead it, and the distances of all pairs.

    States are as of a text: few words, each near its own point, and a slow drift.
    """
    words = 3 * torch.randn(12, 8)[torch.randint(12, (6, 40))]
    hidden = words + 0.1 * torch.randn(6, 40, 8).cumsum(1) + 0.3 * torch.randn(6, 40, 8)
    lengths = torch.full((6,), 40)
    if name == "shared-prefix":
        hidden[:, :25] = hidden[:1, :25]
    elif name == "outliers":  # costs of thousands of eps beside small ones
        hidden[:, ::7] *= 1000
    elif name == "ragged":
        lengths = torch.tensor([40, 13, 5, 26, 37, 1])
    elif name == "nearly-tied":  # every wrong rollout is the same but for a breath
        hidden[1::2] = hidden[1:2] + 1e-3 * torch.randn(3, 40, 8)
    mask = torch.arange(40) < lengths[:, None]
    states = hidden[mask]
    right, wrong = two_sides(states, mask, torch.tensor([True, False] * 3), window, stride)
    costs = token_distances(right.states, wrong.states)
    eps = 0.05 * mean_norm(states)
    return (costs, right, wrong, eps), every_pair(costs, right.spans, wrong.spans, eps, w_eps)


NAMES = "text shared-prefix outliers ragged nearly-tied".split()


@pytest.mark.parametrize(
    "name, window, stride",
    [*((name, 8, 4) for name in NAMES), ("outliers", 1, 1), ("ragged", 20, 3)],
)
def test_minima_are_those_of_solving_every_pair(name, window, stride):
    """The race's minima are those of solving every pair, to 1e-4 nbar."""
    (costs, right, wrong, eps), matrix = race_problem(name, window, stride)
    found = race(costs, right, wrong, eps)
    slack = 1e-4 * eps / 0.05  # 1e-4 nbar: the tolerance of both
    for ours, expected in (found.of_right, matrix.amin(1)), (found.of_wrong, matrix.amin(0)):
        assert_close(ours, expected, rtol=0, atol=slack)
        assert (ours >= 0).all()


def test_most_pairs_are_never_solved():
    """This is the point of the race, among spans that differ."""
    (costs, right, wrong, eps), matrix = race_problem("text", 12, 4)
    take_counts()
    race(costs, right, wrong, eps)
    _, solved = take_counts()
    assert 0 < solved < 0.35 * matrix.numel()


@pytest.mark.parametrize("size, eps", [(2, 1e-6), (30, 1e-6)])
def test_scalings_stay_in_range_at_any_eps(eps, size):
    """The product form must not overflow where potentials move far.

    This is so in sharp problems of points at all scales.
    """
    scales = 10 ** torch.linspace(-3, 2, size)[:, None]
    x = torch.randn(size, 3) * scales
    y = torch.randn(size, 3) * scales
    y[: size // 2] += 50
    costs = torch.cdist(x, y)
    side = Side(None, None, Spans(torch.arange(size)[None], torch.full((1, size), 1 / size)))
    found = race(costs, side, side, eps).of_right
    expected = sinkhorn(costs[None], eps=eps).value
    assert_close(found, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["near", "offset", "same", "prefix"])
def test_token_distances_are_float64_s(name, dtype):
    """They are within 1e-4 of each distance, whatever cancels, and 0 between equal points."""
    x, y = torch.randn(2, 90, 64)
    kinds = {
        "near": (x, x + torch.logspace(-4, 0, 90)[:, None] * y),  # from 1e-4 of the norm up
        "offset": (x + 100, y + 100),
        "same": (x[:1].expand(90, -1), x[:1].expand(90, -1)),
        "prefix": (x, torch.cat([x[:40], y[40:]])),
    }
    x, y = (side.to(dtype) for side in kinds[name])
    exact = (x.double()[:, None] - y.double()[None]).norm(dim=2)
    ours = token_distances(x, y)
    assert ours.dtype == torch.float32
    assert_close(ours.double(), exact, rtol=1e-4, atol=0)
    assert (ours[exact == 0] == 0).all()


@pytest.mark.parametrize(
    ("cost", "eps", "message"),
    [
        (1.0, 0.0, "eps must be positive"),
        (1e30, 1e-30, "not finite"),
        (math.nan, 1.0, "not finite"),
    ],
)
def test_bad_arguments_and_costs_that_are_not_finite_are_named(cost, eps, message):
    """They are, as in `sinkhorn`; one cost of many is enough.

    An overflow in units of eps must not pass for a distance.
    """
    side = Side(None, None, Spans(torch.arange(4)[None], torch.full((1, 4), 0.25)))
    costs = torch.zeros(4, 4)
    costs[1, 2] = cost
    with pytest.raises(ValueError, match=message):
        race(costs, side, side, eps)
