"""Who edits shear.py measures the edit: studies run what stands there, and `lab.fast` is refused."""

import json
import shutil

import edited
import pytest
from builders.case_files import ROOT
from builders.processes import run_script

PLAIN = 'compute_mode="donot_use_mm_for_euclid_dist")'


def test_studies_measure_an_edited_cost_and_refuse_the_fast_one(tmp_path, monkeypatch):
    """Squared distances change SHEAR's gradient and weights; GRPO's and the samples stay."""
    copy = tmp_path / "copy"
    unused = shutil.ignore_patterns(".*", "runs", "evals", "docs", "records")
    shutil.copytree(ROOT, copy, ignore=unused)
    source = (copy / "shear.py").read_text()
    assert PLAIN in source
    (copy / "shear.py").write_text(source.replace(PLAIN, f"{PLAIN}.square()"))
    status, text = run_script(copy, "lab/tests/edited.py", [str(tmp_path)], copy / "printed")
    assert status == 0, text
    there = json.loads(text.splitlines()[-1])
    assert there["statuses"] == [2, 2]
    assert text.count("--use lab.fast: its weights are not those of shear.py") == 2
    monkeypatch.undo()  # as many problems as there
    (tmp_path / "here").mkdir()
    here = edited.measure(tmp_path / "here")
    assert there["grpo"] == pytest.approx(here["grpo"], abs=1e-6)
    assert there["rewards"] == here["rewards"]
    assert abs(there["shear"] - here["shear"]) > 1e-4
    assert abs(there["weight_mean"] - here["weight_mean"]) > 0.1
