"""What the trials of docs/study.jsonl say: every number and the picture of docs/study.md.

    python -m studies.findings    # prints the tables, draws docs/study.png

A trial's curve is its mean training reward over all steps. Rules are compared at the learning rates that `tune` chose
for each, seed by seed: D is the mean of the paired differences with its 90% interval by Student's t, so that an effect
outside of it is excluded at 5% on either side; p is two-sided, and in the primary table adjusted by Holm's method over
all of its tests. A cell is shown when all of its trials have run, so that nobody looks before; Holm's p when all
primary cells have.
"""

import math
import statistics
import sys
from pathlib import Path

import numpy as np
from scipy import stats

from harness import folders, tables
from studies import figures
from studies.trials import CELLS, FEW, HEADROOM, PRIMARY, RULES, SEEDS, chosen_rate, grid, mean_curves

DOCS = Path(__file__).resolve().parent.parent / "docs"
LEVEL = 0.90
LEAST = 20  # lines of a kind
BY_REPAIR = {"T2": "none", "r0": "0", "LP": ".03", "luck": ".1", "r.1": ".1", "r.3": ".3"}  # the cells of the picture
CONTROLS = ("shear", "position"), ("shear", "shuffle"), ("first", "grpo-wrong-.12")
OUTCOMES = {"curve": lambda row: statistics.mean(row["rewards"]), "sampled": lambda row: row["sampled"]}


def by_seed(rows: list[dict], cell: str, rule: str, outcome: str = "curve") -> dict[int, float]:
    """Seed -> outcome of the confirmatory trials."""
    found = {}
    for row in rows:
        if (row["stage"], row["cell"], row["rule"]) == ("confirm", cell, rule):
            found[row["seed"]] = OUTCOMES[outcome](row)
    return found


def finished(rows: list[dict], cell: str) -> bool:
    """Whether all trials of the comparison have run in a cell."""
    seeds = [by_seed(rows, cell, rule).keys() for rule in CELLS[cell].rules]
    return all(set(SEEDS["confirm"]) <= ran for ran in seeds)


