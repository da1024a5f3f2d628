"""The core stands alone, and what one reads is what runs.

A tree without `lab/` trains with GRPO and SHEAR and evaluates; whoever edits shear.py or sinkhorn.py
in it sees the change in the weights of a training step.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders.case_files import ROOT
from torch.testing import assert_close

CORE = "credit grading harness tasks".split()
MOST = 40  # files that `train.py` imports, at most


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
    """`tasks/plug.py` looks up unknown names of --method and --task there; others may print commands."""
    named = set()
    for path in [
        *ROOT.glob("*.py"),
        *(file for room in CORE for file in (ROOT / room).rglob("*.py")),
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and " " not in node.value and node.value.split(".")[0] == "lab":
                named.add(path.name)
    assert named == {"plug.py"}


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """The core without `lab/`, and the tests' folder for --use builders.alternating."""
    folder = tmp_path_factory.mktemp("core")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for room in [*CORE, "tests/builders"]:
        leave_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, folder / room, ignore=leave_out)
    return folder


def run(folder: Path, *words: str) -> str:
    """What Python prints, started in a folder with these words; asserts that it ends well."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f".{os.pathsep}tests"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        timeout=600,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


# The flags of one step from a taught model, whose verdicts alternate, so that groups have both sides.
STEP = "--task embedded --toy-lines 1 --steps 1 --prompts-per-step 2 --prompts-per-update 2 "
STEP += "--rollouts-per-prompt 4 --heldout 4 --eval-groups 2 --window 6 --stride 3 --device cpu "
STEP += "--keep-samples --use builders.alternating"
# Each change of a copy's source, and the flags that go with it. A process per change imports it anew
# and has what is heavy already.
EDITED = """
import json, os, sys
from pathlib import Path
import torch, transformers, tyro
for name, (file, old, new, flags) in json.loads(sys.argv[1]).items():
    source = Path(file).read_text()
    assert source.count(old) == 1, (name, old)
    Path(file).write_text(source.replace(old, new))
    child = os.fork()
    if not child:
        import train
        os._exit(train.main([*flags.split(), "--name", name]))
    assert os.waitpid(child, 0)[1] == 0, name
    Path(file).write_text(source)
"""
EDITS = {
    "plain": ("shear.py", "WINDOW = 100", "WINDOW = 100", ""),
    "twice": ("shear.py", "return torch.cdist(", "return 2 * torch.cdist(", "--eps .1"),
    "zero": ("shear.py", "return torch.cdist(", "return 0 * torch.cdist(", ""),
    "closest": ("shear.py", "solved.value.clamp_min(0.0)", "3 * solved.value.clamp_min(0.0)", ""),
    "sinkhorn": ("sinkhorn.py", "f = (eps * f.T)", "f = (2 * eps * f.T)", ""),
    "grpo": ("shear.py", "return torch.cdist(", "raise RuntimeError(", "--method grpo"),
}


@pytest.fixture(scope="module")
def weights(core, taught):
    """By the name of an edit: the token weights of the rollouts of a step of the edited copy."""
    edits = {}
    for name, (file, old, new, flags) in EDITS.items():
        edits[name] = (file, old, new, f"{STEP} --model {taught} {flags}")
    run(core, "-c", EDITED, json.dumps(edits))
    found = {}
    for name in EDITS:
        rows = (core / "runs" / name / "samples.jsonl").read_text().splitlines()
        of_rollouts = [next(iter(json.loads(row)["weights"].values())) for row in rows]
        found[name] = torch.tensor([weight for rollout in of_rollouts for weight in rollout])
    return found


def test_the_core_trains_without_the_lab(weights):
    """SHEAR's weights differ from each other, and GRPO's are 1; GRPO calls nothing of shear.py."""
    assert weights["plain"].min() >= 0 and weights["plain"].std() > 0.01
    assert (weights["grpo"] == 1).all()


def test_who_edits_token_distances_sees_it_in_a_step(weights):
    """Twice the distances at twice eps double each weight; distances of 0 make all weights 0."""
    assert_close(
        weights["twice"], 2 * weights["plain"], rtol=1e-5, atol=1e-4
    )  # 4 places are written
    assert (weights["zero"] == 0).all()


def test_who_edits_closest_spans_or_sinkhorn_sees_it_in_a_step(weights):
    """Three times the distance of spans triples each weight; another potential changes them."""
    assert_close(weights["closest"], 3 * weights["plain"], rtol=1e-5, atol=2e-4)
    assert (weights["sinkhorn"] - weights["plain"]).abs().max() > 0.01


def test_the_core_evaluates_without_the_lab(core, weights):
    """eval.py answers what a run held out."""
    printed = run(core, "eval.py", "--model", "runs/grpo", "--samples", "1", "--device", "cpu")
    assert "|" in printed


def test_a_name_that_only_the_lab_has_is_refused_without_it(core):
    """One sentence says which methods there are."""
    done = subprocess.run(
        [sys.executable, "train.py", "--method", "opo"],
        cwd=core,
        text=True,
        timeout=300,
        capture_output=True,
    )
    assert done.returncode == 2 and "there is grpo, shear" in done.stderr
