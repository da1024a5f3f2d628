"""studies/compare.py: stages in a row, a table of what they left, and what is refused."""

import importlib
import multiprocessing
import re
import runpy
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from builders.case_files import DOCS, cases
from builders.commands import run_well, words_of
from builders.runs import config_from
from builders.small_models import save_model
from scipy import stats

import train
from harness import files, tables
from studies import compare, figures
from studies.compare import Cell, Trial

RECORDS = DOCS / "records"
SMALL = (
    "--smoke --toy-lines 2 --toy-width 16 --max-tokens 8 --window 4 --stride 2 --eval-groups 2 --steps 1 "
    "--warmup-steps 1 --threads 0"
)


@pytest.fixture
def in_this_process(monkeypatch):
    """Trials run here, one after the other; of each grid only the middle."""
    pool = nullcontext(SimpleNamespace(imap_unordered=map))
    here = SimpleNamespace(Pool=lambda jobs: pool)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: here)
    monkeypatch.setattr(compare, "grid", lambda middle, curves: [middle])
    for name, size in dict(HELDOUT=8, GROUPS=2, CONTINUATIONS=2, TIMED=1).items():
        monkeypatch.setattr(compare, name, size)


def table(folder, lines: list[dict]) -> pd.DataFrame:
    """The trials of a file with these lines."""
    files.write_rows(folder / "rows.jsonl", lines)
    return compare.trials_in(folder / "rows.jsonl")


def test_a_grid_grows_until_its_best_rate_is_inside():
    """It grows to 8 times its middle or to an eighth of it, no further."""
    rates = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    for curves, low, high in (
        ({}, 1, 4),
        ({1.0: 0.1, 2.0: 0.3, 4.0: 0.2}, 1, 4),
        ({1.0: 0.4, 2.0: 0.3, 4.0: 0.2}, 0.5, 4),
        ({1.0: 0.1, 2.0: 0.2, 4.0: 0.3, 8.0: 0.4}, 1, 16),
        ({rate: rate for rate in rates[2:]}, 1, 16),
        ({rate: -rate for rate in rates[:5]}, 0.25, 4),
    ):
        assert compare.grid(2.0, pd.Series(curves)) == [
            rate for rate in rates if low <= rate <= high
        ]


def test_every_rate_is_tuned_on_both_seeds_before_the_best_is_confirmed(tmp_path):
    """Trials that lack are found by seed; the rate of the highest mean curve is then confirmed.

    Rows of other tasks do not count. If rates are given, the best of them is confirmed.
    """
    lines = files.read_lines(RECORDS / "compare.jsonl")
    seeds = (100, 101)
    cell = Cell("--steps 20", 1e-4, ["grpo", "kgae", "arca-lora"])
    lines.append(lines[0] | {"stage": "tune", "cell": "--steps 3", "lr": 5e-5, "rewards": [0.9]})
    lines.append(lines[-2] | {"stage": "confirm", "seed": 77})
    rows = table(tmp_path, lines)
    assert not compare.missing_trials("tune", rows, cell, seeds)
    gone = Trial("tune", cell.flags, 101, "kgae", 2e-4)
    without = rows.query("not (rule == 'kgae' and seed == 101 and lr == 2e-4)")
    assert compare.missing_trials("tune", without, cell, seeds) == [gone]
    assert set(compare.mean_curves(cell, "kgae", without).index) == {5e-5, 1e-4, 4e-4}
    confirmed = [trial.lr for trial in compare.missing_trials("confirm", rows, cell, [9])]
    assert confirmed == [2e-4, 2e-4, 2e-3]
    assert not compare.missing_trials("advantages", rows, cell, seeds)
    of_advantages = compare.missing_trials("advantages", rows, cell, [7, 8])
    assert [trial.rule for trial in of_advantages] == ["grpo"] * 2
    given = Cell(cell.flags, 1e-4, ["grpo"], [100], [5e-5, 1e-4])
    assert not compare.missing_trials("tune", rows, given, [100])
    assert [trial.lr for trial in compare.missing_trials("confirm", rows, given, [9])] == [1e-4]
    given = given._replace(rates=[2e-4, 3e-4])
    assert [trial.lr for trial in compare.missing_trials("tune", rows, given, [100])] == [3e-4]


def test_names_of_rows_are_methods_with_changes():
    """A name may have any method and any factors, in any order."""
    for case in cases("arms.csv"):
        expected = replace(config_from(case["flags"].split()), given=())
        assert compare.settings_of_trial(case["arm"], []) == expected


def test_intervals_are_scipy_s():
    """They are the 90% intervals of Student's t."""
    values = np.array([0.01, 0.03, -0.02, 0.04])
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.90)
    expected = f"+0.015 (-{-low:.3f} to +{high:.3f}), 3/4"
    assert compare.with_interval(pd.Series([*values, None])) == expected


