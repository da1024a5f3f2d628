"""credit/measures.py: each measure of credit against written-out numbers."""

import math

import numpy as np
import pytest
import torch
from builders.rollouts import batch_of, rollouts_like

from base.config import Credit
from credit.batch import effective_weights
from credit.measures import auc_matched, credit_spread, first_error_auc
from credit.rules import RULES, Rule, assign_credit, with_options


def test_a_rollout_is_right_if_its_reward_exceeds_one_half():
    """Rewards of one's own may be any number; one without a verdict is on no side."""
    rewards = torch.tensor([0.5, 0.51, math.nan, -3.0, 1.0, 0.2])
    batch = batch_of(rewards, rollouts_like(torch.ones(6, 2).bool()), 6)
    assert batch.correct.tolist() == [False, True, False, False, True, False]


def test_credit_is_0_outside_of_the_mask_and_a_constant(monkeypatch):
    """What a rule leaves in the padding, even NaN, reaches no loss; autograd sees no rule."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    made = torch.where(mask, 2.0, math.nan).requires_grad_()
    monkeypatch.setitem(RULES, "mine", Rule(lambda batch, context: made * 1, "for this test"))
    batch = batch_of(torch.tensor([1.0, 0.0]), rollouts_like(mask), 2)
    credit = assign_credit(with_options(Credit("mine")), batch, None)
    assert credit.tolist() == [[2, 2, 0], [2, 0, 0]] and not credit.requires_grad


def test_effective_weights_are_what_multiplied_the_advantage():
    """A factor may be negative; it is 1 where A is 0, and 0 outside of the mask."""
    token_advantages = torch.tensor([[1.0, -2, 4], [3, 3, 3], [-1, 0, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0]]).bool()
    ours = effective_weights(token_advantages, torch.tensor([2.0, 0, -1]), mask)
    assert ours.tolist() == [[0.5, -1, 2], [1, 1, 0], [1, 0, 0]]


def spread_of(token_advantages, advantages, mask):
    """The spread of a batch that has these."""
    batch = batch_of(torch.zeros(len(advantages)), rollouts_like(mask), len(advantages))
    batch.advantages = torch.tensor(advantages)
    batch.token_advantages = torch.tensor(token_advantages)
    return credit_spread(batch)


def test_credit_spread_against_written_out_numbers():
    """Two of three rollouts count, with weights 1 1 | 2 -1 0 0; the third has no advantage."""
    token_advantages = [[3.0, 3, 9, 9], [-4, 2, 0, 0], [0, 0, 0, 0]]
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]).bool()
    # |advantages| 3 3: uniform; 0 0 2 4: (6^2) / (4 * 20)
    assert spread_of(token_advantages, [3.0, -2, 0], mask) == pytest.approx(
        dict(
            weight_mean=3 / 6, weight_std=np.std([1, 1, 2, -1, 0, 0], ddof=1), ess=(1 + 36 / 80) / 2
        )
    )


def test_uniform_credit_has_an_effective_share_of_1_and_one_token_its_own():
    """An advantage that replaces A = 0 counts as well; a step without any has no share."""
    mask = torch.ones(1, 5).bool()
    assert spread_of([[-0.7] * 5], [0.0], mask)["ess"] == pytest.approx(1)
    assert spread_of([[1.0, 0, 0, 0, 0]], [1.0], mask)["ess"] == pytest.approx(1 / 5)
    nothing = spread_of([[0.0] * 5], [0.0], mask)
    assert math.isnan(nothing["ess"]) and (nothing["weight_mean"], nothing["weight_std"]) == (1, 0)


def test_the_auc_of_the_first_error_against_written_out_numbers():
    """Two rollouts count beside one that does not. The AUCs have a tie."""
    weights = torch.tensor([[0.1, 0.2, 0.2, 0.9], [0.5, 0.4, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    # after: .2 .9 | .4; before: .1 .2 | .5. Pairs won: (.2: 1.5 of 3), (.9: 3), (.4: 2); of 9
    # positions after: 2, 3, 1; before: 0, 1, 0. Pairs won: 3, 3, 2.5; of 9
    ours = first_error_auc(weights, mask, torch.tensor([2, 1, -1]))
    expected = dict(auc=6.5 / 9, auc_position=8.5 / 9, weight_before=0.8 / 3, weight_after=1.5 / 3)
    assert ours == pytest.approx(expected)
    for nowhere in (-1, 0):  # no rollout counts, or no token comes before the error
        assert first_error_auc(weights, mask, torch.full((3,), nowhere)) == {}


def test_the_matched_auc_compares_tokens_at_one_position_alone():
    """Position gets one half, however well it orders the tokens of a rollout."""
    values = torch.tensor([[1.0, 2, 3], [5, 2, 1], [0, 4, 2]])
    high = torch.tensor([[0, 1, 1], [0, 0, 1], [0, 0, 0]]).bool()
    low = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool()
    # at the second place 2 against 2 and 4, at the third 3 and 1 against 2
    assert auc_matched(values, high, low) == pytest.approx((0.5 + 0 + 1 + 0) / 4)
    # three pairs at one place count three times as much as one pair at another
    columns = torch.tensor([[1.0, 0], [0, 1], [0, 9], [0, 9]])
    ups = torch.tensor([[1, 1], [0, 0], [0, 0], [0, 0]]).bool()
    downs = torch.tensor([[0, 0], [1, 1], [1, 0], [1, 0]]).bool()
    assert auc_matched(columns, ups, downs) == pytest.approx(3 / 4)
    assert auc_matched(torch.arange(3.0).expand(3, 3), high, low) == 0.5
    assert auc_matched(values, high[:1], low[:1]) is None
