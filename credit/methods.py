"""Credit: the one door from advantages A (B,) to token advantages (B, T), and most methods.

    assign_credit(batch, context, Credit("grpo"))   ->  A_i on every token
    assign_credit(batch, context, Credit("shear"))  ->  A_i omega_t, Alg. 1 line 18 of 2604.23318

`credit/table.py` lists all methods and says how to add one. FUNCTIONS below maps their names to
their functions, some of which are in `baselines.py` and `hindsight.py`. A method that needs
further forward passes runs them itself, and logs metrics with `batch.log`.

A method keeps the sign of A unless its entry in the table has `weighs=False`. Token advantages are
detached: weights are constants for autograd. In a docstring, "Inferred" marks what the source
leaves open, and "Deviates" what differs from it. `credit/measures.py` measures where credit went.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from credit import ablations, reward_model, salience
from credit.baselines import opo, opo_shear, otb, otb_shear
from credit.batch import Batch, Context, effective_weights
from credit.hindsight import rlsd, sdpo, serl
from credit.measures import group_moments, positions, standardise
from credit.settings import Credit
from credit.shear_settings import closest_by_rollout, shear_options
from grpo import Rollouts
from shear import mean_norm, shear_advantages, shear_weights


def assign_credit(batch: Batch, context: Context, credit: Credit) -> Tensor:
    """Token advantages (B, T) of a method with its options, 0 outside of the mask.

    `--negative-scale` multiplies those of all wrong rollouts: a control, as methods differ in how
    much they punish. `--rescale mean1` then divides those of a group by its mean weight, so that
    methods differ in direction and not in the size of the step; a group without any weight stays as
    it is.
    """
    token_advantages = FUNCTIONS[credit.method](batch, context, **credit.options)  # (B, T)
    token_advantages = torch.where(batch.mask, token_advantages.detach(), 0.0)
    scale = torch.where(batch.correct[:, None], 1.0, credit.negative_scale)  # (B, 1)
    token_advantages = scale * token_advantages
    if credit.rescale == "mean1":
        counts = batch.mask & (batch.A != 0)  # (B, T)
        weights = effective_weights(token_advantages, batch.advantages, batch.mask)  # (B, T)
        mean, _ = group_moments(weights, counts, batch.group_size)  # (B, 1)
        token_advantages = torch.where(mean > 0, token_advantages / mean, token_advantages)
    return token_advantages


# ---- group and entropies -------------------------------------------------------------------------


def grpo(batch: Batch, context: Context) -> Tensor:
    """A_t = A, the rollout's advantage on every token (Shao et al. 2024, arXiv 2402.03300)."""
    return batch.A.expand(batch.mask.shape)


def entropy_credit(batch: Batch, context: Context, *, alpha: float, kappa: float) -> Tensor:
    """A_t = A + min(alpha H_t, |A| / kappa), H_t in nats (Cheng et al. 2025, arXiv 2506.14758).

    Rewards grow and penalties shrink where the policy was unsure. The default alpha is the source's
    for GRPO. Deviates: the source takes H_t from the forward pass of each update; here it is
    computed once for all updates, from the distribution that the rollout was sampled from.
    """
    return batch.A + torch.minimum(alpha * batch.entropies, batch.A.abs() / kappa)


def hapo(batch: Batch, context: Context, *, alpha: float, phi: float) -> Tensor:
    """A_t = A + alpha sign(A) clip((H_t - mu) / sigma, -|A| / phi, |A| / phi): HAPO (2604.11056).

    mu and sigma are the mean and standard deviation of the entropies of the group's tokens. These
    are Eqs. (6) and (7) of version 1, which calls the method EAPO; version 2, HAPO, may differ.
    """
    bound = batch.A.abs() / phi  # (B, 1)
    z = standardise(batch.entropies, batch.mask, batch.group_size)  # (B, T)
    return batch.A + alpha * batch.A.sign() * z.clamp(-bound, bound)


# ---- hidden states -------------------------------------------------------------------------------


