"""What the lab changes of a step, on two ranks: they make the update of one."""

from pathlib import Path

import pytest
import torch
from adapters import add_adapter
from builders.one_step import one_step
from builders.processes import on_two
from builders.runs import ALONE
from builders.small_models import family_model

import lab.fast
from grpo import rollout
from harness import fsdp
from tasks import toy


def use_adapter(parts) -> None:
    """An adapter that has learned something: with a new one credit would be uniform."""
    parts.adapt = lambda model, seed: add_adapter(model, std=0.1)


ADAPTER = ["--use", "lab.tools.lora:rank=2", "--lr", "1e-2"]
CASES = {
    "fast": (["--method", "shear"], lab.fast.use),
    "own pass": (["--method", "own-baseline"], lab.fast.use),
    "adapter": (["--method", "arca", *ADAPTER], use_adapter),
}


def model_of():
    """An untrained model of one layer; the same on both ranks."""
    torch.manual_seed(1)
    return family_model(spread=0.05, num_hidden_layers=1)


def on_two_ranks(folder: Path, rollouts) -> None:
    """The work of each rank; the main one writes down its results."""
    ranks = fsdp.join("cpu")
    for name, (flags, use) in CASES.items():
        torch.manual_seed(1)
        changes, metrics = one_step(ranks, rollouts, flags, model_of(), use)
        if ranks.main:
            torch.save((changes, metrics), folder / f"{name}.pt")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder that two ranks left, and the rollouts given to them and to one rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("two")
    prompts = [problem["problem"] for problem in toy.make_problems(6, 0, 2, 0)[0]]
    rollouts = rollout(model_of(), toy.make_tokenizer(), prompts, 4, max_tokens=30, temperature=1.0)
    on_two(on_two_ranks, folder, rollouts)
    return folder, rollouts


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_make_the_update_of_one(two, case):
    """Given the same rollouts, the changes of weights agree to 1e-4 (relative L2) in float32."""
    folder, rollouts = two
    others, seen = torch.load(folder / f"{case}.pt", weights_only=False)
    flags, use = CASES[case]
    torch.manual_seed(1)
    ours, metrics = one_step(ALONE, rollouts, flags, model_of(), use)
    size = sum(change.square().sum() for change in ours.values()).sqrt()
    apart = sum((ours[name] - others[name]).square().sum() for name in ours).sqrt()
    assert size > 0.05 and apart / size < 1e-4
    for name, change in others.items():
        assert bool(change.any()) == (case != "adapter" or ".lora_" in name)
    for name in ("loss", "grad_norm", "weight_mean"):
        assert seen[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6)
