"""credit/values.py: values of prefixes and credit from them, against loops by the formulas and written-out numbers."""

import argparse
import math
import statistics

import pytest
import torch
from cases import drawn_batch

from credit.methods import assign_credit
from credit.values import aligned_distances
from grpo import spread
from harness.launch import parse_args

NAN = math.nan


def flags(**changes) -> argparse.Namespace:
    """The recipe's, for responses of some ten tokens, but for `changes`."""
    return argparse.Namespace(**{**vars(parse_args([])), "window": 4, "stride": 2, **changes})


def slow_kgae(states: list[list], rewards: list[float], window: int, width: float, decay: float) -> list[list[float]]:
    """The formula of one group, one number at a time; states (T_i, d) of each rollout."""
    norms = [math.hypot(*state) for rollout in states for state in rollout]
    nbar = sum(norms) / len(norms)
    graded = [row for row in range(len(states)) if not math.isnan(rewards[row])]
    std = statistics.stdev(rewards[row] for row in graded) + 1e-6
    advantages = [[] for _ in states]
    for i in graded:
        others = [j for j in graded if j != i]
        base = sum(rewards[j] for j in others) / len(others)
        values = [base]
        for t in range(1, len(states[i]) + 1):
            above, below = base, 1.0
            for j in others:
                nearest = math.inf
                for u in range(1, len(states[j]) + 1):
                    run = min(window, t, u)
                    total = sum(math.dist(states[i][t - 1 - k], states[j][u - 1 - k]) for k in range(run))
                    nearest = min(nearest, total / run / nbar)
                kernel = math.exp(-nearest / width)
                above += kernel * rewards[j]
                below += kernel
            values.append(above / below)
        values[-1] = rewards[i]
        for t in range(len(states[i])):
            later = range(t, len(states[i]))
            total = sum(decay ** (s - t) * (values[s + 1] - values[s]) for s in later)
            advantages[i].append(total / std)
    return advantages


# ---- kgae -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "decay"), [(1, 0.95), (4, 0.5), (7, 0.95), (50, 0.0)])
def test_kgae_against_a_loop_by_its_formula(window, decay):
    """Ragged lengths, a rollout without a verdict, two groups; windows of one token and above all lengths."""
    batch = drawn_batch([[1, 0, NAN, 0, 1], [0, 1, 0, 0, 0]], shared=3)
    ours = assign_credit("kgae", batch, flags(window=window, method_option=["width=.3", f"decay={decay}"]))
    hidden = spread(batch.hidden, batch.rollouts.mask).double()
    for start in (0, 5):
        rows = range(start, start + 5)
        states = [hidden[row][batch.rollouts.mask[row]].tolist() for row in rows]
        expected = slow_kgae(states, batch.rewards[start : start + 5].tolist(), window, 0.3, decay)
        for row in rows:
            of_rollout = ours[row][batch.rollouts.mask[row]]
            torch.testing.assert_close(of_rollout, torch.tensor(expected[row - start]), atol=2e-5, rtol=1e-4)
    assert ours[~batch.rollouts.mask].abs().max() == 0


def test_kgae_without_discount_telescopes():
    """At decay 1 the first token gets (r - base) / std, which is A n / (n - 1), n rollouts with a verdict."""
    batch = drawn_batch([[1, 0, NAN, 0, 1]], shared=3)
    ours = assign_credit("kgae", batch, flags(method_option=["width=.3", "decay=1"]))
    torch.testing.assert_close(ours[:, 0], batch.advantages * 4 / 3, atol=1e-5, rtol=1e-5)


def test_kgae_gives_nothing_on_a_shared_prefix_and_nothing_to_equal_rewards():
    """Values move only where rollouts part: decay 0 shows the changes alone. One verdict, or equal ones: 0."""
    batch = drawn_batch([[1, 0, 0, 1], [1, 1, NAN, 1], [NAN, NAN, 0, NAN]], shared=3)
    ours = assign_credit("kgae", batch, flags(method_option=["width=.3", "decay=0"]))
    assert ours[:4, 1:3].abs().max() < 1e-6 and ours[:4, 3].abs().min() > 1e-3
    assert ours[4:].abs().max() == 0


def test_aligned_distances_are_means_over_what_there_is():
    """Three against two states on a line, window 2: the first row and column have one pair, the others two."""
    x, y = torch.tensor([[0.0], [1], [5]]), torch.tensor([[0.0], [3]])
    expected = torch.tensor([[0.0, 3], [1, 1], [5, 1.5]])
    torch.testing.assert_close(aligned_distances(x, y, 2), expected)
    assert torch.equal(aligned_distances(y, x, 2), aligned_distances(x, y, 2).T)


# ---- controls -------------------------------------------------------------------------------------------------


def test_shuffle_keeps_each_rollout_s_weights_and_not_their_places():
    """The same numbers in another order, anew with every draw."""
    batch = drawn_batch([[1, 0, NAN, 0, 1]], shared=3)
    shear = assign_credit("shear", batch, flags())
    torch.manual_seed(0)
    ours, again = assign_credit("shuffle", batch, flags()), assign_credit("shuffle", batch, flags())
    assert not torch.equal(ours, shear) and not torch.equal(ours, again)
    for row, inside in enumerate(batch.rollouts.mask):
        assert ours[row][inside].sort().values.tolist() == shear[row][inside].sort().values.tolist()
    assert ours[~batch.rollouts.mask].abs().max() == 0
