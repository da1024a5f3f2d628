"""shear.py and its settings against a slow loop that calls POT; the hooks; the invariances of Algorithm 1."""

import functools
import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import ot
import pytest
import torch

from credit import ablations, shear_settings
from credit.ablations import evened_out
from credit.shear_settings import Settings, closest_by_rollout, group_weights, pair_distances
from fast import race
from shear import closest_spans, shear_advantages, shear_weights, span_bounds, token_distances, token_weights, two_sides

SMALL = dict(window=6, stride=3)
EXACT = dict(eps=0.3, tol=1e-9, max_iters=5000)


def group(seed: int = 0, lengths=(17, 12, 4, 20, 9), dim: int = 5, shared: int = 0):
    """Hidden states (G, T, d), mask (G, T), correct (G,): rollouts 1, 3 are right; the first `shared` states equal."""
    generator = torch.Generator().manual_seed(seed)
    hidden = 3 * torch.randn(len(lengths), max(lengths), dim, generator=generator)
    hidden[:, :shared] = hidden[:1, :shared]
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    correct = torch.tensor([index in (1, 3) for index in range(len(lengths))])
    return hidden, mask, correct


def weights(hidden, mask, correct, **options):
    """As training computes them: by the fast hooks, or an ablation."""
    return group_weights(hidden, mask, correct, Settings(**options))


def slow_weights(hidden, mask, correct, window, stride, eps, reading):
    """Algorithm 1 in float64, token by token, with POT for each pair: written to be read beside the paper."""
    states = [h[m].double().numpy() for h, m in zip(hidden, mask, strict=True)]
    nbar = np.mean([np.linalg.norm(h) for rollout in states for h in rollout])
    omega = np.zeros(mask.shape)
    for i, rollout in enumerate(states):
        opposing = [j for j in range(len(states)) if bool(correct[j]) != bool(correct[i]) and len(states[j])]
        for t in range(len(rollout)):
            covering = []
            for start, end in paper_spans(len(rollout), window, stride):
                if start <= t < end:
                    others = [states[j][s:e] for j in opposing for s, e in paper_spans(len(states[j]), window, stride)]
                    own = rollout[start:end]
                    covering.append(min(pot_distance(own, other, eps * nbar, reading) for other in others))
            omega[i, t] = max(covering) / nbar
    return torch.tensor(omega)


def paper_spans(length: int, window: int, stride: int) -> list[tuple[int, int]]:
    """Eq. (2) with the paper's 1-based a_k, b_k, until one reaches the end."""
    spans, k = [], 1
    while True:
        a = 1 + (k - 1) * stride
        b = min(a + window - 1, length)
        spans.append((a - 1, b))
        if b == length:
            return spans
        k += 1


_cache = {}


def pot_distance(x, y, eps, reading):
    """Eq. (10) or <P, C> by POT."""
    key = (x.tobytes(), y.tobytes(), eps)
    if key not in _cache:
        cost = ot.dist(x, y, metric="euclidean")
        solved = ot.solve(cost, reg=eps, reg_type="KL", max_iter=5000, tol=1e-10)
        _cache[key] = {"value": float(solved.value), "cost": float((solved.plan * cost).sum())}
    return _cache[key][reading]


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 8, 9, 30, 31])
def test_spans_cover_every_token_and_stop_at_the_end(length):
    """Eq. (2): K = 1 or 1 + ceil((T - w) / s); the last span reaches the end and has more than w - s tokens."""
    bounds = span_bounds(length, 6, 3)
    assert bounds == paper_spans(length, 6, 3)
    assert len(bounds) == (1 if length <= 6 else 1 + math.ceil((length - 6) / 3))
    assert set().union(*(range(*span) for span in bounds)) == set(range(length))
    assert bounds[-1][1] - bounds[-1][0] >= min(length, 6 - 3 + 1)
    assert span_bounds(0, 6, 3) == []