def shear(
    batch: Batch, context: Context, *, reading: str, distance: str, normalize: str, pool: str
) -> Tensor:
    """A_t = A omega_t: SHEAR, Algorithm 1 of arXiv 2604.23318.

    The options are the paper's ablations; with `normalize` "rollout", every rollout's weights are
    scaled to the group's mean weight.
    """
    settings = context.shear
    options = shear_options(settings, reading=reading, distance=distance, pool=pool)
    omega = []
    for _, hidden, mask, correct in batch.groups():
        weighed = shear_weights(hidden, mask, correct, **options)  # Alg. 1 lines 1-16
        weights = weighed.omega  # (G, T)
        if normalize == "rollout":
            weights = ablations.even_out(weights, mask)
        omega.append(weights)
        if mask.any():
            batch.log("nbar", torch.tensor(weighed.nbar))
            batch.log("eps_over_nbar", torch.tensor(settings.eps_over(weighed.nbar)))
        closest = weighed.closest
        if closest and not batch.closest:
            batch.closest = closest_by_rollout(weighed, mask, correct, settings)
        if closest and closest.iterations is not None and closest.error is not None:
            batch.log("sinkhorn_iterations", closest.iterations)
            batch.log("sinkhorn_error", closest.error)
    return shear_advantages(batch.advantages, torch.cat(omega))  # Alg. 1 line 18, Step 4


def first(batch: Batch, context: Context, *, threshold: float, place: str) -> Tensor:
    """A_t = A where a wrong rollout first departs from the right ones, 0 elsewhere; ours.

    The distance is W_eps in the reading "cost", which has no floor. Right rollouts keep A on every
    token. A wrong one keeps it only around the onset of its first span whose distance (in units of
    nbar) exceeds `threshold`: on the span's last `stride` tokens (which, but for a response's last
    span, no span before it covers), on `stride` tokens before these and on `stride` after. This
    takes most of the weight off wrong rollouts, so compare it with `--negative-scale`, which does
    the same without looking at tokens, and with `place` "random", which moves these tokens to a
    random place of their rollout.
    """
    settings = context.shear
    stride = settings.stride
    omega = batch.mask.float()  # (B, T)
    options = shear_options(settings, reading="cost")
    for group, hidden, mask, correct in batch.groups():
        weighed = shear_weights(hidden, mask, correct, **options)
        if not weighed.closest:
            continue
        spans = closest_by_rollout(weighed, mask, correct, settings)
        for row in (~correct).nonzero().flatten().tolist():
            omega[group][row] = 0.0
            far = [span for span in spans[row] if span.distance > threshold]
            if far:
                length = int(mask[row].sum())
                start = max(0, far[0].end - 2 * stride)
                end = min(length, far[0].end + stride)
                if place == "random":
                    moved = int(torch.randint(length - (end - start) + 1, ()))
                    start, end = moved, moved + end - start
                omega[group][row, start:end] = 1.0
    return batch.A * omega


def own_side(batch: Batch, context: Context) -> Tensor:
    """A_t = A omega_t as in `shear`, but from the closest span of the same outcome: a control.

    The control is ours. The closest span is one of another rollout. If SHEAR's weights measure more
    than novelty, these should locate errors less well. nbar and eps are those of the whole group;
    omega is 1 in a rollout that is the only one of its side. HarA (arXiv 2610.04344), of which only
    the abstract is public, also compares rollouts of the same outcome, by the distance to their
    barycentre.
    """
    omega = batch.mask.float()  # (B, T)
    for group, hidden, mask, correct in batch.groups():
        if not batch.advantages[group].any():  # no opposing side: A is 0
            continue
        nbar = mean_norm(hidden[mask])
        eps = context.shear.eps_over(nbar) * nbar
        options = shear_options(replace(context.shear, eps=eps, eps_unit="raw"))
        for row in range(len(mask)):
            same = mask & (correct == correct[row])[:, None]  # (G, T)
            alone = torch.arange(len(mask), device=mask.device) == row  # (G,)
            weighed = shear_weights(hidden, same, alone, **options)
            if weighed.closest:
                omega[group][row] = weighed.omega[row] * weighed.nbar / nbar
    return batch.A * omega


# ---- further passes of the policy ----------------------------------------------------------------


