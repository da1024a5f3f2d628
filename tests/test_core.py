"""The core stands alone: it is imported, trains and evaluates in a tree without `lab/`.

The closure of `train.py` under import has no file of the lab, and every import of `lab` by name is
in one place, `tasks/plug.py`.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = "credit grading harness tasks".split()
SIZES = (
    "--toy-lines 1 --toy-width 16 --warmup-steps 2 --steps 1 --prompts-per-step 4 "
    "--prompts-per-update 4 --rollouts-per-prompt 2 --heldout 4 --eval-groups 2 --window 6 "
    "--stride 3 --device cpu"
).split()
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
                for place in (f"{file}.py", f"{file}/__init__.py"):
                    if (ROOT / place).exists():
                        todo.append(place)
    return found


@pytest.mark.parametrize("command", ["train.py", "eval.py"])
def test_a_command_imports_no_file_of_the_lab(command):
    files = closure(command)
    assert not [path for path in files if path.startswith("lab/")]
    assert len([path for path in files if not path.endswith("__init__.py")]) <= MOST


def test_one_file_of_the_core_names_the_lab():
    named = []
    for path in [*ROOT.glob("*.py"), *(p for room in CORE for p in (ROOT / room).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            docs = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if docs and node.value.split(".")[0] == "lab" and " " not in node.value:
                named.append(path.name)
    assert set(named) <= {"plug.py"}


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """The tree without `lab/`."""
    folder = tmp_path_factory.mktemp("core")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for room in CORE:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(folder: Path, *words: str) -> str:
    """What a command prints in a folder; asserts that it ends well."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, timeout=300, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


COUNTED = """
import sys, sinkhorn, shear, train
solve, calls = sinkhorn.sinkhorn, []
shear.sinkhorn = lambda *a, **k: calls.append(len(a[0])) or solve(*a, **k)
assert train.main(sys.argv[1:]) == 0
print("in sinkhorn:", sum(calls), "lab" in sys.modules)
"""


@pytest.mark.parametrize("method", ["grpo", "shear"])
def test_the_core_trains_and_evaluates_without_the_lab(core, method):
    """With SHEAR a step calls `sinkhorn.sinkhorn`: what one reads is what runs."""
    printed = run(core, "-c", COUNTED, *SIZES, "--method", method, "--name", method)
    solved, lab = printed.split("in sinkhorn:")[1].split()
    assert lab == "False"
    if method == "grpo":
        assert solved == "0"
        run(core, "eval.py", "--model", "runs/grpo", "--samples", "1", "--device", "cpu")


def test_shear_calls_sinkhorn_by_default():
    """The default hooks are the plain functions."""
    import torch

    import shear

    torch.manual_seed(0)
    hidden = torch.randn(4, 12, 8)
    right = torch.tensor([True, True, False, False])
    mask = torch.ones(4, 12, dtype=torch.bool)
    solve, calls = shear.sinkhorn, []
    shear.sinkhorn = lambda *words, **options: calls.append(1) or solve(*words, **options)
    try:
        shear.shear_weights(hidden, mask, right, window=4, stride=2)
    finally:
        shear.sinkhorn = solve
    assert len(calls) == 1  # one tile


def test_a_method_of_the_lab_is_refused_without_it(core):
    done = subprocess.run(
        [sys.executable, "train.py", "--method", "opo"], cwd=core, text=True, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 2 and "there is grpo, shear" in done.stdout
