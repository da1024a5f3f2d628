"""The scripts of lab/records: their help. test_compare.py and others read what they print."""

import runpy
import sys

import pytest
from builders.case_files import ROOT

FOLDER = ROOT / "lab" / "records"
SHARED = {"archived", "help", "random_model", "words_start"}  # no scripts
SCRIPTS = sorted({path.stem for path in FOLDER.glob("*.py")} - SHARED)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_comes_before_any_work(script, monkeypatch, capsys):
    """It has the command, and is there before anything but the helper is imported."""
    monkeypatch.setattr("sys.argv", [script, "a-word", "--help"])
    before = {*sys.modules}
    with pytest.raises(SystemExit):
        runpy.run_path(str(FOLDER / f"{script}.py"))
    assert f"lab.records.{script}" in capsys.readouterr().out
    assert {*sys.modules} - before <= {"lab.records", "lab.records.help"}


def test_credit_md_has_the_tables_of_its_rows(monkeypatch, capsys):
    """Every line that its script prints is in the page."""
    monkeypatch.setattr("sys.argv", ["credit"])
    runpy.run_path(str(FOLDER / "credit.py"))
    page = (FOLDER / "credit.md").read_text(encoding="utf-8")
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(printed) > 20 and [line for line in printed if line not in page] == []
