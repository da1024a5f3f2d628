"""The paper's figures on the distance (arXiv 2604.23318), each a function: its statistic, its picture.

    fig_1a_position, fig_1b_changes, fig_3_separation, fig_9_depth     of a table of spans
    fig_10_accuracies, fig_11_matrices                                 of verdicts, of distances
    credit_placement, pooling_smear                                    ours: of credit against the true first error

A table of spans is {"rollout", "number", "right", "end", "distance", "success"}, each (n,) float64. It has one
row for each prefix with a success, the `number`-th of its rollout, which ends at token `end`; the rows of a rollout are
adjacent and in order. Every function writes `path`, a PNG, and returns its numbers. None stands for a number that is
not defined, such as the correlation of constants. Blue is right and orange is wrong, colours that colour-blind readers
can tell apart.

How to read Fig. 1(a): continuations are drawn from the policy that drew the prefix. So over all rollouts the mean
continuation success at length t is the accuracy, up to chance, for every t (the tower property). It moves with t only
because shorter rollouts, often right ones, leave the mean, and because only mixed groups are kept: given that, an easy
problem's success drifts down and a hard one's up. Right and wrong rollouts apart move most; they are drawn beside it.

Left out: the paper's case studies; the figures about training, which `report.py` makes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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
LENGTH = "length of the prefix, tokens"
DPI = 160
rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 8})


def correlation(x: np.ndarray, y: np.ndarray) -> dict[str, float | int | None]:
    """Spearman's rho of x (n,) and y (n,) with its p-value."""
    rho, p = None, None
    if len(x) >= 3 and np.ptp(x) > 0 and np.ptp(y) > 0:
        rho, p = map(float, spearmanr(x, y))
    return {"spearman": rho, "p": p, "n": len(x)}


def correlations(spans: dict[str, np.ndarray]) -> dict:
    """Success against distance, among all spans, and among those of right and of wrong rollouts."""
    result = correlation(spans["distance"], spans["success"])
    for side, _, name in SIDES:
        own = rows_where(spans["right"] == side, spans)
        result[f"within_{name}"] = correlation(own["distance"], own["success"])
    return result


def in_words(result: dict) -> str:
    """Spearman's rho for a title."""
    return "Spearman not defined" if result["spearman"] is None else f"Spearman {result['spearman']:.2f}"


def equal_bins(values: np.ndarray, count: int) -> np.ndarray:
    """Bin (n,) int of each value, from 0, in order: about equally many in each, equal values in the same one."""
    share = (rankdata(values) - 0.5) / len(values)  # of the values that are smaller, half of the equal ones included
    return np.unique((share * count).astype(int), return_inverse=True)[1]


@contextmanager
def drawn(path: Path, width: float, height: float, rows: int = 1, columns: int = 1, **options) -> Iterator:
    """The axes of a figure, which is then saved. (Not pyplot: needs no display and no backend.)"""
    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure.subplots(rows, columns, **options)
    save_png(figure, path)


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
    with drawn(path, 10, 3.8, 1, 2) as (left, right):
        twin = left.twinx()
        twin.spines["right"].set_visible(True)
        means = {}
        for axes, name, colour, label in ((left, "success", "#009E73", SHARE), (twin, "distance", "#7B3294", DISTANCE)):
            means[name], error = mean_by(spans["end"], spans[name], ends)
            axes.plot(ends, means[name], "o-", color=colour, ms=4, lw=2)
            axes.fill_between(ends, means[name] - error, means[name] + error, color=colour, alpha=0.2, lw=0)
            axes.set_ylabel(label, color=colour)
            axes.tick_params(axis="y", labelcolor=colour)
        result = correlation(means["success"], means["distance"]) | {"ends": ends.tolist()}
        result |= {name: values.tolist() for name, values in means.items()}
        left.set(xlabel=LENGTH, ylim=(0, 1), title=f"Fig. 1(a): all rollouts, {in_words(result)}")
        for side, colour, name in SIDES:
            own = rows_where(spans["right"] == side, spans)
            for column, style in (("success", "o-"), ("distance", "s--")):
                mean, _ = mean_by(own["end"], own[column], ends)
                right.plot(ends, mean, style, color=colour, ms=4, label=f"{column} of {name} rollouts")
                result[f"{column}_{name}"] = [None if np.isnan(value) else value for value in mean.tolist()]
        right.set(xlabel=LENGTH, ylabel=f"{SHARE};\n{DISTANCE}", ylim=(0, None), title="Right and wrong rollouts apart")
        right.figure.legend(loc="outside lower right", ncols=2)
    return result


