"""The core stands alone, and what one reads is what runs.

A tree without `lab/` trains and evaluates; whoever edits shear.py or sinkhorn.py in it sees the
change in the weights of a training step.
"""

import shutil
from contextlib import contextmanager

import pytest
import torch
from builders.case_files import ROOT
from builders.commands import words_of
from builders.processes import run_script
from builders.small_models import save_model
from torch.testing import assert_close

from base.files import read_lines
from tasks import toy

# The flags of one step, whose verdicts alternate, so that groups of an untrained model have both sides.
STEP = "--model start --toy-lines 1 --steps 1 --prompts-per-step 2 --prompts-per-update 2 "
STEP += "--rollouts-per-prompt 4 --heldout 4 --eval-groups 2 --window 6 --stride 3 --device cpu "
STEP += "--keep-samples --use builders.alternating"
HALF = """
from credit.rules import rule


@rule("half", "half of A")
def half(batch, context):
    return batch.A.expand(batch.mask.shape) / 2
"""
NINE = """
from dataclasses import replace

from tasks import toy
from base.config import TASKS


def task(*inputs):
    whole, notes = toy.task(*inputs)
    return replace(whole, train=whole.train[:9]), notes


TASKS["nine"] = replace(TASKS["embedded"], make=f"{__name__}:task")
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """The core without `lab/`, and the tests' folder for --use builders.alternating."""
    folder = tmp_path_factory.mktemp("core")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for room in "base", "credit", "grading", "harness", "tasks", "tests/builders":
        leave_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, folder / room, ignore=leave_out)
    save_model(folder / "start", toy.make_model(1, seed=0, width=16))
    return folder


@pytest.fixture
def run(core):
    """A function that returns what a script of the copy prints; it must end with a status."""

    def check(script: str, *words, status: int = 0) -> str:
        ended, printed = run_script(core, script, words_of(words), core / "printed")
        assert ended == status, printed
        return printed

    return check


@contextmanager
def edited(path, old: str, new: str):
    """Inside, a file has one expression in the place of another."""
    source = path.read_text()
    assert source.count(old) == 1
    path.write_text(source.replace(old, new))
    yield
    path.write_text(source)


def test_who_edits_the_core_sees_it_in_a_step(core, run):
    """Twice the distances of tokens at twice eps double each weight; another potential changes them."""

    def weights_of(name: str, *flags) -> torch.Tensor:
        run("train.py", STEP, flags, "--task embedded --name", name)
        weights = []
        for row in read_lines(core / "runs" / name / "samples.jsonl"):
            (values,) = row["weights"].values()
            weights += values
        return torch.tensor(weights)

    plain = weights_of("plain")
    with edited(core / "shear.py", "return torch.cdist(", "return 2 * torch.cdist("):
        assert_close(weights_of("twice", "--eps .1"), 2 * plain, rtol=1e-5, atol=1e-4)
    with edited(core / "sinkhorn.py", "f = (eps * f.T)", "f = (2 * eps * f.T)"):
        assert (weights_of("sinkhorn") - plain).abs().max() > 0.01
    assert plain.min() >= 0 and plain.std() > 0.01


def test_a_file_enters_a_rule_and_a_task(core, run):
    """--method, --task and --resume find what a file of --use enters, as does eval.py's run.

    Another rule of a name is refused: which of them would train?
    """
    (core / "half.py").write_text(HALF)
    (core / "nine.py").write_text(NINE)
    flags = f"{STEP} --task nine --method half --use half.py --use nine.py --name own"
    assert "9 problems to train on" in run("train.py", flags)
    (values,) = read_lines(core / "runs/own/samples.jsonl")[1]["weights"].values()
    assert set(values) == {0.5}
    run("train.py", "--resume runs/own --steps 2")
    assert "| runs/own/model " in run("eval.py", "--model runs/own --samples 1 --device cpu")
    (core / "taken.py").write_text(HALF.replace('"half"', '"grpo"'))
    printed = run("train.py", STEP, "--task embedded --use taken.py", status=2)
    assert 'error: rule("grpo"): another rule has this name' in printed


def test_a_name_that_only_the_lab_has_is_refused_without_it(run):
    """One sentence says which methods there are."""
    printed = run("train.py", "--method opo", status=2)
    assert "--method opo: there is grpo, shear; give one of these" in printed
