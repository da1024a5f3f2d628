"""Dynamic sampling: other groups for those of equal rewards, `--use lab.tools.dynamic:rounds=4`."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from grpo import Rollouts, group_advantages
from harness import fsdp
from harness.sampling import sample_and_grade
from rewards import Verdict, rewards_of
from tasks.errors import BadInput

if TYPE_CHECKING:
    from harness.log import Clock
    from harness.run import Parts, Run


def use(parts: "Parts", *, rounds: int = 4) -> None:
    """Replace groups of equal rewards, at most `rounds` times per step, as DAPO does."""
    if rounds < 1:
        raise BadInput(f"--use lab.tools.dynamic:rounds={rounds}: must be at least 1")
    parts.sample = partial(resample_equal, parts.sample, rounds)


def resample_equal(
    sample: Callable, rounds: int, run: "Run", step: int, clock: "Clock"
) -> tuple[list[dict], Rollouts, list[Verdict]]:
    """Sample a step, and replace groups whose rewards are all equal, at most `rounds` times.

    DAPO's dynamic sampling (Sec. 3.2 of arXiv 2503.14476); deviates: groups that are still equal
    stay, so batches keep their size. The other problems depend on the step and the round alone, so
    that a resumed run draws the same.
    """
    config = run.config
    problems, rollouts, verdicts = sample(run, step, clock)
    problems = list(problems)
    verdicts = list(verdicts)
    replaced = 0
    size = config.rollouts_per_prompt
    for attempt in range(1, 1 + rounds):
        rewards = torch.tensor(rewards_of(verdicts)).view(-1, size)  # (groups, G), NaN: no verdict
        # all advantages of a group are 0 where its rewards, but for NaN, are equal
        mixed = group_advantages(rewards.flatten(), size).view(-1, size).any(1)  # (groups,)
        equal = (~mixed).nonzero().flatten().tolist()
        if not equal:
            break
        drawn = run.context.task.draw(step, config.prompts_per_step, config.seed, attempt)
        others = fsdp.share(drawn, run.ranks)[: len(equal)]
        new_rollouts, new_verdicts = sample_and_grade(run, others, size, config.temperature, clock)
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
    replaced = sum(fsdp.gather(replaced, run.ranks))
    run.extra["replaced"] = replaced / config.prompts_per_step
    return problems, rollouts, verdicts