def differences(rows: list[dict], cell: str, rule: str, other: str, outcome: str = "curve") -> np.ndarray:
    """Of the seeds that both have run, (n,)."""
    ours, theirs = by_seed(rows, cell, rule, outcome), by_seed(rows, cell, other, outcome)
    return np.array([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean, and the ends of its interval at LEVEL."""
    half = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * stats.sem(values)
    return values.mean(), values.mean() - half, values.mean() + half


def holm(p_values: list[float]) -> list[float]:
    """Adjusted by Holm's step-down method."""
    order = np.argsort(p_values)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def with_interval(values: np.ndarray) -> str:
    """+.012 (+.004 to +.020), 8/10."""
    mean, low, high = interval(values)
    return f"{signed(mean)} ({signed(low)} to {signed(high)}), {(values > 0).sum()}/{len(values)}"


def signed(value: float) -> str:
    """+.012"""
    return f"{value:+.3f}".replace("0.", ".")


# ---- tables ---------------------------------------------------------------------------------------------------


def primary(rows: list[dict]) -> list[dict[str, str]]:
    """The tests that decide, with their p and Holm's."""
    table, p_values = [], []
    for cell in PRIMARY:
        for other in ("grpo", "position") if finished(rows, cell) else ():
            values = differences(rows, cell, "shear", other)
            p_values.append(stats.ttest_1samp(values, 0.0).pvalue)
            line = {"cell": cell, "test": f"shear - {other}", "D of the curve": with_interval(values)}
            table.append(line | {"p": f"{p_values[-1]:.3f}", "p (Holm)": "-"})
    if all(finished(rows, cell) for cell in PRIMARY):
        for line, adjusted in zip(table, holm(p_values), strict=True):
            line["p (Holm)"] = f"{adjusted:.3f}"
    return table


def comparison(rows: list[dict], outcome: str) -> list[dict[str, str]]:
    """Every cell and rule: the mean over seeds, and D against GRPO."""
    table = []
    for cell, (_, _, rules) in CELLS.items():
        for rule in rules if finished(rows, cell) else ():
            mean = statistics.mean(by_seed(rows, cell, rule, outcome).values())
            of_grpo = "" if rule == "grpo" else with_interval(differences(rows, cell, rule, "grpo", outcome))
            table.append({"cell": cell, "rule": rule, outcome: f"{mean:.3f}", "D against grpo": of_grpo})
    return table


def controls(rows: list[dict]) -> list[dict[str, str]]:
    """Rules against the control that shares all with them but what the rule claims."""
    table = []
    for cell, (_, _, rules) in CELLS.items():
        for rule, other in CONTROLS if finished(rows, cell) else ():
            if other in rules:
                values = with_interval(differences(rows, cell, rule, other))
                table.append({"cell": cell, "rule - control": f"{rule} - {other}", "D of the curve": values})
    return table


def rates(rows: list[dict]) -> list[dict[str, str]]:
    """The mean curve of every learning rate that was tried, the chosen one marked."""
    table = []
    for cell, (_, _, rules) in CELLS.items():
        for rule in rules:
            curves = mean_curves("tune", cell, rule, rows)
            if curves:
                best = chosen_rate(cell, rule, rows)
                tried = [f"{lr:g}: {curve:.3f}{' *' * (lr == best)}" for lr, curve in sorted(curves.items())]
                table.append({"cell": cell, "rule": rule, "learning rate: curve": ", ".join(tried)})
    return table


def at_equal_rates(rows: list[dict]) -> list[dict[str, str]]:
    """D of the mean curve against GRPO at the same learning rate, over the tuning seeds."""
    table, tried = [], set()
    for cell, (_, _, rules) in CELLS.items():
        curves = {rule: mean_curves("tune", cell, rule, rows) for rule in rules}
        tried |= curves["grpo"].keys()
        for rule in rules[1:]:
            line = {"cell": cell, "rule": rule}
            for lr in curves["grpo"].keys() & curves[rule].keys():
                line[lr] = signed(curves[rule][lr] - curves["grpo"][lr])
            table.append(line)
    columns = {"cell": "cell", "rule": "rule"} | {lr: f"{lr:g}" for lr in sorted(tried)}
    return [{title: line.get(key, "-") for key, title in columns.items()} for line in table]


def exclusions(rows: list[dict]) -> list[dict[str, str]]:
    """What is said of SHEAR - GRPO in each cell: by the plan's word, and gains above the interval alone.

    "jointly" is the bound for all walks at once, by Bonferroni's correction.
    """
    table, walks = [], len(CELLS) - 1
    for cell in CELLS:
        values = differences(rows, cell, "shear", "grpo")
        mean, low, high = interval(values)
        joint = signed(mean + stats.t.ppf(1 - 0.05 / walks, len(values) - 1) * stats.sem(values))
        within = "yes" if low >= -0.01 and high <= 0.01 else "no"
        line = {"cell": cell, "90% interval": f"{signed(low)} to {signed(high)}", "within ±.01": within}
        line["gains excluded above"] = signed(high)
        table.append(line | {"in all walks at once, above": "-" if cell == "T2" else joint})
    return table


def headroom(rows: list[dict]) -> list[dict[str, str]]:
    """Credit from true advantages against GRPO, each at the best rate, and both at the lowest of the first three."""
    table = []
    for cell, (_, lr, _) in HEADROOM.items():
        plain, oracle = (mean_curves("headroom", cell, rule, rows) for rule in ("grpo", "oracle-value"))
        if set(grid(lr, {})) <= plain.keys() & oracle.keys():
            best = {"grpo": max(plain.values()), "oracle-value": max(oracle.values())}
            line = {"cell": cell} | {rule: f"{curve:.3f}" for rule, curve in best.items()}
            line["D"] = signed(best["oracle-value"] - best["grpo"])
            table.append(line | {f"D at {lr / 2:g}": signed(oracle[lr / 2] - plain[lr / 2])})
    return table


def of_start(rows: list[dict], cell: str) -> list[dict]:
    """What `studies.advantages` measured in a cell, a seed each."""
    return [row["advantages"] for row in rows if (row["stage"], row["cell"]) == ("advantages", cell)]


def correlations(rows: list[dict]) -> list[dict[str, str]]:
    """Of each rule's credit with the true advantages of lines, corrected for noise; means over seeds."""
    table = []
    for rule in RULES:
        line = {"rule": rule}
        for cell in CELLS:
            found = [seed["methods"][rule] for seed in of_start(rows, cell) if rule in seed["methods"]]
            line[cell] = "-"
            if found:
                error = math.hypot(*(each["corrected_se"] for each in found)) / len(found)
                line[cell] = f"{statistics.mean(each['corrected'] for each in found):.2f} ± {error:.2f}"
        if set(line.values()) != {rule, "-"}:
            table.append(line)
    return table


def by_kind(rows: list[dict], cell: str) -> list[dict[str, str]]:
    """True advantage and weights by kind of line, over all seeds; kinds of fewer than LEAST lines are left out."""
    kinds = {}  # (side, kind) -> rows
    for seed in of_start(rows, cell):
        for line in seed["kinds"]:
            kinds.setdefault((line["side"], line["kind"]), []).append(line)
    table = []
    for (side, kind), lines in kinds.items():
        counts = [line["lines"] for line in lines]
        if sum(counts) >= LEAST:
            row = {"rollout": side, "line": kind, "lines": str(sum(counts))}
            row["true advantage"] = signed(np.average([line["advantage"] for line in lines], weights=counts))
            for rule in FEW:
                row[rule] = f"{np.average([line['weight'][rule] for line in lines], weights=counts):.2f}"
            table.append(row)
    return table


def all_tables(rows: list[dict]) -> dict[str, list[dict[str, str]]]:
    """Every table of docs/study.md, by its title."""
    return {
        "Primary tests": primary(rows),
        "Mean curve": comparison(rows, "curve"),
        "What is excluded": exclusions(rows),
        "Rules against their controls": controls(rows),
        "Sampled accuracy on held-out problems": comparison(rows, "sampled"),
        "Correlation with true advantages": correlations(rows),
        "Where advantage and weight lie, r.3": by_kind(rows, "r.3"),
        "Where advantage and weight lie, LP": by_kind(rows, "LP"),
        "Headroom": headroom(rows),
        "Learning rates": rates(rows),
        "D at equal learning rates": at_equal_rates(rows),
    }


def picture(rows: list[dict], path: Path) -> None:
    """D by cell, of SHEAR and of the position control, from what cannot be undone to what often is."""
    figure, axes = figures.sheet(7.2, 3.6)
    for shift, rule, colour in ((-0.1, "shear", figures.RIGHT), (0.1, "position", figures.FAINT)):
        for place, cell in enumerate(BY_REPAIR):
            if not finished(rows, cell):
                continue
            mean, low, high = interval(differences(rows, cell, rule, "grpo"))
            label = f"{rule} - grpo" if place == 0 else None
            bar = [[mean - low], [high - mean]]
            axes.errorbar(place + shift, mean, bar, fmt="o", color=colour, capsize=4, label=label)
    axes.axhline(0, color=figures.INK, lw=1)
    axes.axhspan(-0.01, 0.01, color=figures.FAINT, alpha=0.15, lw=0, label="below the smallest effect of interest")
    labels = [f"{cell}\n{chance}" for cell, chance in BY_REPAIR.items()]
    axes.set(xticks=range(len(labels)), xticklabels=labels, xlim=(-0.5, len(labels) - 0.5))
    axes.set(xlabel="cell, and the chance a line of a demonstration's repair", ylabel="D of the mean curve")
    axes.set_title("Differences from GRPO, 90% intervals")
    axes.legend(fontsize=9)
    figures.save_png(figure, path)


def main() -> int:
    """Print the tables and draw the picture."""
    rows = folders.rows(DOCS / "study.jsonl")
    for title, table in all_tables(rows).items():
        print(f"\n{title}\n")
        print("\n".join(tables.markdown(table)) if table else "no rows yet")
    picture(rows, DOCS / "study.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