def changes(spans: dict[str, np.ndarray], least: float) -> tuple[np.ndarray, np.ndarray]:
    """Changes of success and distance from a rollout's prefix to its next, where success changes by `least` or more.

    Prefixes two strides apart are no neighbours, where the one between has no success.
    """
    next_one = (np.diff(spans["rollout"]) == 0) & (np.diff(spans["number"]) == 1)
    success, distance = (np.diff(spans[name])[next_one] for name in ("success", "distance"))
    kept = np.abs(success) >= least - 1e-9
    return success[kept], distance[kept]


def fig_1b_changes(spans: dict[str, np.ndarray], path: Path, least: float = 1 / 16) -> dict:
    """Fig. 1(b): stride-wise changes of success and distance, events with |change| >= 1/16; rho, p-value, count.

    1/16 is one continuation of the paper's 16, the smallest change that they can show; the difference of two such
    shares has a standard deviation of up to 0.18. So `at_least_quarter` has the same of changes of 1/4 and more.
    """
    success, distance = changes(spans, least)
    result = correlation(success, distance)
    with drawn(path, 5.4, 4.2) as axes:
        jitter = np.random.default_rng(0).uniform(-least / 3, least / 3, len(success))  # equal changes hide each other
        axes.scatter(success + jitter, distance, s=14, color=np.where(success < 0, WRONG, RIGHT), alpha=0.45, lw=0)
        if len(success) >= 12:
            sixth = equal_bins(success, 6)
            means = [mean_by(sixth, values, np.unique(sixth))[0] for values in (success, distance)]
            axes.plot(*means, "-o", color=INK, lw=2, ms=6, label="mean of a sixth of the events")
            axes.legend()
        axes.axhline(0, color=FAINT, lw=0.8, zorder=0)
        axes.axvline(0, color=FAINT, lw=0.8, zorder=0)
        axes.set(xlabel=f"change of {SHARE}", ylabel=f"change of {DISTANCE}")
        axes.set_title(f"Fig. 1(b): {result['n']} local changes, {in_words(result)}")
    return result | {"least": least, "at_least_quarter": correlation(*changes(spans, 0.25))}


def fig_3_separation(spans: dict[str, np.ndarray], path: Path, bins: int = 8) -> dict:
    """Fig. 3: within each distance bin, the AUC of continuation success for spans of right against wrong rollouts.

    Also the two densities of success in each bin, histograms with a level for each share of 16; counts, mean distance
    and mean position (`end`), as late spans are far and decided; and how success goes with distance. The bins hold
    about equally many spans, and are fewer where many distances are equal.
    """
    bin_of = equal_bins(spans["distance"], bins)  # (n,)
    bins = bin_of.max() + 1
    levels = np.arange(18) / 16 - 1 / 32
    result = correlations(spans) | {"auc": []}
    result |= {name: mean_by(bin_of, spans[name], np.arange(bins))[0].tolist() for name in ("distance", "end")}
    for _, _, name in SIDES:
        result |= {name: [], f"density_{name}": []}
    for bin in range(bins):
        of_sides = []
        for side, _, name in SIDES:
            of_sides.append(spans["success"][(bin_of == bin) & (spans["right"] == side)])
            result[name].append(len(of_sides[-1]))
            share = np.histogram(of_sides[-1], levels)[0] / max(1, len(of_sides[-1]))
            result[f"density_{name}"].append(share.tolist())
        result["auc"].append(auc(*of_sides))
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


