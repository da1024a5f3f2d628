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

import train

assert train.main([*sys.argv[1:], "--steps", "1", "--warmup-steps", "1"]) == 0
"""


@pytest.mark.parametrize("script", [GRADES, pytest.param(TRAINS, marks=pytest.mark.long)])
def test_all_but_programs_needs_no_linux(script, tmp_path):
    """Workers of math-verify run, the sandbox says what it needs, and the embedded task trains."""
    environment = os.environ | {"PYTHONPATH": f"{WITHOUT_LINUX}:{ROOT}"}
    command = [sys.executable, "-c", script, *RUN_FLAGS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
