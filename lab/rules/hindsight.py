"""Hindsight: the policy, told more than its prompt, as its own teacher; token advantages (B, T).

    rlsd    told the answer; how much likelier a token becomes is its weight
    serl    the same, but told another right rollout of the group
    sdpo    told another right rollout; the log-ratio is the advantage
    iw-opd  the same, more where little of the log-ratio's size lies before the token
    dasd    told another right rollout; A plus a little of the log-ratio, by the token's entropy
    hsd     told the answer and another right rollout; the ratio minus 1 is the advantage
    scapo   told nothing, but asked in other words; tokens that this changes lose some advantage

Each takes one forward pass over the same responses after longer prompts, which must fit into the
model's context. `scapo` takes one pass per rephrasing, and renames in the responses what the
rephrasing renames.

Left out: the sources' losses over the whole vocabulary, as methods here see sampled tokens only.
SDPO and HSD find the one-token form the noisiest. (SDPO's default is the Jensen-Shannon divergence
over the 100 likeliest tokens, ratios cut at 2.) SDPO's teacher, a moving average of rate .05, is
left out too, as is HSD's, which stays near its start.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from credit.batch import Batch, Context
from credit.measures import group_moments, standardise
from credit.rules import rule
from grpo import pad_left
from tasks.errors import BadInput

if TYPE_CHECKING:
    from harness.run import Run


def fits(run: "Run", **options: object) -> None:
    """Raise BadInput where a prompt with an answer or another response exceeds the context."""
    context = run.context
    responses = 2 * run.config.sampling.max_tokens
    longest = max(context.task.train, key=lambda problem: len(problem["problem"]))
    prompt = context.tokenizer(context.task.prompt(context.task.informed(longest)))["input_ids"]
    most = getattr(context.policy.model.config, "max_position_embeddings", math.inf)
    if len(prompt) + responses > most:
        raise BadInput(
            f"--method {run.config.credit.method}: a prompt of {len(prompt)} tokens and two "
            f"responses exceed the model's context of {most}; lower --max-tokens"
        )


@rule("rlsd", "how much likelier the token becomes when the answer is known", prepare=fits)
def rlsd(
    batch: Batch, context: Context, *, mix: float = 0.5, steps: int = 50, bound: float = 0.2
) -> Tensor:
    """A_t = A ((1 - lam) + lam clip(w_t, 1 - bound, 1 + bound)): RLSD (arXiv 2604.03128).

    w_t = exp(sign(A) (log pi'(y_t) - log pi(y_t))), Eqs. (13) to (15). pi' is the policy that also
    sees the final answer; it teaches pi. lam falls from `mix` to 0 over the first `steps`.
    Inferred: A_t stands in the usual clipped loss (Eq. (16) as printed is a min with w_t instead of
    the ratio of policies); pi' is the policy of this step (theirs lags up to 10 steps behind); and
    the answer stands before the problem (`Task.hint`).
    """
    return lean_on(answer_log_ratio, batch, context, mix, steps, bound)


@rule(
    "serl",
    "how much likelier the token becomes after another right rollout is shown",
    prepare=fits,
)
def serl(
    batch: Batch, context: Context, *, mix: float = 0.5, steps: int = 50, bound: float = 0.2
) -> Tensor:
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


@rule(
    "sdpo",
    "the log-ratio after another right rollout is shown",
    weighs=False,
    drops_uncredited=True,
    prepare=fits,
)
def sdpo(batch: Batch, context: Context, *, mix: float = 0.0) -> Tensor:
    """A_t = mix A + (1 - mix) (log pi'(y_t) - log pi(y_t)): SDPO (arXiv 2601.20802).

    Eq. (3) and App. B.1. pi' also sees the first other right rollout of the group. Without one the
    log-ratio is 0, and as in the authors' code a rollout without credit does not count in the
    loss's mean (with a `mix`, theirs has two means). `mix` is 0 in the paper's main runs, .9 for
    weak models. Deviates: their A is r - mean r; their prompt shows the solution below the problem,
    ours above it (`Task.shown`); see also the module's docstring.
    """
    return mix * batch.A + (1 - mix) * peer_log_ratio(batch, context)


@rule(
    "iw-opd",
    "sdpo's log-ratio, enlarged where the rollout has little of it before the token",
    weighs=False,
    drops_uncredited=True,
    prepare=fits,
)
def iw_opd(batch: Batch, context: Context, *, gamma: float = 0.5) -> Tensor:
    """A_t = a_t (1 + gamma (1 - sum_{k<t} |a_k| / sum_k |a_k|)), a_t = log pi'(y_t) - log pi(y_t).

    IW-OPD (arXiv 2606.22600, as in TRL's trainer), whose teacher is another model. Deviates: here
    the teacher is that of `sdpo`, and at gamma 0 the two methods are the same.
    """
    log_ratio = torch.where(batch.mask, peer_log_ratio(batch, context), 0.0)  # (B, T)
    size = log_ratio.abs()
    before = size.cumsum(1) - size
    return log_ratio * (1 + gamma * (1 - before / size.sum(1, keepdim=True).clamp_min(1e-8)))


@rule(
    "dasd",
    "A plus a little of sdpo's log-ratio where entropy is low, minus a little elsewhere",
    weighs=False,
    prepare=fits,
)
def dasd(batch: Batch, context: Context, *, beta: float = 0.1) -> Tensor:
    """A_t = A + beta omega_t d_t, by a right peer's log-ratio d_t: DASD (arXiv 2605.22263).

    omega_t = tanh((tau - H_t) / sigma) sigmoid(|d_t| - 1), d_t = log pi'(y_t) - log pi(y_t). tau is
    the 20% quantile of the rollout's entropies, sigma their mean absolute deviation: tokens of
    higher entropy move away from the teacher. Inferred: beta; d_t is standardised in the rollout;
    the deviation is from the mean; and pi' is that of `sdpo`.
    """
    mask = batch.mask
    entropies = batch.entropies
    log_ratio = standardise(peer_log_ratio(batch, context), mask, 1)  # d, (B, T)
    tau = torch.where(mask, entropies, torch.nan).nanquantile(0.2, dim=1, keepdim=True)  # (B, 1)
    mean, _ = group_moments(entropies, mask, 1)  # (B, 1)
    deviation, _ = group_moments((entropies - mean).abs(), mask, 1)
    omega = ((tau - entropies) / deviation.clamp_min(1e-8)).tanh()  # (B, T)
    omega *= (log_ratio.abs() - 1).sigmoid()
    return batch.A + beta * omega * log_ratio


@rule(
    "hsd",
    "the ratio to a policy that sees the answer and another right rollout, minus 1",
    weighs=False,
    prepare=fits,
)
def hsd(batch: Batch, context: Context) -> Tensor:
    """A_t = pi'(y_t) / pi(y_t) - 1: HSD (arXiv 2606.15576).

    Eqs. (9) and (13). Averaged over y_t ~ pi, A_t grad log pi(y_t) is -grad KL(pi' || pi). pi' also
    sees the answer and, if there is one, a random other right rollout of the group. Verdicts act
    through these alone. The paper calls a one-sample form of its loss unstable, without a formula:
    compare with care. Inferred: the prompt, of which the paper says only that special tokens
    delimit what is told.
    """
    problems = []
    for row, solutions in enumerate(right_peers(batch)):
        problem = context.task.informed(batch.problem_of(row))
        if solutions:
            drawn = solutions[int(torch.randint(len(solutions), ()))]
            problem = context.task.shown(problem, drawn)
        problems.append(problem)
    return informed_log_ratio(batch, problems, context).expm1()


def needs_rephrasing(run: "Run", **options: object) -> None:
    """Raise BadInput if the run's task cannot ask in other words."""
    if not run.context.task.rephrase:
        raise BadInput("--method scapo: --task cannot ask in other words")


@rule(
    "scapo",
    "less credit for tokens that depend on the problem's wording",
    weighs=False,
    prepare=needs_rephrasing,
)
def scapo(batch: Batch, context: Context, *, strength: float = 0.01, phrasings: int = 4) -> Tensor:
    """A_t = A + strength min(u_t, 0), u_t low where rephrasing changes y_t: SCAPO (2609.40360).

    u_t = z(mean over k of z(-d_t)), d_t = 2 |p - p_k| / (p + p_k). p and p_k are pi(y_t) after the
    prompt and after its k-th rephrasing. Inferred: each z is over the group's tokens; and where a
    rephrasing renames things, they are renamed in the response, too. Deviates: theirs ends after
    120 to 200 steps.
    """
    rephrase = context.task.rephrase
    assert rephrase  # the method's entry needs it
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
        log_ratio = informed_log_ratio(batch, problems, context, ids)  # (B, T)
        distance = 2 * (log_ratio.abs() / 2).tanh()  # d, (B, T)
        stable += standardise(-distance, batch.mask, batch.group_size) / phrasings
    stable = standardise(stable, batch.mask, batch.group_size)  # u
    return batch.A + strength * stable.clamp_max(0.0)


def answer_log_ratio(batch: Batch, context: Context) -> Tensor:
    """log pi'(y_t) - log pi(y_t), (B, T), where pi' also sees the answer."""
    problems = [context.task.informed(batch.problem_of(row)) for row in range(len(batch.rewards))]
    return informed_log_ratio(batch, problems, context)


def peer_log_ratio(batch: Batch, context: Context) -> Tensor:
    """log pi'(y_t) - log pi(y_t), (B, T), where pi' also sees the first other right rollout.

    It is 0 in a rollout whose group has no other right one.
    """
    peers = right_peers(batch)
    problems = []
    for row, solutions in enumerate(peers):
        problem = batch.problem_of(row)
        problems.append(context.task.shown(problem, solutions[0]) if solutions else problem)
    log_ratio = informed_log_ratio(batch, problems, context)  # (B, T)
    log_ratio[[not solutions for solutions in peers]] = 0.0
    return log_ratio


def right_peers(batch: Batch) -> list[list[str]]:
    """For each rollout, the other right responses of its group."""
    right = batch.correct.tolist()
    texts = batch.rollouts.texts
    peers = []
    for row in range(len(texts)):
        first = row - row % batch.group_size
        group = range(first, first + batch.group_size)
        peers.append([texts[other] for other in group if right[other] and other != row])
    return peers


def informed_log_ratio(
    batch: Batch, problems: list[dict], context: Context, ids: Tensor | None = None
) -> Tensor:
    """log pi'(y_t) - log pi(y_t), (B, T) float32, where pi' sees other problems, one per rollout.

    `ids`, if given, take the place of the responses that pi' scores.
    """
    rollouts = batch.rollouts if ids is None else replace(batch.rollouts, ids=ids)
    prompts = [context.task.prompt(problem) for problem in problems]
    encoded = context.tokenizer(prompts, add_special_tokens=False)["input_ids"]
    prompt_ids, prompt_mask = pad_left(encoded, 0, rollouts.ids.device)
    informed = replace(rollouts, prompt_ids=prompt_ids, prompt_mask=prompt_mask)
    return context.score(informed, keep_hidden=False).log_probs - batch.log_probs
