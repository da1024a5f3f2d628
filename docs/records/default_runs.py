"""README's table of default runs: five seeds of `python train.py`, with SHEAR and with GRPO.

    for seed in 0 1 2 3 4; do
      python train.py --seed $seed --name shear-$seed
      python train.py --seed $seed --name grpo-$seed --method grpo
    done
    python -m docs.records.default_runs runs/shear-? runs/grpo-?   # runs -> default-runs.jsonl
    python -m docs.records.default_runs                            # default-runs.jsonl -> the table

A row of default-runs.jsonl is a run: its evaluations before and after training, and the reward of
each step; those of the ten runs have further metrics. The ten runs: commit 3fe5855, one thread of
an AMD EPYC, torch 2.13.0, transformers 5.23.0, 2026-11-25.
"""

import sys
from pathlib import Path

import numpy as np
import pandas

from harness import files

ROWS = Path(__file__).with_name("default-runs.jsonl")


def row_of(run: Path) -> dict:
    """What default-runs.jsonl has of a run."""
    settings = files.config_of(run)
    row = {"method": settings["method"], "seed": settings["seed"], "reward": []}
    for line in files.read_lines(run / "metrics.jsonl"):
        for when in ("before", "after"):
            if when in line:
                row[when] = {name: line[when][name] for name in ("greedy", "sampled")}
                row[when] |= line[when]["localisation"]
        if "step" in line:
            row["reward"].append(round(line["reward"], 5))
    return row


def numbers_of(row: dict) -> dict:
    """What the table has of a run."""
    numbers = {"method": row["method"]}
    for when in ("before", "after"):
        for name in ("greedy", "sampled"):
            numbers[f"{name} accuracy {when}"] = row[when][name][0]
        for name in ("auc", "auc_step", "auc_position", "weight_before", "weight_after"):
            numbers[f"{name} {when}"] = row[when][name]
    numbers["reward in training, steps 16-25"] = np.mean(row["reward"][15:25])
    numbers["reward in training, steps 31-40"] = np.mean(row["reward"][30:40])
    return numbers


if sys.argv[1:]:
    ROWS.unlink(missing_ok=True)
    files.append_rows(ROWS, [row_of(Path(run)) for run in sys.argv[1:]])
numbers = pandas.DataFrame(map(numbers_of, files.read_lines(ROWS)))
print(numbers.groupby("method").agg(["mean", "min", "max"]).round(3).T.to_string())
