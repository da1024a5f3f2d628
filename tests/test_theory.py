"""The paper's theorems (arXiv 2604.23318, whose numbering is cited), on data that meets their assumptions.

Checked: Lemma 1, assumption (A3), Theorems 1 and 2, Eq. (18), Props. D.1, F.1 and G.1, and App. H.1. Hidden states
take finitely many values, so population mixtures, D(S) and D* are exact linear programs (POT) and only expectations
over spans are sampled: seeded, and granted 4 standard errors. Bounds hold at sizes at which they say something, and
most tests also show that a slightly stronger claim is false.

The theorems are tested in low dimension, since their rate n^(-1/d) is vacuous at a model's width: 0.9987 at n = 100,
d = 3584. The noise floor eta is measured, twice E W1(Phat_n, Pbar_n), instead of Eq. (5) with an unknown constant.

    pytest tests/test_theory.py
"""

import functools
import math
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import ot
import pytest
import torch
from scipy import stats
from scipy.optimize import linprog

from credit.shear_settings import Settings, group_weights
from shear import closest_spans, shear_weights, span_bounds
from sinkhorn import sinkhorn

RADIUS = 1.0  # (A2)'s M
SPAN, STRIDE, LENGTH = 100, 50, 300  # tokens
STARTS = range(0, LENGTH - SPAN + 1, STRIDE)


def euclidean(x, y):
    return np.linalg.norm(x[:, None] - y[None], axis=-1)


def ball(rng, count):
    """`count` points in the ball of RADIUS in R^3."""
    points = rng.normal(size=(count, 3))
    return RADIUS * points / np.linalg.norm(points, axis=1, keepdims=True) * rng.random((count, 1)) ** (1 / 3)


ATOMS = ball(np.random.default_rng(0), 25)  # the values a hidden state can take
GROUND = euclidean(ATOMS, ATOMS)


def w1(p, q, ground=GROUND):
    """Eq. (3), exactly: a linear program."""
    return ot.emd2(p, q, ground)


def laws(centres):
    """(T, 3) -> (T, atoms): one law for each position, concentrated around its centre."""
    density = np.exp(-8 * euclidean(centres, ATOMS) ** 2)
    return density / density.sum(1, keepdims=True)


def draw(rng, laws):
    """One independent token for each position, as the index of its atom."""
    return (laws.cumsum(1) > rng.random((len(laws), 1))).argmax(1)


def empirical(tokens):
    return np.bincount(tokens, minlength=len(ATOMS)) / len(tokens)


def margin(samples):
    return 4 * np.std(samples, ddof=1) / math.sqrt(len(samples))


def noise_floor(rng, spans):
    """eta: twice an upper limit of E W1(Phat_n, Pbar_n), for the worst of these spans, as (A3) is for any law."""
    floors = [np.array([w1(empirical(draw(rng, span)), span.mean(0)) for _ in range(150)]) for span in spans]
    return 2 * max(floor.mean() + margin(floor) for floor in floors)


def windows(sequence):
    return [sequence[start : start + SPAN] for start in STARTS]


def path(rng):
    """(T, 3) centres that wander along the first axis: independent tokens that are not identically distributed."""
    line = np.linspace(-0.5, 0.3, LENGTH)[:, None] * [1, 0, 0] + [0, -0.4, 0]
    return line + 0.1 * rng.normal(size=line.shape)


def leaving(centres, start, shift):
    return centres + (np.arange(len(centres)) >= start)[:, None] * shift


def coin_floor(n):
    """E W1(Phat_n, Pbar) of coins, tokens uniform on {-1, +1}, exactly."""
    heads = np.arange(n + 1)
    return (stats.binom.pmf(heads, n, 0.5) * np.abs(2 * heads / n - 1)).sum()