def fig_9_depth(spans: dict[str, np.ndarray], path: Path, bins: int = 4) -> dict:
    """Fig. 9: success against distance within position bins, so that depth alone cannot make the relation.

    Of each of (about) `bins` position bins: rho of the two, of all spans and of right and wrong rollouts' apart, and
    mean success by quarter of distance; the AUC by which distance tells wrong rollouts from right ones is added.
    """
    bin_of = equal_bins(spans["end"], bins)  # (n,)
    last = bin_of.max()
    result, names, shades = [], [], []
    with drawn(path, 9.6, 3.8, 1, 2) as (left, right):
        for bin in range(last + 1):
            own = rows_where(bin_of == bin, spans)
            quarter = equal_bins(own["distance"], 4)
            means = mean_by(quarter, own["success"], np.unique(quarter))[0].tolist()
            wrong, others = (own["distance"][own["right"] == side] for side in (0, 1))
            numbers = {"from": int(own["end"].min()), "to": int(own["end"].max()), "means": means}
            result.append(numbers | {"auc_distance": auc(wrong, others)} | correlations(own))
            names.append(f"{numbers['from']}-{numbers['to']}")
            shades.append(HEAT(0.4 + 0.6 * bin / max(1, last)))
            left.plot(range(1, len(means) + 1), means, "o-", color=shades[bin], lw=2, label=f"tokens {names[bin]}")
        left.set(xlabel="quarter of distance, near to far", ylabel=f"mean {SHARE}", ylim=(0, 1), xticks=range(1, 5))
        left.set_title("Fig. 9: at equal depth")
        left.legend(title="prefix ends at", title_fontsize=8)
        places = np.arange(last + 1)
        right.bar(places, [numbers["spearman"] or 0 for numbers in result], color=shades, width=0.6, label="all")
        for offset, (_, colour, name) in zip((-0.15, 0.15), SIDES, strict=True):
            rhos = np.array([numbers[f"within_{name}"]["spearman"] for numbers in result], dtype=float)
            right.scatter(places + offset, rhos, color=colour, s=42, label=f"{name} rollouts")
        right.axhline(0, color=FAINT, lw=0.8)
        right.set(xticks=places, xticklabels=names, xlabel="prefix ends at token", ylabel="Spearman's rho")
        right.set_title(f"Distance and {SUCCESS}, by depth")
        right.legend()
    return {"bins": result}


# ---- of groups ------------------------------------------------------------------------------------------------


def fig_10_accuracies(accuracies: np.ndarray, path: Path) -> dict:
    """Fig. 10: how many groups have each accuracy (n,); those at 0 and at 1 are not retained."""
    values, counts = np.unique(np.round(accuracies, 6), return_counts=True)
    mixed = (values > 0) & (values < 1)
    width = 0.8 * np.diff(values, append=values[-1] + 0.125).min()
    with drawn(path, 5.4, 3.4) as axes:
        for kept, colour, name in ((mixed, RIGHT, "mixed: kept"), (~mixed, FAINT, "all wrong, or all right")):
            bars = axes.bar(values[kept], counts[kept], width, color=colour, label=f"{name} ({counts[kept].sum()})")
            axes.bar_label(bars, fontsize=8)
        axes.set(xlabel="share of right rollouts in a group", ylabel="number of groups")
        axes.set(xlim=(-0.6 * width, 1 + 0.6 * width), title="Fig. 10: group accuracies")
        axes.margins(y=0.25)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(ncols=2, loc="upper center")
    share = float(counts[mixed].sum() / counts.sum())
    return {"mixed": share, "accuracies": values.tolist(), "groups": counts.tolist()}


