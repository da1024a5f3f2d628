"""Print the tables of lab/records/real-weights.md from its rows, and draw its three pictures.

Run: `python -m lab.records.real_weights`. It reads real-weights.json, real-weights-places.json,
real-weights-figures.json, real-weights.jsonl and real-weights-steps.jsonl, and writes
around-error.svg, real-weights-curves.svg and real-weights-steps.svg.

Left out: what the page has from other runs, such as "One run" and "Time".
"""

from lab.records.help import show_help

show_help(__doc__)

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from harness import files, log
from lab.records.archived import marked
from lab.studies import compare, diagnose, figures

RECORDS = Path(__file__).parent
ARMS = ["grpo", "shear", "position", "grpo-wrong-.39"]

where_credit_goes = files.read_json(RECORDS / "real-weights.json")
places = {marked(name): place for name, place in where_credit_goes["methods"].items()}
where_credit_goes["methods"] = places
at_equal_position = files.read_json(RECORDS / "real-weights-places.json")
paper_figures = files.read_json(RECORDS / "real-weights-figures.json")
for lines in (
    diagnose.truth_lines(at_equal_position),
    diagnose.truth_lines(where_credit_goes),  # without the columns of equal position
    diagnose.summary(paper_figures),
):
    print("\n".join(lines[: lines.index("") + 1]))  # without the legend below the table

trials = compare.trials_in(RECORDS / "real-weights.jsonl")
cell = compare.Cell(trials["cell"][0], ARMS, tuning=[100], rates=[1e-5, 2.5e-5])
print("\n".join(log.markdown(compare.table_of(trials, cell))) + "\n")

table = []
counts = np.arange(2, 10_000)  # of seeds
of_shear = compare.outcomes_of(trials, cell.flags, "shear")
for outcome in ("curve", "sampled"):
    for other in ("grpo", "position", "grpo-wrong-.39"):
        of_other = compare.outcomes_of(trials, cell.flags, other)
        difference = of_shear[outcome] - of_other[outcome]  # by seed
        # half the width of the 90% interval for each of these counts, at the observed variance
        half_widths = stats.t.ppf(0.95, counts - 1) * difference.std(ddof=1) / counts**0.5
        row = {"": outcome, "shear less": other, "difference": compare.with_interval(difference)}
        row["seeds for ± .03"] = str(counts[half_widths <= 0.03][0])
        table.append(row)
print("\n".join(log.markdown(table)) + "\n")

curves = {}
table = []
for arm in ARMS:
    curves[arm] = compare.trials_of(trials, "confirm", cell.flags, arm)["rewards"].tolist()
    row = {"mean reward of": arm}
    thirds = np.array(curves[arm]).reshape(-1, 3, 4).mean((0, 2))  # (seeds, thirds, steps) -> (3,)
    for name, mean in zip(("steps 1-4", "5-8", "9-12"), thirds, strict=True):
        row[name] = f"{mean:.3f}"
    table.append(row)
print("\n".join(log.markdown(table)) + "\n")
figures.reward_curves(curves, RECORDS / "real-weights-curves.svg")

runs = pd.DataFrame(files.read_lines(RECORDS / "real-weights-steps.jsonl")).sort_values("seed")
steps = int(runs["rewards"].map(len).min())  # that all runs took
longer: dict = {}  # method -> (seeds, steps)
for method, of_method in runs.groupby("method"):
    longer[method] = np.array([rewards[:steps] for rewards in of_method["rewards"]])
table = []
quarters = [steps * quarter // 4 for quarter in range(5)]
for first, last in [*pairwise(quarters), (steps // 2, steps), (0, steps)]:
    means = {method: rewards[:, first:last].mean(1) for method, rewards in longer.items()}
    row = {"steps": f"{first + 1}-{last}"}
    row |= {method: f"{mean.mean():.3f}" for method, mean in means.items()}
    row["D of shear"] = compare.with_interval(pd.Series(means["shear"] - means["grpo"]))
    table.append(row)
print("\n".join(log.markdown(table)))
figures.reward_curves(longer, RECORDS / "real-weights-steps.svg")
figures.weight_around_error(where_credit_goes["methods"], RECORDS / "around-error.svg")
