"""Hidden states of a group for SHEAR, and groups that could mislead its race."""

from functools import cache, partial
from types import SimpleNamespace

import torch

from credit import rules
from credit.settings import Shear
from lab.fast.distances import token_distances
from lab.fast.race import race
from lab.rules import ablations
from lab.rules.ablations import even_out
from shear import Weighed, every_pair, mean_norm, two_sides
from sinkhorn import sinkhorn


def random_group(seed: int = 0, lengths=(17, 12, 4, 20, 9), dim: int = 5, shared: int = 0):
    """Hidden states (G, T, d), mask (G, T) and correct (G,) of a group.

    Rollouts 1 and 3 are right; the first `shared` states are equal.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = 3 * torch.randn(len(lengths), max(lengths), dim, generator=generator)
    hidden[:, :shared] = hidden[:1, :shared]
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    rollouts = torch.arange(len(lengths))
    return hidden, mask, (rollouts == 1) | (rollouts == 3)


def weigh(hidden, mask, correct, **options) -> Weighed:
    """As training weighs a group: by the fast hooks, or an ablation."""
    settings = {name: options.pop(name) for name in vars(Shear()) if name in options}
    evened = options.pop("normalize", "group") == "rollout"
    hooks = {"distances": token_distances, "closest": race}
    if options.get("reading") == "cost":
        hooks["closest"] = ablations.closest_by_cost
    if options.get("distance", "w1") != "w1":
        hooks["closest"] = getattr(ablations, f"closest_by_{options['distance']}")
    if options.get("pool") == "mean":
        hooks["pool"] = ablations.mean_weights
    context = SimpleNamespace(shear=Shear(**settings), hooks=hooks)
    weighed = rules.weigh(context, hidden, mask, correct)
    if evened:
        return weighed._replace(omega=even_out(weighed.omega, mask.bool()))
    return weighed


def weights(hidden, mask, correct, **options):
    """(G, T), the weights of `weigh`."""
    return weigh(hidden, mask, correct, **options).omega


RACES = (
    "text clustered identical shared-prefix one-point tiny huge outliers ragged nearly-tied".split()
)


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
    if name == "clustered":
        centres = 4 * torch.randn(5, 8, generator=generator)
        hidden = centres[torch.randint(5, (6, 40), generator=generator)] + 1e-3 * hidden
    elif name == "identical":
        hidden = hidden[:1].expand(6, -1, -1).clone()
    elif name == "shared-prefix":
        hidden[:, :25] = hidden[:1, :25]
    elif name == "one-point":
        hidden = torch.ones(6, 40, 8)
    elif name == "tiny":
        hidden = 1e-12 * hidden
    elif name == "huge":
        hidden = 1e12 * hidden
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
    """The inputs of `race` for a group, and the results for all pairs solved.

    The results are values (K+, K-) and iterations (K+, K-).
    """
    hidden, mask, correct = race_case(name, seed)
    right, wrong = two_sides(hidden, mask, correct, window, stride)
    costs = token_distances(right.states, wrong.states)
    eps = 0.05 * mean_norm(hidden[mask])

    def solve(reading, blocks, a, b):
        return getattr(sinkhorn(blocks, a, b, eps=eps, max_iters=100, tol=1e-3), reading).float()

    values = every_pair(costs, right.spans, wrong.spans, partial(solve, "value"))
    iterations = every_pair(costs, right.spans, wrong.spans, partial(solve, "iterations"))
    return (costs, right, wrong, eps), values.clamp_min(0.0), iterations.long()
