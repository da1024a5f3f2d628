"""The scripts of lab/records: their help. test_compare.py and others read what they print."""

import runpy
import sys

import pytest
from builders.case_files import ROOT

FOLDER = ROOT / "lab" / "records"
SHARED = {"archived", "help", "random_model", "words_start"}  # no scripts
SCRIPTS = sorted({path.stem for path in FOLDER.glob("*.py")} - SHARED)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_the_docstring_and_comes_before_any_work(script, monkeypatch, capsys):
    """It has the command, and is there before anything but the helper is imported."""
    path = FOLDER / f"{script}.py"
    monkeypatch.setattr("sys.argv", [script, "a-word", "--help"])
    before = {*sys.modules}
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path))
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert f"lab.records.{script}" in printed
    assert printed.splitlines()[0] in path.read_text(encoding="utf-8").splitlines()[0]
    assert {*sys.modules} - before <= {"lab.records", "lab.records.help"}
