"""The paper's figures on the distance (arXiv 2604.23318), each a function: its statistic, its picture.

    fig_1a_position, fig_1b_changes, fig_3_separation, fig_9_depth     of a table of spans
    fig_10_accuracies, fig_11_matrices                                 of verdicts, of distances

A table of spans is {"rollout", "number", "right", "end", "distance", "success"}, each (n,) float64. It has one
row for each prefix with a success, the `number`-th of its rollout, which ends at token `end`; the rows of a rollout are
adjacent and in order. Every function writes `path`, a PNG, and returns its numbers. None stands for a number that is
not defined, such as the correlation of constants. Blue is right and orange is wrong, colours that colour-blind readers
can tell apart.

How to read Fig. 1(a): continuations are drawn from the policy that drew the prefix. So over all rollouts the mean
continuation success at length t is the accuracy, up to chance, for every t (the tower property). It moves with t only
because shorter rollouts, often right ones, leave the mean, and because only mixed groups are kept: given that, an easy
problem's success drifts down and a hard one's up. Right and wrong rollouts apart move most; they are drawn beside it.

Left out: the paper's case studies; the figures about training, which `report.py` makes; ours against
the true first error, in `truth.py`.
"""

from pathlib import Path

import numpy as np
from matplotlib import rcParams
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.stats import rankdata, spearmanr

from credit.measures import auc

RIGHT, WRONG, INK, FAINT = "#0072B2", "#D55E00", "#222222", "#999999"
SIDES = ((1, RIGHT, "right"), (0, WRONG, "wrong"))  # value in a table of spans, colour, name
HEAT = LinearSegmentedColormap.from_list("heat", ["#FFFFFF", "#FDE3CC", "#F4A259", WRONG, "#7F2704"])
DISTANCE = "local distance / mean norm"
SUCCESS = "continuation success"
SHARE = f"{SUCCESS}, share"  # as an axis has it
DPI = 160
rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
rcParams.update({"legend.frameon": False, "legend.fontsize": 8})


def correlation(x: np.ndarray, y: np.ndarray) -> dict[str, float | int | None]:
    """Spearman's rho of x (n,) and y (n,) with its p-value."""
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return {"spearman": None, "p": None, "n": len(x)}
    result = spearmanr(x, y)
    return {"spearman": float(result.statistic), "p": float(result.pvalue), "n": len(x)}


def equal_bins(values: np.ndarray, count: int) -> np.ndarray:
    """Bin (n,) int of each value, from 0, in order: about equally many in each, equal values in the same one."""
    share = (rankdata(values) - 0.5) / len(values)  # of the values that are smaller, half of the equal ones included
    return np.unique((share * count).astype(int), return_inverse=True)[1]


def sheet(width: float, height: float, rows: int = 1, columns: int = 1, **options):
    """A figure and its axes. (Not pyplot: needs no display and no backend.)"""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def save_png(figure: Figure, path: Path) -> None:
    """A PNG of DPI dots an inch."""
    figure.savefig(path, dpi=DPI)


