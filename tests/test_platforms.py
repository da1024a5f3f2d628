"""What runs without Linux: all but `--task code`.

Another system is made believe, in a process of its own and in those that it starts.
"""

import os
import subprocess
import sys

import pytest
from builders.case_files import ROOT, WITHOUT_LINUX
from builders.commands import RUN_FLAGS

GRADES = r"""
import sys

from grading import sandbox
from rewards import cores, grade_math

assert sys.platform == "other" and cores() >= 1
assert grade_math(r"\boxed{\frac12}", "0.5").reason == "correct"  # in a worker
try:
    sandbox.choose_level()
except sandbox.SandboxError as error:
    assert str(error) == "the sandbox needs Linux"
else:
    raise AssertionError
"""
TRAINS = """
import sys

import torch

import eval
import train

run = sys.argv[1:]
torch.backends.mps.is_available = lambda: True
assert train.main([*run, "--steps", "2", "--warmup-steps", "20", "--out", ".", "--name", "run"]) == 0
assert eval.main("--model run --samples 1 --out evaluated".split()) == 0
"""


@pytest.fixture
def run_without_linux(tmp_path):
    """A function that runs a script in tmp_path and returns what it printed."""

    def run(script: str, *words: str) -> str:
        command = [sys.executable, "-c", script, *words]
        environment = os.environ | {"PYTHONPATH": f"{WITHOUT_LINUX}:{ROOT}"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_math_is_graded_without_linux_and_programs_are_refused(run_without_linux):
    """Workers of math-verify run, and the sandbox says what it needs."""
    run_without_linux(GRADES)


@pytest.mark.long
def test_runs_and_evaluations_need_no_linux(run_without_linux, tmp_path):
    """Training as by default and evaluation run, on the CPU where there is only Apple's GPU."""
    assert "on cpu, compute float32" in run_without_linux(TRAINS, *RUN_FLAGS)
    assert (tmp_path / "evaluated" / "generations.jsonl").exists()