def test_every_stage_and_the_same_command_again(tmp_path, in_this_process, monkeypatch, capsys):
    """The file has rows of four stages, the table all columns; then nothing is left to run.

    Evaluations have one noise and their step; the first step of each run is slow, and so are an
    adapter's and those of dynamic sampling.
    """
    noise = []
    steps = []
    step = train.train_step
    sampled = compare.sample_and_grade
    evaluate = train.evaluate

    def train_step(run, number):
        metrics, samples = step(run, number)
        slow = run.config.credit.lora_rank + run.config.sampling.dynamic_sampling
        seconds = {"generate": 1, "train": slow if number else 9}
        return metrics | {"seconds": seconds}, samples

    def sample_and_grade(run, problems, *sampling):
        noise.append(torch.initial_seed())
        return sampled(run, problems, *sampling)

    monkeypatch.setattr(train, "train_step", train_step)
    monkeypatch.setattr(compare, "sample_and_grade", sample_and_grade)
    monkeypatch.setattr(train, "evaluate", lambda *run: steps.append(run[1]) or evaluate(*run))
    path = tmp_path / "rows.jsonl"
    command = words_of(
        SMALL, "--methods arca-lora-dynamic --seeds 1 2 --tuning-seeds 7 --rows", path
    )
    run_well(compare, command)
    printed = capsys.readouterr().out
    rows = files.read_lines(path)
    assert Counter(row["stage"] for row in rows) == dict(tune=2, confirm=4, cost=2, advantages=1)
    assert {row["code"] for row in rows} == {compare.code_of_training()}
    numbers = set()
    for row in rows:
        if row["stage"] == "confirm":  # an adapter's rate is ten times the others'
            numbers.add((row["rule"], row["lr"], *row["rewards"]))
        elif row["stage"] == "cost":
            numbers.add((row["rule"], row["step"], row["of_grpo"]))
        elif row["stage"] == "advantages":
            numbers.add((*row["advantages"]["methods"],))
    rates = {("grpo", 1e-4, 0.5), ("arca-lora-dynamic", 1e-3, 0.5)}
    assert numbers == rates | {("grpo", 1, 1), ("arca-lora-dynamic", 21, 1), ("grpo",)}
    assert set(noise) == {compare.seed_of(seed) for seed in (1, 2)}
    assert steps == [0, 1] * 4
    assert printed.count("\n") == 2 + 2
    run_well(compare, command)
    assert capsys.readouterr().out == printed and files.read_lines(path) == rows


def test_trials_of_other_code_are_not_added_to(tmp_path, assert_refused):
    """The file stays as it was; rows without a digest are not told apart."""
    path = tmp_path / "rows.jsonl"
    trial = Trial("tune", "--steps 2", 100, "grpo", 1e-4)
    row = {"rewards": [0.5], "code": "0123"} | trial._asdict()
    files.append_rows(path, [row])
    before = path.read_bytes()
    message = "has trials of other code (0123); take that code"
    flags = ["--rows", path, "--steps", "2", "--methods", "grpo"]
    assert_refused(compare.main, flags, message)
    assert path.read_bytes() == before
    compare.refuse_other_code(Cell("--steps 3", 1e-4, ["grpo"]), path)
    files.write_rows(path, [row | {"code": None}])
    compare.refuse_other_code(Cell("--steps 2", 1e-4, ["grpo"]), path)


def test_a_start_of_another_task_is_refused(tmp_path, in_this_process, assert_refused, tiny):
    """No trial of it is added."""
    path = tmp_path / "new" / "rows.jsonl"
    start = save_model(tmp_path / "start", tiny[0])
    flags = words_of("--task words --methods grpo --heldout 64 --model", start, "--rows", path)
    message = "--model: the model's tokenizer loses"
    assert_refused(compare.main, flags, message)
    assert not path.exists()


def test_runs_are_compared_in_a_table_and_a_picture(tmp_path, monkeypatch, capsys):
    """The first run stands beside each of the others, however long; nothing is trained.

    A row that is no step has no reward. A run that goes on has no accuracy after training.
    """
    curves = {}
    monkeypatch.setattr(figures, "reward_curves", lambda of_runs, path: curves.update(of_runs))
    held_out = {"greedy": [0.5, 0.1, 8], "sampled": [0.5, None, 8]}
    for name, rewards in {"long": [0.1, 0.2, None], "short": [0.3]}.items():  # None: not graded
        rows = [{"before": held_out}]
        for step, reward in enumerate(rewards, 1):
            rows.append({"step": step, "reward": reward, "equal_groups": 0, "grad_norm": 0})
        (tmp_path / name).mkdir()
        files.append_rows(tmp_path / name / "metrics.jsonl", rows)
    files.append_rows(tmp_path / "short" / "metrics.jsonl", [{"after": held_out}])
    run_well(compare, tmp_path / "long", tmp_path / "short")
    printed = capsys.readouterr().out.splitlines()
    lines = [[cell.strip() for cell in line.split("|")[2:-1]] for line in printed[2:4]]
    assert lines[0] == ["3", "0.150", "50.0 ± 10.0", "50.0 ± -", "", ""]
    assert lines[1] == ["1", "0.300", *["50.0 ± 10.0", "50.0 ± -"] * 2]
    legend = "reward: mean of all training steps; greedy, sampled: held-out accuracy, %"
    assert printed[4:] == ["", legend, f"wrote {tmp_path / 'compare.png'}"]
    assert curves[str(tmp_path / "long")] == [[0.1, 0.2, None]]


