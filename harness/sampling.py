"""From problems to graded rollouts, and what ends a run that cannot get any.

sample_and_grade(run, ...)      rollouts and their verdicts
resample_equal(run, ...)        other groups for those of equal rewards: dynamic sampling
check_verdicts(run, step, ...)  ends a run in which no rollout could be graded
check_policy(run, step)         ends a run whose logits are not finite
"""

import torch

from credit.batch import Batch
from grpo import Rollouts, group_advantages, rollout
from harness import fsdp
from harness.command import RunFailed
from harness.log import Clock
from harness.models import stop_ids
from harness.run import Run
from rewards import NoVerdict, Verdict, rewards_of


def sample_and_grade(
    run: Run, problems: list[dict], count: int, temperature: float, clock: Clock
) -> tuple[Rollouts, list[Verdict]]:
    """`count` rollouts of each problem, and their verdicts."""
    context = run.context
    rollouts = rollout(
        context.policy.model,
        context.tokenizer,
        [context.task.prompt(problem) for problem in problems],
        count,
        max_tokens=run.config.sampling.max_tokens,
        temperature=temperature,
        stops=stop_ids(context.policy.model, context.tokenizer),
        batch_size=run.config.machine.generate_batch,
        generate=run.generate,
    )
    clock.lap("generate")
    verdicts = context.task.verdicts(problems, rollouts)
    clock.lap("grade")
    return rollouts, verdicts


def resample_equal(
    run: Run,
    step: int,
    problems: list[dict],
    rollouts: Rollouts,
    verdicts: list[Verdict],
    clock: Clock,
) -> tuple[list[dict], Rollouts, list[Verdict], int]:
    """Replace groups whose rewards are all equal, in at most --dynamic-sampling rounds.

    Returns all groups' problems, rollouts and verdicts, and how many groups were replaced.

    DAPO's dynamic sampling (Sec. 3.2 of arXiv 2503.14476); deviates: groups that are still equal
    stay, so batches keep their size. The other problems depend on the step and the round alone, so
    that a resumed run draws the same.
    """
    sampling = run.config.sampling
    problems = list(problems)
    verdicts = list(verdicts)
    replaced = 0
    size = sampling.rollouts_per_prompt
    for attempt in range(1, 1 + sampling.dynamic_sampling):
        rewards = torch.tensor(rewards_of(verdicts)).view(-1, size)  # (groups, G), NaN: no verdict
        # all advantages of a group are 0 where its rewards, but for NaN, are equal
        mixed = group_advantages(rewards.flatten(), size).view(-1, size).any(1)  # (groups,)
        equal = (~mixed).nonzero().flatten().tolist()
        if not equal:
            break
        drawn = run.context.task.draw(step, sampling.prompts_per_step, run.config.seed, attempt)
        others = fsdp.share(drawn, run.ranks)[: len(equal)]
        new_rollouts, new_verdicts = sample_and_grade(
            run, others, size, sampling.temperature, clock
        )
        for group, problem in zip(equal, others, strict=True):
            problems[group] = problem
        # the rollouts of these groups
        places = size * torch.tensor(equal)[:, None] + torch.arange(size)  # (groups, G)
        rows = places.flatten().tolist()
        for row, verdict in zip(rows, new_verdicts, strict=True):
            verdicts[row] = verdict
        order = torch.arange(len(verdicts))
        order[rows] = len(verdicts) + torch.arange(len(rows))
        rollouts = Rollouts.cat([rollouts, new_rollouts]).take(order)
        replaced += len(equal)
    return problems, rollouts, verdicts, replaced


@torch.no_grad()
def check_policy(run: Run, step: int) -> None:
    """Raise RunFailed if the policy's logits are not finite after a step's updates.

    Such a policy could not sample any more.
    """
    context = run.context
    prompt = context.task.prompt(context.task.train[0])
    ids = context.tokenizer(prompt, return_tensors="pt")["input_ids"]  # (1, P)
    if not context.policy.model(ids.to(run.ranks.device)).logits.isfinite().all():
        raise RunFailed(
            f"step {step + 1}: the policy's logits are not finite after its updates; lower --lr"
        )


def check_verdicts(run: Run, step: int, batch: Batch, verdicts: list[Verdict]) -> None:
    """Raise RunFailed, on all ranks, if no complete response of a step has a verdict.

    `batch` holds the rollouts of all ranks, `verdicts` are this rank's. The message has the first
    cause.
    """
    rewards = batch.rewards[~batch.rollouts.truncated]  # (n,); those that are cut off are wrong
    if len(rewards) and rewards.isnan().all():
        own = [verdict.cause for verdict in verdicts if isinstance(verdict, NoVerdict)]
        causes = [*fsdp.gather_items(own, run.ranks), "the reward gave no verdict"]
        raise RunFailed(f"step {step + 1}: no response could be graded: {causes[0]}")
