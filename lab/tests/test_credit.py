"""Credit rules against their formulas, token by token, or against written-out numbers.

Baselines, entropy, the answer's sensitivity, adapters, and scores of a process reward model. Those
of `lab/rules/ablations.py` and `controls.py` have files of their own.
"""

import math
from dataclasses import replace

import pytest
import torch
from builders.rollouts import batch_of, rollouts_like
from crediting import Told, assign, score_lines, weights_of, with_rewards
from near import assert_near
from torch.testing import assert_close

from credit.batch import Batch
from grpo import score, to_padded
from lab.tools import lora
from lab.tools.salience import Answer, outcome_weights


def pair(entropies: list[float]) -> Batch:
    """A right and a wrong rollout of equal tokens."""
    values = torch.tensor([entropies] * 2)  # (2, T)
    rollouts = rollouts_like(torch.ones_like(values).bool())
    return batch_of(torch.tensor([1.0, 0]), rollouts, 2, entropies=values)


def squared_norms(told: Told) -> torch.Tensor:
    """(B, T) of the gradients of log pi in the logits, by autograd in float64."""
    norms = torch.zeros(told.mask.shape, dtype=torch.float64)
    for row, inside in enumerate(told.mask):
        prompt = told.rollouts.prompt_ids[row][told.rollouts.prompt_mask[row]]
        ids = told.rollouts.ids[row][inside]
        with torch.no_grad():
            logits = told.policy.model(torch.cat([prompt, ids])[None]).logits
        logits = logits[0, len(prompt) - 1 : -1].double().requires_grad_()
        chosen = logits.log_softmax(-1).gather(1, ids[:, None])
        (gradient,) = torch.autograd.grad(chosen.sum(), logits)
        norms[row, inside] = gradient.square().sum(-1)
    return norms


