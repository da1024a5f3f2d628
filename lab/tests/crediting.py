"""Batches that rules give credit to: written down, random, or scored by a small model."""

import random
from dataclasses import dataclass, replace

import torch
from adapters import add_adapter
from builders.rollouts import batch_of, rollouts_of
from builders.runs import recipe_with

import lab.rules  # noqa: F401 - enters the rules
from credit.batch import Batch, effective_weights
from credit.rules import assign_credit, with_options
from grpo import Policy, group_advantages, score, to_padded
from harness.run import make_context, make_task
from tasks import toy
from tasks.task import Task


@dataclass
class Told(Batch):
    """A batch, and what its rules may use besides."""

    policy: Policy | None = None
    tokenizer: object = None
    task: Task | None = None


def assign(rule: str, batch: Batch, *options: str, **changes) -> torch.Tensor:
    """Token advantages by a rule with these options, and other settings but the recipe's."""
    changes = dict(window=6, stride=3, method=rule, method_option=options) | changes
    config = recipe_with(**changes)
    known = [getattr(batch, name, None) for name in ("policy", "tokenizer", "task")]
    context = make_context(config, *known, hooks={})
    return assign_credit(with_options(config), batch, replace(context, kept={"prm": None}))


def weights_of(rule: str, batch: Batch) -> torch.Tensor:
    """(B, T), what the rule multiplies advantages by."""
    return effective_weights(assign(rule, batch), batch.advantages, batch.mask)


def with_rewards(batch: Batch, rewards: list[float]) -> Batch:
    """The batch with other verdicts, NaN for none."""
    rewards = torch.tensor(rewards)
    rollouts = replace(batch.rollouts, mask=batch.mask & ~rewards.isnan()[:, None])
    hidden = to_padded(batch.hidden, batch.mask)[rollouts.mask]
    advantages = group_advantages(rewards, batch.group_size)
    return replace(batch, rewards=rewards, advantages=advantages, rollouts=rollouts, hidden=hidden)


def worked_responses() -> Told:
    """Two groups of four worked responses, scored by a tiny model with a trained adapter.

    Problems have two lines. All responses of the second group are wrong.
    """
    model = toy.make_model(2, seed=1).eval()
    tokenizer = toy.make_tokenizer()
    torch.manual_seed(0)
    add_adapter(model, std=0.1)
    config = recipe_with(task="embedded", toy_lines=2, heldout=8)
    _, task, _ = make_task(config, tokenizer, 512)
    problems = task.train[:2]
    asked = [problems[0]] * 4 + [problems[1]] * 4
    rng = random.Random(1037)  # these texts deserve the verdicts below
    texts = [toy.demonstrate(problem, rng) for problem in asked]
    texts[6] = texts[6][:9]  # without a box
    rollouts = rollouts_of(tokenizer, [problem["problem"] for problem in asked], texts)
    policy = Policy(model)
    scored = score(policy, rollouts, temperature=1.0, micro_tokens=300)._asdict()
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])
    batch = batch_of(rewards, rollouts, 4, problems=problems, **scored)
    return Told(**vars(batch), policy=policy, tokenizer=tokenizer, task=task)


def score_lines(prm, questions, rollouts, tokenizer=None, step_end="\n", micro_tokens=0):
    """A process reward model that likes long texts and early lines."""
    scores = []
    for row, text in enumerate(rollouts.texts):
        step = [text[:t].count(step_end) for t in range(int(rollouts.mask[row].sum()))]
        good = 1 / torch.arange(2, text.count(step_end) + 3) + len(text) / 1000
        scores.append((good, torch.tensor(step).long()))
    return scores