def mean_by(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error (k,) of the values at each of the wanted keys; NaN where there are too few."""
    own = [values[keys == key] for key in wanted]
    means = [chosen.mean() if len(chosen) else np.nan for chosen in own]
    errors = [chosen.std(ddof=1) / len(chosen) ** 0.5 if len(chosen) > 1 else np.nan for chosen in own]
    return np.array(means), np.array(errors)


def rows_where(kept: np.ndarray, spans: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows of a table of spans that are `kept`, (n,) bool."""
    return {name: column[kept] for name, column in spans.items()}


# ---- of spans -------------------------------------------------------------------------------------------------


def fig_1a_position(spans: dict[str, np.ndarray], path: Path, least: int = 8) -> dict:
    """Fig. 1(a): mean continuation success and mean local distance of the prefixes of each length; Spearman's rho.

    Lengths with fewer than `least` prefixes are left out.
    """
    ends, counts = np.unique(spans["end"], return_counts=True)
    ends = ends[counts >= least]
    figure, (left, right) = sheet(10, 3.8, 1, 2)
    twin = left.twinx()
    twin.spines["right"].set_visible(True)
    means = {}
    for axes, name, colour, label in ((left, "success", "#009E73", SHARE), (twin, "distance", "#7B3294", DISTANCE)):
        means[name], error = mean_by(spans["end"], spans[name], ends)
        axes.plot(ends, means[name], "o-", color=colour, ms=4, lw=2)
        axes.fill_between(ends, means[name] - error, means[name] + error, color=colour, alpha=0.2, lw=0)
        axes.set_ylabel(label, color=colour)
        axes.tick_params(axis="y", labelcolor=colour)
    left.set_ylim(0, 1)
    result = correlation(means["success"], means["distance"])
    rho = "none" if result["spearman"] is None else f"{result['spearman']:.2f}"
    left.set(xlabel="length of the prefix, tokens", title=f"Fig. 1(a): all rollouts, Spearman {rho}")
    result |= {"ends": ends.tolist(), "success": means["success"].tolist(), "distance": means["distance"].tolist()}
    for side, colour, name in SIDES:
        own = rows_where(spans["right"] == side, spans)
        for column, style in (("success", "o-"), ("distance", "s--")):
            mean, _ = mean_by(own["end"], own[column], ends)
            right.plot(ends, mean, style, color=colour, ms=4, label=f"{column} of {name} rollouts")
            result[f"{column}_{name}"] = [None if np.isnan(value) else value for value in mean.tolist()]
    right.set(xlabel="length of the prefix, tokens", ylabel=f"{SHARE};\n{DISTANCE}", ylim=(0, None))
    right.set_title("Right and wrong rollouts apart")
    figure.legend(loc="outside lower right", ncols=2)
    save_png(figure, path)
    return result


def changes(spans: dict[str, np.ndarray], least: float) -> tuple[np.ndarray, np.ndarray]:
    """Changes of success and distance from a rollout's prefix to its next, where success changes by `least` or more.

    Prefixes two strides apart are no neighbours, where the one between has no success.
    """
    next_one = (np.diff(spans["rollout"]) == 0) & (np.diff(spans["number"]) == 1)
    success = np.diff(spans["success"])[next_one]
    distance = np.diff(spans["distance"])[next_one]
    kept = np.abs(success) >= least - 1e-9
    return success[kept], distance[kept]


def fig_1b_changes(spans: dict[str, np.ndarray], path: Path, least: float = 1 / 16) -> dict:
    """Fig. 1(b): stride-wise changes of success and distance, events with |change| >= 1/16; rho, p-value, count.

    1/16 is one continuation of the paper's 16, the smallest change that they can show; the difference of two such
    shares has a standard deviation of up to 0.18. So `at_least_quarter` has the same of changes of 1/4 and more.
    """
    success, distance = changes(spans, least)
    result = correlation(success, distance)
    figure, axes = sheet(5.4, 4.2)
    jitter = np.random.default_rng(0).uniform(-least / 3, least / 3, len(success))  # equal changes hide each other
    axes.scatter(success + jitter, distance, s=14, color=np.where(success < 0, WRONG, RIGHT), alpha=0.45, lw=0)
    if len(success) >= 12:
        sixth = equal_bins(success, 6)
        mean_success, _ = mean_by(sixth, success, np.unique(sixth))
        mean_distance, _ = mean_by(sixth, distance, np.unique(sixth))
        axes.plot(mean_success, mean_distance, "-o", color=INK, lw=2, ms=6, label="mean of a sixth of the events")
        axes.legend()
    axes.axhline(0, color=FAINT, lw=0.8, zorder=0)
    axes.axvline(0, color=FAINT, lw=0.8, zorder=0)
    rho = "Spearman not defined" if result["spearman"] is None else f"Spearman {result['spearman']:.2f}"
    axes.set(xlabel=f"change of {SHARE}", ylabel=f"change of {DISTANCE}")
    axes.set_title(f"Fig. 1(b): {result['n']} local changes, {rho}")
    save_png(figure, path)
    success, distance = changes(spans, 0.25)
    return result | {"least": least, "at_least_quarter": correlation(success, distance)}


def fig_3_separation(spans: dict[str, np.ndarray], path: Path, bins: int = 8) -> dict:
    """Fig. 3: within each distance bin, the AUC of continuation success for spans of right against wrong rollouts.

    Also the two densities of success in each bin, one level for each share of 16; counts, mean distance and mean
    position (`end`), as late spans are far and decided; and, for both kinds of rollouts apart, how success goes with
    distance. The bins hold about equally many spans.
    """
    bin_of = equal_bins(spans["distance"], bins)  # (n,)
    levels = np.arange(18) / 16 - 1 / 32
    result = separation(spans, bin_of, levels) | within(spans)
    bins = len(result["auc"])  # fewer where many distances are equal
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.7, 1])
    dots, line = upper.subplots(1, 2)
    low = lower.subplots(1, bins, sharey=True, squeeze=False)[0]
    jitter = np.random.default_rng(0).uniform(0.004, 0.027, len(bin_of))
    jittered = spans["success"] + np.where(spans["right"] == 1, jitter, -jitter)  # so neither side hides the other
    for side, colour, name in SIDES:
        kept = spans["right"] == side
        dots.scatter(spans["distance"][kept], jittered[kept], s=7, lw=0, alpha=0.35, color=colour)
        dots.scatter([], [], color=colour, label=f"span of a {name} rollout ({kept.sum():,})")
    upper.legend(loc="outside lower left", ncols=2)
    dots.set(xlabel=DISTANCE, ylabel=SHARE, title="Fig. 3: every span, right just above wrong")
    line.plot(range(1, bins + 1), np.array(result["auc"], dtype=float), "o-", color=INK, lw=2)
    line.axhline(0.5, color=FAINT, lw=1, ls=":")
    line.set(xlabel="distance bin, near to far, about equally many spans each", ylim=(0.4, 1.02), ylabel="AUC")
    line.set_title("AUC of success, right against wrong rollouts")
    for bin, axes in enumerate(low):
        axes.stairs(result["density_right"][bin], levels, fill=True, color=RIGHT)
        axes.stairs(-np.array(result["density_wrong"][bin]), levels, fill=True, color=WRONG)
        axes.set_title(f"bin {bin + 1}\n{result['right'][bin]} right, {result['wrong'][bin]} wrong", fontsize=8)
        axes.axhline(0, color=INK, lw=0.8)
    low[0].set_ylabel("share of spans,\nwrong | right")
    low[0].yaxis.set_major_formatter(lambda height, _: f"{abs(height):g}")
    lower.supxlabel(SHARE, fontsize=10)
    save_png(figure, path)
    return result