def above_weighted_mean(rewards, weights, others=False):
    """r_i - sum_j W_j r_j / sum_j W_j over the rollouts of i's group, (B, 1), by a loop."""
    gaps = []
    for row in range(len(rewards)):
        members = [n for n in range(row // 4 * 4, row // 4 * 4 + 4) if n != row or not others]
        mean = weights[members] @ rewards[members] / weights[members].sum()
        gaps.append(rewards[row] - mean)
    return torch.stack(gaps)[:, None]


@pytest.mark.parametrize("of", ["shear", "position"])
@pytest.mark.parametrize("others", ["no", "yes"])
def test_a_rule_s_own_baseline_is_weighted_by_w_squared_n(of, others, told):
    """A_t = w_t (r - b) with W_i = sum_t w_t^2 n_t."""
    weights = weights_of(of, told)
    energy = (weights**2 * squared_norms(told)).sum(1).float()
    gaps = above_weighted_mean(told.rewards, energy, others == "yes")
    ours = assign("own-baseline", told, f"of={of}", f"others={others}")
    assert_near(ours, weights * gaps, 1e-4)


def test_entropy_adds_at_most_half_the_advantage():
    """Token advantages are A + min(.4 H, |A| / 2), so penalties shrink.

    A is +-.5 (but for the delta of 1e-6), so 1.25 |A| nats reach the bound.
    """
    batch = pair([0.0, 0.1, 2.0])
    expected = [[a, a + 0.04, a + abs(a) / 2] for a in batch.advantages.tolist()]
    assert_close(assign("entropy", batch), torch.tensor(expected))


def test_hapo_stays_within_its_bound_and_knows_the_group():
    """Standardised entropies are clipped at |A| / 2, then multiplied by .2.

    The entropies 0 0 1 | 1 of one group have mean .5 and deviation .5: z = -1, -1, 1 | 1.
    """
    batch = pair([0.0, 0, 1])
    batch.entropies = torch.tensor([[0.0, 0, 1], [1.0, 99, 99]])
    batch.rollouts.mask[1, 1:] = False
    right, wrong = batch.advantages.tolist()
    bend = 0.2 * right / 2
    expected = [[right - bend, right - bend, right + bend], [wrong - bend, 0, 0]]
    assert_close(assign("hapo", batch), torch.tensor(expected))
    mild = assign("hapo", replace(batch, advantages=10 * batch.advantages), "alpha=1")
    assert_close(mild[0], 10 * right + torch.tensor([-1.0, -1, 1]))
    batch.entropies = torch.full((2, 3), 0.3)  # no deviation, no bend, no NaN
    assert_near(assign("hapo", batch), assign("grpo", batch), 1e-4)


def test_outcome_weights_against_written_out_numbers():
    """Importances have log1p 0, 1, 2, 4, so that n = 0, .25, .5, 1.

    theta, the quarter quantile, is .1875; beta is 1.
    """
    importance = torch.tensor([[0, 1, 2, 4, 9, 0.0], [0.7] * 6, [0.7] * 6]).expm1()
    mask = torch.arange(6) < torch.tensor([6, 5, 6])[:, None]
    ours = outcome_weights(importance, {0: Answer(4, 4, 5), 1: Answer(3, 3, 4)}, mask, 0.25, 1.0)
    raw = torch.tensor([0.1, 1 + 0.0625 / 0.8125, 1 + 0.3125 / 0.8125, 2])
    assert_close(ours[0], torch.cat([raw * 4 / raw.sum(), torch.ones(2)]))
    assert_close(ours[1:], mask[1:].float())  # flat importance, and no answer


def test_arca_is_uniform_without_an_adapter_and_follows_it_with_one(told):
    """T w_t has mean 1 in each rollout, in proportion to how far the adapter moves a state."""
    with lora.off(told.policy.model):
        unmoved = score(told.policy, told.rollouts, temperature=1.0, micro_tokens=300).hidden
    change = to_padded((told.hidden - unmoved).norm(dim=-1), told.mask)  # (B, T)
    expected = change * told.lengths / change.sum(1, keepdim=True)
    assert expected.std() > 0.05
    assert_close(weights_of("arca", told)[:4], expected[:4], atol=1e-4, rtol=1e-4)
    assert_close(assign("arca", replace(told, hidden=unmoved)), assign("grpo", told))


def test_prm_fills_scores_backward_and_turns_them_for_wrong_rollouts(told):
    """Each token has the score of its own step, the stop token that of the last."""
    weights = weights_of("prm", told)
    for row, (good, step) in enumerate(score_lines(None, None, told.rollouts)[:4]):
        expected = good[step] if told.advantages[row] > 0 else 1 - good[step]
        assert_close(weights[row, : len(step)], expected)
        assert weights[row, 0] != weights[row, 13]  # lines are 12 tokens


@pytest.mark.parametrize("second", [0.0, math.nan])
def test_pure_against_its_formula(second, told):
    """Its advantages come from r*, suffix sums, a leave-one-out baseline and the group's deviation.

    A rollout without a verdict changes nothing for the others.
    """
    batch = with_rewards(told, [1, second, 0, 1, 0, 0, 0, 0])
    ours = assign("pure", batch)
    scores = score_lines(None, None, batch.rollouts)
    for group in (range(4), range(4, 8)):
        returns = {}
        for row in group:
            good, step = scores[row]
            r = 2 * good.double() - 1
            star = r * (-r / 0.1).softmax(0)
            if len(step):
                later = [star[k:].sum() for k in step.tolist()]
                returns[row] = torch.stack(later) + batch.rewards[row]
        centred = {}
        for row, values in returns.items():
            others = [returns[other].mean() for other in returns if other != row]
            centred[row] = values - sum(others) / len(others)
        std = torch.cat([*centred.values()]).std(correction=0)
        for row in group:
            expected = torch.zeros(batch.mask.shape[1])
            if row in centred:
                expected[batch.mask[row]] = (centred[row] / std).float()
            assert_close(ours[row], expected, atol=1e-4, rtol=1e-4)
