"""Print the tables and outcomes of gradients.md; run it as `-m lab.records.gradients`.

Its last lines compare D with D in Adam's metric, by the rows of credit.md.
"""

from lab.records.help import show_help

show_help(__doc__)

from pathlib import Path

import pandas as pd
from scipy import stats

from harness import files, log
from lab.records.archived import marked
from lab.studies import compare
from lab.studies.alignment import rollouts_needed

FOLDER = Path(__file__).parent
BELOW, ABOVE = -0.002, 0.0015  # D of the rules that the test rules out, and of those it favours

rows = pd.read_json(FOLDER / "gradients.jsonl", lines=True)
rows["arm"] = rows["arm"].replace(compare.NOW_CALLED)
trained = []  # each file's D of the curve, paired by seed
for name in ("compare", "compare-rules", "compare-newest"):
    trials = pd.read_json(FOLDER / f"{name}.jsonl", lines=True)
    trials = trials[trials["stage"] == "confirm"]
    trials["curve"] = [pd.Series(rewards, dtype=float).mean() for rewards in trials["rewards"]]
    curves = trials.pivot_table("curve", "seed", "rule")
    trained.append(curves.sub(curves["grpo"], axis=0))
recorded = pd.concat(trained).drop(columns="grpo").mean()

trials = compare.trials_in(FOLDER / "gradients-tuned.jsonl")
outcomes = {}  # rule -> its outcomes by seed
changes = {}  # rule -> its D of the curve
lines = []
for rule in trials["rule"].unique():
    outcomes[rule] = compare.outcomes_of(trials, trials["cell"][0], rule)
    line = {"method": rule}
    for column, outcome in {"curve": "curve", "held out": "sampled"}.items():
        difference = outcomes[rule][outcome] - outcomes["grpo"][outcome]
        line[column] = f"{outcomes[rule][outcome].mean():.3f}"
        line[f"D, {column}"] = "" if rule == "grpo" else compare.with_interval(difference)
    changes[rule] = (outcomes[rule] - outcomes["grpo"])["curve"].mean()
    lines.append(line)
del changes["grpo"]
at_start = rows[rows["policy"] == "start, baselines"].groupby("arm")["D"].mean()
rank = stats.spearmanr(list(changes.values()), at_start[list(changes)]).statistic
recorded = recorded.combine_first(pd.Series(changes))
print(*log.markdown(lines), f"{len(changes)} rules: Spearman {rank:.2f}", sep="\n")
for ours, other in (
    ("finepo", "finepo-random"),
    ("opo-shear", "shear"),
    ("opo-energy", "opo-shear"),
    ("otb", "opo-energy"),
):
    difference = outcomes[ours] - outcomes[other]
    held_out = compare.with_interval(difference["sampled"])
    print(f"{ours} less {other}: {compare.with_interval(difference['curve'])}; held out {held_out}")

for policy, own in rows.groupby("policy", sort=False):
    usual = own[own["arm"] == "grpo"].set_index("seed")["snr"]
    own = own.assign(ratio=rollouts_needed(own["seed"].map(usual), own["snr"]))
    means = own.groupby("arm").agg(
        cos=("cos", "mean"),
        D=("D", "mean"),
        direction=("direction", "mean"),
        ratio=("ratio", "median"),
    )
    means["below"] = own[own["D"] < 0].groupby("arm").size()
    lines = []
    for arm, row in means.sort_values("D", ascending=False).iterrows():
        line = {"arm": marked(arm), "cos": f"{row['cos']:.3f}", "D": f"{row['D']:+.3f}"}
        line |= {"seeds below": f"{row['below']:.0f}".replace("nan", "0")}
        line |= {"direction": f"{row['direction']:.2f}", "rollouts": f"{row['ratio']:.1f}"}
        line["D of the curve"] = f"{recorded[arm]:+.3f}" if arm in recorded else ""
        lines.append(line)
    print(f"\n{policy}\n", *log.markdown(lines), sep="\n")
    both = means.join(recorded.rename("recorded"), how="inner")
    rank = stats.spearmanr(both["D"], both["recorded"]).statistic
    linear = stats.pearsonr(both["D"], both["recorded"]).statistic
    print(f"\n{len(both)} rules: Spearman {rank:.2f}, Pearson {linear:.2f}")

of_words = pd.read_json(FOLDER / "gradients-words.jsonl", lines=True)
of_words["arm"] = of_words["arm"].replace(compare.NOW_CALLED)
lines = []
usual = of_words[of_words["arm"] == "grpo"].set_index("seed")["snr"]
for arm, own in of_words.groupby("arm"):
    own = own.set_index("seed")
    line = {"arm": arm, "cos": f"{own['cos'].mean():.3f}", "D": compare.with_interval(own["D"])}
    line["direction"] = f"{own['direction'].mean():.2f}"
    line["rollouts"] = f"{rollouts_needed(usual, own['snr']).median():.1f}"
    lines.append(line)
lines.sort(key=lambda line: line["cos"], reverse=True)
print("\nSmolLM2\n", *log.markdown(lines), sep="\n")

in_both = files.read_lines(FOLDER / "credit-gradients.jsonl")
in_both += files.read_lines(FOLDER / "credit-archived.jsonl")
measured = pd.DataFrame(in_both)
measured = measured[(measured["task"] == "embedded") & (measured["seed"] == 0)]
measured = measured[measured["arm"] != "sdpo"]  # at mix=0; it was trained at mix=0.9
print("\nThe screen, seed 0")
for metric in ("D", "D_adam"):
    means = measured.groupby("arm")[metric].mean()
    both = pd.DataFrame({"D": means, "trained": recorded}).dropna()
    below = both[both["D"] < BELOW]
    above = both[both["D"] > ABOVE]
    rank = stats.spearmanr(both["D"], both["trained"]).statistic
    print(
        f"{metric}: of {len(below)} rules below {BELOW} {(below['trained'] > 0).sum()} trained "
        f"better than grpo, of {len(above)} above {ABOVE} {(above['trained'] > 0).sum()}; "
        f"{len(both)} rules, Spearman {rank:.2f}"
    )
