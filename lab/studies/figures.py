"""The paper's figures on the distance (arXiv 2604.23318), each a function: numbers and a picture.

    fig_1a_position, fig_1b_changes, fig_3_separation, fig_9_depth  of a table of spans
    fig_10_accuracies                                               of verdicts

A table of spans has a row for each prefix that was continued, and the rows of a rollout are in
order. Its columns are float64 (`prefixes.SPANS`):
    rollout    number of the rollout, over all groups
    number     number of the prefix in its rollout, from 0
    right      1 if the rollout is right, else 0
    end        length of the prefix, tokens
    distance   its local distance, in units of nbar
    success    share of right answers among its continuations

Every function draws the picture at `path`; those of the paper's figures return their numbers. None
stands for a number that is not defined, such as the correlation of constants. Blue is right and
orange is wrong, colours that colour-blind readers can tell apart.

How to read Fig. 1(a): continuations are drawn from the policy that drew the prefix. So over all
rollouts the mean continuation success at length t is the accuracy, up to chance, for every t (the
tower property). It moves with t only because shorter rollouts, often right ones, leave the mean,
and because only mixed groups are kept: given that, an easy problem's success drifts down and a hard
one's up.

Left out: the paper's case studies and Fig. 11, the distances of two rollouts' spans, which
`lab.tools.page` shows one by one; a run's curve.png, which `harness/log.py` draws.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor

from credit.measures import auc
from lab.tools.curve import FAINT, INK, RIGHT, WRONG

SIDES = {"right": RIGHT, "wrong": WRONG}  # name -> colour
# The two columns that are compared -> their axis labels.
LABELS = {"success": "continuation success, share", "distance": "local distance / mean norm"}
rcParams.update(
    {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "lines.linewidth": 2,
        "lines.markersize": 4,
        "savefig.dpi": 160,
    }
)
for name in ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"):
    rcParams[name] = INK


@contextmanager
def picture(path: Path, width: float, height: float, columns: int = 1) -> Iterator[Sequence[Axes]]:
    """Yield the panels of a figure, and save it at the end.

    It does without pyplot, so it needs neither a display nor a backend.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure.subplots(1, columns, squeeze=False)[0]
    figure.savefig(path)


def correlation(spans: pd.DataFrame) -> dict[str, float | int | None]:
    """Spearman's rho of success and distance, with its p-value."""
    both = spans[list(LABELS)]
    rho, p = None, None
    if len(both) >= 3 and both.nunique().min() > 1:
        rho, p = map(float, spearmanr(both))
    return {"spearman": rho, "p": p, "n": len(both)}


def correlations(spans: pd.DataFrame) -> dict:
    """The `correlation` of all spans, and as "within_right" and "within_wrong" of each side's."""
    result: dict = correlation(spans)
    for side in SIDES:
        result[f"within_{side}"] = correlation(rows_of(side, spans))
    return result


def equal_bins(values: pd.Series, count: int) -> pd.Series:
    """Bin of each value: bins count from 1 and hold about equally many values each.

    Bins follow the values' order, and equal values are in the same bin.
    """
    # the share of the values that are smaller, half of the equal ones included
    share = (values.rank() - 0.5) / len(values)
    bins = (share * count).astype(int)
    return bins.rank(method="dense").astype(int)  # renumbered without empty ones


def rows_of(side: str, spans: pd.DataFrame) -> pd.DataFrame:
    """The rows of the rollouts of a side, "right" or "wrong"."""
    return spans[spans["right"] == (side == "right")]


# ---- of spans ------------------------------------------------------------------------------------


def fig_1a_position(spans: pd.DataFrame, path: Path, least: int = 8) -> dict:
    """Fig. 1(a): mean success and local distance of the prefixes of each length; Spearman's rho.

    Lengths with fewer than `least` prefixes are left out.
    """
    by_end = spans.groupby("end")[list(LABELS)]
    means = by_end.mean()[by_end.size() >= least]
    with picture(path, 10, 3.8, 2) as panels:
        for axes, (name, label) in zip(panels, LABELS.items(), strict=True):
            axes.plot(means[name], "o-", color=INK)
            axes.set(xlabel="length of the prefix, tokens", ylabel=label, ylim=(0, None))
        panels[0].set_title("Fig. 1(a)")
    return correlation(means) | means.reset_index(names="ends").to_dict("list")


def changes(spans: pd.DataFrame, least: float) -> pd.DataFrame:
    """Changes of success and distance from a prefix to the next one of its rollout.

    Those are kept whose success changes by `least` or more, up to rounding. If a prefix is not in
    the table, the prefixes before and after it do not count as neighbours.
    """
    moved = spans.groupby("rollout")[["number", *LABELS]].diff()
    return moved[(moved["number"] == 1) & (moved["success"].abs() >= least - 1e-9)]


