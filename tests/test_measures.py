"""credit/measures.py: each measure of credit against written-out numbers."""

import math

import pytest
import torch

from credit.measures import concentration, effective_weights, localisation, weight_by_side


def test_effective_weights_are_what_multiplied_the_advantage():
    """Also a negative factor; 1 where A is 0, 0 outside of the mask."""
    token_advantages = torch.tensor([[1.0, -2, 4], [3, 3, 3], [-1, 0, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0]]).bool()
    ours = effective_weights(token_advantages, torch.tensor([2.0, 0, -1]), mask)
    assert ours.tolist() == [[0.5, -1, 2], [1, 1, 0], [1, 0, 0]]


def test_concentration_against_written_out_numbers():
    """Two rollouts that count and one without advantage; weights 1 1 | 2 -1 0 0."""
    advantages = torch.tensor([3.0, -2, 0])
    token_advantages = torch.tensor([[3.0, 3, 9, 9], [-4, 2, 0, 0], [0, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]).bool()
    ours = concentration(token_advantages, advantages, mask)
    assert ours["weight_mean"] == pytest.approx(3 / 6)
    assert ours["weight_std"] == pytest.approx(torch.tensor([1.0, 1, 2, -1, 0, 0]).std().item())
    assert ours["sign_changes"] == pytest.approx(1 / 6)
    # |advantages| 3 3: uniform. 0 0 2 4: (6^2) / (4 * 20); sum i v = 3 * 2 + 4 * 4; ceil(4 / 10) =
    # 1 token has 4 of 6
    assert ours["ess"] == pytest.approx((1 + 36 / 80) / 2)
    assert ours["gini"] == pytest.approx((0 + 2 * 22 / (4 * 6) - 5 / 4) / 2)
    assert ours["top_tenth"] == pytest.approx((1 / 2 + 4 / 6) / 2)


def test_uniform_credit_is_not_concentrated_and_one_token_is_wholly():
    """The ends of each scale, in a rollout of 25 tokens, of which 3 are a tenth; an advantage that
    replaces A = 0 counts as well.
    """
    mask = torch.ones(1, 25).bool()
    flat = concentration(torch.full((1, 25), -0.7), torch.tensor([0.0]), mask)
    assert (flat["ess"], flat["gini"], flat["top_tenth"]) == pytest.approx((1, 0, 3 / 25))
    one = concentration(torch.eye(25)[:1], torch.tensor([1.0]), mask)
    assert (one["ess"], one["gini"], one["top_tenth"]) == pytest.approx((1 / 25, 24 / 25, 1))


def test_a_step_without_advantages_has_no_concentration():
    """Groups of equal rewards only: no number that looks like one."""
    ours = concentration(torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3).bool())
    assert math.isnan(ours["ess"]) and math.isnan(ours["gini"]) and math.isnan(ours["top_tenth"])
    assert ours["weight_mean"] == 1 and ours["sign_changes"] == 0


def test_localisation_against_written_out_numbers():
    """Two counted rollouts, one uncounted; AUC with a tie, pooled and a rollout, and that of
    position alone.
    """
    weights = torch.tensor([[0.1, 0.2, 0.2, 0.9], [0.5, 0.4, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    ours = localisation(weights, mask, torch.tensor([[2, 3], [1, 2], [-1, -1]]))
    # after: .2 .9 | .4; before: .1 .2 | .5. Pairs won: (.2: 1.5 of 3), (.9: 3), (.4: 2); of 9
    assert ours["auc"] == pytest.approx(6.5 / 9)
    assert ours["auc_rollout"] == pytest.approx(((1.5 + 2) / 4 + 0) / 2)
    # positions after: 2, 3, 1; before: 0, 1, 0. Pairs won: 3, 3, 2.5; of 9
    assert ours["auc_position"] == pytest.approx(8.5 / 9)
    # the steps' tokens .2 | .4 against .1 .2 .9 .5: 1.5 and 2 of 4
    assert ours["auc_step"] == pytest.approx(3.5 / 8)
    assert ours["weight_before"] == pytest.approx(0.8 / 3) and ours[
        "weight_after"
    ] == pytest.approx(1.5 / 3)
    assert ours["rollouts"] == 2


def test_localisation_without_anything_to_locate_is_none():
    """No counted rollout, or an error at the first token only: no number that looks like one."""
    mask = torch.ones(2, 3).bool()
    for start, end in ((-1, -1), (0, 2)):
        assert localisation(torch.rand(2, 3), mask, torch.tensor([[start, end]] * 2)) is None
        assert math.isnan(
            weight_by_side(torch.rand(2, 3), mask, torch.tensor([start] * 2))["weight_before"]
        )
