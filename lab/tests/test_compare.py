"""lab/studies/compare.py: stages in a row, a table of what they left, and what is refused."""

import importlib
import math
import multiprocessing
import re
import runpy
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from builders.case_files import DOCS, ROOT, cases
from builders.commands import run_well, words_of
from builders.runs import config_from
from scipy import stats

from credit.rules import RULES
from harness import files
from lab.studies import compare, figures
from lab.studies.compare import Cell, Trial

CASES = Path(__file__).with_name("cases")
RECORDS = ROOT / "lab" / "records"
SMALL = (
    "--use builders.alternating --toy-lines 2 --toy-width 16 --max-tokens 8 --window 4 --stride 2 --eval-groups 2 "
    "--prompts-per-step 2 --steps 1 --warmup-steps 1 --threads 0"
)
LORA = "--use lab.tools.lora:rank=16"


@pytest.fixture
def in_this_process(monkeypatch):
    """Trials run here, one after the other; of each grid only the middle."""
    pool = nullcontext(SimpleNamespace(imap_unordered=map))
    here = SimpleNamespace(Pool=lambda jobs: pool)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: here)
    monkeypatch.setattr(compare, "grid", lambda middle, curves: [middle])
    monkeypatch.setattr(compare, "HELDOUT", 8)


def table(folder, lines: list[dict]) -> pd.DataFrame:
    """The trials of a file with these lines."""
    files.write_rows(folder / "rows.jsonl", lines)
    return compare.trials_in(folder / "rows.jsonl")


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


def test_every_rate_is_tuned_on_both_seeds_before_the_best_is_confirmed(tmp_path):
    """Trials that lack are found by seed; the rate of the highest mean curve is then confirmed.

    If rates are given, the best of them is confirmed.
    """
    lines = files.read_lines(RECORDS / "compare.jsonl")
    seeds = (100, 101)
    cell = Cell("--steps 20", ["grpo", "position", f"arca-lora: arca {LORA}"])
    other_task = {"stage": "tune", "cell": "--steps 3", "lr": 5e-5, "rewards": [0.9]}
    rows = table(tmp_path, [*lines, lines[0] | other_task])
    assert not compare.missing_trials("tune", rows, cell, seeds)
    gone = Trial("tune", cell.flags, 101, "position", 2e-4)
    without = rows.query("not (rule == 'position' and seed == 101 and lr == 2e-4)")
    assert compare.missing_trials("tune", without, cell, seeds) == [gone]
    confirmed = [trial.lr for trial in compare.missing_trials("confirm", rows, cell, [9])]
    assert confirmed == [2e-4, 2e-4, 2e-3]
    given = Cell(cell.flags, ["grpo"], [100], [5e-5, 1e-4])
    assert not compare.missing_trials("tune", rows, given, [100])
    assert [trial.lr for trial in compare.missing_trials("confirm", rows, given, [9])] == [1e-4]


def test_an_arm_is_a_method_or_a_name_and_a_command_line():
    """Its flags stand after the others', and none of them is one that all arms share."""
    arm = "half: scaled --method-option of=rlsd --method-option negative=.5"
    flags = "--steps 3 --method scaled --method-option of=rlsd --method-option negative=.5"
    ours = compare.settings_of(arm, ["--steps", "3"])
    assert ours == replace(config_from(flags.split()), use=("lab.fast",))
    assert compare.settings_of("oar-g", []).method == "oar-g"
    assert compare.name_of(arm) == "half"
    assert compare.allowed_arms(["shear", arm], []) == ["grpo", "shear", arm]
    words = ["--model", "M", "--task", "math"]  # which has no reward model and no first error
    names = set(map(compare.name_of, compare.allowed_arms([], words)))
    assert {"grpo", "shear-mean1", "dgpo-lora"} <= names and not {"prm", "oracle", "dgpo"} & names


def test_arms_use_the_fast_functions_unless_they_say_which():
    """What is given stays as it is, and stands after other modules."""
    for use, expected in {
        "builders.alternating": ("lab.fast", "builders.alternating"),
        "builders.alternating --use lab.fast:race=no": ("builders.alternating", "lab.fast:race=no"),
    }.items():
        assert compare.settings_of(f"grpo: grpo --use {use}", []).use == expected


def test_intervals_are_scipy_s():
    """They are the 90% intervals of Student's t."""
    values = np.array([0.01, 0.03, -0.02, 0.04])
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.90)
    expected = f"+0.015 (-{-low:.3f} to +{high:.3f}), 3/4"
    assert compare.with_interval(pd.Series([*values, None])) == expected


