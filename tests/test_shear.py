"""shear.py and its settings against a slow loop that calls POT; hooks; invariances."""

import functools
import math
from dataclasses import replace

import numpy as np
import ot
import pytest
import torch
from builders.groups import random_group, weigh, weights
from builders.near import assert_near
from scipy.spatial.distance import cdist, cosine
from torch.nn.functional import pad
from torch.testing import assert_close

from credit import ablations
from credit.ablations import even_out
from credit.settings import Shear
from credit.shear_settings import closest_by_rollout, shear_options
from shear import (
    closest_spans,
    shear_advantages,
    shear_weights,
    span_bounds,
)

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


def slow_distance(name: str, x, y, eps: float, width: float) -> float:
    """Of two spans' states."""
    apart = cdist(x, y)
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


def slow_closest(
    hidden, mask, correct, name: str, eps: float, window: int, stride: int
) -> list[list[tuple]]:
    """The spans of each rollout, with the distance to the closest opposing span and its place.

    Distances are over nbar.
    """
    states = [h[m].double().numpy() for h, m in zip(hidden, mask, strict=True)]
    spans = [paper_spans(len(rollout), window, stride) for rollout in states]
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


@pytest.mark.parametrize(
    "name, options",
    [
        ("value", {}), ("cost", dict(reading="cost")), ("value", dict(pool="mean")),
        *((name, dict(distance=name)) for name in ("cosine", "chamfer", "mmd")),
    ],
)  # fmt: skip
def test_weights_and_closest_spans_are_those_of_a_slow_loop(name, options):
    """All four steps, both readings and the ablations of Fig. 5 agree with a slow loop.

    One rollout is empty and one below the window.
    """
    hidden, mask, correct = random_group(lengths=(17, 12, 4, 14, 9, 0))
    slow = slow_closest(hidden, mask, correct, name, eps=0.5, window=6, stride=3)
    pool = np.mean if options.get("pool") else np.max
    expected = torch.zeros(mask.shape, dtype=torch.float64)
    for row, token in mask.nonzero().tolist():
        covering = [distance for start, end, distance, *_ in slow[row] if start <= token < end]
        expected[row, token] = pool(covering)
    ours = weigh(
        hidden, mask, correct, eps=0.5, **options, window=6, stride=3, tol=1e-7, max_iters=5000
    )
    assert ours.omega.dtype == torch.float32
    assert_near(ours.omega.double(), expected, 1e-5 if name == "mmd" else 2e-6)
    if not options:  # and shear.py and sinkhorn.py alone
        closest = functools.partial(closest_spans, tol=1e-7, max_iters=5000)
        plain = shear_weights(
            hidden, mask, correct, eps=0.5, closest=closest, window=6, stride=3
        ).omega
        assert_near(plain.double(), expected, 2e-6)  # what float32 reaches
    closest = closest_by_rollout(ours, mask, correct, Shear(window=6, stride=3))
    assert [len(spans) for spans in closest] == [len(spans) for spans in slow]
    for row in range(len(slow)):
        for found, wanted in zip(closest[row], slow[row], strict=True):
            assert found.distance == pytest.approx(wanted[2], abs=1e-5)
            assert (*found[:2], *found[3:]) == (*wanted[:2], *wanted[3:])


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


def test_chunking_changes_nothing(monkeypatch):
    """Pairs are solved on their own, so the chunk size is invisible (of the race: test_race.py)."""
    hidden, mask, correct = random_group(4, lengths=(9, 12, 4, 7), shared=3)
    whole = weights(hidden, mask, correct, reading="cost", window=6, stride=3)
    monkeypatch.setitem(ablations.TILE_ENTRIES, "cpu", 300)
    assert_near(weights(hidden, mask, correct, reading="cost", window=6, stride=3), whole, 2e-6)


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


def test_rollout_normalisation_evens_out_the_means():
    """By normalize="rollout" each mean weight is the group's, and its profile is kept."""
    hidden, mask, correct = random_group(10)
    plain = weights(hidden, mask, correct, window=6, stride=3)
    even = weights(hidden, mask, correct, normalize="rollout", window=6, stride=3)
    means = even.sum(1) / mask.sum(1)
    assert_near(means, (plain.sum() / mask.sum()).expand(5), 1e-6)
    assert_near(even[0] / even[0, 0], plain[0] / plain[0, 0], 1e-5)


def test_rollout_normalisation_leaves_dust_alone():
    """A rollout whose distances are float32's rounding of 0 has no profile to scale up.

    Its weights are 0, not the mean.
    """
    omega = torch.tensor([[1e-14] * 12, [1e-14, 3e-14] * 6, [0.7] * 12])
    even = even_out(omega, torch.ones(3, 12).bool())
    assert even[:2].abs().max() == 0
    assert_close(even[2], torch.full((12,), 0.7 / 3))


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


KINDS = [
    dict(lengths=(30,) * 5, shared=18),
    dict(lengths=(23, 1, 7, 20, 6), dim=64),
    dict(lengths=(5, 4, 3, 2, 5)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_hooks_of_training_give_the_plain_weights(kind, dtype):
    """The race and the matrix product give the weights of plain computation to 1e-5.

    That solves every pair and takes differences of states; nbar is in float32.
    """
    hidden, mask, correct = random_group(13, **kind)
    hidden = hidden.to(dtype)
    plain = shear_weights(hidden, mask, correct, window=6, stride=3).omega
    ours, nbar, closest = weigh(hidden, mask, correct, window=6, stride=3)
    assert_close(ours, plain, atol=1e-6, rtol=1e-5)
    assert plain[mask].min() >= 0 and plain.max() > 0.01
    assert nbar == pytest.approx(hidden[mask].float().norm(dim=-1).mean().item())
    assert (closest.iterations >= 1).all() and (closest.error >= 0).all()


def test_statistics_are_of_every_solved_group_and_reading():
    """The reading "cost" solves all pairs to the end.

    Other distances and groups of one verdict solve nothing. The numbers show that training races
    with the iterations and the tolerance of the settings.
    """
    hidden, mask, correct = random_group(14)

    def closest(correct=correct, **options):
        return weigh(hidden, mask, correct, window=6, stride=3, **options).closest

    of_cost = closest(reading="cost")
    assert len(of_cost.iterations) == len(of_cost.error)
    assert closest(distance="chamfer").error is None
    assert closest(pool="mean", max_iters=2).iterations.max() == 2
    assert 0.01 < closest(tol=0.3).error.max() <= 0.3
    assert closest(torch.ones(5)) is None


@pytest.mark.parametrize("options", [dict(), dict(reading="cost")])
def test_eps_may_be_in_units_of_nbar_or_of_the_distances(options):
    """W_eps(C) / nbar = W_{eps / nbar}(C / nbar): raw eps is eps / nbar in the other unit."""
    hidden, mask, correct = random_group(15)
    nbar = hidden[mask].norm(dim=-1).mean().item()
    raw = Shear(eps=0.7, eps_unit="raw", window=6, stride=3)
    given = shear_options(raw, **options)
    ours, found, _ = shear_weights(hidden, mask, correct, **given)
    assert_close(
        ours, weights(hidden, mask, correct, eps=0.7 / nbar, window=6, stride=3, **options)
    )
    assert found == pytest.approx(nbar) and abs(nbar - 1) > 0.5
    assert raw.eps_over(nbar) == pytest.approx(0.7 / nbar)
    larger = replace(raw, eps=2.1)  # eps in the unit of the distances
    given = shear_options(larger, **options)
    scaled = shear_weights(3 * hidden, mask, correct, **given).omega
    assert_close(scaled, ours, atol=1e-6, rtol=1e-4)


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
