"""The table of lab/records/results.md: five seeds of `python train.py`, with SHEAR and with GRPO.

    for seed in 0 1 2 3 4; do
      python train.py --seed $seed --name shear-$seed
      python train.py --seed $seed --name grpo-$seed --method grpo
    done
    python -m lab.records.default_runs runs/shear-? runs/grpo-?   # runs -> default-runs.jsonl
    python -m lab.records.default_runs                            # default-runs.jsonl -> the table

A row of default-runs.jsonl is a run: its evaluations before and after training, and the reward of
each step. The table has a line per number and a column per method: the mean over the seeds, and in
brackets the lowest and the highest. The rows that are there, of ten runs, have further metrics:
commit 3fe5855, one thread of an AMD EPYC, torch 2.13.0, transformers 5.23.0, 2026-11-25.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from base import files
from harness import log

ROWS = Path(__file__).parent / "rows" / "default-runs.jsonl"
MEASURED = {  # in the evaluations before and after training
    "greedy": "greedy accuracy",
    "sampled": "sampled accuracy",
    "auc": "AUC of the weights",
    "auc_position": "AUC of position",
    "auc_token": "AUC from the wrong token on",
    "auc_matched": "AUC at equal position",
    "auc_step": "AUC of the wrong step",
    "auc_step_before": "the wrong step against tokens before it, equal position",
    "auc_step_after": "the wrong step against tokens after it, equal position",
    "weight_before": "mean weight before the first error",
    "weight_after": "mean weight from the first error on",
}


def row_of(run: Path) -> dict:
    """A run's row in default-runs.jsonl."""
    settings = files.config_of(run)
    first, *steps, last = files.read_lines(run / "metrics.jsonl")
    row = {
        "method": settings["method"],
        "seed": settings["seed"],
        "reward": [round(step["reward"], 5) for step in steps],
    }
    for when, result in {"before": first["before"], "after": last["after"]}.items():
        row[when] = {"greedy": result["greedy"], "sampled": result["sampled"]}
        row[when] |= result["localisation"]
    return row


if sys.argv[1:]:
    files.write_rows(ROWS, [row_of(Path(run)) for run in sys.argv[1:]])
runs = pd.json_normalize(files.read_lines(ROWS)).set_index(["method", "seed"])
for name in ("before.greedy", "before.sampled", "after.greedy", "after.sampled"):
    runs[name] = runs[name].str[0].astype(float)  # the mean, of [mean, error, count]
for steps in (slice(15, 25), slice(30, 40)):
    means = [np.mean(rewards[steps]) for rewards in runs["reward"]]
    runs[f"reward in training, steps {steps.start + 1}-{steps.stop}"] = means
numbers = {}  # name in the table -> column of `runs`
for name, title in MEASURED.items():
    for when in ("before", "after"):
        if f"{when}.{name}" in runs:  # the rows that are there lack the AUCs at equal position
            numbers[f"{title}, {when}"] = f"{when}.{name}"
numbers |= {name: name for name in runs if name.startswith("reward in")}
table = []
for title, name in numbers.items():
    line = {"mean of five seeds (lowest-highest)": title}
    for method, values in runs[name].groupby("method"):
        line[method] = f"{values.mean():.3f} ({values.min():.3f}-{values.max():.3f})"
    table.append(line)
print("\n".join(log.markdown(table)))
