"""lab/bridges/verl_data.py: verl's rows of problems, and its reward."""

from builders.commands import run_well
from datasets import Dataset

from base.files import write_rows
from lab.bridges import verl_data


def test_problems_become_rows_of_verl_and_are_graded(tmp_path, capsys):
    """The instruction is the system's message, and the grader is this project's."""
    write_rows(tmp_path / "own.jsonl", [{"problem": "7*8?", "answer": r"so \boxed{56}"}])
    run_well(verl_data, tmp_path / "train.parquet", "--data", tmp_path / "own.jsonl")
    assert "1 rows: " in capsys.readouterr().out
    (row,) = Dataset.from_parquet(
        str(tmp_path / "train.parquet"), cache_dir=str(tmp_path / "cache")
    )
    system, user = row["prompt"]
    assert r"\boxed{}" in system["content"] and user == {"role": "user", "content": "7*8?"}
    truth = row["reward_model"]["ground_truth"]
    assert verl_data.compute_score("shear", r"It is \boxed{56.0}.", truth) == 1
    assert verl_data.compute_score("shear", r"It is \boxed{55}.", truth, {"index": 0}) == 0
