"""Hindsight: the policy, told more than its prompt, as its own teacher; token advantages (B, T).

    rlsd  told the answer; how much likelier a token becomes is its weight
    serl  the same, but told another right rollout of the group
    sdpo  told another right rollout; the log-ratio is the advantage

Each takes one forward pass over the same responses after longer prompts, which must fit into the
model's context.

Left out: SDPO's loss over the whole vocabulary, as methods here see sampled tokens only. SDPO finds
the one-token form the noisiest. (Its default is the Jensen-Shannon divergence over the 100
likeliest tokens, ratios cut at 2.) SDPO's teacher, a moving average of rate .05, is left out too.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from credit.batch import Batch, Context
from grpo import pad_left


def rlsd(batch: Batch, context: Context, *, mix: float, steps: int, bound: float) -> Tensor:
    """A_t = A ((1 - lam) + lam clip(w_t, 1 - bound, 1 + bound)): RLSD (arXiv 2604.03128).

    w_t = exp(sign(A) (log pi'(y_t) - log pi(y_t))), Eqs. (13) to (15). pi' is the policy that also
    sees the final answer; it teaches pi. lam falls from `mix` to 0 over the first `steps`.
    Inferred: A_t stands in the usual clipped loss (Eq. (16) as printed is a min with w_t instead of
    the ratio of policies); pi' is the policy of this step (theirs lags up to 10 steps behind); and
    the answer stands before the problem (`Task.hint`).
    """
    return lean_on(answer_log_ratio, batch, context, mix, steps, bound)


def serl(batch: Batch, context: Context, *, mix: float, steps: int, bound: float) -> Tensor:
    """A_t as in `rlsd`, with a teacher pi' that sees the first other right rollout of the group.

    SERL (arXiv 2605.19447; the authors' core_algos.py) has a teacher that sees feedback on the
    rollout. Inferred: which feedback; a rollout without a right peer keeps A. Deviates: pi' is the
    policy of this step; theirs is up to 10 steps behind. Every token here is one of an action.
    """
    return lean_on(peer_log_ratio, batch, context, mix, steps, bound)


def lean_on(
    log_ratio_of: Callable[[Batch, Context], Tensor],
    batch: Batch,
    context: Context,
    mix: float,
    steps: int,
    bound: float,
) -> Tensor:
    """The A_t of `rlsd`, given the function that computes log pi' - log pi (B, T).

    Once the share lam is 0, that function is not called, which saves its pass.
    """
    share = mix * max(0.0, 1 - context.step / steps)
    if not share:
        return batch.A.expand(batch.mask.shape)
    ratio = (batch.A.sign() * log_ratio_of(batch, context)).exp()  # (B, T)
    return batch.A * (1 - share + share * ratio.clamp(1 - bound, 1 + bound))


def sdpo(batch: Batch, context: Context, *, mix: float) -> Tensor:
    """A_t = mix A + (1 - mix) (log pi'(y_t) - log pi(y_t)): SDPO (arXiv 2601.20802).

    Eq. (3) and App. B.1. pi' also sees the first other right rollout of the group. Without one the
    log-ratio is 0, and as in the authors' code a rollout without credit does not count in the
    loss's mean (with a `mix`, theirs has two means). `mix` is 0 in the paper's main runs, .9 for
    weak models. Deviates: their A is r - mean r; their prompt shows the solution below the problem,
    ours above it (`Task.shown`); see also the module's docstring.
    """
    return mix * batch.A + (1 - mix) * peer_log_ratio(batch, context)


def answer_log_ratio(batch: Batch, context: Context) -> Tensor:
    """log pi'(y_t) - log pi(y_t), (B, T), where pi' also sees the answer."""
    problems = [context.task.informed(batch.problem_of(row)) for row in range(len(batch.rewards))]
    return informed_log_ratio(batch, problems, context)


def peer_log_ratio(batch: Batch, context: Context) -> Tensor:
    """log pi'(y_t) - log pi(y_t), (B, T), where pi' also sees the first other right rollout.

    It is 0 in a rollout whose group has no other right one.
    """
    right = batch.correct.tolist()
    problems = []
    alone = []  # whether the rollout's group has no other right one
    for row in range(len(batch.rewards)):
        first = row - row % batch.group_size
        group = range(first, first + batch.group_size)
        peers = [other for other in group if right[other] and other != row]
        problem = batch.problem_of(row)
        if peers:
            problem = context.task.shown(problem, batch.rollouts.texts[peers[0]])
        problems.append(problem)
        alone.append(not peers)
    log_ratio = informed_log_ratio(batch, problems, context)  # (B, T)
    log_ratio[alone] = 0.0
    return log_ratio


def informed_log_ratio(batch: Batch, problems: list[dict], context: Context) -> Tensor:
    """log pi'(y_t) - log pi(y_t), (B, T), where pi' sees other problems, one per rollout."""
    prompts = [context.task.prompt(problem) for problem in problems]
    encoded = context.tokenizer(prompts, add_special_tokens=False)["input_ids"]
    prompt_ids, prompt_mask = pad_left(encoded, 0, batch.rollouts.ids.device)
    informed = replace(batch.rollouts, prompt_ids=prompt_ids, prompt_mask=prompt_mask)
    return context.score(informed, keep_hidden=False).log_probs - batch.log_probs