def coin_minimum(spans, n):
    """E d_min over `spans` spans of coins, exactly, for a wrong span at -1: each W1 is 2/n times the count of +1."""
    return 2 / n * (stats.binom.sf(np.arange(n), n, 0.5) ** spans).sum()


# ---- Lemma 1, and (A3) ----


@pytest.fixture(scope="module", params=[(20, 20, 0.1), (12, 30, 0.3), (30, 12, 2.0)], ids=str)
def solved(request):
    """(Transport of eight problems n x m solved to convergence, their exact W1, their numbers of points)."""
    n, m, eps = request.param
    rng = np.random.default_rng(n)
    cost = np.stack([euclidean(ball(rng, n), ball(rng, m)) for _ in range(8)])
    a, b = rng.dirichlet(np.full(n, 3.0), 8), rng.dirichlet(np.full(m, 3.0), 8)
    a[:4], b[:4] = 1 / n, 1 / m  # half of them uniform, as the spans are
    transport = sinkhorn(*map(torch.tensor, (cost, a, b)), eps=eps, max_iters=20_000, tol=1e-9)
    assert transport.error.max() <= 1e-9
    return transport, np.array([w1(*problem) for problem in zip(a, b, cost, strict=True)]), (n, m)


def test_lemma_1_both_readings_lie_between_w1_and_w1_plus_eps_log_n(solved):
    """W1 <= <P, C> <= W_eps <= W1 + eps log min(n, m). Fails if `value` had another KL term, or the plan were poor."""
    transport, exact, points = solved
    plan, independent = transport.plan, transport.a[..., :, None] * transport.b[..., None, :]
    divergence = (plan * (plan / independent).log()).sum((-2, -1))
    torch.testing.assert_close(transport.value, transport.value_linear + transport.eps * divergence, rtol=0, atol=1e-7)
    cost, value = transport.value_linear.numpy() - exact, transport.value.numpy() - exact
    assert ((cost > 0) & (cost < value) & (value <= transport.eps * math.log(min(points)))).all()


def test_lemma_1_upper_bound_is_attained_by_a_span_and_itself():
    """W_eps(P, P) = eps log n where points lie far apart in units of eps. Fails if the floor were debiased away."""
    n, eps = 16, 0.02
    far = torch.tensor(euclidean(np.arange(n)[:, None], np.arange(n)[:, None]))
    transport = sinkhorn(far, eps=eps, max_iters=1000, tol=1e-9)
    assert transport.value.item() == pytest.approx(eps * math.log(n), abs=1e-9)
    assert transport.value_linear.item() == pytest.approx(0, abs=1e-9)


def test_lemma_1_fails_for_the_entropy_form(solved):
    """<P, C> - eps H(P) lies below W1, so Eq. (10) needs KL to the product. Fails if the two forms were one."""
    transport, exact, _ = solved
    plan = transport.plan
    entropy = -(plan * plan.log()).sum((-2, -1))
    assert ((transport.value_linear - transport.eps * entropy).numpy() < exact).all()


