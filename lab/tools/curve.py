"""A run's curve: rewards on the left, token weights on the right.

python -m lab.tools.curve runs/NAME     # runs/NAME/curve.png
"""

import math
import sys
from pathlib import Path

import pandas as pd

from harness import files
from harness.config import TrainConfig

# Colours of figures: blue and orange, as on the page.
RIGHT = "#0072B2"
WRONG = "#D55E00"
INK = "#222222"
FAINT = "#999999"


def draw(folder: Path) -> Path:
    """Draw the curve of a run that has ended; raises BadInput."""
    rows = [files.with_nan(row) for row in files.read_lines(folder / "metrics.jsonl")]
    ends = {name: row[name] for row in rows for name in ("before", "after") if name in row}
    history = [row for row in rows if "step" in row]
    config = files.read_config(files.read_settings(folder / "config.json"))
    path = folder / "curve.png"
    plot(history, ends["before"], ends["after"], config, path)
    return path


def plot(history: list[dict], before: dict, after: dict, config: TrainConfig, path: Path) -> None:
    """Draw the run's curve: rewards on the left, token weights on the right.

    The left panel also has held-out accuracy and the share of groups without signal; the right one
    the weights' floor, which is Eq. (10) for equal spans.
    """
    # Not pyplot, which needs a backend. Imported here, so that only one rank waits for it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    rewards, weights = figure.subplots(1, 2)
    rows = pd.DataFrame(history)  # one per step, a column per metric
    steps = rows["step"]
    # where no token has an advantage the mean is 1, a number that was not measured
    rows["weight_mean"] = rows["weight_mean"].where(rows["equal_groups"] < 1)
    rewards.plot(steps, rows["reward"], color=INK, label="right, training batch")
    rewards.plot(steps, rows["equal_groups"], color=FAINT, label="groups without signal")
    for name, marker, colour in (("greedy", "o", RIGHT), ("sampled", "s", WRONG)):
        means, errors, _ = zip(before[name], after[name], strict=True)
        label = f"right, held out, {name}"
        rewards.errorbar([0, len(steps)], means, errors, fmt=marker, color=colour, label=label)
    # those of --reward may lie elsewhere
    limits = min(0, rows["reward"].min()), max(1, rows["reward"].max())
    rewards.set(ylabel="share", ylim=limits, title=f"{config.task} task")
    curves = {
        "weight_mean": ("all tokens", INK),
        "weight_before": ("wrong, before the first error", RIGHT),
        "weight_after": ("wrong, from it on", WRONG),
    }
    for name, (title, colour) in curves.items():
        if name in rows:
            weights.plot(steps, rows[name], color=colour, label=title)
    if "eps_over_nbar" in rows:
        floor = rows["eps_over_nbar"].mean() * math.log(config.shear.window)
        weights.axhline(floor, color=FAINT, ls="--", lw=1, label="floor, eps ln window")
    weights.axhline(0, color=FAINT, lw=0.5)
    weights.set(ylabel="mean token weight", title=f"{config.credit.method} weights")
    for axes in (rewards, weights):
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    print(draw(Path(sys.argv[1])))
