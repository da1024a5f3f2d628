"""From problems to graded rollouts, and what ends a run that cannot get any.

sample_and_grade(run, ...)      rollouts and their verdicts
sample_step(run, step, clock)   a step's problems, their rollouts and verdicts: `Parts.sample`
check_verdicts(run, step, ...)  ends a run in which no rollout could be graded
check_policy(run, step)         ends a run whose logits are not finite
"""

import torch

from credit.batch import Batch
from grpo import Rollouts, rollout
from harness import fsdp
from harness.log import Clock
from harness.models import stop_ids
from harness.run import Run
from rewards import NoVerdict, Verdict
from tasks.errors import RunFailed


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
        max_tokens=run.config.max_tokens,
        temperature=temperature,
        stops=stop_ids(context.policy.model, context.tokenizer),
        batch_size=run.config.generate_batch,
        generate=run.parts.generate,
    )
    clock.lap("generate")
    verdicts = context.task.verdicts(problems, rollouts)
    clock.lap("grade")
    return rollouts, verdicts


def sample_step(run: Run, step: int, clock: Clock) -> tuple[list[dict], Rollouts, list[Verdict]]:
    """The problems of a step that are this rank's, G rollouts of each, and their verdicts."""
    config = run.config
    drawn = run.context.task.draw(step, config.prompts_per_step, config.seed)
    problems = fsdp.share(drawn, run.ranks)
    rollouts, verdicts = sample_and_grade(
        run, problems, config.rollouts_per_prompt, config.temperature, clock
    )
    return problems, rollouts, verdicts


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