@pytest.mark.parametrize("reading", ["value", "cost"])
def test_weights_agree_with_the_slow_loop(reading):
    """All four steps, rollouts of any length (two below the window), against POT in float64."""
    hidden, mask, correct = group()
    ours = weights(hidden, mask, correct, reading=reading, **SMALL, **EXACT)
    slow = slow_weights(hidden, mask, correct, reading=reading, eps=0.3, **SMALL)
    assert ours.dtype == torch.float32 and ours.shape == mask.shape
    torch.testing.assert_close(ours.double(), slow, atol=2e-6, rtol=0)
    if reading == "value":  # and shear.py and sinkhorn.py alone
        closest = functools.partial(closest_spans, tol=1e-9, max_iters=5000)
        plain = shear_weights(hidden, mask, correct, eps=0.3, closest=closest, **SMALL)
        torch.testing.assert_close(plain.double(), slow, atol=2e-6, rtol=0)


def closest_spans_of(hidden, mask, correct, settings: Settings) -> list[list]:
    """What a solve of a group leaves for the page."""
    stats = defaultdict(list)
    group_weights(hidden, mask, correct, settings, stats)
    found = stats["closest"][0] if stats["closest"] else None
    return closest_by_rollout(found, mask, correct, settings.window, settings.stride)


@pytest.mark.parametrize("reading", ["value", "cost"])
def test_the_closest_opposing_span_is_the_one_that_pot_finds(reading):
    """Its rollout, its place and its distance; one rollout is empty and two are below the window."""
    hidden, mask, correct = group(lengths=(17, 12, 4, 0, 9))
    settings = Settings(window=6, stride=3, eps=0.3, reading=reading, max_iters=3000, tol=1e-6)
    found = closest_spans_of(hidden, mask, correct, settings)
    states = [h[m].double().numpy() for h, m in zip(hidden, mask, strict=True)]
    nbar = np.mean([np.linalg.norm(h) for rollout in states for h in rollout])
    for row, spans in enumerate(found):
        assert [span[:2] for span in spans] == (paper_spans(len(states[row]), 6, 3) if row != 3 else [])
        for start, end, distance, *closest in spans:
            measured = []
            for other in range(5):
                if correct[other] != correct[row] and len(states[other]):
                    for s, e in paper_spans(len(states[other]), 6, 3):
                        pair = states[row][start:end], states[other][s:e]
                        measured.append((pot_distance(*pair, 0.3 * nbar, reading) / nbar, other, s, e))
            lowest, *place = min(measured)
            assert closest == place and distance == pytest.approx(lowest, abs=1e-4)
    assert closest_spans_of(hidden, mask, torch.ones(5, dtype=torch.bool), settings) == [[], [], [], [], []]


def test_default_tolerance_is_close_to_the_limit():
    """At the defaults' eps, tolerance and cap, weights are within 1% of a converged solve."""
    hidden, mask, correct = group(1)
    rough = weights(hidden, mask, correct, **SMALL)
    exact = weights(hidden, mask, correct, tol=1e-9, max_iters=20_000, **SMALL)
    torch.testing.assert_close(rough, exact, atol=0, rtol=1e-2)


def test_shared_spans_have_no_cost_and_a_value_within_eps_log_n():
    """Where both sides share a prefix, `cost` vanishes and `value` stays within eps log(window)."""
    hidden, mask, correct = group(2, lengths=(30, 30, 30, 30, 30), shared=18)
    cost = weights(hidden, mask, correct, reading="cost", eps=0.02, **SMALL)
    value = weights(hidden, mask, correct, reading="value", eps=0.02, **SMALL)
    alone = slice(0, 12)  # tokens whose spans all end within the shared prefix
    assert cost[:, alone].max() < 1e-4 and cost[:, 24:].min() > 0.05
    assert value[:, alone].min() > 0.03 and value[:, alone].max() <= 0.02 * math.log(6) + 1e-5


def test_scale_and_order_and_padding_change_nothing():
    """h -> c h (eps is in units of nbar), tokens inside a span, columns of padding, rollouts: to 1e-5."""
    hidden, mask, correct = group(3, lengths=(6, 6, 6, 6, 6))
    options = dict(window=6, stride=6, tol=1e-6, max_iters=2000)
    omega = weights(hidden, mask, correct, **options)

    def close(other):
        torch.testing.assert_close(other, omega, atol=1e-5, rtol=0)

    close(weights(1000 * hidden, mask, correct, **options))
    close(weights(hidden[:, torch.randperm(6)], mask, correct, **options))
    padded = torch.cat([torch.full((5, 2, 5), math.nan), hidden, torch.full((5, 3, 5), math.nan)], 1)
    inside = torch.cat([torch.zeros(5, 2), mask.float(), torch.zeros(5, 3)], 1)
    before = inside.clone()
    wide = weights(padded, inside, correct, **options)
    assert torch.equal(inside, before)
    close(wide[:, 2:8])
    assert wide[:, :2].abs().max() == 0 and wide[:, 8:].abs().max() == 0
    order = torch.tensor([4, 2, 0, 3, 1])
    shuffled = weights(hidden[order], mask[order], correct[order], **options)
    close(shuffled[order.argsort()])


