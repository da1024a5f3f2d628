"""The tables of docs/records/real-weights.md from its rows, and its two pictures.

Run: `python -m docs.records.real_weights`.
"""

from pathlib import Path

import numpy as np
from scipy import stats

from harness import files, tables
from studies import compare, diagnose, figures

RECORDS = Path(__file__).parent
RULES = ["grpo", "shear", "position", "grpo-wrong-.39"]

where_credit_goes = files.read_settings(RECORDS / "real-weights.json")
of_the_paper = files.read_settings(RECORDS / "real-weights-figures.json")
for lines in (diagnose.truth_lines(where_credit_goes), diagnose.summary(of_the_paper)):
    print("\n".join(lines[: lines.index("") + 1]))  # the table without its legend

trials = compare.trials_in(RECORDS / "real-weights.jsonl")
cell = compare.Cell(trials["cell"][0], 2e-5, RULES, tuning=[100], rates=[1e-5, 2.5e-5])
print("\n".join(tables.markdown(compare.table_of(trials, cell))) + "\n")

table = []
counts = np.arange(2, 10_000)  # of seeds
of_shear = compare.outcomes_of(trials, cell.flags, "shear")
for outcome in ("curve", "sampled"):
    for other in ("grpo", "position", "grpo-wrong-.39"):
        of_other = compare.outcomes_of(trials, cell.flags, other)
        more = of_shear[outcome] - of_other[outcome]  # by seed
        # half the width of D's 90% interval for each of these counts, at the same deviation
        halves = stats.t.ppf(0.95, counts - 1) * more.std(ddof=1) / counts**0.5
        row = {"": outcome, "shear less": other, "difference": compare.with_interval(more)}
        row["seeds for ± .03"] = str(counts[halves <= 0.03][0])
        table.append(row)
print("\n".join(tables.markdown(table)) + "\n")

curves = {}
table = []
for rule in RULES:
    curves[rule] = compare.trials_of(trials, "confirm", cell.flags, rule)["rewards"].tolist()
    row = {"mean reward of": rule}
    thirds = np.array(curves[rule]).reshape(-1, 3, 4).mean((0, 2))  # of (seeds, thirds, steps)
    for name, mean in zip(("steps 1-4", "5-8", "9-12"), thirds, strict=True):
        row[name] = f"{mean:.3f}"
    table.append(row)
print("\n".join(tables.markdown(table)))
figures.reward_curves(curves, RECORDS / "real-weights-curves.svg")
figures.weight_around_error(where_credit_goes["methods"], RECORDS / "around-error.svg")
