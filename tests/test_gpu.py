"""A GPU's results, against the CPU or against the plain way on the same GPU.

    pytest -m gpu    # on a fresh node

All passed on an H200 with torch 2.11.0 and transformers 5.23.0 on 2026-11-26, that of
`lab.studies.gradients` on 2026-11-27.
"""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders.commands import run_well
from builders.groups import RACES, race_problem, random_group, weights
from builders.rollouts import gradients, sample_rollouts, unlike_rollouts
from builders.small_models import family_model
from credit.table import METHODS, Need, methods_needing
from torch import Tensor
from torch.testing import assert_close

import train
from grpo import PADDED, Layout, Policy, Rollouts, policy_loss, score
from harness import checkpoint, files
from harness.fsdp import full, recompute_layers
from lab.fast.packing import packing_of
from lab.fast.race import race
from lab.studies import gradients as gradient_test
from shear import Spans, shear_weights


def recomputing(model: torch.nn.Module, layout: Layout = PADDED) -> Policy:
    """A policy whose layers run again in the backward pass."""
    recompute_layers(model)
    return Policy(model, layout)


def moved(rollouts: Rollouts, device: torch.device) -> Rollouts:
    """The rollouts with their tensors on a device."""
    values = vars(rollouts).items()
    return replace(
        rollouts, **{name: value.to(device) for name, value in values if name != "texts"}
    )


DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
RUN = f"--task embedded --smoke --device {DEVICE.type} --name run"
NEEDS = dict.fromkeys(methods_needing(Need.ADAPTER), "--lora-rank 2")


def to_device(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def relative(ours: Tensor, expected: Tensor) -> float:
    """Relative L2 error."""
    return ((ours.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("name", RACES)
def test_minima_of_the_race_are_those_of_a_cpu(name):
    """A GPU finds the CPU's minima of the same group."""
    (costs, *sides, eps), *_ = race_problem(name)
    there = [side._replace(spans=Spans(*to_device(*side.spans))) for side in sides]
    found = race(costs.to(DEVICE), *there, eps, max_iters=100, tol=1e-3)
    expected = race(costs, *sides, eps, max_iters=100, tol=1e-3)
    for name in ("of_right", "of_wrong"):
        ours = getattr(found, name).cpu()
        assert_close(ours, getattr(expected, name), rtol=1e-4, atol=1e-5 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, dict(reading="cost"), dict(distance="chamfer"), dict(normalize="rollout")]
)
def test_weights_are_those_of_a_cpu(options, dtype):
    """The plain functions, the fast hooks and the ablations give the same weights on both."""
    hidden, mask, correct = random_group(9)
    hidden = hidden.to(dtype)
    there = to_device(hidden, mask, correct)  # (G, T, d), (G, T), (G,)
    expected = weights(hidden, mask, correct, window=6, stride=3, **options)
    assert_close(
        weights(*there, window=6, stride=3, **options).cpu(), expected, atol=1e-5, rtol=1e-4
    )
    plain = shear_weights(hidden, mask, correct, window=6, stride=3).omega
    assert_close(shear_weights(*there, window=6, stride=3).omega.cpu(), plain, atol=1e-5, rtol=1e-4)


def test_scores_and_gradients_are_those_of_a_cpu(tiny):
    """One batch of rollouts gives the same on both, in float32 without TF32."""
    rollouts = sample_rollouts(tiny)
    found = []
    for device in (torch.device("cpu"), DEVICE):
        model = copy.deepcopy(tiny[0]).to(device)
        part = moved(rollouts, device)
        scored = score(Policy(model), part, temperature=0.8, micro_tokens=150)
        logp = recomputing(model)(part, 0.8).log_probs
        old = scored.log_probs + 0.1
        ones = torch.ones(8, device=device)
        loss, _ = policy_loss(logp, old, ones, part.mask, int(part.mask.sum()))
        loss.backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        results = scored.log_probs, scored.entropies, scored.hidden, gradient
        found.append([tensor.cpu() for tensor in results])
    for ours, expected in zip(*found, strict=True):
        assert_close(ours, expected, atol=1e-4, rtol=1e-3)


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


def steps_of(out: Path, *parts) -> list[dict]:
    """The steps' metrics after `train.py` in this process."""
    run_well(train, parts)
    return [row for row in files.read_lines(out / "run" / "metrics.jsonl") if "step" in row]


def test_the_gradient_test_compares_rules(tmp_path):
    """Gradients of the weights in bfloat16 give finite rows, and D of `grpo` is 0."""
    rows = tmp_path / "rows.jsonl"
    sizes = (
        f"--task embedded --smoke --device {DEVICE.type} --dtype bfloat16 --batches 3 --reference 2"
    )
    run_well(gradient_test, sizes, "--arms grpo shear opo --rows", rows)
    found = {row["arm"]: row["D"] for row in files.read_lines(rows)}
    assert set(found) == {"grpo", "shear", "opo"} and all(map(math.isfinite, found.values()))
    assert found["grpo"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_a_step(method, tmp_path):
    """Every method samples, grades, gives credit and trains.

    A smoke test alternates verdicts, so that each group has both.
    """
    flags = f"{RUN} --warmup-steps 1 --steps 1 --method {method} {NEEDS.get(method, '')}"
    [step] = steps_of(tmp_path, flags, "--out", tmp_path)
    assert step["grad_norm"] > 0 and step["skipped"] == 0


def test_one_rank_of_fsdp_and_its_checkpoint(tmp_path, monkeypatch):
    """In bfloat16 each step moves the weights from a ratio of 1.

    --resume restores weights and moments to the bit.
    """
    kept = {}

    def kept_after(function):
        def call(run, key):
            result = function(run, key)
            tensors = []
            for parameter in run.optimizer.param_groups[0]["params"]:
                tensors += [parameter.detach(), *run.optimizer.state[parameter].values()]
            kept[key] = [full(tensor).to("cpu", copy=True) for tensor in tensors]
            return result

        return call

    for name in ("save", "restore"):
        monkeypatch.setattr(checkpoint, name, kept_after(getattr(checkpoint, name)))
    steps = steps_of(tmp_path, RUN, "--dtype bfloat16 --lr 1e-3 --out", tmp_path)
    path = tmp_path / "run" / "checkpoints" / "step-000002"
    saved = kept[2]
    again = steps_of(tmp_path, "--device", DEVICE.type, "--resume", path)
    assert len(steps) == len(again) == 4 and len({step["checksum"] for step in steps}) == 4
    assert max(step["abs_log_ratio"] for step in steps + again) < 1e-2
    # sampled by the restored weights
    assert again[2]["entropy"] == pytest.approx(steps[2]["entropy"], rel=0.05)
    assert all(torch.equal(ours, old) for ours, old in zip(kept[path], saved, strict=True))
