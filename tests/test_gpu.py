"""A GPU's results, against the CPU or against the plain way on the same GPU.

pytest -m gpu tests lab/tests    # on a fresh node, with the lab's
"""

import copy

import pytest
import torch
from builders.commands import BRIEF_FLAGS, run_well
from builders.groups import random_group
from builders.rollouts import sample_rollouts
from torch.testing import assert_close

import train
from base import files
from grpo import Policy, Rollouts, policy_loss, score
from harness import checkpoint
from harness.fsdp import full, recompute_layers
from shear import shear_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
RUN = [*BRIEF_FLAGS, "--name run --steps 4 --save-every 2 --keep 9 --warmup-steps 1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_a_cpu(dtype):
    """The plain functions give the same weights on both."""
    hidden, *verdicts = random_group(17, 12, 4, 20, 9)
    group = hidden.to(dtype), *verdicts
    expected = shear_weights(*group, window=6, stride=3).omega
    ours = shear_weights(*(part.cuda() for part in group), window=6, stride=3).omega
    assert_close(ours.cpu(), expected, atol=1e-5, rtol=1e-4)


def test_scores_and_gradients_are_those_of_a_cpu(tiny):
    """One batch of rollouts gives the same on both, in float32 without TF32."""
    *tensors, texts = vars(sample_rollouts(tiny)).values()
    found = []
    for device in "cpu", "cuda":
        model = copy.deepcopy(tiny[0]).to(device)
        rollouts = Rollouts(*(tensor.to(device) for tensor in tensors), texts)
        scored = score(Policy(model), rollouts, temperature=0.8, micro_tokens=150)
        recompute_layers(model)
        new = Policy(model)(rollouts, 0.8).log_probs
        old = scored.log_probs + 0.1
        loss, _ = policy_loss(new, old, torch.ones(8, device=device), rollouts.mask)
        (loss / int(rollouts.mask.sum())).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        results = scored.log_probs, scored.entropies, scored.hidden, gradient
        found.append([tensor.cpu() for tensor in results])
    for ours, expected in zip(*found, strict=True):
        assert_close(ours, expected, atol=1e-4, rtol=1e-3)


def steps_of(out, *flags) -> list[dict]:
    """The steps' metrics after `train.py` in this process."""
    run_well(train, "--device cuda", flags)
    return [row for row in files.read_lines(out / "run" / "metrics.jsonl") if "step" in row]


def test_one_rank_of_fsdp_and_its_checkpoint(tmp_path, monkeypatch):
    """In bfloat16 each step moves the weights from a ratio of 1.

    --resume restores weights and moments to the bit.
    """
    kept = []

    def kept_after(function):
        def call(run, *step):
            result = function(run, *step)
            tensors = []
            for parameter in run.optimizer.param_groups[0]["params"]:
                tensors += [parameter.detach(), *run.optimizer.state[parameter].values()]
            kept.append([full(tensor).to("cpu", copy=True) for tensor in tensors])
            return result

        return call

    for name in ("save", "restore"):
        monkeypatch.setattr(checkpoint, name, kept_after(getattr(checkpoint, name)))
    steps = steps_of(tmp_path, RUN, "--dtype bfloat16 --lr 1e-3 --out", tmp_path)
    path = tmp_path / "run" / "checkpoints" / "step-000002"
    again = steps_of(tmp_path, "--resume", path)
    assert len(steps) == len(again) == 4 and len({step["checksum"] for step in steps}) == 4
    assert max(step["abs_log_ratio"] for step in steps + again) < 1e-2
    # sampled by the restored weights
    assert again[2]["entropy"] == pytest.approx(steps[2]["entropy"], rel=0.05)
    saved, _, restored, *_ = kept
    assert all(torch.equal(ours, old) for ours, old in zip(restored, saved, strict=True))
