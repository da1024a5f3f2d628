"""One step of training from given rollouts, on one rank or on each of two."""

from collections.abc import Callable
from unittest import mock

import torch
from builders.runs import config_from, run_of, sharded

import train
from grpo import Rollouts
from harness.fsdp import Ranks, full, layers_of
from harness.run import Hooks
from rewards import Verdict
from tasks import toy
from tasks.task import Task

STEP_FLAGS = "--task embedded --toy-lines 2 --prompts-per-step 6 --rollouts-per-prompt 4 ".split()
STEP_FLAGS += "--prompts-per-update 3 --lr 1e-3 --micro-tokens 256".split()


def grade(response: str, reference) -> Verdict:
    """A verdict of right or wrong by the text alone.

    One response has no verdict, so that ranks have unequal work.
    """
    if response == reference:
        return Verdict(None, "infra_error")
    return Verdict(float(len(response) % 2), "graded")


def one_step(
    ranks: Ranks,
    rollouts: Rollouts,
    flags: list[str],
    model,
    use: Callable[[Hooks], None] = lambda hooks: None,
) -> tuple[dict[str, torch.Tensor], dict]:
    """The change of each weight by `train.train_step`, given these rollouts, and its metrics."""
    config = config_from([*STEP_FLAGS, *flags])
    problems = [{"problem": str(i), "answer": rollouts.texts[5]} for i in range(6)]
    parts = "embedded", problems, problems, lambda problem: problem["problem"], grade
    task = Task(*parts, first_error=lambda problem, response: None)
    run = run_of(config, task, model, toy.make_tokenizer(), ranks=ranks)
    use(run.hooks)
    run = sharded(run)
    drawn = [int(problem["problem"]) for problem in task.draw(0, 6, config.seed)]

    def given(model, tokenizer, prompts, count, **limits):
        places = torch.tensor([drawn.index(int(prompt)) for prompt in prompts])
        return rollouts.take((4 * places[:, None] + torch.arange(4)).flatten())

    before = {name: full(p).detach().clone() for name, p in run.trained.named_parameters()}
    # rounded, rotary frequencies would shift late positions
    assert {buffer.dtype for buffer in run.context.policy.buffers()} == {torch.float32}
    assert ("forward" in vars(layers_of(run.trained)[0])) == config.recompute
    with mock.patch("harness.run.rollout", given):
        metrics, samples = train.train_step(run, 0)
    # one rank measures the batch and logs it
    assert ("reward" in metrics) == bool(samples) == ranks.main
    changes = {name: full(p).detach() - before[name] for name, p in run.trained.named_parameters()}
    sampled = dict(run.context.policy.model.named_parameters())
    for name, p in run.trained.model.named_parameters():
        # the sampler holds what was trained
        assert torch.equal(full(p).to(sampled[name].dtype), sampled[name])
    del metrics["seconds"]
    return changes, metrics
