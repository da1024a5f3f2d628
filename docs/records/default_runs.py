"""README's table of default runs: five seeds of `python train.py`, with SHEAR and with GRPO.

    for seed in 0 1 2 3 4; do
      python train.py --seed $seed --name shear-$seed
      python train.py --seed $seed --name grpo-$seed --method grpo
    done
    python -m docs.records.default_runs runs/shear-? runs/grpo-?   # runs -> default-runs.jsonl
    python -m docs.records.default_runs                            # default-runs.jsonl -> the table

A row of default-runs.jsonl is a run: its evaluations before and after training and the metrics of
its steps, without their seconds. The ten runs: commit 3fe5855, one thread of an AMD EPYC, torch
2.13.0, transformers 5.23.0, 2026-11-25.
"""

import sys
from pathlib import Path

import numpy as np

from harness import files, tables

ROWS = Path(__file__).with_name("default-runs.jsonl")
METRICS = "reward solved equal_groups weight_mean weight_before weight_after ess grad_norm".split()


def row_of(run: Path) -> dict:
    """What default-runs.jsonl has of a run."""
    settings = files.config_of(run)
    row = {"method": settings["method"], "seed": settings["seed"]}
    for name in METRICS:
        row[name] = []
    for line in files.read_lines(run / "metrics.jsonl"):
        for when in ("before", "after"):
            if when in line:
                row[when] = {name: line[when][name] for name in ("greedy", "sampled")}
                row[when] |= line[when]["localisation"]
        if "step" in line:
            for name in METRICS:
                row[name].append(round(line[name], 5) if name in line else None)
    return row


def spread(values: list[float]) -> str:
    """.645 (.537-.725): the mean over the seeds, the lowest and the highest."""
    low, mean, high = min(values), np.mean(values), max(values)
    return f"{mean:.3f} ({low:.3f}-{high:.3f})".replace("0.", ".")


def table(rows: list[dict]) -> list[str]:
    """Means over the seeds, with the lowest and the highest, a column for each method."""
    lines = []
    for title, value in (
        ("greedy accuracy before", lambda row: row["before"]["greedy"][0]),
        ("greedy accuracy after", lambda row: row["after"]["greedy"][0]),
        ("sampled accuracy before", lambda row: row["before"]["sampled"][0]),
        ("sampled accuracy after", lambda row: row["after"]["sampled"][0]),
        ("reward in training, steps 16-25", lambda row: np.mean(row["reward"][15:25])),
        ("reward in training, steps 31-40", lambda row: np.mean(row["reward"][30:40])),
        ("AUC of the weights before", lambda row: row["before"]["auc"]),
        ("AUC of the weights after", lambda row: row["after"]["auc"]),
        ("AUC of the wrong step alone, after", lambda row: row["after"]["auc_step"]),
        ("AUC of position alone, before", lambda row: row["before"]["auc_position"]),
        ("AUC of position alone, after", lambda row: row["after"]["auc_position"]),
        ("mean weight before the first error, after", lambda row: row["after"]["weight_before"]),
        ("mean weight from it on, after", lambda row: row["after"]["weight_after"]),
    ):
        line = {"": title}
        for method in ("grpo", "shear"):
            line[method] = spread([value(row) for row in rows if row["method"] == method])
        lines.append(line)
    return tables.markdown(lines)


if sys.argv[1:]:
    ROWS.unlink(missing_ok=True)
    files.append_rows(ROWS, [row_of(Path(run)) for run in sys.argv[1:]])
print("\n".join(table(files.read_lines(ROWS))))
