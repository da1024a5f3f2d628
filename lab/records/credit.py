"""Print the tables of credit.md from their rows; run it as `python -m lab.records.credit`.

credit.jsonl has the trainings, credit-theory.jsonl those on the tasks of the theory,
credit-gradients.jsonl the gradient tests, credit-archived.jsonl those of removed rules, and
credit-energy.jsonl the energies. credit-plan.md has the commands; removed rules are measured in a
worktree of daaeda9, after `git apply lab/records/daaeda9.patch`.
Differences are paired by seed, with 95% intervals (Student's t). Gradients of one or two seeds have
each seed's 90% interval.
"""

from lab.records.help import show_help

show_help(__doc__)

from functools import partial
from pathlib import Path

import pandas as pd

from harness import files, log
from lab.studies import compare
from lab.studies.alignment import rollouts_needed

FOLDER = Path(__file__).parent
with_interval = partial(compare.with_interval, level=0.95)
# rows whose scale of Adam's metric is the exact reference's, which lacks the batches' noise
OLD_SCALE = {("noise-after", 5), ("noise-both", 5), ("noise-none", 5)}
OUTCOMES = {"curve": "curve", "sampled": "held out"}
PAIRS = [
    ("shear-own", "shear"),
    ("shear-own", "grpo"),
    ("shear-own", "grpo-own"),
    ("shear-others", "shear-own"),
    ("position-own", "position"),
    ("shuffle-own", "shuffle"),
    ("entropy-own", "entropy"),
    ("quarter", "shear"),
    ("eighth", "shear"),
    ("double", "grpo-own"),
    ("raw", "shear"),
    ("eps-.02", "shear"),
    ("eps-.15", "shear"),
    ("eps-.35", "shear"),
    ("shear-others", "shear"),  # this and the next were not planned
    ("shear-own", "shuffle-own"),
]


def print_trainings(trials: pd.DataFrame, cell: str) -> None:
    """Print a line per arm of a task, then the comparisons of two arms."""
    confirmed = trials[(trials["cell"] == cell) & (trials["stage"] == "confirm")]
    by_arm = {arm: own.set_index("seed") for arm, own in confirmed.groupby("rule", sort=False)}
    lines = []
    for arm, own in by_arm.items():
        line = {"arm": arm, "lr": f"{own['lr'].iloc[0]:g}"}
        for outcome, title in OUTCOMES.items():
            line[title] = f"{own[outcome].mean():.3f}"
            difference = own[outcome] - by_arm["grpo"][outcome]
            line[f"D, {title}"] = "" if arm == "grpo" else with_interval(difference)
        line["AUC before"] = compare.mean_of(own["before.auc"])
        line["weight"] = compare.mean_of(own["weight_mean"])
        line["share"] = compare.mean_of(own["ess"])
        lines.append(line)
    print(f"\n## Training, {cell}\n", *log.markdown(lines), sep="\n")
    lines = []
    for ours, other in PAIRS:
        if {ours, other} <= by_arm.keys():
            line = {"arms": f"{ours} less {other}"}
            for outcome, title in OUTCOMES.items():
                difference = by_arm[ours][outcome] - by_arm[other][outcome]
                line[title] = with_interval(difference)
            lines.append(line)
    if lines:
        print("", *log.markdown(lines), sep="\n")


def print_tuning(trials: pd.DataFrame, cell: str) -> None:
    """Print each arm's mean training reward on the seeds of tuning, by learning rate."""
    tuned = trials[(trials["cell"] == cell) & (trials["stage"] == "tune")]
    by_rate = tuned.groupby(["rule", "lr"], sort=False)["curve"].mean().unstack()
    lines = []
    for arm, curves in by_rate.iterrows():
        lines.append({"arm": arm} | {f"{lr:g}": f"{curves[lr]:.3f}" for lr in sorted(curves.index)})
    print(f"\n## Tuning, {cell}\n", *log.markdown(lines), sep="\n")


def over_seeds(values: pd.Series, halves: pd.Series) -> str:
    """The mean over seeds with its 95% interval; of one or two, each with its 90% interval."""
    if len(values) > 2:
        return with_interval(values)
    pairs = zip(values, halves, strict=True)
    return ", ".join(f"{value:+.3f} ± {half:.3f}" for value, half in pairs)


def print_gradients(rows: pd.DataFrame, title: str, has_adam: bool = True) -> None:
    """Print a line per arm, the largest D first."""
    usual = rows[rows["arm"] == "grpo"].set_index("seed")["snr"]
    ratio = rollouts_needed(rows["seed"].map(usual), rows["snr"])
    lines = []
    for arm, own in rows.assign(ratio=ratio).groupby("arm"):
        line = {"arm": arm, "cos": f"{own['cos'].mean():.3f}"}
        line["D"] = over_seeds(own["D"], own["half"])
        if has_adam:
            line["D, Adam's metric"] = over_seeds(own["D_adam"], own["half_adam"])
        line["rollouts"] = f"{own['ratio'].median():.1f}".replace("nan", "-")
        lines.append((own["D"].mean(), line))
    lines.sort(key=lambda pair: -pair[0])
    print(f"\n## Gradients, {title}\n", *log.markdown([line for _, line in lines]), sep="\n")


def energy_lines(rows: pd.DataFrame) -> list[dict[str, str]]:
    """A line per task and part of a rollout: means over seeds, with the weights of SHEAR."""
    lines = []
    own = rows[rows["arm"] == "shear"]
    for (task, part), parts in own.groupby(["task", "part"], sort=False):
        means = parts[["energy", "share", "weight", "w2 share"]].mean()
        line = {"task": task, "part": part, "energy": f"{means['energy']:.2f}"}
        line |= {"share, %": f"{means['share']:.0f}", "weight": f"{means['weight']:.2f}"}
        lines.append(line | {"share of w² n, %": f"{means['w2 share']:.0f}"})
    return lines


for name in ("credit.jsonl", "credit-theory.jsonl"):
    trials = compare.trials_in(FOLDER / name)
    for cell in trials["cell"].unique():
        print_trainings(trials, cell)
        print_tuning(trials, cell)

gradient_rows = files.read_lines(FOLDER / "credit-gradients.jsonl")
# the first rows were written before the column
gradients = pd.DataFrame([{"toy_lines": 5} | row for row in gradient_rows])
for (task, lines), rows in gradients.groupby(["task", "toy_lines"], sort=False):
    title = f"{task}, {lines:.0f} lines, {rows['seed'].nunique()} seeds"
    print_gradients(rows, title, has_adam=(task, lines) not in OLD_SCALE)
archived = pd.DataFrame(files.read_lines(FOLDER / "credit-archived.jsonl"))
print_gradients(archived, "removed rules")

energies = pd.DataFrame(files.read_lines(FOLDER / "credit-energy.jsonl"))
print("\n## Energy\n", *log.markdown(energy_lines(energies)), sep="\n")