def test_every_stage_and_the_same_command_again(tmp_path, in_this_process, monkeypatch, capsys):
    """The file has rows of two stages, the table all columns; then nothing is left to run.

    Evaluations have one noise, and each trial prepares its rule.
    """
    noise = set()
    sampled = compare.sample_and_grade

    def sample_and_grade(run, problems, *sampling):
        noise.add(torch.initial_seed())
        return sampled(run, problems, *sampling)

    monkeypatch.setattr(compare, "sample_and_grade", sample_and_grade)
    prepared = []
    prepares = RULES["grpo"]._replace(prepare=lambda run: prepared.append(run.config.seed))
    monkeypatch.setitem(RULES, "grpo", prepares)
    path = tmp_path / "rows.jsonl"
    arm = f"lora: arca {LORA}"
    command = [*words_of(SMALL, "--seeds 1 2 --tuning-seeds 7 --rows", path, "--arms"), arm]
    assert compare.main(command) == 0
    printed = capsys.readouterr().out
    rows = files.read_lines(path)
    assert Counter(row["stage"] for row in rows) == dict(tune=2, confirm=4)
    digests = {compare.code_of(own, flags=SMALL) for own in ("grpo", arm)}
    assert {row["code"] for row in rows} == digests
    # an adapter's rate is ten times the others'
    rates = {(row["rule"], row["lr"]) for row in rows if row["stage"] == "confirm"}
    assert rates == {("grpo", 1e-4), ("lora", 1e-3)}
    assert noise == {compare.seed_of(seed) for seed in (1, 2)}
    assert sorted(prepared) == [1, 2, 7] and printed.count("\n") == 2 + 2
    assert compare.main(command) == 0
    assert capsys.readouterr().out == printed and files.read_lines(path) == rows


def test_trials_of_other_code_or_flags_are_not_added_to(tmp_path, assert_refused):
    """The file stays as it was; rows without a digest are not told apart."""
    path = tmp_path / "rows.jsonl"
    arm = "half: scaled --method-option negative=.5"
    trial = Trial("tune", "--steps 2", 100, "half", 1e-4)._asdict()
    row = trial | {"rewards": [0.5], "code": compare.code_of(arm, flags="--steps 2")}
    files.write_rows(path, [row])
    flags = ["--rows", path, "--steps", "2", "--arms", "half: scaled --method-option negative=.4"]
    message = "has trials of half by other code or flags; give another file"
    assert_refused(compare.main, flags, message)
    assert files.read_lines(path) == [row]
    compare.refuse_other_code(Cell("--steps 2", [arm]), path)
    files.write_rows(path, [row | {"code": None}])
    compare.refuse_other_code(Cell("--steps 2", ["half: grpo"]), path)


def test_the_digest_is_of_all_code(tmp_path):
    """Code in a folder of a folder counts, and so do the arm's flags; tests and pages do not."""
    code = "train.py", "grading/inside/jail.py", "lab/rules/oar.py"
    others = "tests/test_x.py", "lab/studies/compare.py"
    for name in (*code, *others):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    digests = [compare.code_of(arm, tmp_path) for arm in ("grpo: grpo --clip-low .1", "grpo")]
    for name in (*others, *code):
        (tmp_path / name).write_text("1")
        digests.append(compare.code_of("grpo", tmp_path))
    assert digests[1] == digests[2] == digests[3] and len(set(digests)) == 5


def test_a_rule_has_one_name_in_old_and_new_rows(tmp_path):
    """`opo` of rows written before is `opo-energy`, beside rows written since."""
    row = {"stage": "confirm", "cell": "--steps 20", "lr": 2e-4}
    old = row | {"seed": 0, "rule": "opo", "rewards": [0.5, 0.7]}
    new = row | {"seed": 1, "rule": "opo-energy", "rewards": [0.1, 0.3]}
    trials = table(tmp_path, [old, new])
    outcomes = compare.outcomes_of(trials, "--steps 20", "opo-energy")
    assert outcomes["curve"].round(6).to_dict() == {0: 0.6, 1: 0.2}