def oar_g(
    batch: Batch, context: Context, *, quantile: float, beta: float, probe: str, noise: float
) -> Tensor:
    """A_t = A omega_t, omega_t by the answer's sensitivity to token t: OAR-G (arXiv 2601.07408).

    The sensitivity is gradient times input. The defaults of quantile, beta and noise are those of
    the authors' page and code; the paper's own (ACL 2026) are not known. As in the code, J is the
    KL of the answer's mean logits (with the probe "kl"), and the gradient is multiplied by the
    embedding, which the page does not do. Inferred: the answer is the one that was given, read
    where it was sampled. With either probe, importance depends in part on the noise, which is drawn
    anew in each step.
    """
    importance_of = partial(salience.importance_by_gradient, probe=probe, noise=noise)
    return by_importance(importance_of, batch, context, quantile, beta)


def oar_p(batch: Batch, context: Context, *, quantile: float, beta: float, probe: str) -> Tensor:
    """A_t = A omega_t as in `oar_g`, the sensitivity measured by hiding one token after the other.

    It takes one forward pass per token before the answer. Deviates: with the probe "logp" a token
    whose absence makes the answer likelier has importance 0; in their code, less than 0.
    """
    importance_of = partial(salience.importance_by_masking, probe=probe)
    return by_importance(importance_of, batch, context, quantile, beta)


def by_importance(
    importance_of: Callable[[Rollouts, Context, salience.Answers], Tensor],
    batch: Batch,
    context: Context,
    quantile: float,
    beta: float,
) -> Tensor:
    """The A_t of `oar_g`, given the function that measures importance (B, T).

    Only rollouts whose A is not 0 are probed.
    """
    answers = salience.answer_places(context.tokenizer, batch.rollouts)
    probed = {row: answers[row] for row in answers if batch.advantages[row] != 0}
    importance = importance_of(batch.rollouts, context, probed)
    return batch.A * salience.outcome_weights(importance, probed, batch.mask, quantile, beta)


def arca(batch: Batch, context: Context, *, floor: float) -> Tensor:
    """A_t = A T w_t, w_t in proportion to a_t + floor, a_t = ||h_adapted - h_base||: ARCA.

    Eqs. (8) and (15) of arXiv 2606.00257; w_t sums to 1 over the rollout's T tokens, so T w_t has
    mean 1. h is the last layer's state with the LoRA adapter and without it; an untrained adapter
    (B = 0) gives weight 1. Inferred: the floor, of which the source only says that it is small.
    """
    change = salience.adapter_residual(batch.rollouts, context, batch.states)
    change = (change + floor) * batch.mask  # (B, T)
    total = change.sum(1, keepdim=True).clamp_min(floor)  # (B, 1)
    return batch.A * change * batch.lengths / total


def dgpo(batch: Batch, context: Context, *, tau: float, kappa: float) -> Tensor:
    """A_t = A w_t, w_t = T softmax_t(d_t (H_t / log V)^kappa / tau): DGPO (arXiv 2605.03327).

    The softmax is over the rollout's T tokens, so the mean weight is 1. d_t is the squared
    Hellinger distance of the policy's next-token distribution from that of the start, which is the
    model without its LoRA adapter, and V is the size of the vocabulary. At the default tau the
    weights hardly differ until the policy has moved far: read `weight_std` in metrics.jsonl beside
    any result. Formula and defaults are those of two implementations, as the paper's text was not
    found. Inferred: distributions are those of the temperature of sampling. Deviates: weights are
    computed once per step; in the implementations, in each update.
    """
    drift = salience.drift_from_start(batch.rollouts, context)  # (B, T)
    vocabulary = context.policy.model.config.get_text_config().vocab_size
    scores = drift * (batch.entropies / math.log(vocabulary)) ** kappa
    shares = torch.where(batch.mask, scores / tau, -torch.inf).softmax(1)  # (B, T)
    return batch.A * batch.lengths * shares


# ---- another model -------------------------------------------------------------------------------


def step_scores(batch: Batch, context: Context) -> list[tuple[Tensor, Tensor]]:
    """For each rollout, P(good) of its steps (K,), and the step (T_i,) of each of its tokens."""
    assert context.prm is not None  # the method's entry needs one
    questions = [batch.problem_of(row)["problem"] for row in range(len(batch.rewards))]
    return reward_model.score_steps(
        context.prm,
        questions,
        batch.rollouts,
        context.tokenizer,
        context.task.step_end,
        context.micro_tokens,
    )


