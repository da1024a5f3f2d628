"""SHEAR's mean weight by line, from the first wrong line on, in the samples of five runs.

It prints the mean weight of right and of wrong rollouts, then that of the lines of wrong rollouts,
by their offset from the first wrong line, each with its count. The runs are runs/shear-0 to
runs/shear-4, made by the commands of lab/records/results.md.

Run: `python -m lab.records.weights_by_line`.
"""

from lab.records.help import show_help

show_help(__doc__)

from collections import defaultdict
from pathlib import Path
from statistics import mean

from harness import files

LINE = 12  # tokens of a line

by_verdict = defaultdict(list)
by_line = defaultdict(list)
for path in Path("runs").glob("shear-[0-4]/samples.jsonl"):
    for row in files.read_lines(path):
        if row["advantage"] == 0:
            continue
        weights = row["weights"]["shear"]
        first_error = row["first_error"]
        by_verdict["right" if row["score"] else "wrong"].append(mean(weights))
        if row["score"] or not first_error or first_error[0] % LINE:
            continue
        for start in range(0, len(weights) - LINE + 1, LINE):
            offset = (start - first_error[0]) // LINE  # 0 is the first wrong line
            by_line[offset].append(mean(weights[start : start + LINE]))
for means in (by_verdict, by_line):
    for name in sorted(means):
        print(name, round(mean(means[name]), 3), len(means[name]))
