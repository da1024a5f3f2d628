"""The paper's theorems (arXiv 2604.23318), a statement a test, on data that meets its assumptions.

Numbers and order of theorems and equations are the paper's. A test computes both sides of a
statement and compares them. `must_fail` (conftest.py) shows beside it that a wrong variant of the
statement, such as another constant, fails. So the data is tight: coins, Diracs, few points. Four
tests, which say so, check the statement alone; the others run the solver or Algorithm 1.

W1 is what the solver or Algorithm 1 finds at a small eps, and is granted its floor eps log n (Lemma
1). The noise floor eta is exact, 2 E W1(Phat_n, Pbar_n), in the place of Eq. (5)'s unknown constant.
The theorems are tested in low dimension: at n = 100, d = 3584 their rate n^(-1/d) is 0.9987.
"""

import math
from itertools import product

import numpy as np
import ot
import pytest
import torch
from builders.groups import solved_within
from scipy import stats
from scipy.optimize import linear_sum_assignment, linprog
from torch.nn.utils.rnn import pad_sequence

from shear import shear_advantages, shear_weights, token_weights
from sinkhorn import sinkhorn

RADIUS = 1.0  # (A2)'s M
# Places of tokens, at distance M from 0. LEAN is 1.5 away from LEFT.
LEFT = (-1.0, 0.0)
RIGHT = (1.0, 0.0)
UP = (0.0, 1.0)
LEAN = (0.125, math.sqrt(1 - 0.125**2))
EPS = 0.01  # in units of nbar
FLOOR = EPS * math.log(2)  # of spans whose tokens are at LEFT and RIGHT
# The theorems of a wrong span are Theorem 2, those of a right one Prop. F.1.
SIDES = pytest.mark.parametrize("side", ["wrong", "right"])


# ---- what the tests compute ----------------------------------------------------------------------


def euclidean(x, y):
    """The distances between points x (n, d) and y (m, d)."""
    return np.linalg.norm(np.asarray(x)[:, None] - np.asarray(y), axis=-1)


def solve(costs, *masses, eps=EPS):
    """The solver's answer, converged."""
    return sinkhorn(torch.tensor(costs), *masses, eps=eps, max_iters=20_000, tol=1e-7)


def weigh(rollouts, correct, **options):
    """Algorithm 1's weights (G, T) of rollouts of points, and nbar."""
    states = [torch.tensor(np.array(rollout)).float() for rollout in rollouts]
    mask = [torch.ones(len(rollout)) for rollout in rollouts]
    weighed = shear_weights(
        pad_sequence(states, batch_first=True),
        pad_sequence(mask, batch_first=True),
        torch.tensor(correct),
        **options,
    )
    return weighed.omega.numpy(), weighed.nbar


def distances(side, window, own, opposing):
    """Eq. (8), d_min of the spans of a rollout that is alone on its side, a value for each token.

    The spans do not overlap, so nbar omega_t is d_min of the span of t.
    """
    correct = [side == "right"] + [side != "right"] * len(opposing)
    measure = solved_within(max_iters=3000, tol=1e-4)
    options = dict(window=window, stride=window, eps=EPS, measure=measure)
    omega, nbar = weigh([own, *opposing], correct, **options)
    return nbar * omega[0, : len(own)]


def coin(heads):
    """The law {place: chance} of a token that is at RIGHT with this chance, otherwise at LEFT."""
    return {LEFT: 1 - heads, RIGHT: heads}


EARLY = [coin(0.05), coin(0.95)]  # two laws that rarely stray: E W1(Phat, Phat') is .98 eta
LATE = [coin(0.02)] * 2
OPPOSITE = [coin(0.98)] * 2
FAIR = [coin(0.5)]


def chance(span):
    """Eq. (6) of a span of coins: Pbar is the coin of their mean chance."""
    return np.mean([law[RIGHT] for law in span])


def drift(span, other):
    """Eq. (7), D(S) of spans of coins: the share of mass that has to cross, times the way of 2."""
    return 2 * abs(chance(span) - chance(other))