def prm(batch: Batch, context: Context) -> Tensor:
    """A_t = A omega_t, omega_t = p_k for A > 0 and 1 - p_k for A < 0, p_k the score of t's step.

    "PRM-based advantage reshaping", SHEAR's baseline with backward-filled scores: p_k is read at
    the step's end. Inferred: the formula, of which the paper says no more; p_k for both signs would
    punish the good steps of wrong rollouts most.
    """
    omega = batch.mask.float()  # (B, T)
    for row, (good, step) in enumerate(step_scores(batch, context)):
        scores = good[step]  # (T_i,)
        omega[row, : len(step)] = scores if batch.advantages[row] > 0 else 1 - scores
    return batch.A * omega


def finepo(batch: Batch, context: Context, *, alpha: float, bound: float, scores: str) -> Tensor:
    """A_t = A omega_t, omega_t = clip(1 + alpha sign(A) D_k / D, 0, bound): FinePO.

    D_k = p_k - (the mean of p over the rollout's tokens), p_k the score of t's step, and D is the
    largest positive D_k. So the best step of a right rollout has (1 + alpha) A, that of a wrong one
    (1 - alpha) A, however little the scores differ; before the clip the rollout's sum stays A T.
    The source is SketchVL (arXiv 2601.05688), whose steps are actions on an image. With `scores`
    "random" they are uniform draws, its control. Inferred: alpha and bound, as the public text has
    lost the decimals. Deviates: steps and scores are those of `prm` (theirs are whole numbers from
    1 to 4; their unit does not matter); its term for frequent kinds of actions has no counterpart.
    """
    omega = batch.mask.float()  # (B, T)
    for row, (good, step) in enumerate(step_scores(batch, context)):
        good = good.double()  # rounding must not decide where all scores are equal
        if scores == "random":
            good = torch.rand(good.shape).to(good)
        above = good - good[step].mean()  # (K,)
        slope = alpha * batch.advantages[row].sign() / (above.max().clamp_min(0.0) + 1e-6)
        omega[row, : len(step)] = (1 + slope * above).clamp(0.0, bound)[step]
    return batch.A * omega


def pure(batch: Batch, context: Context, *, temperature: float, outcome: float) -> Tensor:
    """A_t = (G_t - baseline) / std, in place of A: the min-form of PURE (arXiv 2504.15275).

    The source is Cheng et al. 2025. r_k = 2 p_k - 1 per step, and r*_k = r_k exp(-r_k /
    temperature) / sum_j exp(-r_j / temperature). The sum of r*_k lies between the smallest r_k and
    their mean, and tends to the former as the temperature falls. G_t is the sum of r*_k over the
    step of token t and all later ones, plus `outcome` times the verdict. The baseline is the mean
    of G over the tokens of the group's other rollouts, rollout by rollout.

    Deviates: their code divides the baseline by the padded width; ours by true lengths. Theirs then
    whitens over the batch, which takes its mean off again; ours drops this recentring and divides
    by the group's standard deviation, so that credit depends neither on padding nor on the number
    of ranks. That standard deviation counts as at least 0.1; otherwise groups of equal verdicts
    would make large advantages of small differences between scores.
    """
    mask = batch.mask
    returns = torch.zeros_like(batch.log_probs)  # (B, T)
    for row, (good, step) in enumerate(step_scores(batch, context)):
        rewards = 2 * good - 1  # r, (K,)
        shares = rewards * (-rewards / temperature).softmax(0)  # r*, (K,)
        returns[row, : len(step)] = shares.flip(0).cumsum(0).flip(0)[step]
    returns = torch.where(mask, returns + outcome * batch.correct[:, None], 0.0)
    graded = mask.any(1).view(-1, batch.group_size)  # (groups, G), those with a verdict
    means = (returns.sum(1) / mask.sum(1).clamp_min(1)).view(graded.shape)
    others = graded.sum(1, keepdim=True) - 1  # (groups, 1), leave one out
    baseline = (means.sum(1, keepdim=True) - means) / others.clamp_min(1)  # (groups, G)
    compared = (others > 0).repeat_interleave(batch.group_size, 0)  # (B, 1), one alone has none
    centred = torch.where(compared, returns - baseline.view(-1, 1), 0.0)  # (B, T)
    return centred / group_moments(centred, mask, batch.group_size)[1].clamp_min(0.1)


# ---- controls ------------------------------------------------------------------------------------


