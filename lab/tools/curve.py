"""A run's curve: rewards on the left, token weights on the right.

    python -m lab.tools.curve runs/NAME     # runs/NAME/curve.png

It reads config.json, metrics.jsonl and samples.jsonl, also of a run that goes on, was interrupted
or was resumed. The left panel has the reward, held-out accuracy and the share of groups without
signal. The right one has the mean token weight, the weights before and after the first error in the
rollouts of samples.jsonl (one group per step, or all with `--keep-samples`), and the floor of the
weights, which is Eq. (10) for equal spans.
"""

import math
import statistics
import sys
from pathlib import Path

import tyro

from base import files
from base.errors import BadInput
from lab.tools.command import command, packages

# Colours of figures: blue and orange, as on the page.
RIGHT = "#0072B2"
WRONG = "#D55E00"
INK = "#222222"
FAINT = "#999999"


def draw(run: tyro.conf.Positional[Path]) -> None:
    """Draw curve.png, the curve of the run in a folder."""
    settings = files.config_of(run)
    if settings is None:
        raise BadInput(f"{run}: is no run of train.py, which has a config.json; give its folder")
    rows = [files.with_nan(row) for row in files.read_lines(run / "metrics.jsonl")]
    history = [row for row in rows if "step" in row]
    if not history:
        raise BadInput(f"{run / 'metrics.jsonl'}: has no step yet; wait for the first")
    sides = weights_by_side(files.read_lines(run / "samples.jsonl"))
    history = [sides.get(row["step"], {}) | row for row in history]
    evaluations = {}  # after how many steps -> accuracies
    done = 0
    for row in rows:
        done = row.get("step", done)
        for when in ("before", "after"):
            if when in row:
                evaluations[done] = row[when]
    path = run / "curve.png"
    plot(history, evaluations, settings, path)
    print(path)


def weights_by_side(samples: list[dict]) -> dict[int, dict[str, float]]:
    """By step, the mean weights before and after the true first errors of rollouts with credit."""
    weights: dict[int, dict[str, list[float]]] = {}
    for row in samples:
        if row["first_error"] and row["score"] == 0 and row["advantage"]:
            start = row["first_error"][0]
            (of_tokens,) = row["weights"].values()  # the run's rule
            of_step = weights.setdefault(row["step"], {"weight_before": [], "weight_after": []})
            of_step["weight_before"] += of_tokens[:start]
            of_step["weight_after"] += of_tokens[start:]
    means = {}
    for step, sides in weights.items():
        means[step] = {name: statistics.mean(side) for name, side in sides.items() if side}
    return means


def plot(history: list[dict], evaluations: dict[int, dict], settings: dict, path: Path) -> None:
    """Draw the rows of steps, and evaluations by the number of steps before them.

    A metric that a row lacks leaves a gap.
    """
    with packages():
        from matplotlib.figure import Figure  # not pyplot, which needs a backend
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    rewards, weights = figure.subplots(1, 2)
    steps = column(history, "step")
    reward = column(history, "reward")
    equal_groups = column(history, "equal_groups")
    rewards.plot(steps, reward, color=INK, label="right, training batch")
    rewards.plot(steps, equal_groups, color=FAINT, label="groups without signal")
    for name, marker, colour in (("greedy", "o", RIGHT), ("sampled", "s", WRONG)):
        means = [found[name][0] for found in evaluations.values()]
        errors = [found[name][1] for found in evaluations.values()]
        label = f"right, held out, {name}"
        rewards.errorbar(list(evaluations), means, errors, fmt=marker, color=colour, label=label)
    # those of --reward may lie elsewhere
    known = [value for value in reward if math.isfinite(value)]
    limits = min(0, *known, 0), max(1, *known, 1)
    rewards.set(ylabel="share", ylim=limits, title=f"{settings.get('task')} task")
    curves = {
        "weight_mean": ("all tokens", INK),
        "weight_before": ("wrong, before the first error", RIGHT),
        "weight_after": ("wrong, from it on", WRONG),
    }
    for name, (title, colour) in curves.items():
        values = column(history, name)
        if name == "weight_mean":
            # where no token has an advantage the mean is 1, a number that was not measured
            for place, share in enumerate(equal_groups):
                if share == 1:
                    values[place] = math.nan
        if any(map(math.isfinite, values)):
            weights.plot(steps, values, color=colour, label=title)
    eps = [value for value in column(history, "eps_over_nbar") if math.isfinite(value)]
    if eps and "window" in settings:
        floor = sum(eps) / len(eps) * math.log(settings["window"])
        weights.axhline(floor, color=FAINT, ls="--", lw=1, label="floor, eps ln window")
    weights.axhline(0, color=FAINT, lw=0.5)
    weights.set(ylabel="mean token weight", title=f"{settings.get('method')} weights")
    for axes in (rewards, weights):
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=160)


def column(rows: list[dict], name: str) -> list[float]:
    """A metric of each row, NaN where it is missing."""
    return [row.get(name, math.nan) for row in rows]


main = command("lab.tools.curve", draw)

if __name__ == "__main__":
    sys.exit(main())
