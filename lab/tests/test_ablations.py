"""SHEAR by the hooks of `lab.fast` is the plain one; its ablations agree with slow loops."""

import math

import numpy as np
import ot
import pytest
import torch
from near import assert_near
from ragged import random_group
from scipy.spatial.distance import cdist, cosine
from torch.testing import assert_close
from weighing import FAST, weigh

from base.config import Shear
from credit.measures import closest_by_rollout
from lab.rules import ablations
from lab.rules.ablations import even_out
from shear import shear_weights, span_bounds

SPANS = dict(window=6, stride=3)


def slow_distance(name: str, x, y, eps: float, width: float) -> float:
    """Of the states of two spans."""
    apart = cdist(x, y)
    if name == "centroid":
        return np.linalg.norm(x.mean(0) - y.mean(0))
    if name == "cosine":
        return cosine(x.mean(0), y.mean(0))
    if name == "chamfer":
        return (apart.min(1).mean() + apart.min(0).mean()) / 2
    if name == "mmd":
        kernels = [np.exp(-((each / width) ** 2) / 2) for each in (cdist(x, x), cdist(y, y), apart)]
        square = kernels[0].mean() + kernels[1].mean() - 2 * kernels[2].mean()
        return math.sqrt(max(0.0, square))
    solved = ot.solve(apart, reg=eps, reg_type="KL", max_iter=5000, tol=1e-10)
    return float(solved.value if name == "value" else (solved.plan * apart).sum())


def slow_closest(hidden, mask, correct, name: str, eps: float) -> list[list[tuple]]:
    """The spans of each rollout: start, end, distance over nbar, the closest span's row and place."""
    states = [h[m].double().numpy() for h, m in zip(hidden, mask, strict=True)]
    spans = [span_bounds(len(rollout), **SPANS) for rollout in states]
    nbar = np.linalg.norm(np.concatenate(states), axis=1).mean()
    right = hidden[correct][mask[correct]].double()
    wrong = hidden[~correct][mask[~correct]].double()
    width = np.quantile(cdist(right, wrong), 0.5, method="lower")
    found = []
    for i, own in enumerate(states):
        found.append([])
        for start, end in spans[i]:
            distances = []
            for j, other in enumerate(states):
                for s, e in spans[j] if correct[j] != correct[i] else ():
                    distance = slow_distance(name, own[start:end], other[s:e], eps * nbar, width)
                    distances.append((distance / nbar, j, s, e))
            found[i].append((start, end, *min(distances)))
    return found


HOOKS = {
    "value": FAST,
    "cost": {"measure": ablations.transport_cost},
    "chamfer": {"measure": ablations.chamfer_distance},
    "centroid": {"closest": ablations.closest_by_centroid},
    "cosine": {"closest": ablations.closest_by_cosine},
    "mmd": {"closest": ablations.closest_by_mmd},
    "mean": {"pool": ablations.mean_weights},
}


@pytest.mark.parametrize("name", HOOKS)
def test_weights_and_closest_spans_are_those_of_a_slow_loop(name):
    """By the race, by the other reading of Eq. (10), and by the ablations of Fig. 5."""
    hidden, mask, correct = random_group(lengths=(14, 9, 4, 11, 0))
    distance = "value" if name == "mean" else name
    slow = slow_closest(hidden, mask, correct, distance, eps=0.5)
    pool = np.mean if name == "mean" else np.max
    expected = torch.zeros(mask.shape, dtype=torch.float64)
    for row, token in mask.nonzero().tolist():
        covering = [distance for start, end, distance, *_ in slow[row] if start <= token < end]
        expected[row, token] = pool(covering)
    settings = dict(eps=0.5, **SPANS)
    ours = weigh(hidden, mask, correct, HOOKS[name], **settings)
    near = {"chamfer": 2e-6, "cosine": 2e-6, "mmd": 1e-5}.get(name, 1e-3)  # `sinkhorn` stops early
    assert_near(ours.omega.double(), expected, near)
    closest = closest_by_rollout(ours, mask, correct, Shear(**settings))
    assert [len(spans) for spans in closest] == [len(spans) for spans in slow]
    for row in range(len(slow)):
        for found, wanted in zip(closest[row], slow[row], strict=True):
            assert found.distance == pytest.approx(wanted[2], abs=max(near, 1e-5))
            assert (*found[:2], *found[3:]) == (*wanted[:2], *wanted[3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", [dict(lengths=(30,) * 5, shared=18), dict(lengths=(23, 1, 7, 20, 6), dim=64)]
)
def test_the_fast_hooks_give_the_plain_weights(kind, dtype):
    """The race and the matrix product give the weights of plain computation to 1e-4.

    That solves every pair and takes differences of states; nbar is in float32.
    """
    hidden, mask, correct = random_group(13, **kind)
    hidden = hidden.to(dtype)
    plain = shear_weights(hidden, mask, correct, **SPANS).omega
    ours = weigh(hidden, mask, correct, **SPANS)
    assert_close(ours.omega, plain, atol=1e-4, rtol=0)
    assert plain[mask].min() >= 0 and plain.max() > 0.01
    assert ours.nbar == pytest.approx(hidden[mask].float().norm(dim=-1).mean().item())


def test_rollout_normalisation_evens_out_the_means():
    """Each rollout's mean weight is the group's, and its profile is kept.

    A rollout whose distances are float32's rounding of 0 has no profile to scale up.
    """
    omega = torch.tensor([[1e-14] * 4, [0.1, 0.2, 0.3, 0.0], [0.7] * 4])
    mask = torch.ones(3, 4).bool()
    mask[1, 3] = False
    expected = torch.tensor([[0.0] * 4, [0.5, 1, 1.5, 0], [1.0] * 4]) * omega.sum() / 11
    assert_near(even_out(omega, mask), expected, 1e-6)