def separation(spans: dict[str, np.ndarray], bin_of: np.ndarray, levels: np.ndarray) -> dict[str, list]:
    """The numbers of Fig. 3, one for each bin; densities are histograms with edges `levels`."""
    result = {name: [] for name in ("auc", "right", "wrong", "density_right", "density_wrong")}
    bins = np.unique(bin_of)
    for bin in bins:
        right = spans["success"][(bin_of == bin) & (spans["right"] == 1)]
        wrong = spans["success"][(bin_of == bin) & (spans["right"] == 0)]
        result["auc"].append(auc(right, wrong))
        for name, success in (("right", right), ("wrong", wrong)):
            share = np.histogram(success, levels)[0] / max(1, len(success))
            result[name].append(len(success))
            result[f"density_{name}"].append(share.tolist())
    for name in ("distance", "end"):
        result[name] = mean_by(bin_of, spans[name], bins)[0].tolist()
    return result


def within(spans: dict[str, np.ndarray]) -> dict[str, dict]:
    """Success against distance, among the spans of right rollouts and among those of wrong ones."""
    result = {}
    for side, _, name in SIDES:
        own = rows_where(spans["right"] == side, spans)
        result[f"within_{name}"] = correlation(own["distance"], own["success"])
    return result


def fig_9_depth(spans: dict[str, np.ndarray], path: Path, bins: int = 4) -> dict:
    """Fig. 9: success against distance within position bins, so that depth alone cannot make the relation.

    Of each of (about) `bins` position bins: rho of the two, of all spans and of right and wrong rollouts' apart, and
    mean success by quarter of distance; the AUC by which distance tells wrong rollouts from right ones is added.
    """
    bin_of = equal_bins(spans["end"], bins)  # (n,)
    last = bin_of.max()
    figure, (left, right) = sheet(9.6, 3.8, 1, 2)
    result, names, shades = [], [], []
    for bin in range(last + 1):
        own = rows_where(bin_of == bin, spans)
        quarter = equal_bins(own["distance"], 4)
        means = mean_by(quarter, own["success"], np.unique(quarter))[0].tolist()
        numbers = {"from": int(own["end"].min()), "to": int(own["end"].max()), "means": means}
        numbers["auc_distance"] = auc(own["distance"][own["right"] == 0], own["distance"][own["right"] == 1])
        result.append(numbers | correlation(own["distance"], own["success"]) | within(own))
        names.append(f"{numbers['from']}-{numbers['to']}")
        shades.append(HEAT(0.4 + 0.6 * bin / max(1, last)))
        left.plot(range(1, len(means) + 1), means, "o-", color=shades[bin], lw=2, label=f"tokens {names[bin]}")
    places = np.arange(last + 1)
    right.bar(places, [numbers["spearman"] or 0 for numbers in result], color=shades, width=0.6, label="all")
    for offset, (_, colour, name) in zip((-0.15, 0.15), SIDES, strict=True):
        rhos = np.array([numbers[f"within_{name}"]["spearman"] for numbers in result], dtype=float)
        right.scatter(places + offset, rhos, color=colour, s=42, label=f"{name} rollouts")
    right.set_xticks(places, names)
    right.legend()
    right.axhline(0, color=FAINT, lw=0.8)
    left.set(xlabel="quarter of distance, near to far", ylabel=f"mean {SHARE}", ylim=(0, 1), xticks=range(1, 5))
    left.set_title("Fig. 9: at equal depth")
    left.legend(title="prefix ends at", title_fontsize=8)
    right.set(xlabel="prefix ends at token", ylabel="Spearman's rho", title=f"Distance and {SUCCESS}, by depth")
    save_png(figure, path)
    return {"bins": result}


