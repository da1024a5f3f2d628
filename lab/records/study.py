"""Print the tables of lab/records/study.md, and five that it leaves out, from study.jsonl.

Run: `python -m lab.records.study`. A curve is the mean reward of all training steps. D is the mean
difference, paired by seed, with its 90% interval by Student's t.

Left out: running trials. The page names the commit whose code made the rows.
"""

from lab.records.help import show_help

show_help(__doc__)

from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from harness import files, log
from lab.records.archived import marked
from lab.studies.advantages import half_width
from lab.studies.compare import mean_of, with_interval

PATH = Path(__file__).with_name("study.jsonl")
CELLS = ["r.3", "LP", "r0", "r.1", "luck", "T2"]
RULES = "grpo shear shear-mean1 position shuffle kgae first grpo-wrong-.12".split()
PAIRS = [(rule, "grpo") for rule in RULES[1:]]
PAIRS += [("shear", "position"), ("shear", "shuffle"), ("first", "grpo-wrong-.12")]
WALKS = 5  # the cells but T2
WEIGHED = ["shear", "position"]

trials = pd.json_normalize(files.read_lines(PATH), max_level=1)
trials["curve"] = [np.mean(rewards) for rewards in trials["rewards"]]


def show(table: list[dict[str, str]]) -> None:
    """Print a table and an empty line."""
    print("\n".join(log.markdown(table)) + "\n")


def outcome_of(cell: str, rule: str, name: str = "curve") -> pd.Series:
    """Seed -> outcome of the comparison's trials; empty if the rule was not tried."""
    own = trials[(trials["stage"] == "confirm") & (trials["cell"] == cell)]
    return own[own["rule"] == rule].set_index("seed")[name].astype(float)


def curves_of(stage: str, cell: str, rule: str) -> pd.Series:
    """Learning rate -> mean curve over the two seeds of a stage."""
    own = trials[(trials["stage"] == stage) & (trials["cell"] == cell)]
    by_rate = own[own["rule"] == rule].pivot_table("curve", "lr", "seed")
    return by_rate.dropna().mean(axis=1)


def primary_tests() -> list[dict[str, str]]:
    """The plan's four tests: D, p and Holm's p."""
    table = []
    p_values = []
    for cell in ("r.3", "LP"):
        for other in ("grpo", "position"):
            more = outcome_of(cell, "shear") - outcome_of(cell, other)
            p_values.append(stats.ttest_1samp(more, 0).pvalue)
            line = {"cell": cell, "test": f"shear - {other}", "D of the curve": with_interval(more)}
            table.append(line | {"p": f"{p_values[-1]:.3f}"})
    adjusted = 0.0
    for rank, place in enumerate(np.argsort(p_values)):  # Holm's method, from the smallest p up
        adjusted = max(adjusted, min(1, (len(p_values) - rank) * p_values[place]))
        table[place]["p (Holm)"] = f"{adjusted:.3f}"
    return table


def exclusions() -> list[dict[str, str]]:
    """SHEAR - GRPO in each cell: which gains are excluded at 5%, alone and in all walks at once."""
    table = []
    for cell in CELLS:
        more = outcome_of(cell, "shear") - outcome_of(cell, "grpo")
        half = half_width(more)
        jointly = stats.t.ppf(1 - 0.05 / WALKS, len(more) - 1) * stats.sem(more)  # Bonferroni
        low = more.mean() - half
        high = more.mean() + half
        line = {"cell": cell, "90% interval": f"{low:+.3f} to {high:+.3f}"}
        line["within ±0.01"] = "yes" if max(-low, high) <= 0.01 else "no"
        line["gains excluded above"] = f"{high:+.3f}"
        line["in all walks at once"] = "-" if cell == "T2" else f"{more.mean() + jointly:+.3f}"
        table.append(line)
    return table


