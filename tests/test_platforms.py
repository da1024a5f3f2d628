"""What runs without Linux: all but `--task code`.

Another system is made believe, in a process of its own and in those that it starts.
"""

import os
import subprocess
import sys

import pytest
from builders.case_files import ROOT, WITHOUT_LINUX
from builders.commands import words_of

FLAGS = words_of(
    "--task embedded --toy-lines 1 --prompts-per-step 4 --rollouts-per-prompt 4 --prompts-per-update 2 "
    "--heldout 8 --eval-groups 4 --steps 1 --warmup-steps 1"
)
SCRIPT = r"""
import sys

import train
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
assert train.main(sys.argv[1:]) == 0
"""


@pytest.mark.long
def test_all_but_programs_needs_no_linux(tmp_path):
    """Workers of math-verify run, the sandbox says what it needs, and the embedded task trains."""
    environment = os.environ | {"PYTHONPATH": f"{WITHOUT_LINUX}:{ROOT}"}
    command = [sys.executable, "-c", SCRIPT, *FLAGS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
