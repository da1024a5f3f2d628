"""Rollouts, GRPO and SHEAR on a simulated GPU.

A tensor that is left on the CPU is found in each.
"""

from unittest import mock

import pytest
import torch
from builders import alternating
from builders.groups import random_group
from builders.runs import recipe_with, run_of, sharded
from builders.simulated_gpu import CUDA, Cuda, mark

import train
from credit.rules import RULES
from grpo import rollout
from harness.fsdp import Ranks
from harness.run import make_task
from shear import shear_weights
from tasks import toy

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a real GPU finds its mistakes itself"
)


@pytest.fixture(autouse=True, scope="module")
def gpu():
    """All of this file is done on the simulated GPU, which has neither clock nor memory."""
    names = "synchronize max_memory_allocated reset_peak_memory_stats".split()
    answers = dict.fromkeys(names, lambda: 0)
    with mock.patch.multiple(torch.cuda, **answers), Cuda():
        yield


@pytest.fixture(scope="module")
def run():
    """A run whose rollouts are `written`."""
    model = toy.make_model(1, seed=0, width=16)
    tokenizer = toy.make_tokenizer()
    mark([*model.parameters(), *model.buffers()], CUDA)
    sizes = dict(prompts_per_step=2, rollouts_per_prompt=2, prompts_per_update=1, micro_tokens=60)
    sizes |= dict(generate_batch=3, toy_lines=1, max_tokens=16, heldout=2, window=4, stride=4)
    config = recipe_with(**sizes, steps=2, task="embedded", dtype="float32")
    config, task, _ = make_task(config, tokenizer, 512)
    loaded = run_of(config, task, model, tokenizer, Ranks(0, 1, CUDA))
    loaded.hooks.generate = written
    return sharded(loaded)


def written(model, prompt_ids, prompt_mask, *, pad, **limits):
    """A stand-in for `hf_generate`: responses of two lengths, two in three of them boxed."""
    tokenizer = toy.make_tokenizer()
    boxed = tokenizer("a=1+2=1+2=3\n\\boxed{3}<eos>")["input_ids"]
    short = tokenizer("a=1+2=3\n<eos>")["input_ids"]
    short += [pad] * (len(boxed) - len(short))
    responses = [boxed if row % 3 else short for row in range(len(prompt_ids))]
    return torch.tensor(responses, device=prompt_ids.device)


def take_step(run, method: str) -> dict:
    """The metrics of a step, from an evaluation and problems to moved weights."""
    alternating.use(run.hooks)
    run.rule = RULES[method]
    train.evaluate(run)
    return train.train_step(run, 0)[0]


@pytest.mark.parametrize("method", ["grpo", "shear"])
def test_a_step(run, method):
    """A step goes from rollouts to moved weights, in float32."""
    weights = list(run.trained.parameters())
    before = [weight.clone() for weight in weights]
    metrics = take_step(run, method)
    assert metrics["grad_norm"] > 0 and metrics["skipped"] == 0
    assert not all(torch.equal(old, new) for old, new in zip(before, weights, strict=True))
    assert all(weight.device == CUDA for weight in weights)


def test_shear_alone():
    """shear.py and sinkhorn.py give a CPU's weights without the hooks of training."""
    hidden, mask, correct = random_group(lengths=(9, 8, 7))
    expected = shear_weights(hidden, mask, correct, window=6, stride=3).omega
    there = hidden.to(CUDA), mask.to(CUDA), correct.to(CUDA)
    omega = shear_weights(*there, window=6, stride=3).omega
    assert omega.is_cuda and torch.equal(omega.cpu(), expected)


def test_rollouts_by_generate(run):
    """transformers' own loop runs greedily, and refuses logits that are not finite."""
    rollouts = rollout(
        run.context.policy.model,
        run.context.tokenizer,
        ["a=1+2;a?\n", "a?\n"],
        2,
        max_tokens=3,
        temperature=0.0,
    )
    assert rollouts.ids.is_cuda and rollouts.mask.is_cuda


# ---- and that it could have failed ---------------------------------------------------------------


class Forgetful:
    """torch, one of whose functions forgets the device that it is given."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, name: str):
        function = getattr(torch, name)
        if name != self.name:
            return function
        return lambda *args, device=None, **options: function(*args, **options)


LEFT_ON_THE_CPU = [  # where, by which functions, and the method whose step meets it
    ("grpo", "zeros tensor", "grpo"), ("credit.batch", "tensor", "grpo"),
    ("shear", "tensor arange", "shear"), ("sinkhorn", "arange", "shear"),
    ("credit.batch", "full", "shear"), ("credit.measures", "arange", "shear"),
]  # fmt: skip


@pytest.mark.parametrize("module, names, method", LEFT_ON_THE_CPU)
def test_a_tensor_left_on_the_cpu_is_found(module, names, method, run, monkeypatch):
    """Each of these functions is caught, and so is what NumPy is given."""
    for name in names.split():
        monkeypatch.setattr(f"{module}.torch", Forgetful(name))
        with pytest.raises(RuntimeError, match="same device"):
            take_step(run, method)
    with pytest.raises(TypeError, match="numpy"):
        torch.ones(2, device=CUDA).numpy()