def noise(span):
    """The noise floor eta = 2 E W1(Phat_n, Pbar_n) of a span of n coins.

    With k tokens at RIGHT, W1 is 2 |k / n - their mean chance|.
    """
    chances = np.ones(1)  # of each k
    for law in span:
        chances = np.convolve(chances, [law[LEFT], law[RIGHT]])
    n = len(span)
    return 2 * chances @ (2 * np.abs(np.arange(n + 1) / n - chance(span)))


def expected(side, own, opposing):
    """E d_min of one span against opposing rollouts, exactly: the mean over all outcomes.

    All are given as the laws of their tokens.
    """
    laws = list(own)
    starts = []  # of the opposing rollouts among all tokens
    for rollout in opposing:
        starts.append(len(laws))
        laws += rollout
    mean = 0.0
    for places in product(*laws):
        span, *rollouts = np.split(places, starts)
        probability = math.prod(law[place] for law, place in zip(laws, places, strict=True))
        mean += probability * distances(side, len(own), span, rollouts)[0]
    return mean


# ---- Sec. 4: a pair of rollouts ------------------------------------------------------------------


def test_assumption_a3_rate_holds_at_three_dimensions_and_not_below(must_fail):
    """Assumption (A3): E W1(Phat_n, Pbar_n) <= C_d M n^(-1/d), for independent tokens of two laws.

    n^(1/d) E W1 is about the same for n = 8 and n = 512 at d = 3. At d = 2 it grows with a
    logarithm, at d = 1 as sqrt(n). The statement alone, as it is an assumption on data: W1 of two
    samples, at most twice that of one, by matching.
    """
    rng = np.random.default_rng(1)

    def mean_distance(n, d, draws):
        total = 0.0
        for _ in range(draws):
            samples = rng.random((2, n, d))
            samples[..., 0] = (samples[..., 0] + np.arange(n) % 2) / 2  # by turns in its halves
            costs = euclidean(*samples)
            total += costs[linear_sum_assignment(costs)].mean()
        return total / draws

    def growth(d):
        return 64 ** (1 / d) * mean_distance(512, d, 3) / mean_distance(8, d, 200)

    assert growth(3) == pytest.approx(1, abs=0.1)
    with must_fail("two dimensions"):
        assert growth(2) == pytest.approx(1, abs=0.1)
    with must_fail("one dimension"):
        assert growth(1) == pytest.approx(1, abs=0.1)


def test_theorem_1_i_before_the_divergence(must_fail):
    """Theorem 1 (i): E W1 <= eta for spans before the divergence, whose laws are the same."""
    before = expected("wrong", EARLY, [EARLY])
    assert before <= noise(EARLY) + FLOOR
    with must_fail("the noise of less than two spans"):
        assert before <= 0.8 * noise(EARLY) + FLOOR


def test_theorem_1_ii_after_the_divergence(must_fail):
    """Theorem 1 (ii): E W1 >= D(S) - eta after it. In one line, |E W1 - D(S)| <= eta anywhere."""
    one_of_two = [LATE[0], OPPOSITE[0]]  # a span across the divergence
    for other in (OPPOSITE, one_of_two):
        distance = expected("wrong", LATE, [other])
        eta = max(noise(LATE), noise(other))
        assert drift(LATE, other) - eta <= distance <= drift(LATE, other) + eta + FLOOR
        with must_fail("a larger D(S) below"):
            assert 1.2 * drift(LATE, other) - eta <= distance
        with must_fail("a smaller D(S) above"):
            assert distance <= 0.8 * drift(LATE, other) + eta + FLOOR


def test_theorem_1_iii_separation(must_fail):
    """Theorem 1 (iii): E W1 grows by at least D(S) - 2 eta > 0 from before to after."""
    growth = expected("wrong", LATE, [OPPOSITE]) - expected("wrong", EARLY, [EARLY])
    gap = drift(LATE, OPPOSITE) - 2 * noise(EARLY) - FLOOR
    assert growth >= gap > 0
    with must_fail("without eta"):
        assert growth >= drift(LATE, OPPOSITE) - FLOOR


# ---- Sec. 4: groups of rollouts ------------------------------------------------------------------


