"""Hindsight: the policy, told more than its prompt, as its own teacher; token advantages (B, T)
from its opinion.

    rlsd   told the answer; how much likelier a token becomes is its weight
    sdpo   told another right rollout of the group; the log-ratio is the advantage
    hsd    told the answer and another right rollout; the ratio minus 1 is the advantage
    scapo  told nothing, but asked in other words; tokens that this changes lose some advantage

Each takes one forward pass over the same responses after longer prompts, which must fit into the
model's context.

Left out: the sources' losses over the whole vocabulary, of which SDPO and HSD find the sampled
token's share to be the noisiest part: a method of this loop sees sampled tokens only. (SDPO's
default is the Jensen-Shannon divergence of the 100 likeliest, ratios cut at 2.) SDPO's teacher lags
behind, a moving average of rate .05; HSD stays near its start.
"""

from dataclasses import replace

import torch
from torch import Tensor

from credit.batch import Batch, Context
from credit.measures import standardised
from grpo import log_probs, pad_id, pad_left


def rlsd(batch: Batch, context: Context, *, mix: float, steps: int, bound: float) -> Tensor:
    """A_t = A ((1 - lam) + lam clip(w_t, 1 - bound, 1 + bound)), w_t = exp(sign(A) (log pi'(y_t) -
    log pi(y_t))).

    RLSD (arXiv 2604.03128, Eqs. 13 to 15): pi', the policy that also sees the final answer, teaches
    pi; lam falls from `mix` to 0 over the first `steps`. Inferred: A_t stands in the usual clipped
    loss (Eq. 16 as printed is a min with w_t instead of the ratio of policies); pi' is the policy
    of this step (theirs lags up to 10 steps behind); and the answer stands before the problem
    (`Task.hint`).
    """
    scale = batch.advantages[:, None]  # (B, 1)
    share = mix * max(0.0, 1 - context.step / steps)
    if not share:
        return scale.expand(batch.rollouts.mask.shape)
    told = [context.task.informed(batch.problem_of(row)) for row in range(len(batch.rewards))]
    ratio = (
        scale.sign() * (told_log_probs(batch, told, context) - batch.log_probs)
    ).exp()  # (B, T)
    return scale * (1 - share + share * ratio.clamp(1 - bound, 1 + bound))


def sdpo(batch: Batch, context: Context, *, mix: float) -> Tensor:
    """A_t = mix A + (1 - mix) (log pi'(y_t) - log pi(y_t)), Eq. (3) and App. B.1 of SDPO (arXiv
    2601.20802).

    pi' also sees the first other right rollout of the group. Without one its part is 0, and as in
    the authors' code a rollout without credit does not count in the loss's mean (with a `mix`,
    theirs has two means). `mix` is 0 in the paper's main runs, .9 for weak models. Deviates: their
    A is r - mean r; their prompt, which shows the solution below the problem, ours above it
    (`Task.shown`); and see above.
    """
    told, peers = [], right_peers(batch)
    for row, solutions in enumerate(peers):
        problem = batch.problem_of(row)
        told.append(context.task.shown(problem, solutions[0]) if solutions else problem)
    log_ratio = told_log_probs(batch, told, context) - batch.log_probs  # (B, T)
    log_ratio[[not solutions for solutions in peers]] = 0.0
    return mix * batch.advantages[:, None] + (1 - mix) * log_ratio


def hsd(batch: Batch, context: Context) -> Tensor:
    """A_t = pi'(y_t) / pi(y_t) - 1: minus the gradient of KL(pi' || pi), Eqs. (9), (13) of HSD
    (arXiv 2606.15576).

    pi' also sees the answer and a random other right rollout of the group, if there is one.
    Verdicts act through these alone. The paper calls a one-sample form of its loss unstable,
    without a formula: compare with care. Inferred: the prompt, of which it says that special tokens
    delimit what is told.
    """
    task, told = context.task, []
    for row, solutions in enumerate(right_peers(batch)):
        told.append(task.informed(batch.problem_of(row)))
        if solutions:
            told[-1] = task.shown(told[-1], solutions[int(torch.randint(len(solutions), ()))])
    return (told_log_probs(batch, told, context) - batch.log_probs).expm1()


def scapo(batch: Batch, context: Context, *, strength: float, phrasings: int) -> Tensor:
    """A_t = A + strength min(u_t, 0), u_t = z(mean over k of z(-d_t)), d_t = 2 |p - p_k| / (p +
    p_k): SCAPO.

    p and p_k are pi(y_t) after the prompt and after its k-th rephrasing (arXiv 2609.40360).
    Inferred: each z is over the group's tokens; and where a rephrasing gives things other names,
    the response gets them, too. Deviates: theirs ends after 120 to 200 steps.
    """
    rephrase = context.task.rephrase
    assert rephrase  # the method's entry needs it
    mask = batch.rollouts.mask
    stable = torch.zeros_like(batch.log_probs)  # (B, T)
    id_of = context.tokenizer.get_vocab()
    for k in range(phrasings):
        problems = []
        ids = batch.rollouts.ids.clone()  # (B, T)
        for row, response in enumerate(batch.rollouts.ids):
            problem, names = rephrase(batch.problem_of(row), k)
            problems.append(problem)
            for old, new in names.items():
                ids[row, response == id_of[old]] = id_of[new]
        log_ratio = told_log_probs(batch, problems, context, ids) - batch.log_probs  # (B, T)
        distance = 2 * (log_ratio.abs() / 2).tanh()  # d, (B, T)
        stable += standardised(-distance, mask, batch.group_size) / phrasings
    return batch.advantages[:, None] + strength * standardised(
        stable, mask, batch.group_size
    ).clamp_max(0.0)


def right_peers(batch: Batch) -> list[list[str]]:
    """For each rollout, the other right responses of its group."""
    right, found = batch.correct.tolist(), []
    for row in range(len(right)):
        first = row - row % batch.group_size
        others = [
            other
            for other in range(first, first + batch.group_size)
            if right[other] and other != row
        ]
        found.append([batch.rollouts.texts[other] for other in others])
    return found


def told_log_probs(
    batch: Batch, problems: list[dict], context: Context, ids: Tensor | None = None
) -> Tensor:
    """Log-probabilities (B, T) float32 of the same responses, or of `ids`, to other problems, one
    per rollout.
    """
    rollouts = batch.rollouts if ids is None else replace(batch.rollouts, ids=ids)
    prompts = [context.task.prompt(problem) for problem in problems]
    encoded = context.tokenizer(prompts, add_special_tokens=False)["input_ids"]
    ids, mask = pad_left(encoded, pad_id(context.tokenizer), rollouts.ids.device)
    return log_probs(
        context.policy,
        replace(rollouts, prompt_ids=ids, prompt_mask=mask),
        temperature=context.temperature,
        micro_tokens=context.micro_tokens,
        keep_hidden=False,
    ).log_probs