def fig_1b_changes(spans: pd.DataFrame, path: Path, least: float = 1 / 16) -> dict:
    """Fig. 1(b): changes of success and distance from prefix to prefix; rho, p-value, count.

    A change counts if success changes by 1/16 or more: one continuation of the paper's 16, the
    smallest change that they can show. (The difference of two such shares has a standard deviation
    of up to 0.18.)
    """
    moved = changes(spans, least)
    with picture(path, 5.4, 4.2) as (axes,):
        colours = np.where(moved["success"] < 0, WRONG, RIGHT)
        axes.scatter(moved["success"], moved["distance"], s=14, color=colours, alpha=0.45, lw=0)
        axes.set(xlabel=f"change of {LABELS['success']}", ylabel=f"change of {LABELS['distance']}")
        axes.set_title(f"Fig. 1(b): {len(moved)} local changes")
    return correlation(moved)


def fig_3_separation(spans: pd.DataFrame, path: Path, bins: int = 8) -> dict:
    """Fig. 3: per distance bin, the AUC of success, spans of right against wrong rollouts.

    The result also has the bins' mean distances, how many spans of each side they have, and the
    correlations of success and distance. The bins hold about equally many spans, and are fewer
    where many distances are equal.
    """
    bin_of = equal_bins(spans["distance"], bins)  # (n,)
    distances = spans["distance"].groupby(bin_of).mean()  # a value per bin
    result = correlations(spans) | {"distance": distances.tolist()}
    success = {}  # side -> for each bin, the successes of its spans
    with picture(path, 9.6, 4, 2) as (boxes, line):
        for shift, (side, colour) in zip((0.2, -0.2), SIDES.items(), strict=True):
            success[side] = [rows_of(side, spans[bin_of == n])["success"] for n in distances.index]
            result[side] = list(map(len, success[side]))
            boxes.boxplot(
                success[side],
                positions=distances.index + shift,
                widths=0.3,
                manage_ticks=False,
                patch_artist=True,
                boxprops={"fc": colour},
                medianprops={"color": "white"},
                label=f"spans of {side} rollouts",
            )
        result["auc"] = [
            auc_of(right, wrong)
            for right, wrong in zip(success["right"], success["wrong"], strict=True)
        ]
        line.plot(distances.index, np.array(result["auc"], dtype=float), "o-", color=INK)
        line.axhline(0.5, color=FAINT, lw=1, ls=":")
        bin_label = "distance bin, near to far, about equally many spans each"
        boxes.set(xlabel=bin_label, ylabel=LABELS["success"], title="Fig. 3: quartiles of each bin")
        boxes.legend()
        line.set(xlabel=bin_label, ylabel="AUC of success, right against wrong", ylim=(0.4, 1.02))
    return result


def auc_of(right: pd.Series, wrong: pd.Series) -> float | None:
    """`credit.measures.auc`; None where a side is empty."""
    sides: list[Tensor] = [torch.tensor(side.to_numpy()) for side in (right, wrong)]
    return auc(*sides) if all(map(len, sides)) else None


def fig_9_depth(spans: pd.DataFrame, path: Path, bins: int = 4) -> dict:
    """Fig. 9: success against distance within position bins, so that depth is held fixed.

    Each of (about) `bins` position bins has the correlations of the two, and the mean success by
    quarter of distance.
    """
    quarters = range(1, 5)
    result = []
    with picture(path, 5.4, 3.8) as (axes,):
        for _, own in spans.groupby(equal_bins(spans["end"], bins)):
            quarter_of = equal_bins(own["distance"], 4)
            means = own["success"].groupby(quarter_of).mean().reindex(quarters)
            first, last = int(own["end"].min()), int(own["end"].max())
            numbers = {"from": first, "to": last, "means": means.tolist()}
            result.append(numbers | correlations(own))
            axes.plot(means, "o-", label=f"prefix ends at {first}-{last}")
        axes.set(xlabel="quarter of distance, near to far", ylabel=f"mean {LABELS['success']}")
        axes.set(ylim=(0, 1), xticks=quarters, title="Fig. 9: at equal depth")
        axes.legend()
    return {"bins": result}


# ---- of groups -----------------------------------------------------------------------------------


def fig_10_accuracies(accuracies: pd.Series, path: Path) -> dict:
    """Fig. 10: how many groups have each accuracy (n,); those at 0 and at 1 are left out later."""
    values, counts = np.unique(np.round(accuracies, 6), return_counts=True)
    mixed = (values > 0) & (values < 1)
    share = float(counts[mixed].sum() / counts.sum())
    with picture(path, 5.4, 3.4) as (axes,):
        axes.bar(values, counts, 0.05, color=np.where(mixed, RIGHT, FAINT))
        axes.set(xlabel="share of right rollouts in a group", ylabel="number of groups")
        axes.set_title(f"Fig. 10: group accuracies, {share:.0%} mixed (blue)")
    return {"mixed": share, "accuracies": values.tolist(), "groups": counts.tolist()}