def pooled() -> str:
    """SHEAR - GRPO over the six cells, whose effects may differ (DerSimonian and Laird)."""
    differences = [outcome_of(cell, "shear") - outcome_of(cell, "grpo") for cell in CELLS]
    means = np.array([more.mean() for more in differences])
    variances = np.array([more.sem() ** 2 for more in differences])
    weights = 1 / variances
    common = np.average(means, weights=weights)
    excess = (weights * (means - common) ** 2).sum() - (len(CELLS) - 1)
    between = max(0.0, excess / (weights.sum() - (weights**2).sum() / weights.sum()))
    weights = 1 / (variances + between)
    half = stats.norm.ppf(0.95) / weights.sum() ** 0.5
    return f"shear - grpo, pooled: {np.average(means, weights=weights):+.3f} ± {half:.3f}"


def comparison(name: str) -> list[dict[str, str]]:
    """GRPO's outcome in each cell, and D of the other rules; without counts of seeds."""
    grpo = {cell: f"{outcome_of(cell, 'grpo', name).mean():.3f}" for cell in CELLS}
    table = [{name: "grpo"} | grpo]
    for rule, other in PAIRS:
        line = {name: f"{marked(rule)} - {other}"}
        for cell in CELLS:
            more = outcome_of(cell, rule, name) - outcome_of(cell, other, name)
            line[cell] = with_interval(more).split(",")[0] if more.notna().any() else ""
        table.append(line)
    return table


def learning_rates() -> list[dict[str, str]]:
    """The mean curve of each learning rate that was tried on the tuning seeds."""
    table = []
    for cell in CELLS:
        for rule in RULES:
            curves = curves_of("tune", cell, rule)
            line = {"cell": cell, "rule": marked(rule)}
            for rate, curve in curves.items():
                line[f"{rate:g}"] = f"{curve:.3f}"
            if len(curves):
                table.append(line)
    return table


def headroom() -> list[dict[str, str]]:
    """Credit from true values against GRPO, each at its best rate, and both at 1e-4."""
    table = []
    for cell in trials["cell"][trials["stage"] == "headroom"].unique():
        grpo = curves_of("headroom", cell, "grpo")
        oracle = curves_of("headroom", cell, "oracle-value")
        line = {"cell": cell, "grpo": f"{grpo.max():.3f}", "oracle-value": f"{oracle.max():.3f}"}
        line["D"] = f"{oracle.max() - grpo.max():+.3f}"
        table.append(line | {"D at 0.0001": f"{oracle[1e-4] - grpo[1e-4]:+.3f}"})
    return table


def correlations() -> list[dict[str, str]]:
    """Of each rule's credit with the true advantages of lines, corrected for noise; two seeds."""
    table = []
    for rule in RULES:
        line = {"rule": marked(rule)}
        for cell in CELLS:
            own = trials[(trials["stage"] == "advantages") & (trials["cell"] == cell)]
            found = [
                methods.get(rule, {}).get("corrected") for methods in own["advantages.methods"]
            ]
            line[cell] = mean_of(pd.Series(found, dtype=float))
        table.append(line)
    return table


def kinds_of_line(cell: str) -> list[dict[str, str]]:
    """The true advantage of each kind of line of 20 lines or more, and rules' mean weight on it."""
    own = trials[(trials["stage"] == "advantages") & (trials["cell"] == cell)]
    kinds = pd.json_normalize(own["advantages.kinds"].sum())
    kinds = kinds.set_index(["side", "kind"])
    numbers = kinds[["advantage", *(f"weight.{rule}" for rule in WEIGHED)]]
    sums = numbers.mul(kinds["lines"], axis=0).groupby(level=[0, 1], sort=False).sum()
    counts = kinds["lines"].groupby(level=[0, 1], sort=False).sum()
    table = []
    for (side, kind), count in counts[counts >= 20].items():
        advantage, *weights = sums.loc[(side, kind)] / count
        line = {"rollout": side, "line": kind, "lines": str(count)}
        line["true advantage"] = f"{advantage:+.3f}"
        for rule, weight in zip(WEIGHED, weights, strict=True):
            line[rule] = f"{weight:.2f}"
        table.append(line)
    return table


show(primary_tests())
show(comparison("curve"))
print(pooled() + "\n")
show(headroom())
show(correlations())
show(exclusions())
show(kinds_of_line("r.3"))
show(kinds_of_line("LP"))
show(comparison("sampled"))
show(learning_rates())
