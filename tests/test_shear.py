"""shear.py: Algorithm 1 line by line, then the whole against a slow loop, then what changes nothing.

Hidden states are written down or drawn on the spot. A wrong variant beside a line must fail.
"""

import math
from functools import partial

import ot
import pytest
import torch
from builders.groups import random_group, solved_within
from torch.nn.functional import pad
from torch.testing import assert_close

import shear
from shear import (
    algorithm_1,
    closest_spans,
    mean_norm,
    shear_advantages,
    shear_weights,
    span_bounds,
    token_distances,
    token_weights,
    two_sides,
)
from sinkhorn import sinkhorn, take_counts

SPANS = dict(window=6, stride=3)
ONE_TOKEN = dict(window=1, stride=1)


def diracs(*rollouts: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (G, T, 1) and mask (G, T) of rollouts of numbers, as long as the first."""
    hidden = torch.tensor(rollouts)[:, :, None]
    return hidden, torch.ones(hidden.shape[:2])


# ---- line by line --------------------------------------------------------------------------------


def paper_spans(length: int, window: int, stride: int) -> list[tuple[int, int]]:
    """Eq. (2) with the paper's 1-based a_k and b_k, until a span reaches the end."""
    spans = []
    k = 1
    b = 0
    while b < length:
        a = 1 + (k - 1) * stride
        b = min(a + window - 1, length)
        spans.append((a - 1, b))
        k += 1
    return spans


@pytest.mark.parametrize("length", [0, 1, 5, 6, 7, 8, 9, 31])
def test_spans_cover_every_token_and_stop_at_the_end(length):
    """Eq. (2): K = 1 or 1 + ceil((T - w) / s), and the last span is the first that ends at T."""
    bounds = span_bounds(length, 6, 3)
    assert bounds == paper_spans(length, 6, 3)
    assert not length or len(bounds) == 1 + math.ceil(max(0, length - 6) / 3)


def test_the_cost_is_the_euclidean_distance(must_fail):
    """Eq. (3): ||x - y||, not squared; equal states of norm 90 are exactly 0 apart."""
    x = torch.randn(7, 64)
    x *= 90 / x.norm(dim=1, keepdim=True)
    y = x + torch.randn(7, 64)
    expected = (x[:, None] - y).norm(dim=-1)
    assert_close(token_distances(x, y), expected)
    assert not token_distances(x, x).diagonal().any()
    with must_fail("squared"):
        assert_close(token_distances(x, y), expected**2)


def test_right_and_wrong_rollouts_oppose_each_other(must_fail):
    """Eq. (4): O_i is the other side; spans stay within their rollout; no verdict, no side."""
    hidden, mask, correct = random_group(8, 7, 3, 0)
    right, wrong = two_sides(hidden[mask.bool()], mask, correct, **SPANS)
    assert torch.equal(right.states, hidden[1, :7])
    assert torch.equal(wrong.states, torch.cat([hidden[0, :8], hidden[2, :3]]))
    starts = wrong.spans.tokens[:, 0].tolist()
    assert starts == [0, 3, 8]
    assert_close(wrong.spans.mass[2], torch.tensor([1 / 3] * 3 + [0.0] * 3))
    with must_fail("spans of one long rollout"):
        assert starts == [start for start, _ in paper_spans(11, **SPANS)]


def test_line_5_the_closest_span_of_all_opposing_rollouts(must_fail):
    """Line 5: d_k is the minimum over the spans of every opposing rollout, at any place."""
    hidden, mask = diracs([5.0, 9.0], [1.0, 2.0], [4.0, 2.0])
    correct = torch.tensor([1, 0, 0])
    closest = shear_weights(hidden, mask, correct, **ONE_TOKEN).closest
    assert_close(closest.of_right, torch.tensor([1.0, 5]))
    assert_close(closest.of_wrong, torch.tensor([4.0, 3, 1, 3]))
    assert closest.right_to.tolist() == [2, 2] and closest.wrong_to.tolist() == [0, 0, 0, 0]
    with must_fail("the span at the same place"):
        assert_close(closest.of_right, torch.tensor([1.0, 7]))


def test_line_10_nbar_is_the_mean_norm_of_all_tokens_of_the_group(must_fail):
    """Line 10: right and wrong rollouts count, a token each; padding does not."""
    hidden, mask = diracs([3.0, 3.0, 3.0, 3.0], [-8.0, 100.0, 100.0, 100.0])
    mask[1, 1:] = 0
    nbar = shear_weights(hidden, mask, torch.tensor([1, 0]), **ONE_TOKEN).nbar
    assert nbar == pytest.approx(4) == mean_norm(hidden[mask.bool()])
    with must_fail("the mean over rollouts of their means"):
        assert nbar == pytest.approx((3 + 8) / 2)


def test_line_14_a_token_has_the_largest_distance_of_its_spans(must_fail):
    """Line 14: max pooling, over the spans that cover a token."""
    spans = shear.spans_of(torch.ones(1, 8).bool(), window=4, stride=2)
    omega = token_weights(torch.tensor([1.0, 5, 3]), spans)
    assert omega.tolist() == [1, 1, 5, 5, 5, 5, 3, 3]
    with must_fail("mean pooling"):
        assert omega.tolist() == [1, 1, 3, 3, 4, 4, 3, 3]


def test_no_opposing_set_means_weight_one():
    """Line 16: all right or all wrong gives 1 on the mask; an empty rollout is on no side."""
    hidden, mask, correct = random_group(9, 7, 8)
    for verdicts in (torch.ones(3), torch.zeros(3)):
        weighed = shear_weights(hidden, mask, verdicts, **SPANS)
        assert torch.equal(weighed.omega, mask.float()) and weighed.closest is None
        assert (torch.cat(algorithm_1(list(hidden), verdicts, torch.ones(3), **SPANS)) == 1).all()
    mask[1] = False  # the right one has no verdict
    assert torch.equal(shear_weights(hidden, mask, correct, **SPANS).omega, mask.float())


def test_advantages_are_rollout_advantages_times_weights(must_fail):
    """Line 18: A omega for each token; the sign of A stays, and autograd sees a constant."""
    hidden, mask, correct = random_group(9, 7, 8)
    advantages = torch.tensor([-0.5, 1, -0.5])

    def closest(costs, *others):
        assert not costs.requires_grad  # their graph would keep all of them
        return closest_spans(costs, *others)

    hidden.requires_grad_()
    omega = shear_weights(hidden, mask, correct, closest=closest, **SPANS).omega
    ours = shear_advantages(advantages, omega)
    for row in range(3):
        assert torch.equal(ours[row], advantages[row] * omega[row])
    assert torch.equal(ours.sign(), advantages.sign()[:, None] * mask)
    assert not ours.requires_grad
    with must_fail("weights of mean 1"):
        assert_close(ours, advantages[:, None] * omega / omega[mask].mean())


# ---- the whole -----------------------------------------------------------------------------------


def slow_weights(hidden, mask, correct, eps: float, window: int, stride: int) -> torch.Tensor:
    """Algorithm 1 in float64, a rollout, a span, a token at a time, with POT for each pair."""
    states = [rollout[kept].double() for rollout, kept in zip(hidden, mask, strict=True)]
    nbar = torch.cat(states).norm(dim=1).mean()
    omega = torch.zeros(mask.shape, dtype=torch.float64)
    for i, own in enumerate(states):
        opposing = [j for j in range(len(states)) if correct[j] != correct[i]]
        for start, end in paper_spans(len(own), window, stride):
            distances = []
            for j in opposing:
                for first, last in paper_spans(len(states[j]), window, stride):
                    cost = (own[start:end, None] - states[j][first:last]).norm(dim=-1)
                    solved = ot.solve(cost, reg=eps * nbar, reg_type="KL", max_iter=5000, tol=1e-10)
                    distances.append(solved.value / nbar)
            omega[i, start:end] = omega[i, start:end].clamp(min=min(distances))
    return omega


def test_weights_are_those_of_a_slow_loop(must_fail):
    """Algorithm 1 as a whole; a rollout is empty, one shorter than the window."""
    hidden, mask, correct = random_group(9, 12, 4, 7, 0)
    expected = slow_weights(hidden, mask, correct, eps=0.5, **SPANS)
    measure = solved_within(max_iters=5000, tol=1e-7)
    omega = shear_weights(hidden, mask, correct, eps=0.5, measure=measure, **SPANS).omega
    assert omega.dtype == torch.float32
    assert_close(omega.double(), expected, atol=2e-6, rtol=0)
    advantages = torch.tensor([0.5, -1.0, 2.0, 0.3, -0.7])
    ours = shear_advantages(advantages, omega)
    states = [rollout[kept] for rollout, kept in zip(hidden, mask.bool(), strict=True)]
    listed = algorithm_1(states, correct, advantages, eps=0.5, measure=measure, **SPANS)
    for row, token_advantages in enumerate(listed):
        assert_close(ours[row][mask[row].bool()], token_advantages, atol=2e-6, rtol=0)
    with must_fail("the sides exchanged"):
        other = shear_weights(hidden, mask, correct.roll(1), eps=0.5, **SPANS).omega
        assert_close(other.double(), expected, atol=1e-2, rtol=0)


def test_default_weights_are_those_of_a_converged_solve_to_a_ten_thousandth(must_fail):
    """At all defaults, window 100 among them, on random walks that part after 60 tokens."""
    steps = torch.randn(3, 200, 16)
    steps[:, :60] = steps[0, :60]
    walks = steps.cumsum(1)
    mask = torch.ones(3, 200)
    correct = torch.tensor([1, 0, 0])

    def converged(costs, a, b, eps):
        return sinkhorn(costs.double(), a, b, eps=eps, max_iters=20_000, tol=1e-9).value.float()

    ours = shear_weights(walks, mask, correct).omega
    exact = shear_weights(walks, mask, correct, measure=converged).omega
    assert_close(ours, exact, atol=0, rtol=1e-4)
    with must_fail("another eps"):
        assert_close(shear_weights(walks, mask, correct, eps=0.04).omega, exact, atol=0, rtol=1e-4)


def test_eps_may_be_in_units_of_nbar_or_of_the_distances(must_fail):
    """W_eps(C) / nbar = W_{eps / nbar}(C / nbar): raw eps is eps / nbar in the other unit."""
    hidden, mask, correct = random_group(9, 12, 4)
    nbar = hidden[mask].norm(dim=-1).mean().item()
    raw = shear_weights(hidden, mask, correct, eps=0.7, eps_unit="raw", **SPANS).omega
    assert_close(raw, shear_weights(hidden, mask, correct, eps=0.7 / nbar, **SPANS).omega)
    with must_fail("eps itself"):
        assert_close(raw, shear_weights(hidden, mask, correct, eps=0.7, **SPANS).omega)


def test_scale_and_order_and_padding_change_nothing(must_fail):
    """h -> c h, the order within a span, the order of rollouts and padding change nothing.

    The scale does not because eps is in units of nbar.
    """
    hidden, mask, correct = random_group(6, 6, 6, 6)
    measure = solved_within(max_iters=2000, tol=1e-6)
    exactly = partial(shear_weights, window=6, stride=6, eps=0.5, measure=measure)
    omega = exactly(hidden, mask, correct).omega
    near = partial(assert_close, atol=1e-5, rtol=0)
    near(exactly(1000 * hidden, mask, correct).omega, omega)
    with must_fail("a scale, where eps is raw"):
        near(exactly(1000 * hidden, mask, correct, eps_unit="raw").omega, omega)
    near(exactly(hidden[:, torch.randperm(6)], mask, correct).omega, omega)
    order = torch.tensor([3, 2, 0, 1])
    near(exactly(hidden[order], mask[order], correct[order]).omega, omega[order])
    wider = pad(hidden, (0, 0, 2, 3), value=math.nan)
    wide = exactly(wider, pad(mask, (2, 3)), correct).omega
    near(wide, pad(omega, (2, 3)))


def test_tiles_change_nothing(monkeypatch):
    """Pairs are solved on their own, so it does not matter how many are solved together."""
    hidden, mask, correct = random_group(9, 12, 4, 7)
    whole = shear_weights(hidden, mask, correct, **SPANS).omega
    monkeypatch.setitem(shear.TILE, "cpu", 300)
    assert_close(shear_weights(hidden, mask, correct, **SPANS).omega, whole, atol=2e-6, rtol=0)


def test_pairs_that_do_not_converge_are_counted():
    """The counts are of every pair of spans, since they were last taken."""
    hidden, mask, correct = random_group(9, 12, 4)
    take_counts()
    closest = shear_weights(hidden, mask, correct, **SPANS).closest
    pairs = len(closest.of_right) * len(closest.of_wrong)
    assert pairs == 3 * 3 and take_counts() == (0, pairs) and take_counts() == (0, 0)
    shear_weights(hidden, mask, correct, measure=solved_within(2, 1e-12), **SPANS)
    assert take_counts() == (pairs, pairs)


# ---- what is refused -----------------------------------------------------------------------------


def test_zero_states_have_weight_zero_and_states_that_are_not_finite_are_refused():
    """nbar = 0 must not divide 0 by 0; a NaN of one token would spread into the group's credit."""
    hidden, mask, correct = random_group(9, 7, 8)
    assert not shear_weights(0 * hidden, mask, correct, **SPANS).omega.any()
    for value in (math.nan, math.inf):
        hidden[0, 3, 0] = value
        with pytest.raises(ValueError, match="hidden states"):
            shear_weights(hidden, mask, correct, **SPANS)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(window=0), "window must be at least 1"),
        (dict(window=4, stride=5), "stride must be between 1 and the window"),
        (dict(stride=0), "stride must be between 1 and the window"),
        (dict(eps_unit="Nbar"), "eps_unit must be"),
        (dict(correct=torch.tensor([-1, 1])), "correct must be bool, or 0 and 1; it has -1"),
        (dict(correct=torch.tensor([0.5, 1])), "correct must be bool, or 0 and 1; it has 0.5"),
    ],
)
def test_bad_options_are_named(options, message):
    """They are, also where nothing is solved."""
    hidden, mask, _ = random_group(9, 7)
    with pytest.raises(ValueError, match=message):
        shear_weights(**{"hidden": hidden, "mask": mask, "correct": torch.ones(2), **options})
