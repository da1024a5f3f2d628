"""What 25 comparisons with `grpo` allow to say: p, Holm's p and the noise of steps.

It reads the trials of lab/records/methods.md from compare.jsonl, and prints a line per method. D
is the mean difference of the curve from `grpo`, paired by seed. p is of a t test over the five
seeds. Holm's p accounts for the number of methods. "step noise" is half of the 90% interval that D
would have if the only noise were that of the steps: a seed's difference is a mean of 20 steps,
whose standard error follows from their spread. "too alike" is the chance (chi-square) that five
differences with this noise agree as well as these do, or better.

Run: `python -m lab.records.many_comparisons`.
"""

from lab.records.help import show_help

show_help(__doc__)

from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from harness import files, log
from lab.records.archived import marked
from lab.studies.compare import with_interval

PATH = Path(__file__).with_name("compare.jsonl")

trials = pd.DataFrame(files.read_lines(PATH))
confirm = trials[trials["stage"] == "confirm"].set_index(["rule", "seed"])["rewards"]
of_grpo = np.array(confirm["grpo"].sort_index().tolist())  # (seeds, steps)
lines = []
for rule in confirm.index.unique("rule").drop("grpo"):
    more = np.array(confirm[rule].sort_index().tolist()) - of_grpo  # (seeds, steps)
    by_seed = more.mean(1)  # (seeds,)
    errors = stats.sem(more, axis=1)  # (seeds,) standard errors of by_seed from the steps
    seeds = len(by_seed)
    spread = np.sum(((by_seed - by_seed.mean()) / errors) ** 2)  # chi-square, seeds - 1 degrees
    half = stats.norm.ppf(0.95) * np.sqrt(np.sum(errors**2)) / seeds
    lines.append(
        {
            "method": marked(rule),
            "D": with_interval(pd.Series(by_seed)),
            "p": stats.ttest_1samp(by_seed, 0).pvalue,
            "step noise": f"±{half:.3f}",
            "too alike": f"{stats.chi2.cdf(spread, seeds - 1):.4f}",
        }
    )
lines.sort(key=lambda line: line["p"])
adjusted = 0.0
for rank, line in enumerate(lines):  # Holm's method, from the smallest p up
    adjusted = max(adjusted, min(1.0, line["p"] * (len(lines) - rank)))
    line["p"] = f"{line['p']:.4f}"
    line["p (Holm)"] = f"{adjusted:.3f}"
print("\n".join(log.markdown(lines)))
