"""Hindsight: the policy, told more than its prompt, as its own teacher; token advantages (B, T).

    rlsd    told the answer; how much likelier a token becomes is its weight
    serl    the same, but told another right rollout of the group
    sdpo    told another right rollout; the log-ratio is the advantage

Each takes one forward pass over the same responses after longer prompts, which must fit into the
model's context.

Left out: the sources' losses over the whole vocabulary, as rules here see sampled tokens only. SDPO
finds the one-token form the noisiest. (Its default is the Jensen-Shannon divergence over the 100
likeliest tokens, ratios cut at 2.) SDPO's teacher, a moving average of rate .05, is left out, too.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from credit.batch import Batch, Context
from credit.rules import rule
from grpo import pad_left, token_ids
from harness.models import context_of
from lab.rules.oar import needs_box
from tasks.errors import BadInput
from tasks.task import Task

if TYPE_CHECKING:
    from harness.run import Run


# What tells the answer, and a right response, before the problem; by task.
TOLD = {"embedded": ("\\boxed{{{}}}\n", "{}\n")}
USUAL = "The final answer is \\boxed{{{}}}.\n\n", "A correct solution:\n\n{}\n\n"


def with_answer(task: Task, problem: dict) -> dict:
    """The same problem with its answer told."""
    answer, _ = TOLD.get(task.name, USUAL)
    return problem | {"problem": answer.format(problem[task.reference]) + problem["problem"]}


def with_response(task: Task, problem: dict, response: str) -> dict:
    """The same problem with a right response to it told."""
    _, right = TOLD.get(task.name, USUAL)
    return problem | {"problem": right.format(response) + problem["problem"]}


def fits_answer(run: "Run", **options: object) -> None:
    """Raise BadInput for programs, or where a prompt that tells the answer leaves no room."""
    needs_box(run)
    check_room(run, partial(with_answer, run.context.task), responses=1)


def fits_peer(run: "Run", **options: object) -> None:
    """Raise BadInput where a prompt that tells a response of the group leaves no room."""
    check_room(run, partial(with_response, run.context.task, response=""), responses=2)


def check_room(run: "Run", tell: Callable[[dict], dict], responses: int) -> None:
    """Raise BadInput where a prompt that tells more, with `responses`, exceeds the context."""
    context = run.context
    task = context.task
    prompts = [task.prompt(tell(problem)) for problem in task.train + task.heldout]
    longest = max(map(len, token_ids(context.tokenizer, prompts)))
    most = context_of(context.policy.model)
    if longest + responses * run.config.max_tokens > most:
        raise BadInput(
            f"--method {run.config.method}: its prompt of {longest} tokens and {responses} "
            f"response(s) of --max-tokens exceed the model's context of {most}; lower --max-tokens"
        )


@rule("rlsd", "how much likelier the token becomes when the answer is known", prepare=fits_answer)
def rlsd(
    batch: Batch, context: Context, *, mix: float = 0.5, steps: int = 50, bound: float = 0.2
) -> Tensor:
    """A_t = A ((1 - lam) + lam clip(w_t, 1 - bound, 1 + bound)): RLSD (arXiv 2604.03128).

    w_t = exp(sign(A) (log pi'(y_t) - log pi(y_t))), Eqs. (13) to (15). pi' is the policy that also
    sees the final answer; it teaches pi. lam falls from `mix` to 0 over the first `steps`.
    Inferred: A_t stands in the usual clipped loss (Eq. (16) as printed is a min with w_t instead of
    the ratio of policies); pi' is the policy of this step (theirs lags up to 10 steps behind); and
    the answer stands before the problem (`TOLD`).
    """
    return lean_on(answer_log_ratio, batch, context, mix, steps, bound)


@rule(
    "serl",
    "how much likelier the token becomes after another right rollout is shown",
    prepare=fits_peer,
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
    prepare=fits_peer,
)
def sdpo(batch: Batch, context: Context, *, mix: float = 0.0) -> Tensor:
    """A_t = mix A + (1 - mix) (log pi'(y_t) - log pi(y_t)): SDPO (arXiv 2601.20802).

    Eq. (3) and App. B.1. pi' also sees the first other right rollout of the group. Without one the
    log-ratio is 0, and as in the authors' code a rollout without credit does not count in the
    loss's mean (with a `mix`, theirs has two means). `mix` is 0 in the paper's main runs, .9 for
    weak models. Deviates: their A is r - mean r; their prompt shows the solution below the problem,
    ours above it (`with_response`); see also the module's docstring.
    """
    return mix * batch.A + (1 - mix) * peer_log_ratio(batch, context)


def answer_log_ratio(batch: Batch, context: Context) -> Tensor:
    """log pi'(y_t) - log pi(y_t), (B, T), where pi' also sees the answer."""
    task = context.task
    problems = [with_answer(task, batch.problem_of(row)) for row in range(len(batch.rewards))]
    return informed_log_ratio(batch, problems, context)


def peer_log_ratio(batch: Batch, context: Context) -> Tensor:
    """log pi'(y_t) - log pi(y_t), (B, T), where pi' also sees the first other right rollout.

    It is 0 in a rollout whose group has no other right one.
    """
    peers = right_peers(batch)
    problems = []
    for row, solutions in enumerate(peers):
        problem = batch.problem_of(row)
        if solutions:
            problem = with_response(context.task, problem, solutions[0])
        problems.append(problem)
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


def informed_log_ratio(batch: Batch, problems: list[dict], context: Context) -> Tensor:
    """log pi'(y_t) - log pi(y_t), (B, T) float32; pi' sees other problems, one per rollout."""
    rollouts = batch.rollouts
    prompts = [context.task.prompt(problem) for problem in problems]
    encoded = context.tokenizer(prompts, add_special_tokens=False)["input_ids"]
    prompt_ids, prompt_mask = pad_left(encoded, 0, rollouts.ids.device)
    informed = replace(rollouts, prompt_ids=prompt_ids, prompt_mask=prompt_mask)
    return context.score(informed, keep_hidden=False).log_probs - batch.log_probs
