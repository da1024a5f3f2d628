"""What runs without Linux: all but `--task code`.

Another system is made believe, in a process of its own and in those that it starts.
"""

import os
import subprocess
import sys

from builders.case_files import ROOT, WITHOUT_LINUX
from builders.commands import RUN_FLAGS

SCRIPT = r"""
import sys

import torch

import eval
import train
from grading import sandbox
from rewards import cores, grade_math

run = sys.argv[1:]
assert sys.platform == "other" and cores() >= 1
torch.backends.mps.is_available = lambda: True
assert train.main([*run, "--steps", "2", "--warmup-steps", "20", "--out", ".", "--name", "run"]) == 0
assert eval.main("--model run --samples 1 --out evaluated".split()) == 0
assert grade_math(r"\boxed{\frac12}", "0.5").reason == "correct"  # in a worker
try:
    sandbox.choose_level()
except sandbox.SandboxError as error:
    assert str(error) == "the sandbox needs Linux"
else:
    raise AssertionError
"""


def test_without_linux_all_but_programs_run(tmp_path):
    """Training as by default, evaluation and math-verify run."""
    command = [sys.executable, "-c", SCRIPT, *RUN_FLAGS]
    environment = os.environ | {"PYTHONPATH": f"{WITHOUT_LINUX}:{ROOT}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "on cpu, compute float32" in done.stdout
    assert (tmp_path / "evaluated" / "generations.jsonl").exists()
