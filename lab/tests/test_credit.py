"""Credit rules against their formulas, token by token, or against written-out numbers.

Baselines, entropy, the answer's sensitivity, adapters, and scores of a process reward model. Those
of `lab/rules/ablations.py`, `controls.py` and `hindsight.py` have files of their own.
"""

import math
from dataclasses import replace

import pytest
import torch
from builders.near import assert_near
from builders.rollouts import batch_of, rollouts_like
from crediting import Told, assign, score_lines, weights_of, with_rewards
from torch.testing import assert_close

from credit.batch import Batch
from grpo import score, to_padded
from lab.tools import lora, reward_model
from lab.tools.salience import Answer, outcome_weights
from tasks import toy


def pair(entropies: list[float]) -> Batch:
    """A right and a wrong rollout of equal tokens."""
    values = torch.tensor([entropies] * 2)  # (2, T)
    rollouts = rollouts_like(torch.ones_like(values).bool())
    return batch_of(torch.tensor([1.0, 0]), rollouts, 2, entropies=values)


def logits_of(model, told: Told, row: int) -> torch.Tensor:
    """(T, V) at each token of a response, float64, by a pass of its own."""
    rollouts = told.rollouts.take(torch.tensor([row]))
    prompt = rollouts.prompt_ids[rollouts.prompt_mask]
    ids = torch.cat([prompt, rollouts.ids[rollouts.mask]])
    with torch.no_grad():
        return model(ids[None]).logits[0, len(prompt) - 1 : -1].double()


def squared_norms(told: Told) -> torch.Tensor:
    """(B, T) of the gradients of log pi in the logits, by autograd in float64."""
    norms = torch.zeros(told.mask.shape, dtype=torch.float64)
    for row, inside in enumerate(told.mask):
        logits = logits_of(told.policy.model, told, row).requires_grad_()
        chosen = logits.log_softmax(-1).gather(1, told.rollouts.ids[row][inside][:, None])
        (gradient,) = torch.autograd.grad(chosen.sum(), logits)
        norms[row, inside] = gradient.square().sum(-1)
    return norms


