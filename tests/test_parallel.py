"""harness/fsdp.py: two ranks do the work of one, with whole or sharded weights.

The checks on two ranks run once, over gloo; the ranks leave their results.
"""

import contextlib
import io
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from builders.commands import BRIEF_FLAGS, raising, words_of
from builders.one_step import one_step
from builders.processes import on_two
from builders.runs import ALONE, assert_same_run, recipe_with, run_of, sharded
from builders.small_models import family_model
from builders.stand_ins import hear_no_other_ranks
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from transformers import AutoModelForCausalLM

import train
from base import files
from base.errors import BadInput
from grpo import Policy, Rollouts, rollout
from harness import checkpoint, fsdp
from harness import run as load
from harness.fsdp import Ranks, checksum, share
from harness.log import open_folder
from tasks import toy
from tasks.task import Task

# Flags of one rank, and those that two ranks have besides.
CASES = {
    "float32": ("--method shear", "--recompute"),
    "bfloat16": ("--method shear", "--dtype bfloat16"),
}


def model_with_experts():
    """An untrained model; the same on both ranks."""
    torch.manual_seed(1)
    return family_model("mixtral", spread=0.02, num_local_experts=4, num_hidden_layers=1)


def on_two_ranks(folder: Path, rollouts: Rollouts, untaught: str) -> None:
    """The work of each rank, which checks what both have alike; the main one leaves its results."""
    ranks = fsdp.join("cpu")
    tensors = fsdp.gather([torch.full((2,), ranks.rank), "x"], ranks)
    assert [tensor.tolist() for tensor, _ in tensors] == [[0, 0], [1, 1]]
    assert fsdp.total({"a": 1.0, "b": ranks.rank}, ranks) == {"a": 2, "b": 1}
    assert fsdp.gather(share(list(range(5)), ranks), ranks) == [[0, 1], [2, 3, 4]]
    for fails in False, ranks.main:
        with contextlib.suppress(BadInput), fsdp.raise_together(ranks), fsdp.main_first(ranks):
            time.sleep(0.2 if ranks.main else 0)
            with (folder / "order").open("a") as file:
                file.write(f"{ranks.rank}")
            if fails:
                raise BadInput
    for name, flags in CASES.items():
        step = one_step(ranks, rollouts, words_of(flags), model_with_experts())
        if ranks.main:
            torch.save(step, folder / f"{name}.pt")
    config = recipe_with(out=str(folder), name=f"of-{ranks.rank}")
    task = Task("embedded", [{}], [{}], None, None)
    run = run_of(config, task, toy.make_model(1, seed=1), None, ranks=ranks)
    with open_folder(run) as opened:
        assert opened.name == "of-0"
    run = sharded(run)

    def other_checksum(values, number):
        return checksum(values, number) + ranks.rank

    differ = pytest.raises(RuntimeError, match="sampling and trained weights differ")
    with mock.patch.object(fsdp, "checksum", other_checksum), differ:
        fsdp.refresh(run.trained, run.context.policy, ranks)
    # A whole run in this process group, and its second step once more.
    torch.distributed.destroy_process_group = lambda: None
    sizes = words_of(BRIEF_FLAGS, "--out", folder, "--model")
    whole = words_of(
        untaught, "--steps 2 --prompts-per-update 4 --save-every 1 --keep 2 --name whole"
    )
    assert train.main([*sizes, *whole]) == 0
    if ranks.main:
        shutil.copytree(folder / "whole", folder / "resumed")
    fsdp.gather(None, ranks)
    assert train.main(["--resume", f"{folder}/resumed/checkpoints/step-000001"]) == 0
    # a folder that one rank alone cannot read: the main one prints the sentence
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert train.main([*sizes, untaught if ranks.main else str(folder)]) == 2
    start = f"error: --model {folder}: " if ranks.main else ""
    assert said.getvalue().startswith(start) and said.getvalue().count("\n") == ranks.main