def fig_11_matrices(pairs: dict[str, tuple[np.ndarray, list[int], list[int], int | None]], path: Path) -> dict:
    """Fig. 11: span-span distances of a right rollout to others, such as a wrong one and another right one.

    Of each pair: the matrix (K, L), the last tokens (K,) of the right rollout's spans and (L,) of the other's, and the
    first of the other's spans that shows its first error, if any. The numbers are the means of all distances and of
    the columns' minima.
    """
    highest = max(pair[0].max() for pair in pairs.values())
    result = {}
    with drawn(path, 4.8 * len(pairs) + 0.6, 4.4, 1, len(pairs), squeeze=False) as sheets:
        for axes, (name, pair) in zip(sheets[0], pairs.items(), strict=True):
            matrix, row_ends, ends, error = pair
            image = axes.imshow(matrix, cmap=HEAT, vmin=0, vmax=highest, origin="lower", aspect="auto")
            for set_ticks, labels in ((axes.set_xticks, ends), (axes.set_yticks, row_ends)):
                step = max(1, len(labels) // 5)
                set_ticks(range(0, len(labels), step), labels[::step])
            axes.set(xlabel="last token of its span", ylabel="last token of the right rollout's span")
            axes.set_title(f"... {name}")
            axes.spines[:].set_visible(False)
            if error is not None:
                axes.axvline(error - 0.5, color=INK, ls="--", lw=1.5)
                box = dict(fc="white", ec="none", alpha=0.85, pad=2)
                axes.text(error - 0.3, len(matrix) - 0.75, "first error", fontsize=9, color=INK, va="top", bbox=box)
            result[name] = {"mean": float(matrix.mean()), "mean_minimum": float(matrix.min(0).mean())}
        axes.figure.colorbar(image, ax=sheets[0].tolist(), label="span-span distance / mean norm", shrink=0.9)
        axes.figure.suptitle("Fig. 11: the spans of a right rollout against those of ...")
    return result


# ---- of credit ------------------------------------------------------------------------------------------------


def credit_placement(results: dict[str, dict], ylabel: str, path: Path) -> None:
    """Each method's (or setting's) AUC against the true first error, and how far off its peak lies."""
    heights = range(len(results))
    from_error, step_alone = ([place[name] for place in results.values()] for name in ("auc", "auc_step"))
    with drawn(path, 10, 1.6 + 0.34 * len(results), 1, 2, sharey=True) as (left, right):
        left.hlines(heights, step_alone, from_error, color="#DDDDDD", lw=3, zorder=1)
        left.scatter(from_error, heights, color=RIGHT, s=42, zorder=2, label="from the first error on")
        left.scatter(step_alone, heights, color=WRONG, marker="D", s=30, zorder=2, label="wrong step alone")
        for height, place in enumerate(results.values()):
            if place["peak"]:
                low, middle, high = place["peak"]["quartiles"]
                right.plot([low, high], [height, height], color=RIGHT, lw=4, alpha=0.35, solid_capstyle="round")
                right.scatter(middle, height, color=RIGHT, s=42, zorder=2)
            else:
                right.text(0, height, "  no peak: one weight everywhere", color=FAINT, va="center", fontsize=8)
        position = next(iter(results.values()))["auc_position"]  # the same for all
        left.axvline(position, color=INK, ls="--", lw=1, label=f"position alone, {position:.2f}")
        left.axvline(0.5, color=FAINT, ls=":", lw=1)
        left.set(yticks=heights, yticklabels=list(results), xlabel="AUC of the token weights", xlim=(-0.02, 1.02))
        left.set(ylabel=ylabel, title="Do weights find the true first error?")
        left.invert_yaxis()
        left.figure.legend(loc="outside lower left", ncols=3)
        right.axvline(0, color=INK, ls="--", lw=1)
        right.set(xlabel="from first error to peak, tokens (median, middle half)")
        right.set_title("How far off does the largest weight lie?")


def pooling_smear(curves: dict[str, list[float | None]], window: int, path: Path) -> dict:
    """Mean weight by token offset from the wrong step's last token, by pooling; where half is risen.

    A curve (2 r + 1,) has offsets -r to r. Its base is its largest value where no span reaches the wrong step's end, w
    tokens ahead and more, its top its largest in the w tokens after it; None where a curve lacks these.
    """
    result = {}
    with drawn(path, 6.4, 3.8) as axes:
        for pooling, curve in curves.items():
            values = np.array(curve, dtype=float)  # None becomes NaN
            offsets = np.arange(len(values)) - len(values) // 2
            known = ~np.isnan(values)
            before = known & (offsets <= -window)
            after = known & (offsets > 0) & (offsets <= window)
            result[pooling] = {"half_risen": None, "offsets": offsets.tolist(), "weights": curve}
            if before.any() and after.any():
                base, top = values[before].max(), values[after].max()
                risen = known & (offsets > -window) & (values >= (base + top) / 2)
                result[pooling] |= {"base": float(base), "top": float(top), "half_risen": int(offsets[risen].min())}
            colour = {"max": WRONG, "mean": RIGHT}[pooling]
            axes.plot(offsets, values, "o-", color=colour, ms=4, lw=2, label=f"{pooling} pooling")
        axes.axvline(0, color=INK, ls="--", lw=1)
        axes.axvspan(1 - window, 0, color=FAINT, alpha=0.15, lw=0, label="w - 1 tokens ahead")
        axes.set(xlabel="offset from the first wrong step's last token, tokens", ylabel="mean weight", ylim=(0, None))
        axes.set_title("How far ahead of the true first error weights rise")
        axes.legend(fontsize=9, loc="upper left")
    return result
