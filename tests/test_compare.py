"""studies/compare.py: stages in a row, a table of what they left, and what is refused."""

from pathlib import Path

import pytest

from harness import files, tables
from studies import compare, study, trials
from studies.trials import Cell

DOCS = Path(__file__).parents[1] / "docs"
SMALL = "--smoke --toy-lines 2 --toy-width 16 --window 4 --stride 2 --eval-groups 8 --steps 1 --warmup-steps 9"
SMALL += " --threads 0"


@pytest.fixture
def in_this_process(monkeypatch):
    """Trials run here, one after the other, as if the code were committed; of each grid only the middle."""

    def run_stage(stage, cells, seeds, path, jobs):
        for name, cell in cells.items():
            for seed in seeds:
                missing = trials.lacking(stage, study.trial_rows(path), {name: cell}, [seed])
                if missing:
                    study.run_from_one_start(({"stage": stage, "plan": None, "code": "c"}, cell, missing, path))

    monkeypatch.setattr(compare, "run_stage", run_stage)
    monkeypatch.setattr(trials, "grid", lambda middle, curves: [middle])
    monkeypatch.setitem(trials.SEEDS, "tune", (7,))
    monkeypatch.setitem(trials.SEEDS, "advantages", (7,))
    monkeypatch.setattr(study, "HELDOUT", 8)
    monkeypatch.setattr(study, "GROUPS", 2)


def test_every_stage_and_the_same_command_again(tmp_path, in_this_process, capsys):
    """Rows of four stages, a table of all columns; then nothing is left to run."""
    command = [*SMALL.split(), "--methods", "grpo", "arca-lora", "--seeds", "1", "2"]
    command += ["--rows", str(tmp_path / "rows.jsonl")]
    assert compare.main(command) == 0
    printed = capsys.readouterr().out
    rows = files.rows(tmp_path / "rows.jsonl")
    expected = dict(tune=2, confirm=4, cost=2, advantages=1)
    stages = {stage: [row for row in rows if row["stage"] == stage] for stage in expected}
    assert {stage: len(found) for stage, found in stages.items()} == expected
    assert {row["lr"] for row in stages["confirm"]} == {1e-4, 1e-3}  # an adapter's is ten times the others'
    assert all(row["step"] > 0 and row["of_grpo"] > 0 for row in stages["cost"])
    assert "arca-lora" not in stages["advantages"][0]["advantages"]["methods"]
    assert printed.count("\n") == 2 + 2
    assert compare.main(command) == 0
    assert capsys.readouterr().out == printed and files.rows(tmp_path / "rows.jsonl") == rows


def test_the_table_is_of_rows_paired_by_seed():
    """Means over the seeds, D with its interval, AUCs before and after, cost against grpo's."""
    cell, rows = Cell("--steps 2", 1e-4, ["grpo", "shear"]), []
    for rule, more in (("grpo", 0.0), ("shear", 0.1)):
        usual = {"cell": cell.flags, "rule": rule, "lr": 1e-4}
        for seed, curve in ((100, 0.4), (101, 0.4)):
            rows.append(usual | {"stage": "tune", "seed": seed, "rewards": [curve], "sampled": curve})
        for seed, curve in ((0, 0.4), (1, 0.6)):
            auc = {"auc": 0.5 + more, "auc_step": 0.5 - more}
            numbers = {"rewards": [curve + more], "sampled": curve - more, "weight_mean": 1.0, "ess": 0.25}
            rows.append(usual | {"stage": "confirm", "seed": seed, "before": auc, "after": auc} | numbers)
        rows.append(usual | {"stage": "cost", "seed": 100, "step": 2.0 + 10 * more, "of_grpo": 2.0})
    methods = {"grpo": {"corrected": 0.25}, "shear": {"corrected": 0.5}}
    advantages = {"stage": "advantages", "cell": cell.flags, "rule": "grpo", "advantages": {"methods": methods}}
    grpo, shear = compare.table_of([*rows, advantages], cell)
    assert grpo["curve"] == "0.500" and grpo["D, curve"] == "" and shear["curve"] == "0.600"
    assert shear["D, curve"] == "+.100 (+.100 to +.100), 2/2" and shear["D, held out"].startswith("-.100 (")
    assert shear["AUC"] == "0.60 / 0.60" and shear["wrong step"] == "0.40 / 0.40"
    assert shear["correlation"] == "0.50" and shear["extra cost"] == "+50%" and grpo["extra cost"] == "+0%"
    assert (shear["weight"], shear["share"], shear["lr"]) == ("1.00", "0.25", "0.0001")
    assert len(tables.markdown([grpo, shear])) == 4


def test_the_page_has_what_the_rows_say():
    """The table of docs/methods.md can be computed again."""
    rows = files.rows(DOCS / "compare.jsonl")
    confirmed = {row["rule"] for row in rows if row["stage"] == "confirm"}
    cell = Cell("--steps 20", 1e-4, [rule for rule in trials.RULES if rule in confirmed])
    assert "\n".join(tables.markdown(compare.table_of(rows, cell))) in (DOCS / "methods.md").read_text()


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--methods shear", "all are compared with grpo; add it"),
        ("--methods grpo oracle-value", "--method oracle-value needs what each line"),
        ("--seeds 0 0", "--seeds 0 0: 100 and 101 choose the rates"),
        ("--seeds 0 100", "--seeds 0 100: 100 and 101 choose the rates"),
        ("--seed 3", "--seed: the trials set it; leave it out"),
        ("--window 0", "--window 0: must be at least 1"),
        ("--rows /dev/null/rows.jsonl", "--rows /dev/null/rows.jsonl: its folder"),
        ("--methods grpo nothing", "--methods: invalid choice: 'nothing'"),
    ],
)
def test_bad_input_is_one_sentence_before_any_trial(flags, words, tmp_path, assert_refused):
    """Nothing is written."""
    assert_refused(compare.main, ["--rows", tmp_path / "rows.jsonl", *flags.split()], words)
    assert not list(tmp_path.iterdir())
