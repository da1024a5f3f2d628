"""The newest methods of credit/table.py, each against its formula, token by token, in float64."""

import argparse
import math

import pytest
import torch
from made import made_batch, without_text

from credit.batch import Batch
from credit.methods import assign_credit
from harness.launch import parse_args


def flags(**changes) -> argparse.Namespace:
    """The recipe's, and `changes`."""
    return argparse.Namespace(**{**vars(parse_args([])), **changes})


def drawn(rewards: list[float], group_size: int, **parts) -> Batch:
    """Rollouts of 5 to 10 tokens, of random probabilities, entropies and states in six dimensions."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(10) < torch.randint(5, 11, (len(rewards), 1), generator=generator)
    log_probs, entropies = -6 * torch.rand(mask.shape, generator=generator), torch.rand(mask.shape, generator=generator)
    hidden = torch.randn(*mask.shape, 6, generator=generator)[mask]
    parts |= dict(log_probs=log_probs, entropies=entropies, hidden=hidden)
    return made_batch(torch.tensor(rewards), without_text(mask), group_size, **parts)


def tokens(batch: Batch):
    """(rollout, place) of every token."""
    return batch.rollouts.mask.nonzero().tolist()


@pytest.mark.parametrize("options", [{}, dict(alpha=0.2, strength=0.5)])
def test_taco(options):
    """1 - lambda (1 - exp(-r)), r = -log p - H + log alpha, where A > 0 and r > 0; else 1. The defaults: .01, .9."""
    batch = drawn([1, 0, 0, 1, 1, 1], 3)
    alpha, strength = options.get("alpha", 0.01), options.get("strength", 0.9)
    given = flags(method_option=[f"{name}={value}" for name, value in options.items()])
    ours, weights = assign_credit("taco", batch, given), []
    for i, t in tokens(batch):
        r = -batch.log_probs[i, t].item() - batch.entropies[i, t].item() + math.log(alpha)
        weights.append(1 - strength * (1 - math.exp(-r)) if batch.advantages[i] > 0 and r > 0 else 1)
        assert ours[i, t].item() == pytest.approx(batch.advantages[i].item() * weights[-1], rel=1e-5)
    assert min(weights) < 0.9 < max(weights) == 1
