"""shear.py against a slow loop that calls POT; its hooks; what must change nothing."""

import functools
import math

import numpy as np
import ot
import pytest
import torch
from builders.groups import random_group, weigh, weights
from builders.near import assert_near
from scipy.spatial.distance import cdist
from torch.nn.functional import pad
from torch.testing import assert_close

import shear
from shear import closest_spans, shear_advantages, shear_weights, span_bounds

# ---- Algorithm 1 in float64, token by token, with POT per pair, to be read beside the paper ------


def paper_spans(length: int, window: int, stride: int) -> list[tuple[int, int]]:
    """Eq. (2) with the paper's 1-based a_k, b_k, until one reaches the end."""
    spans = []
    k = 1
    b = 0
    while b < length:
        a = 1 + (k - 1) * stride
        b = min(a + window - 1, length)
        spans.append((a - 1, b))
        k += 1
    return spans


def slow_closest(hidden, mask, correct, eps: float, window: int, stride: int) -> list[list[tuple]]:
    """The spans of each rollout, each with its distance to the closest opposing span.

    A span is (start, end, distance over nbar).
    """
    states = [h[m].double().numpy() for h, m in zip(hidden, mask, strict=True)]
    spans = [paper_spans(len(rollout), window, stride) for rollout in states]
    nbar = np.linalg.norm(np.concatenate(states), axis=1).mean()
    found = []
    for i, own in enumerate(states):
        found.append([])
        for start, end in spans[i]:
            distances = []
            for j, other in enumerate(states):
                if correct[j] == correct[i]:
                    continue
                for s, e in spans[j]:
                    apart = cdist(own[start:end], other[s:e])  # Eq. (3)
                    solved = ot.solve(
                        apart, reg=eps * nbar, reg_type="KL", max_iter=5000, tol=1e-10
                    )
                    distances.append(solved.value / nbar)  # Eq. (10)
            found[i].append((start, end, min(distances)))
    return found


def test_weights_are_those_of_a_slow_loop():
    """All four steps agree with a float64 loop; one rollout is empty and one below the window."""
    hidden, mask, correct = random_group(lengths=(17, 12, 4, 14, 9, 0))
    slow = slow_closest(hidden, mask, correct, eps=0.5, window=6, stride=3)
    expected = torch.zeros(mask.shape, dtype=torch.float64)
    for row, token in mask.nonzero().tolist():
        covering = [distance for start, end, distance in slow[row] if start <= token < end]
        expected[row, token] = max(covering)
    ours = weigh(hidden, mask, correct, eps=0.5, window=6, stride=3, tol=1e-7, max_iters=5000)
    assert ours.omega.dtype == torch.float32
    assert_near(ours.omega.double(), expected, 2e-6)
    of_right = [distance for row in slow[1:2] + slow[3:4] for _, _, distance in row]
    distances = (ours.closest.of_right / ours.nbar).tolist()
    assert distances == pytest.approx(of_right, abs=1e-5)


@pytest.mark.parametrize("length", [0, 1, 5, 6, 7, 8, 9, 31])
def test_spans_cover_every_token_and_stop_at_the_end(length):
    """They are those of Eq. (2), and K = 1 or 1 + ceil((T - w) / s) in number."""
    bounds = span_bounds(length, 6, 3)
    assert bounds == paper_spans(length, 6, 3)
    assert not length or len(bounds) == 1 + math.ceil(max(0, length - 6) / 3)


def test_default_tolerance_is_close_to_the_limit():
    """At the defaults' eps, tolerance and cap, weights are within 1% of a converged solve."""
    hidden, mask, correct = random_group(1)
    rough = weights(hidden, mask, correct, window=6, stride=3)
    exact = weights(hidden, mask, correct, tol=1e-5, max_iters=3000, window=6, stride=3)
    assert_close(rough, exact, atol=0, rtol=1e-2)


def test_scale_and_order_and_padding_change_nothing():
    """To 1e-5, h -> c h, order within a span, padding and order of rollouts change nothing.

    The scale changes nothing because eps is in units of nbar.
    """
    hidden, mask, correct = random_group(3, lengths=(6, 6, 6, 6, 6))
    exactly = functools.partial(weights, window=6, stride=6, tol=1e-6, max_iters=2000)
    omega = exactly(hidden, mask, correct)

    def close(other):
        assert_near(other, omega, 1e-5)

    close(exactly(1000 * hidden, mask, correct))
    close(exactly(hidden[:, torch.randperm(6)], mask, correct))
    inside = pad(mask.float(), (2, 3))
    before = inside.clone()
    wide = exactly(pad(hidden, (0, 0, 2, 3), value=math.nan), inside, correct)
    assert torch.equal(inside, before)
    close(wide[:, 2:8])
    assert not wide[before == 0].any()
    order = torch.tensor([4, 2, 0, 3, 1])
    shuffled = exactly(hidden[order], mask[order], correct[order])
    close(shuffled[order.argsort()])