@SIDES
def test_theorem_2_i_and_proposition_f1_i_before_the_latest_divergence(side, must_fail):
    """Theorem 2 (i), Prop. F.1 (i): E d_min <= eta before the latest of all divergence points."""
    diverged = [{UP: 1}] * 4  # at once
    latest = EARLY + [{LEAN: 1}] * 2
    limit = noise(EARLY) + FLOOR
    assert expected(side, EARLY, [diverged, latest]) <= limit
    with must_fail("0.8 eta"):
        assert expected(side, EARLY, [diverged, latest]) <= 0.8 * noise(EARLY) + FLOOR
    with must_fail("without the rollout that diverges last"):
        assert expected(side, EARLY, [diverged]) <= limit


def union_slack(spans, n):
    """M sqrt(2 ln J / n), the repair of Theorem 2 (ii).

    By Eq. (18) the largest of J spans' W1(Phat, Pbar) exceeds their expectation by this at most.
    """
    return RADIUS * np.sqrt(2 * np.log(spans) / n)


@SIDES
def test_theorem_2_ii_iii_and_proposition_f1_ii_iii_repaired(side, must_fail):
    """Theorem 2 (ii), (iii), Prop. F.1, repaired: |E d_min - D*| <= eta + slack after tau*.

    (iii) d_min grows by at least D* - 2 eta - slack. Both sides are at RIGHT for n tokens; then one
    goes LEFT. An opposing rollout was at LEAN before, so D* is its distance, not that at the same
    place.
    """
    n = 100
    rng = np.random.default_rng(2)
    opposing = [[RIGHT] * 2 * n, [LEAN] * n + [RIGHT] * n]
    draws = []
    for strays in rng.random((6, n, 1)) < 0.02:
        own = np.concatenate([[RIGHT] * n, np.where(strays, RIGHT, LEFT)])
        draws.append(distances(side, n, own, opposing)[[0, n]])
    before, after = np.mean(draws, axis=0)
    star = 0.98 * math.dist(LEFT, LEAN) + 0.02 * math.dist(RIGHT, LEAN)
    eta = noise([coin(0.02)] * n)
    slack = union_slack(4, n)
    assert star - eta - slack <= after <= star + eta
    assert after - before >= star - 2 * eta - slack > 0
    with must_fail("D of the span at the same place"):
        assert 0.98 * math.dist(LEFT, RIGHT) - eta - slack <= after
    with must_fail("a smaller D*"):
        assert after <= 0.8 * star + eta


@SIDES
def test_theorem_2_ii_counterexample_in_algorithm_1(side, must_fail):
    """Theorem 2 (ii), Prop. F.1 (ii), counterexample: one of many noisy spans is close by chance.

    A span is at LEFT; J opposing spans are fair coins, D* = 1. d_min is 2 / n times the fewest heads.
    """
    rng = np.random.default_rng(7)
    heads = rng.random((20, 6, 1)) < 0.5
    opposing = np.where(heads, RIGHT, LEFT)
    distance = distances(side, 6, [LEFT] * 6, opposing)[0]
    assert distance == pytest.approx(2 * heads.mean(1).min(), abs=FLOOR)
    with must_fail("D* - eta"):
        assert distance >= 1 - noise(FAIR * 6)


def least_of_coins(spans, n):
    """E d_min of that counterexample, exactly: J spans of n coins, each 2 / n times its heads."""
    at_most = np.minimum(stats.binom.cdf(np.arange(n), n, 0.5), 1 - 1e-15)  # k heads
    return 2 / n * np.exp(spans * np.log1p(-at_most)).sum()


def test_theorem_2_ii_is_false_as_printed_and_true_repaired(must_fail):
    """Theorem 2 (ii), repaired: E d_min >= D* - eta - M sqrt(2 ln J / n), and nothing less.

    The statement alone. The proof as printed needs E max_j X_j, while (A3) bounds E X_j, X_j =
    W1(Phat_j, Pbar_j).
    """
    n = np.array([100, 100, 1600, 6400])
    spans = np.array([100, 1e6, 1e6, 1e40])
    printed = 1 - np.array([noise(FAIR * k) for k in n])  # D* - eta
    exact = np.array(list(map(least_of_coins, spans, n)))
    slack = union_slack(spans, n)
    assert (exact >= printed - slack).all()
    with must_fail("as printed"):
        assert (exact >= printed).all()
    with must_fail("0.8 of the slack"):
        assert (exact >= printed - 0.8 * slack).all()