@pytest.mark.parametrize("reading", ["value", "cost"])
@pytest.mark.parametrize("entries", [1, 1000])
def test_chunking_changes_nothing(entries, reading, monkeypatch):
    """Pairs are solved on their own, so the chunk size is invisible, in the race and without."""
    hidden, mask, correct = group(4, shared=3)
    whole = weights(hidden, mask, correct, reading=reading, **SMALL)
    monkeypatch.setitem(ablations.TILE_ENTRIES, "cpu", entries)
    monkeypatch.setitem(race.CHUNK_ENTRIES, "cpu", entries)
    ours = weights(hidden, mask, correct, reading=reading, **SMALL)
    torch.testing.assert_close(ours, whole, atol=2e-6, rtol=0)


def test_no_opposing_set_means_weight_one():
    """Alg. 1 line 16: all right or all wrong gives ones on the mask; an empty rollout is in neither set."""
    hidden, mask, correct = group(5)
    for verdicts in (torch.ones(5), torch.zeros(5)):
        assert torch.equal(weights(hidden, mask, verdicts, **SMALL), mask.float())
    mask[1], mask[3] = False, False  # the two right rollouts have no verdict
    assert torch.equal(weights(hidden, mask, correct, **SMALL), mask.float())


def test_a_rollout_without_mask_is_as_if_absent():
    """It enters neither a set nor nbar, and gets weight 0."""
    hidden, mask, correct = group(6)
    hidden[4] = 1e6
    mask[4] = False
    omega = weights(hidden, mask, correct, **SMALL)
    without = weights(hidden[:4], mask[:4], correct[:4], **SMALL)
    torch.testing.assert_close(omega[:4], without, atol=1e-6, rtol=0)
    assert omega[4].abs().max() == 0


def test_all_zero_states_give_zero_not_nan():
    """nbar = 0 must not divide 0 by 0."""
    _, mask, correct = group(8)
    assert weights(torch.zeros(5, 20, 5), mask, correct, **SMALL).abs().max() == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_states_that_are_not_finite_are_refused(value):
    """A NaN on a response token would otherwise spread silently into the whole group's credit."""
    hidden, mask, correct = group(8)
    hidden[0, 3, 0] = value
    with pytest.raises(ValueError, match="hidden states"):
        weights(hidden, mask, correct, **SMALL)