def test_assumption_a3_rate_holds_in_three_dimensions_and_fails_in_one():
    """(A3): E W1(Phat_n, Pbar_n) <= C_d M n^(-1/d) for independent tokens of different laws, if d >= 3.

    Fails if n^(1/3) E W1 grows in d = 3. In d = 1 it does: coins keep n E W1 growing like sqrt(n).
    """
    rng = np.random.default_rng(2)
    side = np.linspace(-1, 1, 10) / math.sqrt(3)
    grid = np.stack(np.meshgrid(side, side, side, indexing="ij"), -1).reshape(-1, 3)  # first axis slowest
    scaled = []
    for n, draws in ((8, 60), (64, 30), (512, 4)):
        lower_half = np.arange(n) % 2 * (len(grid) // 2)  # even positions live in one half, odd ones in the other
        samples = [
            w1(np.full(n, 1 / n), np.full(1000, 1e-3), euclidean(grid[lower_half + rng.integers(500, size=n)], grid))
            for _ in range(draws)
        ]
        scaled.append(n ** (1 / 3) * np.mean(samples))
    assert all(later < 1.05 * earlier for earlier, later in pairwise(scaled)), scaled
    assert scaled[-1] > 0.6 * scaled[0]  # and the rate is the true one, not a loose bound
    assert all(8 * n * coin_floor(8 * n) > 2.5 * n * coin_floor(n) for n in (8, 64))


# ---- Theorem 1: a wrong span against the right span at its position ----


class Pairing(NamedTuple):
    population: float  # D(S), Eq. (7)
    sampled: np.ndarray  # W1(Phat^-, Phat^+)
    eta: float


@pytest.fixture(scope="module")
def theorem_1():
    """The pairings of five spans: two before tau = 150, one that straddles it, two after."""
    rng = np.random.default_rng(3)
    centres = path(rng)
    right, wrong = laws(centres), laws(leaving(centres, 150, [0, 0.7, 0.3]))
    rollouts = [(windows(draw(rng, wrong)), windows(draw(rng, right))) for _ in range(400)]
    pairings = []
    for k, (q, p) in enumerate(zip(windows(wrong), windows(right), strict=True)):
        sampled = np.array([w1(empirical(x[k]), empirical(y[k])) for x, y in rollouts])
        pairings.append(Pairing(w1(q.mean(0), p.mean(0)), sampled, noise_floor(rng, [q, p])))
    return pairings


def test_theorem_1_i_pre_divergence_distance_is_at_most_eta(theorem_1):
    """E W1 <= eta for b <= tau, Eq. (12). Fails if eta lost its factor 2: half of it is not enough."""
    for population, sampled, eta in theorem_1[:2]:
        assert population == pytest.approx(0, abs=1e-12)
        assert sampled.mean() - margin(sampled) <= eta
        assert sampled.mean() - margin(sampled) > eta / 2


def test_theorem_1_ii_post_divergence_distance_is_at_least_D_minus_eta(theorem_1):
    """E W1 >= D(S) - eta for a > tau, Eq. (16). Fails if D(S) were not the distance of the span's mixtures.

    W1 is jointly convex, so Jensen gives E W1 >= D(S) without any eta; that is what is asserted.
    """
    for population, sampled, eta in theorem_1[3:]:
        assert population - eta > 0.3
        assert sampled.mean() + margin(sampled) >= population


def test_theorem_1_iii_divergence_separates_by_D_minus_two_eta(theorem_1):
    """E W1 after - E W1 before >= D(S) - 2 eta > 0, Eq. (17). Fails if noise before outgrew the gap after.

    A separation by D(S) would be false: noise lifts the distance before more than the one after.
    """
    for before, after in product(theorem_1[:2], theorem_1[3:]):
        gap = after.sampled.mean() - before.sampled.mean()
        slack = margin(after.sampled) + margin(before.sampled)
        assert gap + slack >= after.population - before.eta - after.eta > 0
        assert gap + slack < after.population


def test_theorem_1_in_one_line_distance_is_within_eta_of_D_for_any_span(theorem_1):
    """|E W1 - D(S)| <= eta, straddling spans included. Fails if eta lost its factor 2, as the first spans need it."""
    assert 0.1 < theorem_1[2].population < min(theorem_1[3].population, theorem_1[4].population)
    for population, sampled, eta in theorem_1:
        assert abs(sampled.mean() - population) - margin(sampled) <= eta


# ---- Theorem 2 and Prop. F.1: the closest opposing span ----


class Minimum(NamedTuple):
    population: float  # D*(S), Eq. (9)
    sampled: np.ndarray  # d_min(S), Eq. (8)
    without_latest: np.ndarray  # the same without the opposing rollout that diverges last


def closest(rng, own, start, opposing, draws=150):
    """d_min of the span of `own` at `start` over all spans of the `opposing` rollouts, the latest of them last."""
    span = slice(start, start + SPAN)
    population = min(w1(own[span].mean(0), other.mean(0)) for rollout in opposing for other in windows(rollout))
    distances = np.empty((draws, len(opposing), len(STARTS)))
    for row in distances:
        phat = empirical(draw(rng, own)[span])
        row[:] = [[w1(phat, empirical(other)) for other in windows(draw(rng, rollout))] for rollout in opposing]
    return Minimum(population, distances.min((1, 2)), distances[:, :-1].min((1, 2)))


@pytest.fixture(scope="module")
def theorem_2():
    """(d_min of a wrong span before and after tau* = 150, eta): right rollouts leave the wrong one at 10, 30, 150."""
    rng = np.random.default_rng(4)
    centres = path(rng)
    wrong = leaving(centres, 150, [0, 1.0, 0.2])
    opposing = [leaving(centres, 10, [0, 0, 0.6]), leaving(centres, 30, [0, 0, -0.6]), centres]
    return group(rng, laws(wrong), [laws(rollout) for rollout in opposing])


@pytest.fixture(scope="module")
def proposition_f1():
    """(d_min of a right span before and after tau = 150, eta): wrong rollouts leave the right one at 10, 30, 150."""
    rng = np.random.default_rng(5)
    centres = path(rng)
    right = leaving(centres, 150, [0.3, 0.9, 0])  # the problem's next step
    opposing = [leaving(right, tau, [0, -1.0, sign]) for tau, sign in ((10, 0.5), (30, -0.5), (150, 0.1))]
    return group(rng, laws(right), [laws(rollout) for rollout in opposing])


def group(rng, own, opposing):
    before, after = (closest(rng, own, start, opposing) for start in (50, 200))
    return before, after, noise_floor(rng, [span for rollout in (own, *opposing) for span in windows(rollout)])


def union_slack(spans, n):
    """M sqrt(2 ln J / n): E max over J spans of W1(Phat, Pbar) exceeds the largest expectation by this at most."""
    return RADIUS * math.sqrt(2 * math.log(spans) / n)


def assert_aligned(before, eta):
    """(i), and that it takes the latest divergence point, not an earlier one."""
    assert before.population == pytest.approx(0, abs=1e-12)
    assert before.sampled.mean() - margin(before.sampled) <= eta
    assert before.without_latest.mean() - margin(before.without_latest) > eta


def assert_repaired_bound(after, eta):
    bound = after.population - eta - union_slack(3 * len(STARTS), SPAN)
    assert bound > 0.05
    assert after.sampled.mean() + margin(after.sampled) >= bound
    assert after.sampled.mean() - margin(after.sampled) <= after.population + eta


def assert_separated(before, after, eta):
    bound = after.population - 2 * eta - union_slack(3 * len(STARTS), SPAN)
    gap, slack = after.sampled.mean() - before.sampled.mean(), margin(after.sampled) + margin(before.sampled)
    assert bound > 0
    assert gap + slack >= bound
    assert gap + slack < after.population


def test_theorem_2_i_closest_span_is_within_eta_before_the_latest_divergence(theorem_2):
    """E d_min <= eta for b <= tau* = max tau_k. Fails if tau* were an earlier tau_k."""
    before, _, eta = theorem_2
    assert_aligned(before, eta)


def test_theorem_2_ii_repaired_closest_span_is_at_least_D_star_minus_eta_minus_union_slack(theorem_2):
    """E d_min >= D* - eta - M sqrt(2 ln J / n) for a > tau*. Fails if a span strayed by more than (18)."""
    _, after, eta = theorem_2
    assert_repaired_bound(after, eta)


def test_theorem_2_iii_repaired_divergence_separates_closest_spans(theorem_2):
    """d_min grows by D* - 2 eta - M sqrt(2 ln J / n) at least. Fails if the closest span ignored the divergence."""
    assert_separated(*theorem_2)


def test_proposition_f1_i_right_span_is_within_eta_before_divergence(proposition_f1):
    """E d_min <= eta for a right span with b <= tau. Fails if tau were not the latest divergence of the wrong."""
    before, _, eta = proposition_f1
    assert_aligned(before, eta)


def test_proposition_f1_ii_repaired_right_span_is_at_least_D_star_minus_eta_minus_union_slack(proposition_f1):
    """E d_min >= D* - eta - M sqrt(2 ln J / n) for a right span, a > tau. Fails if a span strayed by more than (18)."""
    _, after, eta = proposition_f1
    assert_repaired_bound(after, eta)


def test_proposition_f1_iii_repaired_divergence_separates_right_spans(proposition_f1):
    """The same separation for right spans. Fails if the closest wrong span ignored the divergence."""
    assert_separated(*proposition_f1)


def test_theorem_2_ii_as_printed_has_a_counterexample():
    """E d_min >= D* - eta is false for many opposing spans: its proof needs E max_j X_j, and (A3) bounds E X_j.

    D* = 1: wrong tokens at -1, right ones uniform on {-1, +1}. Fails if the printed bound held at J = 100, n = 100,
    or if the closed form were not what sampled spans show.
    """
    assert [coin_minimum(spans, 4) for spans in (1, 10, 100, 1000)] == pytest.approx([1.00, 0.27, 0.001, 0], abs=5e-3)
    printed = 1 - 2 * coin_floor(100)
    assert printed == pytest.approx(0.84, abs=5e-3)
    assert printed > coin_minimum(100, 100) == pytest.approx(0.75, abs=5e-3)
    assert printed - union_slack(100, 100) == pytest.approx(0.54, abs=5e-3)

    rng = np.random.default_rng(6)
    for spans, n in ((10, 4), (30, 100)):
        right = rng.choice([-1, 1], size=(200, spans, n))
        sampled = np.array([min(stats.wasserstein_distance(x, [-1]) for x in rollouts) for rollouts in right])
        assert abs(sampled.mean() - coin_minimum(spans, n)) <= margin(sampled)


def test_theorem_2_ii_repaired_bound_is_sharp_in_its_constant():
    """The repaired bound holds for all J, and half its slack is not enough. Fails if (18) had M/n for 2M/n."""
    for n in (100, 400, 1600):
        for spans in (1, 10, 100, 10**4, 10**6):
            bound = 1 - 2 * coin_floor(n) - union_slack(spans, n)
            assert bound > 0
            assert coin_minimum(spans, n) >= bound
        assert coin_minimum(10**6, n) < 1 - 2 * coin_floor(n) - union_slack(10**6, n) / 2


def test_theorem_2_iii_as_printed_has_a_counterexample():
    """D* > 2 eta does not make the expected minimum grow. Fails if that condition were enough.

    A thousand right spans toss the coins of the other counterexample; one more tosses them far above, where the
    wrong rollout tossed along until it diverged to -1. Before: two samples of one law. After: the smallest of all.
    """
    n, spans = 12, 1000
    assert 2 * (2 * coin_floor(n)) < 1  # 2 eta < D*
    two_samples = stats.binom.pmf(np.arange(2 * n + 1), 2 * n, 0.5) @ np.abs(np.arange(2 * n + 1) - n) * 2 / n
    assert coin_minimum(spans, n) < 0.6 * two_samples


# ---- Eq. (18) ----


def test_equation_18_one_token_moves_the_distance_by_at_most_2M_over_n():
    """Fails if the bounded difference were M/n: a token that crosses the ball from the others attains 2M/n."""
    rng = np.random.default_rng(7)
    span = laws(path(rng)[:20])
    for _ in range(300):
        tokens = draw(rng, span)
        changed = tokens.copy()
        changed[rng.integers(len(tokens))] = rng.integers(len(ATOMS))
        moved = w1(empirical(tokens), span.mean(0)) - w1(empirical(changed), span.mean(0))
        assert abs(moved) <= 2 * RADIUS / len(tokens) + 1e-12
    together, strayed = [RADIUS] * 20, [RADIUS] * 19 + [-RADIUS]
    assert stats.wasserstein_distance(strayed, together) == pytest.approx(2 * RADIUS / 20)


def test_equation_18_tail_of_the_distance_is_sub_gaussian():
    """P(|W1 - E W1| >= u) <= 2 exp(-n u^2 / (2 M^2)). Fails with M/n differences, whose exponent is four times this."""
    n, heads = 100, np.arange(101)
    deviation = np.abs(np.abs(2 * heads / n - 1) - coin_floor(n))  # of the coins' W1(Phat_n, Pbar)
    exceeding = [(u, stats.binom.pmf(heads, n, 0.5)[deviation >= u].sum()) for u in np.linspace(0.12, 0.4, 15)]
    assert all(tail <= 2 * math.exp(-n * u**2 / (2 * RADIUS**2)) < 1 for u, tail in exceeding)
    assert any(tail > 2 * math.exp(-4 * n * u**2 / (2 * RADIUS**2)) for u, tail in exceeding)


# ---- Prop. D.1 ----


@pytest.fixture(scope="module")
def mixtures():
    """Pairs of population mixtures, from close to far apart."""
    rng = np.random.default_rng(9)
    pairs = []
    for shift in np.linspace(0, 1.2, 25):
        centres = 0.3 * rng.normal(size=(20, 3))
        pairs.append((laws(centres).mean(0), laws(centres + shift * rng.normal(size=3)).mean(0)))
    return pairs[1:]


def test_proposition_d1_a_distance_is_at_least_that_of_the_means(mixtures):
    """D >= ||difference of the means||, equal for a translation. Fails if the cost were squared or scaled."""
    ratios = np.array([w1(p, q) / np.linalg.norm((p - q) @ ATOMS) for p, q in mixtures])
    assert (ratios >= 1 - 1e-12).all()
    assert ratios.max() > 1.1  # more than first moments
    uniform, shift = np.full(len(ATOMS), 1 / len(ATOMS)), np.array([0.3, -0.2, 0.1])
    assert w1(uniform, uniform, euclidean(ATOMS, ATOMS + shift)) == pytest.approx(np.linalg.norm(shift))


def test_proposition_d1_b_distance_is_at_least_the_change_of_spread(mixtures):
    """D >= |E_Q ||h - c|| - E_P ||h - c||| for any c. Fails for a distance that sees the means only: at equal means."""
    rng = np.random.default_rng(10)
    for p, q in mixtures:
        spread = np.abs((p - q) @ euclidean(ATOMS, 2 * ball(rng, 50)))
        assert w1(p, q) >= spread.max() - 1e-12
    narrow, wide = np.array([0, 0, 0.5, 0.5]), np.array([0.5, 0.5, 0, 0])
    points = np.array([[-1.0], [1.0], [-0.2], [0.2]])
    assert w1(wide, narrow, euclidean(points, points)) == pytest.approx(0.8)  # the bound at c = 0, attained


def test_proposition_d1_c_distance_is_the_kantorovich_rubinstein_supremum(mixtures):
    """D = sup over 1-Lipschitz f of E_P f - E_Q f. Fails if the reference solved another problem than Eq. (7)."""
    i, j = np.where(~np.eye(len(ATOMS), dtype=bool))
    differences = np.eye(len(ATOMS))[i] - np.eye(len(ATOMS))[j]  # f_i - f_j <= |x_i - x_j| for every pair
    for p, q in mixtures[::4]:
        witness = linprog(q - p, A_ub=differences, b_ub=GROUND[i, j], bounds=(-2, 2))
        assert w1(p, q) == pytest.approx(-witness.fun, abs=1e-9)


def test_proposition_d1_d_distance_is_at_most_2M_total_variation(mixtures):
    """D <= 2 M TV. Fails with a radius for the diameter: opposite Diracs attain it."""
    for p, q in mixtures:
        assert w1(p, q) <= 2 * RADIUS * np.abs(p - q).sum() / 2
    opposite = euclidean(np.array([[RADIUS], [-RADIUS]]), np.array([[RADIUS], [-RADIUS]]))
    assert w1(np.array([1.0, 0]), np.array([0, 1.0]), opposite) == pytest.approx(2 * RADIUS)


# ---- Prop. G.1: several divergences, and Remark C.1 ----


@pytest.fixture(scope="module")
def regimes():
    """(right laws, wrong laws, drifted): aligned, drifted, aligned again, drifted to elsewhere."""
    centres = path(np.random.default_rng(11))
    position = np.arange(LENGTH)
    first, second = (position >= 80) & (position < 190), position >= 260
    wrong = centres + first[:, None] * [0, 0.9, 0] + second[:, None] * [0, 0.2, 0.7]
    return laws(centres), laws(wrong), first | second


def test_proposition_g1_population_distance_is_the_drifted_fraction_times_that_of_the_drifted_tokens(regimes):
    """D(S) = lambda W1(drifted mixtures) for the same-position pairing, exactly. Fails if aligned tokens helped.

    A span's fraction of one constant W1 is not exact: what multiplies lambda depends on which tokens drifted.
    """
    right, wrong, drifted = regimes
    factors = []
    for start in range(0, LENGTH - SPAN + 1, 5):
        span = slice(start, start + SPAN)
        inside = drifted[span]
        apart = w1(wrong[span][inside].mean(0), right[span][inside].mean(0)) if inside.any() else 0.0
        assert w1(wrong[span].mean(0), right[span].mean(0)) == pytest.approx(inside.mean() * apart, abs=1e-12)
        factors.append(apart)
    assert min(factors) < 0.9 * max(factors)


def test_proposition_g1_sampled_distance_follows_the_regimes(regimes):
    """Short spans: at most eta inside an aligned regime, at least D - eta inside a drifted one, between on a border.

    Fails if an earlier divergence left a trace in a later aligned regime.
    """
    right, wrong, _ = regimes
    rng = np.random.default_rng(12)
    spans = {name: slice(start, start + 60) for name, start in dict(aligned=195, border=160, drifted=110).items()}
    eta = noise_floor(rng, [side[span] for span in spans.values() for side in (right, wrong)])
    sampled = {name: [] for name in spans}
    for _ in range(300):
        x, y = draw(rng, wrong), draw(rng, right)
        for name, span in spans.items():
            sampled[name].append(w1(empirical(x[span]), empirical(y[span])))
    mean = {name: np.mean(values) for name, values in sampled.items()}
    assert mean["aligned"] - margin(sampled["aligned"]) <= eta
    population = w1(wrong[spans["drifted"]].mean(0), right[spans["drifted"]].mean(0))
    assert mean["drifted"] + margin(sampled["drifted"]) >= population - eta > 0.2
    assert mean["aligned"] + 0.1 < mean["border"] < mean["drifted"] - 0.1


def test_remark_c1_drifts_that_cancel_leave_no_distance():
    """D(S) = 0 if the two sides swap laws halfway, though every token drifted. Fails if W1 were a mean over tokens."""
    here, there = laws(np.full((50, 3), -0.3)), laws(np.full((50, 3), 0.3))
    right, wrong = np.concatenate([here, there]), np.concatenate([there, here])
    assert w1(here.mean(0), there.mean(0)) > 0.5
    assert w1(right.mean(0), wrong.mean(0)) == pytest.approx(0, abs=1e-12)


# ---- App. H.1: pooling, in the production code ----


def step_group(length, tau):
    """A right rollout at one unit vector, and a wrong one that jumps to another at `tau`: (hidden, mask, correct).

    Against a Dirac every coupling is the product, so W_eps is the drifted fraction times sqrt(2), for any eps.
    """
    hidden = torch.eye(2)[torch.stack([torch.zeros(length), torch.arange(length) >= tau]).long()]
    return hidden, torch.ones(2, length), torch.tensor([1, 0])


def test_h1_max_pooling_keeps_the_post_divergence_distance_and_mean_pooling_dilutes_it():
    """The first drifted token has the full distance under max, (w + 1)/(2 w) of it under mean. Fails if pools swap.

    No token is in a span before and one after the divergence, as App. H.1 words it: a boundary token's other spans
    are those that straddle it.
    """
    window, tau = 10, 30
    group = step_group(60, tau)
    pooled = {pool: group_weights(*group, Settings(window=window, stride=1, pool=pool))[1] for pool in ("max", "mean")}
    after = math.sqrt(2)
    assert pooled["max"][tau].item() == pytest.approx(after, rel=1e-5)
    assert pooled["mean"][tau].item() == pytest.approx(after * (window + 1) / (2 * window), rel=1e-5)
    assert (pooled["mean"] <= pooled["max"] + 1e-6).all()
    torch.testing.assert_close(pooled["max"][tau:], torch.full((30,), after), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("stride", "first"), [(1, 21), (5, 25)])
def test_h1_max_pooling_smears_the_signal_up_to_window_minus_one_tokens_before_divergence(stride, first):
    """Weights are 0 up to tau - w and positive from the next span's start on. Fails if spans reached further."""
    window, tau = 10, 30
    weights = shear_weights(*step_group(60, tau), window=window, stride=stride)[1]
    assert (weights > 1e-6).nonzero()[0].item() == first
    starts = torch.arange(60) // stride * stride  # of the last span that covers a token, the most drifted one
    expected = math.sqrt(2) * ((starts + window - tau) / window).clamp(0, 1)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_lemma_1_carries_the_theorems_over_to_the_weights_of_algorithm_1():
    """nbar omega is the largest d_min of Eq. (8) over covering spans, up to eps log w, for right and wrong rollouts.

    Fails if the weights took another minimum, pool, side or unit than the theorems are about.
    """
    rng = np.random.default_rng(13)
    window, stride, eps, lengths, correct = 8, 4, 0.03, [24, 30, 19, 24], [1, 0, 1, 0]
    states = [
        ball(rng, length) + np.linspace(0, 4, length)[:, None] * [right, 0, 1]
        for length, right in zip(lengths, correct, strict=True)
    ]
    hidden, mask = torch.zeros(4, 30, 3), torch.zeros(4, 30)
    for row, points in enumerate(states):
        hidden[row, : len(points)], mask[row, : len(points)] = torch.tensor(points), 1
    closest = functools.partial(closest_spans, max_iters=300)
    options = dict(window=window, stride=stride, eps=eps, closest=closest)
    weights = shear_weights(hidden, mask, torch.tensor(correct), **options)

    nbar = np.linalg.norm(np.concatenate(states), axis=1).mean()
    slack = eps * math.log(window)  # Lemma 1, in units of nbar
    spans = [[x[first:last] for first, last in span_bounds(len(x), window, stride)] for x in states]
    for row, points in enumerate(states):
        opposing = [span for other in range(4) if correct[other] != correct[row] for span in spans[other]]
        minima = [min(w1([], [], euclidean(span, other)) for other in opposing) / nbar for span in spans[row]]
        bounds = span_bounds(len(points), window, stride)
        for token, omega in enumerate(weights[row, : len(points)].tolist()):
            exact = max(d for d, (first, last) in zip(minima, bounds, strict=True) if first <= token < last)
            assert exact - 1e-3 <= omega <= exact + slack + 1e-4
        assert np.ptp(minima) > 3 * slack  # or the bracket would not tell spans apart
