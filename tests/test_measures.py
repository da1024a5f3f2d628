"""credit/measures.py: each measure of credit against written-out numbers."""

import math

import pytest
import torch

from credit.batch import effective_weights
from credit.measures import concentration, localisation, weight_by_side


def test_effective_weights_are_what_multiplied_the_advantage():
    """A factor may be negative; it is 1 where A is 0, and 0 outside of the mask."""
    token_advantages = torch.tensor([[1.0, -2, 4], [3, 3, 3], [-1, 0, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0]]).bool()
    ours = effective_weights(token_advantages, torch.tensor([2.0, 0, -1]), mask)
    assert ours.tolist() == [[0.5, -1, 2], [1, 1, 0], [1, 0, 0]]


def test_concentration_against_written_out_numbers():
    """Of three rollouts two count, with weights 1 1 | 2 -1 0 0, and one has no advantage."""
    advantages = torch.tensor([3.0, -2, 0])
    token_advantages = torch.tensor([[3.0, 3, 9, 9], [-4, 2, 0, 0], [0, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]).bool()
    # |advantages| 3 3: uniform.
    # 0 0 2 4: (6^2) / (4 * 20); sum i v = 3 * 2 + 4 * 4; ceil(4 / 10) = 1 token has 4 of 6.
    expected = dict(
        weight_mean=3 / 6,
        weight_std=torch.tensor([1.0, 1, 2, -1, 0, 0]).std().item(),
        sign_changes=1 / 6,
        ess=(1 + 36 / 80) / 2,
        gini=(0 + 2 * 22 / (4 * 6) - 5 / 4) / 2,
        top_tenth=(1 / 2 + 4 / 6) / 2,
    )
    ours = concentration(token_advantages, advantages, mask)
    assert {name: ours[name] for name in expected} == pytest.approx(expected)


def test_uniform_credit_is_not_concentrated_and_one_token_is_wholly():
    """Each scale has its ends, in a rollout of 25 tokens, of which 3 are a tenth.

    An advantage that replaces A = 0 counts as well.
    """
    mask = torch.ones(1, 25).bool()
    names = ("ess", "gini", "top_tenth")
    for token_advantages, advantage, expected in (
        (torch.full((1, 25), -0.7), 0.0, (1, 0, 3 / 25)),
        (torch.eye(25)[:1], 1.0, (1 / 25, 24 / 25, 1)),
    ):
        ours = concentration(token_advantages, torch.tensor([advantage]), mask)
        assert [ours[name] for name in names] == pytest.approx(expected)


def test_a_step_without_advantages_has_no_concentration():
    """Groups of equal rewards alone give no number that looks like one."""
    ours = concentration(torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3).bool())
    assert all(math.isnan(ours[name]) for name in ("ess", "gini", "top_tenth"))
    assert ours["weight_mean"] == 1 and ours["sign_changes"] == 0


def test_localisation_against_written_out_numbers():
    """Every kind of AUC is that of two rollouts that count beside one that does not.

    The AUCs have a tie; they are pooled, by rollout, and of position alone.
    """
    weights = torch.tensor([[0.1, 0.2, 0.2, 0.9], [0.5, 0.4, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    expected = dict(
        # after: .2 .9 | .4; before: .1 .2 | .5. Pairs won: (.2: 1.5 of 3), (.9: 3), (.4: 2); of 9
        auc=6.5 / 9,
        auc_rollout=((1.5 + 2) / 4 + 0) / 2,
        # positions after: 2, 3, 1; before: 0, 1, 0. Pairs won: 3, 3, 2.5; of 9
        auc_position=8.5 / 9,
        # the steps' tokens .2 | .4 against .1 .2 .9 .5: 1.5 and 2 of 4
        auc_step=3.5 / 8,
        weight_before=0.8 / 3,
        weight_after=1.5 / 3,
        rollouts=2,
    )
    ours = localisation(weights, mask, torch.tensor([[2, 3], [1, 2], [-1, -1]]))
    assert {name: ours[name] for name in expected} == pytest.approx(expected)


def test_localisation_without_anything_to_locate_is_none():
    """Without a rollout that counts, or a token before the error, there is no number."""
    weights = torch.rand(2, 3)
    mask = torch.ones(2, 3).bool()
    for start, end in ((-1, -1), (0, 2)):
        places = torch.tensor([[start, end]] * 2)
        assert localisation(weights, mask, places) is None
        assert math.isnan(weight_by_side(weights, mask, places[:, 0])["weight_before"])
