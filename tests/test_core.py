"""The core stands alone, and what one reads is what runs.

A tree without `lab/` trains with GRPO and SHEAR and evaluates; whoever edits shear.py or sinkhorn.py
in it sees the change in the weights of a training step.
"""

import ast
import shutil
from pathlib import Path

import pytest
import torch
from builders.case_files import ROOT
from builders.commands import words_of
from builders.processes import run_script
from builders.small_models import save_model
from torch.testing import assert_close

from base.files import read_lines
from tasks import toy

CORE = "base credit grading harness tasks".split()
MOST = 28  # files that `train.py` imports, at most


def closure(start: str) -> set[str]:
    """The files of this project that a file imports, and those that they import."""
    found: set[str] = set()
    todo = [start]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                file = name.replace(".", "/")
                todo += [
                    place
                    for place in (f"{file}.py", f"{file}/__init__.py")
                    if (ROOT / place).exists()
                ]
    return found


@pytest.mark.parametrize("command", ["train.py", "eval.py"])
def test_a_command_imports_no_file_of_the_lab(command):
    """Nor does anything that it imports, and they are few."""
    files = closure(command)
    assert not [path for path in files if path.startswith("lab/")]
    assert len([path for path in files if not path.endswith("__init__.py")]) <= MOST


def test_one_file_of_the_core_imports_the_lab_by_name():
    """`base/options.py` looks up unknown names of --method and --task there; others may print commands."""
    named = set()
    for path in [
        *ROOT.glob("*.py"),
        *(file for room in CORE for file in (ROOT / room).rglob("*.py")),
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and " " not in node.value and node.value.split(".")[0] == "lab":
                named.add(path.name)
    assert named == {"options.py"}


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """The core without `lab/`, and the tests' folder for --use builders.alternating."""
    folder = tmp_path_factory.mktemp("core")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for room in [*CORE, "tests/builders"]:
        leave_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, folder / room, ignore=leave_out)
    save_model(folder / "start", toy.make_model(1, seed=0, width=16))
    return folder


def run(core: Path, script: str, *words) -> tuple[int | None, str]:
    """The exit status and the output of a script of the copy."""
    return run_script(core, script, words_of(words), core / "printed")


# The flags of one step, whose verdicts alternate, so that groups of an untrained model have both sides.
STEP = "--task embedded --model start --toy-lines 1 --steps 1 --prompts-per-step 2 "
STEP += "--prompts-per-update 2 --rollouts-per-prompt 4 --heldout 4 --eval-groups 2 --window 6 "
STEP += "--stride 3 --device cpu --keep-samples --use builders.alternating"
# Each change of the copy's source, and the flags that go with it.
EDITS = {
    "plain": ("shear.py", "WINDOW = 100", "WINDOW = 100", ""),
    "twice": ("shear.py", "return torch.cdist(", "return 2 * torch.cdist(", "--eps .1"),
    "closest": (
        "shear.py",
        "return closest_of(every_pair(",
        "return closest_of(3 * every_pair(",
        "",
    ),
    "sinkhorn": ("sinkhorn.py", "f = (eps * f.T)", "f = (2 * eps * f.T)", ""),
    "grpo": ("shear.py", "return torch.cdist(", "raise RuntimeError(", "--method grpo"),
}


@pytest.fixture(scope="module")
def weights(core):
    """By the name of an edit: the token weights of the rollouts of a step of the edited copy."""
    weights_of = {}
    for name, (file, old, new, flags) in EDITS.items():
        source = (core / file).read_text()
        assert source.count(old) == 1
        (core / file).write_text(source.replace(old, new))
        status, printed = run(core, "train.py", STEP, flags, "--name", name)
        assert status == 0, printed
        (core / file).write_text(source)
        weights_of[name] = []
        for row in read_lines(core / "runs" / name / "samples.jsonl"):
            (values,) = row["weights"].values()
            weights_of[name] += values
    return {name: torch.tensor(values) for name, values in weights_of.items()}


def test_the_core_trains_without_the_lab(weights):
    """SHEAR's weights differ from each other, and GRPO's are 1; GRPO calls nothing of shear.py."""
    assert weights["plain"].min() >= 0 and weights["plain"].std() > 0.01
    assert (weights["grpo"] == 1).all()


def test_who_edits_token_distances_sees_it_in_a_step(weights):
    """Twice the distances at twice eps double each weight."""
    places = 1e-4  # four places are written
    assert_close(weights["twice"], 2 * weights["plain"], rtol=1e-5, atol=places)


def test_who_edits_closest_spans_or_sinkhorn_sees_it_in_a_step(weights):
    """Three times the distance of spans triples each weight; another potential changes them."""
    assert_close(weights["closest"], 3 * weights["plain"], rtol=1e-5, atol=2e-4)
    assert (weights["sinkhorn"] - weights["plain"]).abs().max() > 0.01


def test_the_core_evaluates_without_the_lab(core, weights):
    """eval.py answers what a run held out."""
    status, printed = run(core, "eval.py", "--model runs/grpo --samples 1 --device cpu")
    assert status == 0 and "| runs/grpo/model " in printed, printed


OWN = """
from dataclasses import replace

from credit.rules import rule
from tasks import toy
from base.config import TASKS


@rule("half", "half of A")
def half(batch, context):
    return batch.A.expand(batch.mask.shape) / 2


def task(*inputs):
    whole, notes = toy.task(*inputs)
    return replace(whole, train=whole.train[:9]), notes


TASKS["nine"] = replace(TASKS["embedded"], make=f"{__name__}:task")
"""


def test_a_file_enters_a_rule_and_a_task(core):
    """--method, --task and --resume find what a file of --use enters, as does eval.py's run."""
    (core / "rewards_of_mine.py").write_text(OWN)
    flags = STEP.replace("--task embedded", "--task nine --method half --use rewards_of_mine.py")
    status, printed = run(core, "train.py", flags, "--name own")
    assert status == 0 and "9 problems to train on" in printed, printed
    (values,) = read_lines(core / "runs/own/samples.jsonl")[1]["weights"].values()
    assert set(values) == {0.5}
    status, printed = run(core, "train.py", "--resume runs/own --steps 2")
    assert status == 0, printed
    status, printed = run(core, "eval.py", "--model runs/own --samples 1 --device cpu")
    assert status == 0 and "| runs/own/model " in printed, printed


def test_a_rule_s_name_is_its_own(core):
    """A file that enters another rule of a name is refused: which of them would train?"""
    (core / "taken.py").write_text(OWN.replace('"half"', '"grpo"'))
    status, printed = run(core, "train.py", STEP, "--method grpo --use taken.py --name taken")
    assert status == 2 and 'error: rule("grpo"): another rule has this name' in printed, printed


def test_a_name_that_only_the_lab_has_is_refused_without_it(core):
    """One sentence says which methods there are."""
    status, printed = run(core, "train.py", "--method opo")
    assert status == 2 and "--method opo: there is grpo, shear; give one of these" in printed