def oracle(batch: Batch, context: Context, *, mass: int) -> Tensor:
    """A_t = A in right rollouts; in wrong ones only on the true first wrong step, 0 elsewhere.

    A wrong rollout whose first wrong step is not known keeps A. This is the credit of a perfect
    locator of errors. With `mass` 1 the n tokens of the step have A T / n, so that the rollout's
    sum stays A T: EGCA (arXiv 2603.16158), whose locator is a language model that compares a
    program's trace with a solution's. Deviates: its A is r - mean r.
    """
    position = positions(batch.mask)  # (B, T)
    places = batch.true_errors(context.task, context.tokenizer)
    start, end, _ = places.split(1, dim=1)  # (B, 1) each
    kept = (((position >= start) & (position < end)) | (start < 0)) & batch.mask  # (B, T)
    gain = batch.lengths / kept.sum(1, keepdim=True).clamp_min(1)  # (B, 1)
    return batch.A * kept * gain**mass


def cliff(batch: Batch, context: Context, *, prefix: float) -> Tensor:
    """A_t = A_cor - b, but A_inc - b from a wrong rollout's true first error on: Cliff.

    Before its first error a wrong rollout has `prefix` A_cor - b (arXiv 2609.02817, whose teacher
    names the error that the task knows here). A_cor = (1 - mu) / sigma and A_inc = -mu / sigma, mu
    the group's share of right rollouts and sigma = sqrt(mu (1 - mu)); b makes the mean over the
    group's tokens 0. Inferred: a wrong rollout without a known error keeps A, and b is taken off
    all other tokens.
    """
    mask = batch.mask
    right = batch.correct[:, None]  # (B, 1)
    mu, _ = group_moments(right, ~batch.rewards[:, None].isnan(), batch.group_size)
    sigma = (mu * (1 - mu)).sqrt()
    start = batch.true_errors(context.task, context.tokenizer)[:, :1]  # (B, 1)
    before = positions(mask) < start  # (B, T)
    good = torch.where(right, 1.0, prefix) * (1 - mu)  # (B, 1)
    credit = torch.where(right | before, good, -mu) / sigma  # (B, T)
    moved = right | (start >= 0)  # (B, 1)
    credit = torch.where(moved, credit, batch.A)
    mean, _ = group_moments(credit, mask, batch.group_size)
    share, _ = group_moments(moved.expand_as(mask), mask, batch.group_size)  # of moved tokens
    return torch.where(batch.A != 0, credit - moved * mean / share, 0.0)  # b = mean / share


def position_credit(batch: Batch, context: Context) -> Tensor:
    """A_t = A t / T: later tokens get more, whatever they say."""
    return batch.A * batch.mask.cumsum(1) / batch.lengths.clamp_min(1)


def random_credit(batch: Batch, context: Context) -> Tensor:
    """A_t = A u, u uniform in [0, 2] and the same for `--window` tokens in a row."""
    omega = batch.mask.float()  # (B, T)
    for row, length in enumerate(batch.mask.sum(1).tolist()):
        draws = 2 * torch.rand(-(-length // context.shear.window))
        omega[row, :length] = draws.repeat_interleave(context.shear.window)[:length].to(omega)
    return batch.A * omega


def shuffle(batch: Batch, context: Context, **ablations: str) -> Tensor:
    """A_t = A omega_p(t), omega as in `shear`, p a random permutation of the rollout's tokens.

    A control with the values of SHEAR's weights, but not their places.
    """
    token_advantages = shear(batch, context, **ablations)
    for row, length in enumerate(batch.mask.sum(1).tolist()):
        token_advantages[row, :length] = token_advantages[row, torch.randperm(length)]
    return token_advantages


# The function of each method of `credit.table.METHODS`.
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "opo": opo,
    "otb": otb,
    "opo-shear": opo_shear,
    "otb-shear": otb_shear,
    "shear": shear,
    "first": first,
    "entropy": entropy_credit,
    "hapo": hapo,
    "oar-g": oar_g,
    "oar-p": oar_p,
    "arca": arca,
    "dgpo": dgpo,
    "prm": prm,
    "finepo": finepo,
    "pure": pure,
    "rlsd": rlsd,
    "serl": serl,
    "sdpo": sdpo,
    "oracle": oracle,
    "cliff": cliff,
    "own-side": own_side,
    "position": position_credit,
    "random": random_credit,
    "shuffle": shuffle,
}