# ---- of groups ------------------------------------------------------------------------------------------------


def fig_10_accuracies(accuracies: np.ndarray, path: Path) -> dict:
    """Fig. 10: how many groups have each accuracy (n,); those at 0 and at 1 are not retained."""
    values, counts = np.unique(np.round(accuracies, 6), return_counts=True)
    mixed = (values > 0) & (values < 1)
    figure, axes = sheet(5.4, 3.4)
    width = 0.8 * np.diff(values, append=values[-1] + 0.125).min()
    for kept, colour, name in ((mixed, RIGHT, "mixed: kept"), (~mixed, FAINT, "all wrong, or all right")):
        bars = axes.bar(values[kept], counts[kept], width, color=colour, label=f"{name} ({counts[kept].sum()})")
        axes.bar_label(bars, fontsize=8)
    axes.set(xlabel="share of right rollouts in a group", ylabel="number of groups", title="Fig. 10: group accuracies")
    axes.set_xlim(-0.6 * width, 1 + 0.6 * width)
    axes.margins(y=0.25)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(ncols=2, loc="upper center")
    save_png(figure, path)
    share = float(counts[mixed].sum() / counts.sum())
    return {"mixed": share, "accuracies": values.tolist(), "groups": counts.tolist()}


def fig_11_matrices(pairs: dict[str, tuple[np.ndarray, list[int], list[int], int | None]], path: Path) -> dict:
    """Fig. 11: span-span distances of a right rollout to others, such as a wrong one and another right one.

    Of each pair: the matrix (K, L), the last tokens (K,) of the right rollout's spans and (L,) of the other's, and the
    first of the other's spans that shows its first error, if any. The numbers are the means of all distances and of
    the columns' minima.
    """
    highest = max(pair[0].max() for pair in pairs.values())
    figure, sheets = sheet(4.8 * len(pairs) + 0.6, 4.4, 1, len(pairs), squeeze=False)
    result = {}
    for column, (name, pair) in enumerate(pairs.items()):
        axes = sheets[0, column]
        matrix, row_ends, ends, error = pair
        image = axes.imshow(matrix, cmap=HEAT, vmin=0, vmax=highest, origin="lower", aspect="auto")
        step = max(1, len(ends) // 5)
        axes.set_xticks(range(0, len(ends), step), ends[::step])
        step = max(1, len(row_ends) // 5)
        axes.set_yticks(range(0, len(row_ends), step), row_ends[::step])
        axes.set(title=f"... {name}", xlabel="last token of its span", ylabel="last token of the right rollout's span")
        axes.spines[:].set_visible(False)
        if error is not None:
            axes.axvline(error - 0.5, color=INK, ls="--", lw=1.5)
            box = dict(fc="white", ec="none", alpha=0.85, pad=2)
            axes.text(error - 0.3, len(matrix) - 0.75, "first error", fontsize=9, color=INK, va="top", bbox=box)
        result[name] = {"mean": float(matrix.mean()), "mean_minimum": float(matrix.min(0).mean())}
    figure.colorbar(image, ax=sheets[0].tolist(), label="span-span distance / mean norm", shrink=0.9)
    figure.suptitle("Fig. 11: the spans of a right rollout against those of ...")
    save_png(figure, path)
    return result