def test_runs_are_compared_in_a_table_and_a_picture(tmp_path, monkeypatch, capsys):
    """Runs may have any length; nothing is trained.

    A step that was not graded does not count. A run that goes on has no accuracy after training.
    """
    curves = {}
    monkeypatch.setattr(figures, "reward_curves", lambda of_runs, path: curves.update(of_runs))
    held_out = {"greedy": [0.5, 0.1, 8], "sampled": [0.5, None, 8]}
    after = {"after": held_out | {"localisation": {"auc": 0.925}}}
    step = {"equal_groups": 0, "grad_norm": 0}
    graded = [step | {"step": 1, "reward": 0.1}, step | {"step": 2, "reward": None}]
    for name, rows in {"long": graded, "short": [graded[0], after]}.items():
        (tmp_path / name).mkdir()
        files.append_rows(tmp_path / name / "metrics.jsonl", [{"before": held_out}, *rows])
    run_well(compare, tmp_path / "long", tmp_path / "short")
    printed = capsys.readouterr().out.splitlines()
    lines = [[cell.strip() for cell in line.split("|")[2:-1]] for line in printed[2:4]]
    assert lines[0] == ["2", "0.100", "50.0 ± 10.0", "50.0 ± -", "", "", ""]
    assert lines[1] == ["1", "0.100", *["50.0 ± 10.0", "50.0 ± -"] * 2, "92.5"]
    assert curves[str(tmp_path / "long")] == [[0.1, None]]


def test_runs_are_drawn_however_long_they_are(tmp_path, monkeypatch):
    """A curve is the mean of its seeds, and has all its steps."""
    lines = []
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda figure, *to, **by: lines.extend(figure.axes[0].lines)
    )
    curves = {"a": [[0.0, 1.0], [1.0, 1.0]], "b": [[0.5]], "c": [[0.0, None, 0.0]]}
    figures.reward_curves(curves, tmp_path / "a.png")
    drawn = {line.get_label(): line.get_ydata().tolist() for line in lines}
    assert drawn == {"a": [0.5, 1.0], "b": [0.5], "c": pytest.approx([0, math.nan, 0], nan_ok=True)}


def test_no_trial_counts_at_another_rate_or_without_its_seed_in_the_other_arm(tmp_path):
    """A step in which nothing could be graded does not count in a mean either.

    The table is otherwise that of the page, below.
    """
    lines = files.read_lines(RECORDS / "compare.jsonl")
    cell = Cell("--steps 20", ["grpo", "shear"])

    expected = compare.table_of(table(tmp_path, lines), cell)
    row = next(row for row in lines if (row["stage"], row["rule"]) == ("confirm", "shear"))
    row["rewards"].append(None)
    lines.append(row | {"lr": 7e-4, "rewards": [0.9]})
    assert compare.table_of(table(tmp_path, lines), cell) == expected
    lines.append(row | {"seed": 99, "rewards": [0.9]})
    unpaired = compare.table_of(table(tmp_path, lines), cell)[1]
    shear = expected[1]
    assert unpaired["D, curve"] == shear["D, curve"] and unpaired["curve"] > shear["curve"]


@pytest.mark.parametrize("page", ["study", "results", "real-weights", "methods", "gradients"])
def test_a_page_has_what_its_script_prints(page, tmp_path, monkeypatch, capsys):
    """Every row of a table is printed from committed rows, and pictures are drawn again.

    A page may leave out rows, and the last columns.
    """
    script = {"results": "default_runs"}.get(page, page.replace("-", "_"))
    monkeypatch.setattr("sys.argv", [script])
    records = tmp_path / "lab" / "records"
    shutil.copytree(RECORDS, records, ignore=shutil.ignore_patterns("real*.svg"))
    (tmp_path / "docs").mkdir()
    runpy.run_path(str(records / f"{script}.py"))
    printed = capsys.readouterr().out
    rows = re.findall(r"(?m)^\|.*$", (RECORDS / f"{page}.md").read_text(encoding="utf-8"))
    assert len(rows) > 9 and not [row for row in rows if f"\n{row}" not in "\n" + printed]
    if page == "real-weights":
        drawn = records / "real-weights-curves.svg"
        assert "prefers-color-scheme:dark" in drawn.read_text(encoding="utf-8")
        runpy.run_path(str(records / "steps_picture.py"))  # README's picture
        assert (tmp_path / "docs" / "steps.svg").read_text() == (DOCS / "steps.svg").read_text()


@pytest.mark.parametrize("case", cases("study_refusals.csv", CASES))
def test_bad_input_is_one_sentence_before_anything_is_made(
    case, tmp_path, monkeypatch, assert_refused
):
    """A study refuses the flags of study_refusals.csv with their words, and writes no file."""
    monkeypatch.chdir(tmp_path)
    command = importlib.import_module(f"lab.studies.{case['study']}")
    assert "|" not in assert_refused(command.main, case["flags"].split(), case["words"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
