"""credit.py: methods differ in their advantages and in nothing else; the measures against written-out numbers.

Run: pytest tests/test_credit.py
"""

import pytest
import torch

import shear
from credit import METHODS, Batch, credit, effective_weights, localisation
from grpo import Rollouts, Scored, group_advantages, policy_loss


def batch_of(seed: int = 0) -> Batch:
    """Two groups of four rollouts, the first mixed, the second all wrong."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(10)[None] < torch.tensor([10, 7, 9, 10, 5, 10, 10, 3])[:, None]
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])
    rollouts = Rollouts(None, None, torch.zeros(8, 10, dtype=torch.long), mask, torch.zeros(8).bool(), [""] * 8)
    hidden = torch.randn(8, 10, 6, generator=generator)
    scored = Scored(torch.zeros(8, 10), torch.zeros(8, 10), hidden)
    return Batch(group_advantages(rewards, 4), rewards, rollouts, scored, 4)


OPTIONS = {"shear": dict(window=4, stride=2)}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_finite_detached_token_advantages(method):
    """(B, T), no gradient, and nothing for a group without contrast."""
    batch = batch_of()
    ours = credit(method, batch, OPTIONS)
    assert ours.shape == batch.rollouts.mask.shape and not ours.requires_grad
    assert ours.isfinite().all() and ours[4:].abs().max() == 0 and ours[:4].abs().max() > 0


def test_shear_is_the_rollout_advantage_times_its_weights():
    """The door adds nothing to Algorithm 1, and reports how the solver fared."""
    batch = batch_of()
    ours = credit("shear", batch, OPTIONS)
    mask, hidden = batch.rollouts.mask, batch.scored.hidden
    omega = shear.shear_weights(hidden[:4], mask[:4], batch.correct[:4], window=4, stride=2)
    assert torch.equal(ours[:4], batch.advantages[:4, None] * omega)
    assert 1 <= batch.stats["sinkhorn_iterations"] <= 100 and batch.stats["sinkhorn_error"] >= 0


def test_shear_with_unit_weights_is_grpo_to_the_bit(monkeypatch):
    """Ones in place of a mixed group's weights: the same loss and the same gradient, bit for bit."""

    def ones(hidden, mask, correct, **options):
        return mask.float()

    monkeypatch.setattr(shear, "shear_weights", ones)
    batch = batch_of()
    old = torch.randn(8, 10)
    results = []
    for method in ("grpo", "shear"):
        logp = (old + 0.3 * torch.sin(torch.arange(80.0)).view(8, 10)).requires_grad_()
        loss, metrics = policy_loss(logp, old, credit(method, batch, OPTIONS), batch.rollouts.mask, 64)
        loss.backward()
        results.append((loss.detach(), logp.grad, metrics))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


def test_effective_weights_recover_what_multiplied_the_advantage():
    """omega where A is not 0, 1 where it is, 0 outside the mask."""
    batch = batch_of()
    mask = batch.rollouts.mask
    omega = shear.shear_weights(batch.scored.hidden[:4], mask[:4], batch.correct[:4], window=4, stride=2)
    ours = effective_weights(credit("shear", batch, OPTIONS), batch.advantages, mask)
    torch.testing.assert_close(ours[:4], omega, atol=1e-6, rtol=0)
    assert torch.equal(ours[4:], mask[4:].float())
    assert torch.equal(effective_weights(credit("grpo", batch, OPTIONS), batch.advantages, mask), mask.float())


def test_localisation_against_written_out_numbers():
    """Two counted rollouts, one uncounted; AUC with a tie, pooled and a rollout, and that of position alone."""
    weights = torch.tensor([[0.1, 0.2, 0.2, 0.9], [0.5, 0.4, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    ours = localisation(weights, mask, torch.tensor([2, 1, -1]))
    # after: .2 .9 | .4; before: .1 .2 | .5. Pairs won: (.2: 1.5 of 3), (.9: 3), (.4: 2); of 9
    assert ours["auc"] == pytest.approx(6.5 / 9)
    assert ours["auc_rollout"] == pytest.approx(((1.5 + 2) / 4 + 0) / 2)
    # positions after: 2, 3, 1; before: 0, 1, 0. Pairs won: 3, 3, 2.5; of 9
    assert ours["auc_position"] == pytest.approx(8.5 / 9)
    assert ours["weight_before"] == pytest.approx(0.8 / 3) and ours["weight_after"] == pytest.approx(1.5 / 3)
    assert ours["rollouts"] == 2


def test_localisation_without_anything_to_locate_is_none():
    """No counted rollout, or an error at the first token only: no number that looks like one."""
    mask = torch.ones(2, 3).bool()
    for first in ([-1, -1], [0, 0]):
        assert localisation(torch.rand(2, 3), mask, torch.tensor(first)) is None


def test_uniform_weights_locate_nothing():
    """GRPO's weights are all equal: every AUC is exactly one half."""
    ours = localisation(torch.ones(4, 9), torch.ones(4, 9).bool(), torch.tensor([2, 5, 1, -1]))
    assert ours["auc"] == ours["auc_rollout"] == 0.5
