"""What depends on --seed, the step and the rank: problems, weights, updates, noise.

Noise is a sampler's next random number.
"""

import copy
from dataclasses import replace
from itertools import product
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import pytest
import torch
from builders.commands import words_of
from builders.rollouts import rollouts_of
from builders.runs import ALONE, config_from
from builders.stand_ins import hear_no_other_ranks, replace_sampler

import train
from credit.batch import Batch
from harness.fsdp import Ranks
from harness.run import Run, load_run, start_run, warm_up_policy
from tasks import toy
from tasks.task import Task, split

FLAGS = (
    "--toy-lines 2 --toy-width 16 --heldout 12 --eval-groups 12 --temperature .7 "
    "--prompts-per-step 12 --prompts-per-update 1 --rollouts-per-prompt 2"
)


class Asked(NamedTuple):
    """A call of the sampler."""

    prompts: tuple[str, ...]
    temperature: float
    noise: float


def texts(problems: list[dict]) -> tuple[str, ...]:
    return tuple(problem["problem"] for problem in problems)


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """For seeds 0, 0 and 1: the run, and its lesson's forbidden and shown problems.

    The lessons teach nothing.
    """
    made = []
    lessons = []
    plain = toy.demonstrations

    def demonstrations(lines, forbidden, rng):
        pairs = plain(lines, forbidden, rng)
        lessons.append((forbidden, texts([problem for problem, _ in pairs])))
        return pairs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "demonstrations", demonstrations)
        patch.setattr(toy, "teach", lambda model, batch_loss, steps, name: batch_loss().item())
        for seed in (0, 0, 1):
            folder = tmp_path_factory.mktemp("run")
            run = load_run(config_from(words_of(FLAGS, "--seed", seed)), ALONE)
            warm_up_policy(run, folder)
            made.append((start_run(run, folder), lessons[-1]))
    return made


def test_what_a_run_starts_from_depends_on_its_seed(starts):
    """Problems, weights and demonstrations depend on the seed and on nothing else.

    No lesson shows a held-out problem.
    """
    facts = []
    for run, (forbidden, shown) in starts:
        weights = run.trained.model.get_input_embeddings().weight.tolist()
        task = run.context.task
        facts.append([texts(task.train), texts(task.heldout), shown, weights])
        assert forbidden == set(texts(task.heldout))
    assert facts[0] == facts[1]
    assert not [fact for fact, other in zip(facts[0], facts[2], strict=True) if fact == other]


def test_what_is_held_out_of_a_file_depends_on_the_seed():
    """The problems held out of a file depend on the seed alone."""
    task = Task("t", [{"problem": str(n)} for n in range(40)], [], itemgetter("problem"), None)
    parts = [
        split(task, toy.make_tokenizer(), heldout=8, seed=seed, max_prompt_tokens=9)[0]
        for seed in (0, 0, 1)
    ]
    assert parts[0] == parts[1] and parts[0].heldout != parts[2].heldout


@pytest.fixture
def asked(starts, monkeypatch):
    """A function that records how a part of a run calls the sampler, and its order of rollouts.

    It takes the seed, and the rank of two.
    """
    calls = []
    orders = []
    first, _ = starts[0]

    def rollout(model, tokenizer, prompts, count, *, temperature, **options):
        calls.append(Asked(tuple(prompts), temperature, torch.rand(()).item()))
        prompts = np.repeat(prompts, count).tolist()
        return rollouts_of(tokenizer, prompts, [r"\boxed{3}"] * len(prompts))

    minibatches = Batch.minibatches

    def recorded(batch, *inputs):
        orders.extend(rows.tolist() for rows in minibatches(batch, *inputs))
        return minibatches(batch, *inputs)

    replace_sampler(monkeypatch, rollout)
    hear_no_other_ranks(monkeypatch)
    monkeypatch.setattr(Batch, "minibatches", recorded)

    def ask(part, *inputs, seed: int = 0, rank: int = 0) -> tuple[list[Asked], list[list[int]]]:
        """Run this part of seed 0's run with another seed; its problems stay the same."""
        torch.manual_seed(99)  # what was drawn before must not matter
        calls.clear()
        orders.clear()
        run = copy.copy(first)
        run.config = replace(first.config, seed=seed)
        run.ranks = Ranks(rank, 2, ALONE.device)
        part(run, *inputs)
        return list(calls), list(orders)

    return ask


def test_steps_differ_by_seed_step_and_rank(asked):
    """Noise differs by all three, the order of updates by seed and step.

    Problems differ by seed and step.
    """
    seen = {}
    calls = []
    orders = []
    for seed, step in product((0, 1), (2, 1, 0)):
        of_ranks = [asked(train.train_step, step, seed=seed, rank=rank) for rank in (0, 1)]
        (first, order), (second, other) = of_ranks
        assert order == other
        calls += first + second
        orders.append(str(order))
        seen[seed, step] = of_ranks
    assert seen[0, 1][0] == asked(train.train_step, 1)
    assert len(calls) == 12 and {call.temperature for call in calls} == {0.7}
    assert len({call.prompts for call in calls}) == len({call.noise for call in calls}) == 12
    assert len(set(orders)) == 6
    for of_seed in (calls[:6], calls[6:]):
        drawn = [prompt for call in of_seed for prompt in call.prompts]
        # of one epoch, in which a prompt may stand twice
        assert len(drawn) == 36 and len(set(drawn)) > 30


def evaluate_after(run: Run, steps: int) -> None:
    """Evaluate a run of which `steps` steps are done."""
    run.context = replace(run.context, step=steps)
    train.evaluate(run)


def test_evaluations_before_and_after_have_one_noise_that_no_step_has(asked):
    """Noise differs by seed and rank; greedy sampling comes first, then the run's temperature."""
    noises = set()
    for seed, rank in product((0, 1), (0, 1)):
        calls, _ = asked(evaluate_after, 0, seed=seed, rank=rank)
        assert (calls, []) == asked(evaluate_after, 40, seed=seed, rank=rank)
        assert [call.temperature for call in calls] == [0.0, 0.7]
        calls.append(asked(train.train_step, 0, seed=seed, rank=rank)[0][0])
        noises |= {call.noise for call in calls}
    assert len(noises) == 12