def span_pairs(hidden, mask, correct, distance):
    """Slow token weights for the ablations' distances: numpy, one span at a time."""
    states = [h[m].double().numpy() for h, m in zip(hidden, mask, strict=True)]
    nbar = np.mean([np.linalg.norm(h) for rollout in states for h in rollout])
    right = np.concatenate([s for s, c in zip(states, correct, strict=True) if c])
    wrong = np.concatenate([s for s, c in zip(states, correct, strict=True) if not c])
    cross = np.sort(ot.dist(right, wrong, metric="euclidean").ravel())
    width = cross[(len(cross) - 1) // 2]  # torch's median: the lower one

    def kernel(x, y):
        return np.mean([math.exp(-np.sum((p - q) ** 2) / (2 * width**2)) for p in x for q in y])

    def measure(x, y):
        if distance == "cosine":
            u, v = x.mean(0), y.mean(0)
            return (1 - u @ v / np.linalg.norm(u) / np.linalg.norm(v)) / nbar
        if distance == "chamfer":
            near = np.mean([min(np.linalg.norm(p - q) for q in y) for p in x])
            return (near + np.mean([min(np.linalg.norm(p - q) for p in x) for q in y])) / 2 / nbar
        return math.sqrt(max(0.0, kernel(x, x) + kernel(y, y) - 2 * kernel(x, y))) / nbar

    omega = torch.zeros(mask.shape, dtype=torch.float64)
    for i, rollout in enumerate(states):
        for start, end in paper_spans(len(rollout), **SMALL):
            opposing = [j for j in range(len(states)) if correct[j] != correct[i]]
            others = [states[j][s:e] for j in opposing for s, e in paper_spans(len(states[j]), **SMALL)]
            nearest = min(measure(rollout[start:end], other) for other in others)
            omega[i, start:end] = omega[i, start:end].clamp_min(nearest)
    return omega


@pytest.mark.parametrize("distance", ["cosine", "chamfer", "mmd"])
def test_other_distances_agree_with_written_out_loops(distance):
    """The ablations of Fig. 5, formulas as in the docstring of `shear_weights`."""
    hidden, mask, correct = group(9)
    ours = weights(hidden, mask, correct, distance=distance, **SMALL)
    torch.testing.assert_close(ours.double(), span_pairs(hidden, mask, correct, distance), atol=1e-5, rtol=0)


def test_rollout_normalisation_evens_out_the_means():
    """normalize="rollout": every rollout's mean weight is the group's, its profile is kept."""
    hidden, mask, correct = group(10)
    plain = weights(hidden, mask, correct, **SMALL)
    even = weights(hidden, mask, correct, normalize="rollout", **SMALL)
    means = even.sum(1) / mask.sum(1)
    torch.testing.assert_close(means, (plain.sum() / mask.sum()).expand(5), atol=1e-6, rtol=0)
    torch.testing.assert_close(even[0] / even[0, 0], plain[0] / plain[0, 0], atol=1e-5, rtol=0)


def test_rollout_normalisation_leaves_dust_alone():
    """A rollout whose distances are float32's rounding of 0 has no profile to scale up: weights 0, not the mean."""
    hidden = torch.randn(3, 12, 4, generator=torch.Generator().manual_seed(2))
    hidden[1] = hidden[0] + 1e-14  # right and wrong, alike but for dust; the third is far from both
    mask, correct = torch.ones(3, 12).bool(), torch.tensor([True, False, False])
    omega = torch.tensor([[1e-14] * 12, [1e-14, 3e-14] * 6, [0.7] * 12])
    even = evened_out(omega, mask)
    assert even[:2].abs().max() == 0
    torch.testing.assert_close(even[2], torch.full((12,), 0.7 / 3))
    ours = weights(hidden, mask, correct, normalize="rollout", reading="cost", eps=1e-3, **SMALL)
    assert ours[:2].max() == 0 and ours[2].min() > 0


def test_mean_pooling_is_the_mean_over_covering_spans():
    """pool="mean" lies between a token's spans; a token under a single span has that span's distance."""
    hidden, mask, correct = group(11, lengths=(9, 9, 9, 9, 9))
    largest = weights(hidden, mask, correct, **SMALL)
    mean = weights(hidden, mask, correct, pool="mean", **SMALL)
    torch.testing.assert_close(mean[:, :3], largest[:, :3])  # only the span [0, 6)
    torch.testing.assert_close(mean[:, 6:], largest[:, 6:])  # only the span [3, 9)
    torch.testing.assert_close(mean[:, 3:6], (mean[:, :3] + mean[:, 6:]) / 2)


def test_advantages_are_rollout_advantages_times_weights():
    """Alg. 1 line 18: the sign of A stays; 0 outside of the mask."""
    hidden, mask, correct = group(12)
    advantages = torch.linspace(-1, 1, 5)
    ours = shear_advantages(advantages, hidden, mask, correct, **SMALL)
    assert torch.equal(ours, advantages[:, None] * shear_weights(hidden, mask, correct, **SMALL))
    assert (ours.sign() == advantages.sign()[:, None] * mask).all()


KINDS = {
    "random": dict(),
    "shared prefix": dict(lengths=(30,) * 5, shared=18),
    "ragged": dict(lengths=(23, 1, 7, 20, 6)),
    "shorter than a span": dict(lengths=(5, 4, 3, 2, 5)),
    "wide": dict(dim=64),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eps", [0.05, 0.5])
def test_the_hooks_of_training_give_the_plain_weights(kind, dtype, eps):
    """The race and the matrix product against every pair solved and differences of states, to 1e-5 of the weights."""
    hidden, mask, correct = group(13, **KINDS[kind])
    hidden = hidden.to(dtype)
    plain = shear_weights(hidden, mask, correct, eps=eps, **SMALL)
    stats = defaultdict(list)
    ours = group_weights(hidden, mask, correct, Settings(eps=eps, **SMALL), stats)
    torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)
    assert plain[mask].min() >= 0 and plain.max() > 0.01
    assert (stats["sinkhorn_iterations"][0] >= 1).all() and (stats["sinkhorn_error"][0] >= 0).all()


def test_settings_name_the_limits_of_the_race(monkeypatch):
    """Training races, with the iterations and the tolerance of the settings."""
    seen = []

    def noted(costs, right_spans, wrong_spans, eps, **limits):
        seen.append(limits)
        return race.race_matrix(costs, right_spans, wrong_spans, eps)

    monkeypatch.setattr(shear_settings, "race_matrix", noted)
    group_weights(*group(9), Settings(max_iters=7, tol=0.5, **SMALL))
    assert seen == [dict(max_iters=7, tol=0.5, stats=None)]


def test_statistics_are_of_every_solved_group_and_reading():
    """The reading "cost" solves all pairs to the end; other distances and groups of one verdict solve nothing."""
    hidden, mask, correct = group(14)
    for options, count in ((dict(reading="cost"), 1), (dict(distance="chamfer"), 0), (dict(pool="mean"), 1)):
        stats = defaultdict(list)
        group_weights(hidden, mask, correct, Settings(**SMALL, **options), stats)
        assert len(stats["sinkhorn_error"]) == count and len(stats["nbar"]) == 1
        if "reading" in options:
            assert len(stats["sinkhorn_iterations"][0]) == len(stats["sinkhorn_error"][0])
    stats = defaultdict(list)
    group_weights(hidden, mask, torch.ones(5), Settings(**SMALL), stats)
    assert set(stats) == {"nbar", "eps_over_nbar"}


@pytest.mark.parametrize("options", [dict(), dict(pool="mean"), dict(reading="cost")])
def test_eps_may_be_in_units_of_nbar_or_of_the_distances(options):
    """W_eps(C) / nbar = W_{eps / nbar}(C / nbar): raw eps is eps / nbar in the other unit, and both are reported."""
    hidden, mask, correct = group(15)
    nbar = hidden[mask].norm(dim=-1).mean().item()
    stats = defaultdict(list)
    raw = Settings(eps=0.7, eps_unit="raw", **SMALL, **options)
    ours = group_weights(hidden, mask, correct, raw, stats)
    torch.testing.assert_close(ours, group_weights(hidden, mask, correct, Settings(eps=0.7 / nbar, **SMALL, **options)))
    assert stats["nbar"][0].item() == pytest.approx(nbar) and abs(nbar - 1) > 0.5
    assert stats["eps_over_nbar"][0].item() == pytest.approx(0.7 / nbar)
    scaled = group_weights(3 * hidden, mask, correct, replace(raw, eps=2.1))  # eps in the unit of the distances
    torch.testing.assert_close(scaled, ours, atol=1e-6, rtol=1e-4)
    right, wrong = two_sides(hidden, mask, correct, **SMALL)
    costs = token_distances(right.states, wrong.states)
    solved = pair_distances(hidden, mask, correct, raw)(costs, right.spans, wrong.spans, 0.7).amin(1)
    if options.get("pool") != "mean":
        torch.testing.assert_close(ours[right.mask], token_weights(solved / nbar, right.spans), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(window=0), "window must be at least 1"),
        (dict(window=4, stride=5), "stride"),
        (dict(stride=0), "stride"),
        (dict(reading="sharp"), "reading must be one of value, cost"),
        (dict(distance="w2"), "distance must be one of w1, cosine, chamfer, mmd"),
        (dict(normalize="token"), "normalize must be"),
        (dict(pool="min"), "pool must be"),
    ],
)
def test_bad_options_are_named(options, message):
    """ValueError with the choices, also where the group would not be solved at all."""
    hidden, mask, _ = group(14)
    with pytest.raises(ValueError, match=message):
        weights(hidden, mask, torch.ones(5), **options)