def test_theorem_2_iii_is_false_as_printed(must_fail):
    """Theorem 2 (iii): D* > 2 eta does not separate; d_min can fall after the divergence.

    The statement alone. Before it 999 opposing spans are far away, and the distance is that of two
    spans of coins; after it there are 1000 spans of coins to choose from.
    """
    n = 12
    heads = np.arange(2 * n + 1)
    before = stats.binom.pmf(heads, 2 * n, 0.5) @ (2 * np.abs(heads - n) / n)
    gap = 1 - 2 * noise(FAIR * n)
    assert gap > 0
    with must_fail("as printed"):
        assert least_of_coins(1000, n) - before >= gap
    assert gap - union_slack(1000, n) < 0  # the repaired condition does not hold here


# ---- App. B: Sinkhorn's distance -----------------------------------------------------------------


def test_lemma_1_w_eps_lies_between_w1_and_w1_plus_eps_log_n(must_fail):
    """Lemma 1: W1 <= W_eps <= W1 + eps log n, n the points of the smaller span.

    The lower bound needs KL(P || P x Q): with the entropy instead, W_eps is less by eps log(n m).
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9, 3))
    y = rng.normal(size=(20, 3))
    exact = ot.emd2([], [], euclidean(x, y))  # W1, Eq. (3)
    value = solve(euclidean(x, y), eps=0.1).value.item()
    assert exact <= value <= exact + 0.1 * math.log(9)
    with must_fail("the entropy in the place of KL"):
        assert exact <= value - 0.1 * math.log(9 * 20)


def test_lemma_1_bounds_are_attained(must_fail):
    """Lemma 1: Diracs attain the lower bound; far-apart points and themselves the upper one."""
    diracs = solve(np.full((9, 9), 2.0), eps=0.1)
    assert diracs.value.item() == pytest.approx(2)
    points = 5 * np.arange(9)[:, None]
    itself = solve(euclidean(points, points).astype(float), eps=0.1)
    assert itself.value.item() == pytest.approx(0.1 * math.log(9))
    with must_fail("the cost of the plan, without the KL term"):
        assert itself.value_linear.item() == pytest.approx(0.1 * math.log(9))


def test_lemma_1_weights_of_equal_spans_are_the_floor(must_fail):
    """Lemma 1, of weights: for two sides alike of n far-apart tokens, omega = eps log n.

    eps is in units of nbar, which is 7.
    """
    rollouts = [7 * np.eye(16)] * 2
    floor = pytest.approx(0.05 * math.log(16), abs=1e-4)
    one_span = dict(window=16, stride=16, eps=0.05)
    assert weigh(rollouts, [1, 0], **one_span)[0] == floor
    with must_fail("eps in units of the distances"):
        assert weigh(rollouts, [1, 0], eps_unit="raw", **one_span)[0] == floor


def test_appendix_b_w_eps_keeps_an_order_of_spans_beyond_eps_log_n(must_fail):
    """App. B: a span that is farther by W1 is farther by W_eps if the gap exceeds eps log n.

    The near span is n far-apart tokens, W1 = 0, and has the whole floor; the far one is Diracs, W1
    = gap, and has none.
    """
    n = 16
    floor = 0.35 * math.log(n)
    axes = 7 * np.eye(18)

    def far_minus_near(gap):
        far = axes[16] + gap * np.eye(18)[17]
        rollouts = [[*axes[:n], *[axes[16]] * n], [*axes[:n], *[far] * n]]
        omega, _ = weigh(rollouts, [1, 0], window=n, stride=n, eps=0.35, eps_unit="raw")
        return omega[1, n] - omega[1, 0]

    assert far_minus_near(1.05 * floor) > 1e-3
    with must_fail("a gap of less than eps log n"):
        assert far_minus_near(0.8 * floor) > 1e-3


# ---- App. C: proof of Theorem 1 ------------------------------------------------------------------


def test_remark_c1_drifts_that_cancel_leave_no_distance(must_fail):
    """Remark C.1: D(S) = 0 where two sides swap laws halfway, though every token drifted."""
    wrong = [LEFT] * 5 + [RIGHT] * 5
    right = [RIGHT] * 5 + [LEFT] * 5
    assert distances("wrong", 10, wrong, [right])[0] <= FLOOR + 1e-3
    with must_fail("spans that end where the laws change"):
        assert distances("wrong", 5, wrong, [right[:5]])[0] <= FLOOR + 1e-3


def test_equation_18_one_token_moves_the_distance_by_at_most_2m_over_n(must_fail):
    """Eq. (18): one h_t moves W1(Phat_n, Pbar) by at most 2 M / n; one that crosses the ball does.

    Pbar is a fair coin, and k of the span's n tokens are at LEFT, k from 0 to n.
    """
    n = 10
    span = [RIGHT] * n
    values = []
    for k in range(n + 1):
        values.append(solve(euclidean(span, [LEFT, RIGHT])).value.item())
        span[k % n] = LEFT
    moved = np.abs(np.diff(values))
    assert moved.max() <= 2 * RADIUS / n + FLOOR
    with must_fail("M / n"):
        assert moved.max() <= RADIUS / n + FLOOR


def test_equation_18_tail_is_sub_gaussian(must_fail):
    """Eq. (18): so P(|W1 - E W1| >= u) <= 2 exp(-n u^2 / (2 M^2)), exactly, for n fair coins.

    The statement alone. If one token moved W1 by M / n only, the exponent would be 4 times this.
    Here E W1 < u, so W1 is never that far below; W1 = 2 k / n - 1 with k or n - k heads.
    """
    n = 10_000
    heads = np.arange(n + 1)
    mean = stats.binom.pmf(heads, n, 0.5) @ np.abs(2 * heads / n - 1)
    u = np.arange(1, 21) / math.sqrt(n)
    least = np.ceil(n * (1 + mean + u) / 2 - 1e-9)  # heads
    log_tail = stats.binom.logsf(least - 1, n, 0.5)  # of more heads; log 2 more with the fewer
    assert (log_tail <= -n * u**2 / (2 * RADIUS**2)).all()
    with must_fail("an exponent of 1.2 times this"):
        assert (log_tail <= -1.2 * n * u**2 / (2 * RADIUS**2)).all()


# ---- App. D: lower and upper bounds of D ---------------------------------------------------------


def random_laws():
    """Points in the unit disc (8, 2), and two laws on them."""
    rng = np.random.default_rng(9)
    angles = 3 * np.arange(8)
    points = np.linspace(0.2, 1, 8)[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)
    return points, *rng.dirichlet(np.full(8, 0.5), 2)


def population_distance(points, p, q):
    """D of two laws on the same points by the solver, at most eps log n above W1."""
    return solve(euclidean(points, points), torch.tensor(p), torch.tensor(q)).value.item()


def test_proposition_d1_a_distance_of_the_means():
    """Prop. D.1 (a): D >= ||E_P h - E_Q h||, with equality for a translation."""
    points, p, q = random_laws()
    assert population_distance(points, p, q) >= np.linalg.norm((p - q) @ points)
    square = np.array([(0, 0), (0, 0.5), (0.6, 0), (0.6, 0.5)])
    left = np.array([0.5, 0.5, 0, 0])
    moved = population_distance(square, left, left[::-1].copy())
    assert 0.6 - 1e-6 <= moved <= 0.6 + FLOOR


def test_proposition_d1_b_distances_to_a_centre(must_fail):
    """Prop. D.1 (b): D >= |E_P ||h - c|| - E_Q ||h - c||| for any c, attained at equal means."""
    points, p, q = random_laws()
    centres = list(product(np.linspace(-2, 2, 9), repeat=2))
    spreads = np.abs((p - q) @ euclidean(points, centres))
    assert population_distance(points, p, q) >= spreads.max()
    line = np.array([LEFT, RIGHT, (-0.2, 0), (0.2, 0)])
    wide = np.array([0.5, 0.5, 0, 0])
    shrunk = population_distance(line, wide, wide[::-1].copy())
    assert 0.8 - 1e-6 <= shrunk <= 0.8 + FLOOR  # c = 0
    with must_fail("the distance of the means"):
        assert shrunk <= np.linalg.norm((wide - wide[::-1]) @ line) + FLOOR


def test_proposition_d1_c_kantorovich_rubinstein(must_fail):
    """Prop. D.1 (c): D = sup of E_P f - E_Q f over 1-Lipschitz f."""
    points, p, q = random_laws()
    i, j = np.where(~np.eye(8, dtype=bool))
    difference = np.eye(8)[i] - np.eye(8)[j]  # f_i - f_j

    def supremum(lipschitz):
        limits = lipschitz * euclidean(points, points)[i, j]
        return -linprog(q - p, difference, limits, bounds=(-9, 9)).fun

    distance = population_distance(points, p, q)
    floor = EPS * math.log(8)
    assert supremum(1) - 1e-6 <= distance <= supremum(1) + floor
    with must_fail("steeper functions"):
        assert supremum(1.2) - 1e-6 <= distance
    with must_fail("flatter functions"):
        assert distance <= supremum(0.8) + floor


def test_proposition_d1_d_total_variation():
    """Prop. D.1 (d): D <= 2 M TV, attained by opposite Diracs."""
    points, p, q = random_laws()
    variation = np.abs(p - q).sum() / 2
    assert population_distance(points, p, q) <= 2 * RADIUS * variation
    diracs = population_distance([LEFT, RIGHT], np.array([1.0, 0]), np.array([0, 1.0]))
    assert diracs == pytest.approx(2 * RADIUS)


# ---- App. E: groups, and what Theorem 2 needs ----------------------------------------------------


@SIDES
def test_theorem_e1_i_needs_an_opposing_rollout_as_long_as_the_span(side, must_fail):
    """Theorem E.1 (i), footnote: a shorter rollout of the same laws has only one short span.

    Its span has other laws where laws change (Diracs, eta = 0); otherwise it is noisier.
    """
    whole = [LEFT, LEFT, RIGHT, RIGHT]
    assert distances(side, 4, whole, [whole])[0] <= FLOOR + 1e-3
    with must_fail("a shorter rollout"):
        assert distances(side, 4, whole, [whole[:3]])[0] <= FLOOR + 1e-3
    noisy = expected(side, FAIR * 5, [FAIR])
    assert noisy <= (noise(FAIR * 5) + noise(FAIR)) / 2 + FLOOR
    with must_fail("the noise of the longer one"):
        assert noisy <= noise(FAIR * 5) + FLOOR


@SIDES
def test_remark_e1_an_opposing_rollout_that_was_there_leaves_nothing(side, must_fail):
    """Remark E.1: d_min after the divergence is small if an opposing span, of any place, is close."""
    own = [RIGHT] * 4 + [LEFT] * 4
    was_there = [LEFT] * 4 + [RIGHT] * 4
    never = [RIGHT] * 8
    assert distances(side, 4, own, [never, was_there])[4] < 0.01
    with must_fail("no opposing rollout has been there"):
        assert distances(side, 4, own, [never])[4] < 0.01


# ---- App. G and H: what follows for weights ------------------------------------------------------


@SIDES
def test_proposition_g1_distances_follow_the_regimes(side, must_fail):
    """Prop. G.1: d_min is 0 inside an aligned regime, D* in a drifted one, its share on a border.

    Diracs, eta = 0, in spans of 5. The drift is .6 in tokens 10 to 21 and 1.2 from 32 on. On a
    border it holds while no opposing rollout has visited where the drift went.
    """
    shift = np.repeat([0, 0.6, 0, 1.2], [10, 12, 10, 8])
    own = [(step, 0.0) for step in shift]
    others = [[(0.0, 0.0)] * 40, [(0.0, -2.0)] * 40]
    star = np.repeat(shift.reshape(8, 5).mean(1), 5)  # of each token's span
    assert distances(side, 5, own, others) == pytest.approx(star, abs=1e-3)
    with must_fail("an opposing rollout has visited"):
        visited = distances(side, 5, own, [*others, [(0.6, 0.0)] * 40])
        assert visited == pytest.approx(star, abs=1e-3)


def mean_weights(distances, spans):
    """A wrong variant of `token_weights`: the mean over the spans that cover a token."""
    real = spans.mass > 0
    covering = distances[:, None].expand_as(real)[real]
    omega = distances.new_zeros(int(spans.tokens.max()) + 1)
    return omega.scatter_reduce(0, spans.tokens[real], covering, "mean", include_self=False)


def drifted_share(window, stride, pool=token_weights):
    """omega of a rollout of 60 tokens that leaves the other from token 30 on; 1 if all its span."""
    own = np.eye(2)[np.arange(60) // 30]
    options = dict(window=window, stride=stride, pool=pool)
    return weigh([own, [own[0]] * 60], [0, 1], **options)[0][0] / math.sqrt(2)


def test_h1_max_pooling_keeps_the_post_divergence_distance():
    """App. H.1: the first drifted token has the full distance under max, half of it under mean.

    Of w spans that cover it, 1 to w tokens have drifted: (w + 1) / (2 w) in the mean.
    """
    assert drifted_share(window=10, stride=1)[30] == pytest.approx(1, abs=1e-4)
    diluted = drifted_share(window=10, stride=1, pool=mean_weights)[30]
    assert diluted == pytest.approx(11 / 20, abs=1e-4)


@pytest.mark.parametrize("stride", [1, 5])
def test_h1_max_pooling_reaches_w_minus_s_tokens_back(stride, must_fail):
    """App. H.1: a token's weight is the share of drifted tokens in the last span that covers it.

    So weights rise w - s tokens before the divergence; no span ends there and none begins.
    """
    last = np.arange(60) // stride * stride  # its first token
    shares = np.clip((last + 10 - 30) / 10, 0, 1)
    omega = drifted_share(window=10, stride=stride)
    assert omega == pytest.approx(shares, abs=1e-4)
    assert np.nonzero(omega > 1e-4)[0][0] == 30 - 10 + stride
    with must_fail("mean pooling"):
        mean = drifted_share(window=10, stride=stride, pool=mean_weights)
        assert mean == pytest.approx(shares, abs=1e-4)


def test_h2_distances_increase_along_a_drift(must_fail):
    """App. H.2: distances grow along a line that no opposing rollout crosses; the paper has no proof.

    It is false of a line that is crossed, and of one whose tokens alternate with their counterparts.
    """
    drifting = np.stack([np.zeros(18), np.arange(-6, 12).clip(0) / 12], 1)  # tau = 6

    def steps(own, *opposing):
        return np.diff(distances("wrong", 6, own, opposing)[::6])

    start = [(0.0, 0.0)] * 18
    assert (steps(drifting, start) > 0.1).all()
    with must_fail("a line that is crossed"):
        assert (steps(drifting, start, [(0.0, 0.75)] * 18) > 0.1).all()
    with must_fail("tokens that alternate"):
        alternate = drifting * np.resize([[1], [-1]], (18, 1))
        assert (steps(alternate, -alternate) > 0.1).all()


@SIDES
def test_h3_and_remark_1_credit_grows_after_errors_with_the_sign_of_a(side, must_fail):
    """App. H.3, Remark 1: weights are small on track and large off it; the sign of A stays.

    In a wrong rollout, off track is an error, which mends here; in a right one, where wrong rollouts
    do not follow. Spans that reach into it blur its border by w - 1 tokens.
    """
    window = 5
    off = np.zeros(60, dtype=bool)
    off[20:32] = True
    off[47:] = True
    own = [(1.0, float(gone)) for gone in off]
    right = side == "right"
    omega, _ = weigh([own, [(1.0, 0.0)] * 60], [right, not right], window=window, stride=1)
    advantage = 1.0 if right else -1.0
    credit = shear_advantages(torch.tensor([advantage, -advantage]), torch.tensor(omega))[0]
    size = advantage * credit.numpy()
    assert size.min() >= 0
    on_track = ~np.convolve(off, np.ones(2 * window - 1), "same").astype(bool)
    assert size[off].min() > size[on_track].max() + 0.5
    with must_fail("a border without blur"):
        assert size[off].min() > size[~off].max() + 0.5
