"""lab/studies/compare.py: stages in a row, a table of what they left, and what is refused."""

import importlib
import multiprocessing
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from builders.case_files import ROOT, cases
from builders.commands import words_of
from builders.runs import config_from
from edited import SIZES
from scipy import stats

from base import files
from credit.rules import RULES
from lab.studies import compare
from lab.studies.compare import Cell, Trial

CASES = Path(__file__).with_name("cases")
TRIAL = " ".join(SIZES)
LORA = "--use lab.tools.lora:rank=16"


@pytest.fixture
def in_this_process(monkeypatch):
    """Trials run here, one after the other; of each grid only the middle."""
    pool = nullcontext(SimpleNamespace(imap_unordered=map))
    here = SimpleNamespace(Pool=lambda jobs: pool)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: here)
    monkeypatch.setattr(compare, "grid", lambda middle, curves: [middle])
    monkeypatch.setattr(compare, "TUNING", (7,))


def test_a_grid_grows_until_its_best_rate_is_inside():
    """It grows to 8 times its middle or to an eighth of it, no further."""
    rates = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    for curves, low, high in (
        ({}, 1, 4),
        ({1.0: 0.4, 2.0: 0.3, 4.0: 0.2}, 0.5, 4),
        ({rate: rate for rate in rates[2:]}, 1, 16),
        ({rate: -rate for rate in rates[:5]}, 0.25, 4),
    ):
        assert compare.grid(2.0, pd.Series(curves)) == [
            rate for rate in rates if low <= rate <= high
        ]


def test_every_rate_is_tuned_on_both_seeds_before_the_best_is_confirmed():
    """Trials that lack are found by seed; the rate of the highest mean curve is then confirmed.

    If rates are given, the best of them is confirmed.
    """
    rows = compare.trials_in(ROOT / "lab/records/rows/compare.jsonl")
    seeds = (100, 101)
    cell = Cell("--steps 20", ["grpo", "position", f"arca-lora: arca {LORA}"])
    assert not compare.missing_trials("tune", rows, cell, seeds)
    gone = Trial("tune", cell.flags, 101, "position", 2e-4)
    without = rows.query("not (rule == 'position' and seed == 101 and lr == 2e-4)")
    assert compare.missing_trials("tune", without, cell, seeds) == [gone]
    confirmed = [trial.lr for trial in compare.missing_trials("confirm", rows, cell, [9])]
    assert confirmed == [2e-4, 2e-4, 2e-3]
    given = Cell(cell.flags, ["grpo"], [5e-5, 1e-4])
    assert not compare.missing_trials("tune", rows, given, seeds)
    assert [trial.lr for trial in compare.missing_trials("confirm", rows, given, [9])] == [1e-4]


def test_an_arm_is_a_method_or_a_name_and_a_command_line():
    """Its flags stand after the others', and none of them is one that all arms share."""
    arm = "half: scaled --method-option of=entropy --method-option negative=.5"
    flags = "--steps 3 --method scaled --method-option of=entropy --method-option negative=.5"
    ours = compare.settings_of(arm, ["--steps", "3"])
    assert ours == config_from(flags.split())  # with the plain functions
    assert compare.settings_of(f"{arm} --use lab.fast", []).use == ("lab.fast",)
    assert compare.settings_of("oar-g", []).method == "oar-g"
    assert compare.name_of(arm) == "half"
    assert compare.allowed_arms(["shear", arm], []) == ["grpo", "shear", arm]


def test_every_stage_and_the_same_command_again(tmp_path, in_this_process, monkeypatch, capsys):
    """The file has rows of two stages, the table all columns; then nothing is left to run.

    Evaluations have one noise, and each trial prepares its rule.
    """
    noise = set()
    sampled = compare.sample

    def sample(run, problems, *sampling):
        noise.add(torch.initial_seed())
        return sampled(run, problems, *sampling)

    monkeypatch.setattr(compare, "sample", sample)
    prepared = []
    prepares = RULES["grpo"]._replace(prepare=lambda run, folder: prepared.append(run.config.seed))
    monkeypatch.setitem(RULES, "grpo", prepares)
    path = tmp_path / "rows.jsonl"
    arm = f"lora: arca {LORA}"
    command = [*words_of(TRIAL, "--seeds 1 2 --rows", path, "--arms"), arm]
    assert compare.main(command) == 0
    printed = capsys.readouterr().out
    rows = files.read_lines(path)
    assert Counter(row["stage"] for row in rows) == dict(tune=2, confirm=4)
    # an adapter's rate is ten times the others'
    rates = {(row["rule"], row["lr"]) for row in rows if row["stage"] == "confirm"}
    assert rates == {("grpo", 1e-4), ("lora", 1e-3)}
    assert noise == {compare.seed_of(seed) for seed in (1, 2)}
    assert sorted(prepared) == [1, 2, 7]
    assert compare.main(command) == 0
    assert printed.endswith(capsys.readouterr().out) and files.read_lines(path) == rows


def test_trials_of_other_code_or_flags_are_not_added_to(tmp_path, assert_refused):
    """The file stays as it was."""
    path = tmp_path / "rows.jsonl"
    arm = "half: scaled --method-option negative=.5"
    row = Trial("tune", "--steps 2", 100, "half", 1e-4)._asdict()
    row |= {"rewards": [0.5], "code": compare.code_of(arm, flags="--steps 2")}
    files.write_rows(path, [row])
    flags = ["--rows", path, "--steps", "2", "--arms", "half: scaled --method-option negative=.4"]
    message = "has trials of half by other code or flags; give another file"
    assert_refused(compare.main, flags, message)
    assert files.read_lines(path) == [row]
    compare.refuse_other_code(Cell("--steps 2", [arm]), path)


@pytest.mark.parametrize("case", cases("study_refusals.csv", CASES))
def test_bad_input_is_one_sentence_before_anything_is_made(
    case, tmp_path, monkeypatch, assert_refused
):
    """A study refuses the flags of study_refusals.csv with their words, and writes no file."""
    monkeypatch.chdir(tmp_path)
    command = importlib.import_module(f"lab.studies.{case['study']}")
    assert "|" not in assert_refused(command.main, case["flags"].split(), case["words"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_digest_is_of_all_code(tmp_path):
    """Code in a folder of a folder counts, and so do the arm's flags; tests and pages do not."""
    code = "train.py", "grading/inside/jail.py", "lab/rules/oar.py"
    others = "tests/test_x.py", "lab/studies/compare.py"
    for name in (*code, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    digests = [compare.code_of(arm, tmp_path) for arm in ("grpo: grpo --clip-low .1", "grpo")]
    for name in (*others, *code):
        (tmp_path / name).write_text("1")
        digests.append(compare.code_of("grpo", tmp_path))
    assert digests[1] == digests[2] == digests[3] and len(set(digests)) == 5


def test_intervals_are_scipy_s():
    """They are the 90% intervals of Student's t."""
    values = np.array([0.01, 0.03, -0.02, 0.04])
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.90)
    expected = f"+0.015 (-{-low:.3f} to +{high:.3f}), 3/4"
    assert compare.with_interval(pd.Series([*values, None])) == expected