def test_a_panel_has_the_first_run_and_another_one(tmp_path, monkeypatch):
    """Each panel has the first run and another one, however long they are."""
    panels = []
    save = "savefig"
    monkeypatch.setattr(figures.Figure, save, lambda figure, *to, **by: panels.extend(figure.axes))
    curves = {"a": [[0.0, 1.0], [1.0, 1.0]], "b": [[0.5]], "c": [[0.0, 0.0, 0.0]]}
    figures.reward_curves(curves, tmp_path / "a.png")
    lines = [[(line.get_label(), *line.get_ydata()) for line in axes.lines] for axes in panels]
    first = ("a", 0.5, 1.0)
    assert lines == [[first, ("b", 0.5)], [first, ("c", 0.0, 0.0, 0.0)]]


def test_no_trial_counts_at_another_rate_or_without_its_seed_in_the_other_arm(tmp_path):
    """A step in which nothing could be graded does not count in a mean either.

    The table is otherwise that of the page, below.
    """
    lines = files.read_lines(RECORDS / "compare.jsonl")
    cell = Cell("--steps 20", 1e-4, ["grpo", "shear"])

    expected = compare.table_of(table(tmp_path, lines), cell)
    row = next(row for row in lines if (row["stage"], row["rule"]) == ("confirm", "shear"))
    row["rewards"].append(None)
    lines.append(row | {"lr": 7e-4, "rewards": [0.9]})
    assert compare.table_of(table(tmp_path, lines), cell) == expected
    lines.append(row | {"seed": 99, "rewards": [0.9]})
    unpaired = compare.table_of(table(tmp_path, lines), cell)[1]
    shear = expected[1]
    assert unpaired["D, curve"] == shear["D, curve"] and unpaired["curve"] > shear["curve"]


def test_the_page_has_what_the_rows_say():
    """The tables of docs/records/methods.md can be computed again, and every arm is in one.

    The page leaves some columns out. The rules that are named here last were not compared, as
    docs/methods.md says.
    """
    page = (RECORDS / "methods.md").read_text()
    newest = "grpo taco cliff scapo own-side".split()
    planned = "grpo signbalance grpo+shear grpo+shear-until=20 gmts bipace serl iw-opd dasd".split()
    others = [*newest, *planned, "finepo", "dgpo-lora"]
    first = [rule for rule in compare.ARMS if rule == "grpo" or rule not in others]
    tables_of = {"compare": first, "compare-newest": newest, "compare-rules": planned}
    left_out = ["lr", "held out", "extra cost", "weight", "share"]
    for name, rules in tables_of.items():
        file = f"{name}.jsonl"
        rows = compare.trials_in(RECORDS / file)
        cell = Cell("--steps 20", 1e-4, rules)
        assert set(rows["rule"][rows["stage"] == "confirm"]) == set(rules)
        table = pd.DataFrame(compare.table_of(rows, cell)).drop(columns=left_out)
        assert "\n".join(tables.markdown(table.to_dict("records"))) in page


@pytest.mark.parametrize("page", ["study", "results", "real-weights"])
def test_a_page_has_what_its_script_prints(page, tmp_path, monkeypatch, capsys):
    """Every row of a table is printed from committed rows, and pictures are drawn again.

    A page may leave out rows, and the last columns.
    """
    script = {"results": "default_runs"}.get(page, page.replace("-", "_"))
    monkeypatch.setattr("sys.argv", [script])
    shutil.copytree(RECORDS, tmp_path / "records", ignore=shutil.ignore_patterns("real*.svg"))
    runpy.run_path(str(tmp_path / "records" / f"{script}.py"))
    printed = capsys.readouterr().out
    rows = re.findall(r"(?m)^\|.*$", (RECORDS / f"{page}.md").read_text(encoding="utf-8"))
    assert len(rows) > 9 and not [row for row in rows if f"\n{row}" not in "\n" + printed]
    if page == "real-weights":
        drawn = tmp_path / "records" / "real-weights-curves.svg"
        assert "prefers-color-scheme:dark" in drawn.read_text(encoding="utf-8")
        runpy.run_path(str(tmp_path / "records" / "steps_picture.py"))  # README's picture
        assert (tmp_path / "steps.svg").read_text() == (DOCS / "steps.svg").read_text()


@pytest.mark.parametrize("case", cases("study_refusals.csv"))
def test_bad_input_is_one_sentence_before_anything_is_made(
    case, tmp_path, monkeypatch, assert_refused
):
    monkeypatch.chdir(tmp_path)
    command = importlib.import_module(f"studies.{case['study']}")
    assert "|" not in assert_refused(command.main, case["flags"].split(), case["words"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