@pytest.fixture(scope="module")
def two(untaught, tmp_path_factory):
    """The folder that two ranks left, and the rollouts given to them and to one rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("two")
    model = toy.make_model(2, seed=1).eval()
    tokenizer = toy.make_tokenizer()
    prompts = [problem["problem"] for problem in toy.make_problems(6, 0, 2, 0)[0]]
    rollouts = rollout(model, tokenizer, prompts, 4, max_tokens=30, temperature=1.0)
    on_two(on_two_ranks, folder, rollouts, untaught)
    return folder, rollouts


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_make_the_update_of_one(two, case):
    """Given the same rollouts, two ranks change the weights as one does.

    The changes agree to 1e-4 (relative L2) in float32 at lr 1e-3, also where layers run again.
    """
    folder, rollouts = two
    other, seen = torch.load(folder / f"{case}.pt", weights_only=False)
    is_rounded = case == "bfloat16"
    ours, metrics = one_step(ALONE, rollouts, CASES[case][0].split(), model_with_experts())
    size = sum(change.square().sum() for change in ours.values()).sqrt()
    apart = sum((ours[name] - other[name]).square().sum() for name in ours).sqrt()
    assert size > 0.05 and apart / size < (0.5 if is_rounded else 1e-4)
    assert all(change.dtype == torch.float32 and change.any() for change in other.values())
    assert metrics["infra_errors"] == seen["infra_errors"] > 0
    close = dict(rel=0.1, abs=0.02) if is_rounded else dict(rel=1e-4, abs=1e-6)
    names = "reward loss grad_norm abs_log_ratio weight_mean length clip_share".split()
    theirs, own = ([of_run[name] for name in names] for of_run in (seen, metrics))
    assert theirs == pytest.approx(own, **close)


def test_the_main_rank_goes_first(two):
    """What it downloads the other finds; it does so where it fails, too."""
    assert (two[0] / "order").read_text() == "0101"


def test_two_ranks_resume_to_the_same_run(two):
    """From the checkpoint of the first step, weights, samples and metrics are equal to the bit.

    The folder is one that transformers loads.
    """
    folder, _ = two
    assert_same_run(folder / "resumed", folder / "whole")
    ours = files.read_lines(folder / "resumed" / "metrics.jsonl")
    assert len(ours) == 4 and len({row["checksum"] for row in ours[1:3]}) == 2
    assert AutoModelForCausalLM.from_pretrained(folder / "resumed" / "model")


def test_one_rank_goes_on_from_a_checkpoint_of_two(two):
    """Weights and moments are equal to the bit."""
    path, _ = files.find_checkpoint(two[0] / "resumed")
    model = toy.make_model(1, seed=5, width=16)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.load(path, SimpleNamespace(trained=Policy(model), optimizer=optimizer, ranks=ALONE))
    saved = load_file(path / "model" / "model.safetensors")
    parts = [load_file(part) for part in sorted((path / "state").iterdir())]  # of both ranks
    for name, weight in model.named_parameters():
        assert torch.equal(weight, saved[name])
        key = f"state.model.{name}.exp_avg"
        moments = [part[key] for part in parts if key in part]
        assert torch.equal(torch.cat(moments), optimizer.state[weight]["exp_avg"])
        assert optimizer.state[weight]["step"] == 2


def test_more_ranks_than_work_are_refused(monkeypatch):
    """A rank without a prompt, or without a problem to evaluate, would fail in the middle."""
    hear_no_other_ranks(monkeypatch)
    for size in ("prompts_per_step", "heldout", "eval_groups"):
        with pytest.raises(BadInput, match=" 1: there are 2 ranks; raise it"):
            load.load_run(recipe_with(**{size: 1}), Ranks(0, 2, ALONE.device))


def test_a_rank_that_fails_ends_the_others(tmp_path):
    """The launcher ends rank 0, which would wait for hours, and has the status of rank 1."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1': os._exit(130)\ntime.sleep(7200)"
    )
    assert fsdp.launch(2, str(script), []) == 130


def test_a_rank_that_a_signal_ends_is_a_failure(monkeypatch):
    """Its exit status is negative, which no command returns."""
    killed = ProcessFailure(local_rank=1, pid=1, exitcode=-9, error_file="none")
    ended = raising(ChildFailedError("train.py", {1: killed}))
    monkeypatch.setattr(fsdp, "elastic_launch", lambda config, python: ended)
    assert fsdp.launch(2, "train.py", []) == 1


def test_ranks_may_finish_a_step_before_the_launcher_kills_them(monkeypatch):
    """train.py starts two ranks of itself with the same flags; torch 2.11 has no such patience."""
    started = Mock()
    monkeypatch.setattr(fsdp, "elastic_launch", started)
    flags = ["--ranks", "2", "--device", "cpu"]
    assert train.main(flags) == 0
    (given, _), _ = started.call_args
    assert given.nproc_per_node == 2 and getattr(given, "shutdown_timeout", 86_400) == 86_400
    started.return_value.assert_called_once_with("-u", train.__file__, *flags)


def test_checksums_of_shards_add_up_and_one_bit_shows():
    """This holds in float32 and bfloat16; equal tensors at different places count differently."""
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        values = torch.randn(10, 3).to(dtype)
        whole = checksum(values, 4)
        assert sum(checksum(part, 4) for part in values.split(3)) == whole != checksum(values, 5)
        values.view(bits)[7, 1] ^= 1
        assert checksum(values, 4) != whole
