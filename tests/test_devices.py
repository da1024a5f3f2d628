"""Rollouts, GRPO and SHEAR on a simulated GPU, which finds tensors that are left on the CPU."""

from unittest import mock

import pytest
import torch
from builders import alternating
from builders.runs import recipe_with, run_of, sharded
from builders.simulated_gpu import CUDA, Cuda, mark

import train
from credit.rules import RULES
from grpo import rollout
from harness.fsdp import Ranks
from harness.run import make_task
from tasks import toy

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a real GPU finds its mistakes itself"
)


@pytest.fixture(autouse=True)
def gpu():
    """All of this file is done on the simulated GPU, which has neither clock nor memory."""
    answers = dict.fromkeys(["synchronize", "max_memory_allocated"], lambda: 0)
    with mock.patch.multiple(torch.cuda, **answers), Cuda():
        yield


@pytest.fixture
def run():
    """A run whose rollouts are `written`, and whose verdicts alternate."""
    model = toy.make_model(1, seed=0, width=16)
    tokenizer = toy.make_tokenizer()
    mark([*model.parameters(), *model.buffers()], CUDA)
    sizes = dict(prompts_per_step=2, rollouts_per_prompt=2, prompts_per_update=1, micro_tokens=60)
    sizes |= dict(generate_batch=3, toy_lines=1, max_tokens=16, heldout=2, window=4, stride=4)
    config = recipe_with(**sizes, task="embedded", dtype="float32")
    config, task, _ = make_task(config, tokenizer, 512)
    loaded = run_of(config, task, model, tokenizer, Ranks(0, 1, CUDA))
    loaded.hooks.generate = written
    alternating.use(loaded.hooks)
    return sharded(loaded)


def written(model, prompt_ids, prompt_mask, *, pad, **limits):
    """A stand-in for `hf_generate`: responses of two lengths, two in three of them boxed."""
    tokenizer = toy.make_tokenizer()
    boxed = tokenizer("a=1+2=1+2=3\n\\boxed{3}<eos>")["input_ids"]
    short = tokenizer("a=1+2=3\n<eos>")["input_ids"]
    short += [pad] * (len(boxed) - len(short))
    responses = [boxed if row % 3 else short for row in range(len(prompt_ids))]
    return torch.tensor(responses, device=prompt_ids.device)


@pytest.mark.parametrize("method", ["grpo", "shear"])
def test_an_evaluation_and_a_step(run, method):
    """They go from rollouts to moved weights, in float32."""
    run.rule = RULES[method]
    weights = list(run.trained.parameters())
    before = [weight.clone() for weight in weights]
    train.evaluate(run)
    metrics, _ = train.train_step(run, 0)
    assert metrics["grad_norm"] > 0 and metrics["skipped"] == 0
    assert not all(torch.equal(old, new) for old, new in zip(before, weights, strict=True))
    assert all(weight.device == CUDA for weight in weights)


def test_rollouts_by_generate(run):
    """transformers' own loop runs greedily."""
    model = run.context.policy.model
    prompts = ["a=1+2;a?\n", "a?\n"]
    rollouts = rollout(model, run.context.tokenizer, prompts, 2, max_tokens=3, temperature=0.0)
    assert rollouts.ids.device == rollouts.mask.device == CUDA
    with pytest.raises(TypeError, match="numpy"):
        rollouts.ids.numpy()
    with pytest.raises(RuntimeError, match="same device"):
        rollouts.ids + torch.ones(3)