def above_weighted_mean(told, weights, others=False):
    """r_i - sum_j W_jt r_j / sum_j W_jt over the rollouts of i's group, (B, T), by a loop."""
    expected = torch.zeros(told.mask.shape, dtype=torch.float64)
    for row, t in told.mask.nonzero().tolist():
        members = [n for n in range(row // 4 * 4, row // 4 * 4 + 4) if n != row or not others]
        total = sum(weights[n, t] for n in members)
        weighted = sum(weights[n, t] * told.rewards[n].item() for n in members)
        expected[row, t] = told.rewards[row] - weighted / total
    return expected.float()


def test_baselines_are_means_weighted_by_length_or_by_squared_norms_of_gradients(told):
    """OPO's b has lengths, as verl's `compute_opo_outcome_advantage`; SHEAR's weights multiply."""
    energy = squared_norms(told).sum(1, keepdim=True).expand(told.mask.shape)
    lengths = told.lengths.double().expand(told.mask.shape)
    omega = weights_of("shear", told)
    of_energy = above_weighted_mean(told, energy)
    assert_near(assign("opo-length", told), above_weighted_mean(told, lengths), 1e-4)
    assert_near(assign("opo-energy", told), of_energy, 1e-4)
    assert_near(assign("opo-shear", told), omega * of_energy, 1e-4)


def test_a_token_s_baseline_is_of_the_rollouts_that_have_not_ended(told):
    """B_t = sum G W_t mask_t / sum W_t mask_t, as verl's `compute_optimal_token_baseline_advantage`.

    The last rollout to end is its own baseline there: A_t = 0.
    """
    norms = squared_norms(told)
    expected = above_weighted_mean(told, norms.cumsum(1) * told.mask)
    assert len(set(told.lengths.flatten().tolist())) > 1
    assert_near(assign("otb", told), expected, 1e-4)
    assert_near(assign("otb-shear", told), weights_of("shear", told) * expected, 1e-4)


@pytest.mark.parametrize("of", ["shear", "position"])
@pytest.mark.parametrize("others", ["no", "yes"])
def test_a_rule_s_own_baseline_is_weighted_by_w_squared_n(of, others, told):
    """A_t = w_t (r - b) with W_i = sum_t w_t^2 n_t; of GRPO, whose w is 1, it is opo-energy."""
    weights = weights_of(of, told)
    energy = (weights.double() ** 2 * squared_norms(told)).sum(1, keepdim=True)
    gaps = above_weighted_mean(told, energy.expand(told.mask.shape), others == "yes")
    ours = assign("own-baseline", told, f"of={of}", f"others={others}")
    assert_near(ours, weights * gaps, 1e-4)
    assert_near(assign("own-baseline", told, "of=grpo"), assign("opo-energy", told), 1e-5)


def test_the_own_baseline_gives_a_weighted_gradient_the_least_mean_square():
    """Of the mean, the baseline for weights 1 and the own one, sum_i |w g|^2 (r - b)^2 is least.

    The sum is the second moment of the weighted gradient over a group whose gradients are
    orthogonal.
    """
    generator = torch.Generator().manual_seed(0)
    norms, omega = torch.rand(2, 50, generator=generator)
    rewards = (torch.rand(50, generator=generator) < 0.4).float()

    def second_moment(weights: torch.Tensor) -> float:
        b = (weights * rewards).sum() / weights.sum()
        return (omega**2 * norms * (rewards - b) ** 2).sum().item()

    own = second_moment(omega**2 * norms)
    assert own < min(second_moment(norms), second_moment(torch.ones(50)))


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


def test_the_noise_of_oar_g_is_made_anew_by_seed_and_step(told):
    """For a seed and step it is the same again, whatever was drawn before."""
    ours = [assign("oar-g", told, step=step, seed=seed) for step, seed in ((3, 0), (4, 0), (3, 1))]
    assert torch.equal(assign("oar-g", told), ours[0])
    assert len(torch.stack(ours).unique(dim=0)) == 3


def test_arca_is_uniform_without_an_adapter_and_follows_it_with_one(told):
    """T w_t has mean 1 in each rollout, in proportion to how far the adapter moves a state."""
    with lora.off(told.policy.model):
        unmoved = score(told.policy, told.rollouts, temperature=1.0, micro_tokens=300).hidden
    change = to_padded((told.hidden - unmoved).norm(dim=-1), told.mask)  # (B, T)
    assert change[told.mask].std() > 0.05 * change[told.mask].mean()
    expected = change * told.lengths / change.sum(1, keepdim=True)
    assert_close(weights_of("arca", told)[:4], expected[:4], atol=1e-4, rtol=1e-4)
    assert_close(assign("arca", replace(told, hidden=unmoved)), assign("grpo", told))


@pytest.mark.parametrize(("tau", "kappa"), [(0.5, 1.0), (0.02, 0.5), (0.1, 0.0)])
def test_dgpo_against_a_loop_by_its_formula(told, tau, kappa):
    """Token by token: whole distributions, the start's by a model without adapter, and a softmax.

    All of it is in float64. The sum of a rollout is T A, and at kappa 0 entropies do not count.
    """
    start = toy.make_model(2, seed=1).eval()  # as `worked_responses` adapted it
    ours = assign("dgpo", told, f"tau={tau}", f"kappa={kappa}", temperature=0.7, micro_tokens=100)
    for row, inside in enumerate(told.mask):
        p = (logits_of(told.policy.model, told, row) / 0.7).softmax(-1)
        q = (logits_of(start, told, row) / 0.7).softmax(-1)
        scores = []
        for t, entropy in enumerate(told.entropies[row][inside].tolist()):
            distance = 1 - float((p[t] * q[t]).sqrt().sum())
            scores.append(distance * (entropy / math.log(p.shape[1])) ** kappa)
        total = sum(math.exp(score / tau) for score in scores)
        weights = [len(scores) * math.exp(score / tau) / total for score in scores]
        expected = told.advantages[row] * torch.tensor(weights)
        assert_close(ours[row][inside], expected, atol=1e-5, rtol=1e-4)
        assert max(weights) - min(weights) > 0.005  # at the default tau, near GRPO


def test_prm_fills_scores_backward_and_turns_them_for_wrong_rollouts(told):
    """Each token has the score of its own step, the stop token that of the last."""
    weights = weights_of("prm", told)
    for row, (good, step) in enumerate(score_lines(None, None, told.rollouts)[:4]):
        expected = good[step] if told.advantages[row] > 0 else 1 - good[step]
        assert_close(weights[row, : len(step)], expected)
        assert weights[row, 0] != weights[row, 13]  # lines are 12 tokens


def slow_finepo(
    advantage: float, good: list[float], step: list[int], alpha: float, bound: float
) -> list[float]:
    """The formula of one rollout, step by step: A' = A + alpha k D, k = |A| / max D, clipped."""
    lengths = [step.count(k) for k in range(len(good))]
    mean = sum(length * p for length, p in zip(lengths, good, strict=True)) / sum(lengths)
    k = abs(advantage) / (max(0.0, max(good) - mean) + 1e-6)
    moved = [advantage + alpha * k * (p - mean) for p in good]
    if advantage > 0:
        clipped = [min(max(value, 0.0), bound * advantage) for value in moved]
    else:
        clipped = [max(min(value, 0.0), bound * advantage) for value in moved]
    return [clipped[number] for number in step]


@pytest.fixture
def scores(told, monkeypatch):
    """For each rollout, the scores of its steps, which a test changes, and its tokens' steps.

    A step of a token, three longer ones, and one without a token.
    """
    generator = torch.Generator().manual_seed(3)
    rows = []
    for length in told.lengths.flatten().tolist():
        step = torch.tensor([0, *sorted([1, 2, 3] * length)[: length - 1]])
        rows.append((torch.rand(5, generator=generator), step))
    monkeypatch.setattr(reward_model, "score_steps", lambda *inputs: rows)
    return rows


@pytest.mark.parametrize(("alpha", "bound"), [(0.5, 2.0), (0.1, 1.0), (3.0, 1.5)])
def test_finepo_against_a_loop_by_its_formula(told, scores, alpha, bound):
    """Right and wrong rollouts, with and without clipping."""
    ours = assign("finepo", told, f"alpha={alpha}", f"bound={bound}")
    for row, (good, step) in enumerate(scores):
        advantage = told.advantages[row].item()
        credit = slow_finepo(advantage, good.tolist(), step.tolist(), alpha, bound)
        expected = torch.tensor(credit)
        assert_close(ours[row, : len(step)], expected, atol=1e-6, rtol=1e-5)


def test_finepo_can_draw_scores_and_gives_a_for_equal_ones(told, scores):
    """Random scores are drawn anew each time."""
    drawn = assign("finepo", told, "scores=random")
    assert not torch.equal(drawn, assign("finepo", told, "scores=random"))
    scores[:] = [(torch.full((5,), 0.7), step) for _, step in scores]
    assert_near(assign("finepo", told), assign("grpo", told), 1e-6)


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
            star = r * (-r / 0.1).exp() / (-r / 0.1).exp().sum()
            assert r.min() - 1e-9 <= star.sum() <= r.mean() + 1e-9
            if len(step):
                later = torch.stack([star[k:].sum() for k in step.tolist()])
                returns[row] = later + batch.rewards[row]
        centred = {}
        for row, values in returns.items():
            others = [returns[other].mean() for other in returns if other != row]
            centred[row] = values - sum(others) / len(others)
        std = torch.cat(list(centred.values())).std(correction=0)
        for row in group:
            expected = centred.get(row, torch.zeros(0)) / std
            inside = batch.mask[row]
            assert_close(ours[row][inside], expected.float(), atol=1e-4, rtol=1e-4)
            assert ours[row][~inside].count_nonzero() == 0


def test_pure_does_not_blow_up_small_differences_of_scores(told, monkeypatch):
    """Scores that differ by a hundredth give advantages of that order, not of order 1.

    All verdicts of the group are equal. Where the reward model overflows, the update is skipped.
    """
    even = []
    for row, (good, step) in enumerate(score_lines(None, None, told.rollouts)):
        even.append((torch.full_like(good, 0.5 + 0.001 * row), step))
    monkeypatch.setattr(reward_model, "score_steps", lambda *inputs: even)
    assert 0 < assign("pure", told)[4:].abs().max() < 0.2
    even[4][0].fill_(math.nan)
    assert assign("pure", told)[4:][told.mask[4:]].isnan().all()
