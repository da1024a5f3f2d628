"""Who edits shear.py measures the edit: studies run what stands there, and `lab.fast` is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import edited
import pytest
from builders.case_files import ROOT

PLAIN = 'compute_mode="donot_use_mm_for_euclid_dist")'


def test_studies_measure_an_edited_cost_and_refuse_the_fast_one(tmp_path):
    """Squared distances change SHEAR's gradient and weights; GRPO's and the samples stay."""
    copy = tmp_path / "copy"
    unused = shutil.ignore_patterns(".*", "runs", "evals", "tests", "docs", "records")
    shutil.copytree(ROOT, copy, ignore=unused)
    source = (copy / "shear.py").read_text()
    assert PLAIN in source
    (copy / "shear.py").write_text(source.replace(PLAIN, f"{PLAIN}.square()"))
    paths = f"{copy}:{ROOT / 'tests'}"
    program = Path(edited.__file__)
    ended = subprocess.run(
        [sys.executable, "-P", program, tmp_path],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    there = json.loads(ended.stdout.splitlines()[-1])
    assert there["statuses"] == [2, 2]
    assert ended.stderr.count("--use lab.fast: its weights are not those of shear.py") == 2
    (tmp_path / "here").mkdir()
    here = edited.measure(tmp_path / "here")
    assert there["grpo"] == pytest.approx(here["grpo"], abs=1e-6)
    assert there["rewards"] == here["rewards"]
    assert abs(there["shear"] - here["shear"]) > 1e-4
    assert abs(there["weight_mean"] - here["weight_mean"]) > 0.1
