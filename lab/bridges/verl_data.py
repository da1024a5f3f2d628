"""Problems as verl's parquet, and this project's math grader as verl's reward.

    python -m lab.bridges.verl_data train.parquet                  # the paper's training set
    python -m lab.bridges.verl_data train.parquet --data own.jsonl # a file, as --data of train.py

With `custom_reward_function.path=lab/bridges/verl_data.py` verl calls `compute_score`. What could
not be graded scores 0, as verl has no score for it.
"""

import sys
from pathlib import Path

import tyro

from lab.tools.command import command
from rewards import grade_math
from tasks.problems import load_problems
from tasks.task import INSTRUCTIONS


def convert(file: tyro.conf.Positional[Path], *, data: str | None = None) -> None:
    """Write the math problems of `data`, or of the hub, as rows of verl."""
    from datasets import Dataset  # late: slow, and verl's workers need `compute_score` alone

    problems, notes = load_problems("math", data)
    rows = []
    for number, problem in enumerate(problems):
        system = {"role": "system", "content": INSTRUCTIONS["math"]}
        rows.append(
            {
                "data_source": "shear",
                "prompt": [system, {"role": "user", "content": problem["problem"]}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": problem["answer"]},
                "extra_info": {"index": number},
            }
        )
    Dataset.from_list(rows).to_parquet(str(file))
    print("\n".join([*notes, f"{len(rows):,} rows: {file}"]))


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> float:
    """1.0 for a right response, else 0.0, with the arguments that verl gives."""
    return grade_math(solution_str, ground_truth).reward or 0.0


main = command("lab.bridges.verl_data", convert)

if __name__ == "__main__":
    sys.exit(main())