def test_tiles_change_nothing(monkeypatch):
    """Pairs are solved on their own, so it does not matter how many are solved together."""
    hidden, mask, correct = random_group(4, lengths=(9, 12, 4, 7), shared=3)
    whole = weights(hidden, mask, correct, window=6, stride=3)
    monkeypatch.setitem(shear.TILE, "cpu", 300)
    assert_near(weights(hidden, mask, correct, window=6, stride=3), whole, 2e-6)


def test_no_opposing_set_means_weight_one():
    """Alg. 1 line 16: all right or all wrong gives ones on the mask.

    An empty rollout is in neither set.
    """
    hidden, mask, correct = random_group(5)
    for verdicts in (torch.ones(5), torch.zeros(5)):
        assert torch.equal(weights(hidden, mask, verdicts, window=6, stride=3), mask.float())
    mask[1] = False
    mask[3] = False  # the two right rollouts have no verdict
    assert torch.equal(weights(hidden, mask, correct, window=6, stride=3), mask.float())


def test_zero_states_have_weight_zero_and_states_that_are_not_finite_are_refused():
    """nbar = 0 must not divide 0 by 0.

    A NaN on a response token would spread silently into the group's credit.
    """
    hidden, mask, correct = random_group(8)
    assert weights(0 * hidden, mask, correct, window=6, stride=3).abs().max() == 0
    for value in (math.nan, math.inf):
        hidden[0, 3, 0] = value
        with pytest.raises(ValueError, match="hidden states"):
            weights(hidden, mask, correct, window=6, stride=3)


def test_advantages_are_rollout_advantages_times_weights():
    """By Alg. 1 line 18 the sign of A stays; padding has 0, and autograd sees a constant."""
    hidden, mask, correct = random_group(12)
    hidden.requires_grad_()
    advantages = torch.linspace(-1, 1, 5)

    def closest(costs, *spans_and_eps):
        assert not costs.requires_grad
        return closest_spans(costs, *spans_and_eps)

    omega = shear_weights(hidden, mask, correct, closest=closest, window=6, stride=3).omega
    ours = shear_advantages(advantages, omega)
    plain = shear_weights(hidden, mask, correct, window=6, stride=3).omega
    assert torch.equal(ours, advantages[:, None] * plain)
    assert (ours.sign() == advantages.sign()[:, None] * mask).all() and not ours.requires_grad


def test_statistics_are_of_every_pair_of_spans():
    """`closest` says how many iterations each pair took, and how far off its marginals are."""
    hidden, mask, correct = random_group(14)
    closest = weigh(hidden, mask, correct, window=6, stride=3, max_iters=2).closest
    pairs = len(closest.of_right) * len(closest.of_wrong)
    assert len(closest.iterations) == len(closest.error) == pairs
    assert closest.iterations.max() == 2
    rough = weigh(hidden, mask, correct, window=6, stride=3, tol=0.3).closest
    assert 0.01 < rough.error.max() <= 0.3
    assert weigh(hidden, mask, torch.ones(5), window=6, stride=3).closest is None


def test_eps_may_be_in_units_of_nbar_or_of_the_distances():
    """W_eps(C) / nbar = W_{eps / nbar}(C / nbar): raw eps is eps / nbar in the other unit."""
    hidden, mask, correct = random_group(15)
    nbar = hidden[mask].norm(dim=-1).mean().item()
    assert abs(nbar - 1) > 0.5
    raw = weigh(hidden, mask, correct, eps=0.7, eps_unit="raw", window=6, stride=3)
    assert raw.nbar == pytest.approx(nbar)
    assert_close(raw.omega, weights(hidden, mask, correct, eps=0.7 / nbar, window=6, stride=3))
    scaled = weights(3 * hidden, mask, correct, eps=2.1, eps_unit="raw", window=6, stride=3)
    assert_close(scaled, raw.omega, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(window=0), "window must be at least 1"),
        (dict(window=4, stride=5), "stride must be between 1 and the window"),
        (dict(stride=0), "stride must be between 1 and the window"),
    ],
)
def test_bad_options_are_named(options, message):
    """They are, before anything is solved."""
    with pytest.raises(ValueError, match=message):
        weights(*random_group(14), **options)
