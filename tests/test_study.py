"""The study: which trials a stage lacks, rows that name their plan and code, and statistics against scipy's."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from harness import files, tables
from studies import findings, study, trials
from studies.trials import Trial
from tasks.rows import BadInput

DOCS = Path(__file__).parents[1] / "docs"


def row(stage: str, cell: str, seed: int, rule: str, lr: float, curve: float) -> dict:
    trial = Trial(cell, seed, rule, lr)._asdict()
    return {"stage": stage, "plan": "p", "code": "c", **trial, "rewards": [curve - 0.1, curve + 0.1], "sampled": curve}


def test_a_grid_grows_until_its_best_rate_is_inside():
    assert trials.grid(2.0, {}) == [1.0, 2.0, 4.0]
    assert trials.grid(2.0, {1.0: 0.1, 2.0: 0.3, 4.0: 0.2}) == [1.0, 2.0, 4.0]
    assert trials.grid(2.0, {1.0: 0.4, 2.0: 0.3, 4.0: 0.2}) == [0.5, 1.0, 2.0, 4.0]
    assert trials.grid(2.0, {1.0: 0.1, 2.0: 0.2, 4.0: 0.3, 8.0: 0.4}) == [1.0, 2.0, 4.0, 8.0, 16.0]
    rising = {1.0: 0.1, 2.0: 0.2, 4.0: 0.3, 8.0: 0.4, 16.0: 0.5}
    assert trials.grid(2.0, rising) == sorted(rising)  # 8 times the middle: no further


def test_every_rate_is_tuned_on_both_seeds_before_the_best_is_confirmed():
    rows, cell = [], trials.CELLS["T2"]
    for rule in cell.rules:
        for lr in (5e-5, 1e-4, 2e-4):
            for seed in trials.SEEDS["tune"]:
                rows.append(row("tune", "T2", seed, rule, lr, 0.5 if lr == 1e-4 else 0.4))
    task = {"T2": cell}, trials.SEEDS["tune"]
    assert not trials.lacking("tune", rows, *task)
    assert trials.lacking("tune", rows[:-1], *task) == [Trial("T2", 101, "kgae", 2e-4)]
    assert trials.mean_curves("tune", "T2", "kgae", rows[:-1]).keys() == {5e-5, 1e-4}
    assert trials.chosen_rate("T2", "shear", rows) == 1e-4


def test_seeds_of_the_comparison_chose_nothing():
    assert len(trials.SEEDS["confirm"]) == 10
    assert not set(trials.SEEDS["confirm"]) & (set(trials.SEEDS["tune"]) | set(trials.SEEDS["headroom"]))


def test_rows_of_other_code_and_rates_that_are_not_chosen_are_refused(tmp_path):
    """What is run, and is not run again, is in test_compare.py."""
    path = tmp_path / "rows.jsonl"
    files.append_rows(path, [row("tune", "T2", 100, "grpo", 1e-4, 0.5) | {"code": "c"}])
    study.refuse_other_code(path, {"stage": "tune", "code": "c"})
    with pytest.raises(BadInput, match="of other code"):
        study.refuse_other_code(path, {"stage": "tune", "code": "another"})
    with pytest.raises(BadInput, match="run the stage tune first"):
        study.study(study.make_parser().parse_args(["confirm", "--cells", "T2", "--rows", str(path)]))


def test_a_plan_or_code_that_is_not_committed_is_refused(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(["git", "-C", tmp_path, *name, *words], check=True, capture_output=True, text=True).stdout

    monkeypatch.setattr(study, "ROOT", tmp_path)
    plan = tmp_path / "plan.md"
    plan.write_text("first\n")
    with pytest.raises(BadInput, match="run the study in its repository"):
        study.committed(["plan.md"])
    git("init", "-q")
    with pytest.raises(BadInput, match=r"plan\.md: is not as committed"):
        study.committed(["plan.md"])
    git("add", ".")
    git("commit", "-qm", "plan")
    assert study.committed(["plan.md"]) == git("hash-object", "plan.md").strip()
    plan.write_text("second\n")
    with pytest.raises(BadInput, match=r"plan\.md: is not as committed"):
        study.committed(["plan.md"])


def test_holm_and_intervals():
    assert findings.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    values = np.array([0.01, 0.03, -0.02, 0.04])
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.90)
    assert findings.interval(values) == pytest.approx((values.mean(), low, high))
    assert findings.with_interval(values).startswith("+.015 (") and findings.with_interval(values).endswith("3/4")


def test_differences_are_paired_by_seed():
    rows = [row("confirm", "r.3", seed, "grpo", 1.0, 0.1 * seed) for seed in (1, 2, 3)]
    rows += [row("confirm", "r.3", seed, "shear", 1.0, 0.1 * seed + 0.02) for seed in (3, 2)]
    rows += [row("tune", "r.3", 1, "shear", 1.0, 0.9)]
    assert findings.differences(rows, "r.3", "shear", "grpo") == pytest.approx([0.02, 0.02])


def test_the_page_has_what_the_rows_say():
    """Every line of every table of docs/study.md can be computed again."""
    page = (DOCS / "study.md").read_text(encoding="utf-8")
    for title, table in findings.all_tables(files.rows(DOCS / "study.jsonl")).items():
        assert table and "\n".join(tables.markdown(table)) in page, title
