"""Rollouts and SHEAR on a simulated GPU, which finds tensors that are left on the CPU."""

from unittest import mock

import pytest
import torch
from builders import alternating
from builders.runs import recipe_with, run_of, sharded
from builders.simulated_gpu import CUDA, Cuda, mark

import train
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
    """A run whose verdicts alternate."""
    model = toy.make_model(1, seed=0, width=16)
    tokenizer = toy.make_tokenizer()
    mark([*model.parameters(), *model.buffers()], CUDA)
    sizes = dict(prompts_per_step=2, rollouts_per_prompt=2, prompts_per_update=1, micro_tokens=60)
    sizes |= dict(generate_batch=3, toy_lines=1, max_tokens=16, heldout=2, window=4, stride=4)
    config = recipe_with(**sizes, task="embedded", dtype="float32")
    config, task, _ = make_task(config, tokenizer, 512)
    loaded = run_of(config, task, model, tokenizer, Ranks(0, 1, CUDA))
    alternating.use(loaded.hooks)
    return sharded(loaded)


def test_an_evaluation_and_a_step(run):
    """They go from rollouts to moved weights, in float32."""
    weights = list(run.trained.parameters())
    before = [weight.clone() for weight in weights]
    train.evaluate(run)
    metrics, _ = train.train_step(run, 0)
    assert metrics["grad_norm"] > 0 and metrics["skipped"] == 0
    assert not all(torch.equal(old, new) for old, new in zip(before, weights, strict=True))
    assert all(weight.device == CUDA for weight in weights)
    with pytest.raises(RuntimeError, match="same device"):  # what the GPU is simulated for
        weights[0] + torch.ones(1)
