"""Groups weighed by the lab's hooks, and groups that could mislead its race."""

from functools import cache
from types import SimpleNamespace

import torch

from base.config import Shear
from credit import rules
from lab.fast.distances import token_distances
from lab.fast.race import race
from shear import Weighed, every_pair, mean_norm, two_sides, w_eps

FAST = {"cost": token_distances, "closest": race}  # the hooks of `--use lab.fast`


def weigh(hidden, mask, correct, hooks=FAST, **settings) -> Weighed:
    """As training weighs a group with these hooks and settings."""
    context = SimpleNamespace(shear=Shear(**settings), hooks=hooks)
    return rules.weigh(context, hidden, mask, correct)


RACES = "text identical shared-prefix tiny outliers ragged nearly-tied".split()


def states_of_a_text(generator, rollouts, length, dim):
    """States (G, T, d) as of a text: few words, each near its own point, and a slow drift.

    They are hard to match in parts.
    """
    points = 3 * torch.randn(12, dim, generator=generator)
    drift = 0.1 * torch.randn(rollouts, length, dim, generator=generator).cumsum(1)
    noise = 0.3 * torch.randn(rollouts, length, dim, generator=generator)
    return points[torch.randint(12, (rollouts, length), generator=generator)] + drift + noise


def race_case(name, seed=0):
    """Hidden states (6, 40, 8), mask and verdicts of one group that could mislead a race."""
    generator = torch.Generator().manual_seed(seed)
    hidden = states_of_a_text(generator, 6, 40, 8)
    lengths = torch.full((6,), 40)
    if name == "identical":
        hidden = hidden[:1].expand(6, -1, -1).clone()
    elif name == "shared-prefix":
        hidden[:, :25] = hidden[:1, :25]
    elif name == "tiny":
        hidden = 1e-12 * hidden
    elif name == "outliers":  # costs of thousands of eps beside small ones
        hidden[:, ::7] *= 1000
    elif name == "ragged":
        lengths = torch.tensor([40, 13, 5, 26, 37, 1])
    elif name == "nearly-tied":  # every wrong rollout is the same but for a breath
        hidden[1::2] = hidden[1:2] + 1e-3 * torch.randn(3, 40, 8, generator=generator)
    mask = torch.arange(40)[None] < lengths[:, None]
    return hidden, mask, torch.tensor([True, False] * 3)


@cache
def race_problem(name, seed=0, window=8, stride=4):
    """The inputs of `race` for a group, and the distances (K+, K-) of all pairs."""
    hidden, mask, correct = race_case(name, seed)
    right, wrong = two_sides(hidden[mask], mask, correct, window, stride)
    costs = token_distances(right.states, wrong.states)
    eps = 0.05 * mean_norm(hidden[mask])

    values = every_pair(costs, right.spans, wrong.spans, eps, w_eps)
    return (costs, right, wrong, eps), values
