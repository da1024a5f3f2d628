"""What the lab does on a GPU, against the CPU or against the plain way on the same GPU.

pytest -m gpu tests lab/tests    # on a fresh node, with the core's
"""

import copy
from dataclasses import replace

import pytest
import torch
from builders.commands import BRIEF_FLAGS, run_well
from builders.small_models import family_model
from ragged import gradients, random_group, unlike_rollouts
from torch import Tensor
from torch.testing import assert_close
from weighing import FAST, weigh

import lab.rules  # noqa: F401 - enters the rules
import train
from base import files
from credit.rules import RULES
from grpo import PADDED, Layout, Policy, Rollouts
from harness.fsdp import recompute_layers
from lab.fast.packing import packing_of
from lab.rules import ablations
from lab.rules.adapter import needs_adapter

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def recomputing(model: torch.nn.Module, layout: Layout = PADDED) -> Policy:
    """A policy whose layers run again in the backward pass."""
    recompute_layers(model)
    return Policy(model, layout)


def moved(rollouts: Rollouts, device: torch.device) -> Rollouts:
    """The rollouts with their tensors on a device."""
    tensors = {name: value for name, value in vars(rollouts).items() if name != "texts"}
    return replace(rollouts, **{name: value.to(device) for name, value in tensors.items()})


def relative(ours: Tensor, expected: Tensor) -> float:
    """Relative L2 error."""
    return ((ours.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hooks", [FAST, {"measure": ablations.chamfer_distance}])
def test_weights_are_those_of_a_cpu(hooks, dtype):
    """The fast hooks and an ablation give the same weights on both."""
    hidden, mask, correct = random_group(9)
    hidden = hidden.to(dtype)
    expected = weigh(hidden, mask, correct, hooks, window=6, stride=3).omega
    there = [tensor.to(DEVICE) for tensor in (hidden, mask, correct)]
    ours = weigh(*there, hooks, window=6, stride=3).omega
    assert_close(ours.cpu(), expected, atol=1e-5, rtol=1e-4)


def test_packed_rollouts_are_padded_ones():
    """Packed gradients are compared with those of one rollout at a time in float32.

    They are equal in float32; by `varlen_attn` in bfloat16 they are as good as padded ones.
    """
    half = family_model("qwen3", head_dim=128).bfloat16().to(DEVICE)
    whole = copy.deepcopy(half).float()
    rollouts = moved(unlike_rollouts(), DEVICE)
    pulls = torch.randn(rollouts.ids.shape, device=DEVICE)
    expected = gradients(Policy(copy.deepcopy(whole)), rollouts, pulls, at_once=1)
    padded_half = gradients(recomputing(copy.deepcopy(half)), rollouts, pulls, at_once=8)
    packed_half = gradients(recomputing(half, packing_of(half)), rollouts, pulls, at_once=8)
    packed = gradients(recomputing(whole, packing_of(whole)), rollouts, pulls, at_once=8)
    for exact, *both, values in zip(packed, packed_half, padded_half, expected, strict=True):
        ours, usual = (relative(half, values) for half in both)
        assert relative(exact, values) < 1e-3 and ours < 2 * usual + 1e-3, (ours, usual)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_takes_a_step(rule, tmp_path):
    """Every rule samples, grades, gives credit and trains."""
    adapter = "--use lab.tools.lora:rank=2" if RULES[rule].prepare is needs_adapter else ""
    flags = f"--device cuda --warmup-steps 1 --use lab.fast {adapter} --steps 1 --method {rule}"
    run_well(train, BRIEF_FLAGS, flags, "--name run --out", tmp_path)
    step = files.read_lines(tmp_path / "run" / "metrics.jsonl")[1]
    assert step["grad_norm"] > 0 and step["skipped"] == 0
