"""The paper's figures on the distance (arXiv 2604.23318), each a function: its statistic, its picture.

    fig_1a_position, fig_1b_changes, fig_3_separation, fig_9_depth     of a table of spans
    fig_10_accuracies, fig_11_matrices                                 of verdicts, of distances
    credit_placement, pooling_smear, shaded_rollout                    ours, where the first error is known

A table of spans is {"group", "rollout", "right", "end", "distance", "success"}, each (n,) float64: a row a prefix,
which ends at token `end`; rows of a rollout are adjacent and in order. Every function writes `path`, a PNG, and returns
its numbers; None stands for what cannot be told, such as the correlation of constants. Blue is right, orange wrong:
colours that nobody confuses.

One thing to know about Fig. 1(a). Continuations are drawn from the policy that drew the prefix, so over all rollouts
the mean continuation success of the prefixes of length t is, but for chance, the accuracy itself, whatever t is (the
tower property). It moves with t where rollouts leave, as right ones do that are shorter; and because only mixed groups
are kept: given that, an easy problem's success drifts down and a hard one's up. Right and wrong rollouts apart move
most, and are drawn beside it.

Left out: the paper's case studies, and every figure about training, which `report.py` and `compare.py` make.
"""

from pathlib import Path

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from scipy.stats import rankdata, spearmanr

from credit.measures import auc

RIGHT, WRONG, INK, FAINT = "#0072B2", "#D55E00", "#222222", "#999999"
HEAT = LinearSegmentedColormap.from_list("heat", ["#FFFFFF", "#FDE3CC", "#F4A259", WRONG, "#7F2704"])
DISTANCE = "local distance / mean norm"
SUCCESS = "continuation success"
DPI = 160


def correlation(x: np.ndarray, y: np.ndarray) -> dict[str, float | int | None]:
    """Spearman's rho of x (n,) and y (n,) with its p-value."""
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return {"spearman": None, "p": None, "n": len(x)}
    found = spearmanr(x, y)
    return {"spearman": float(found.statistic), "p": float(found.pvalue), "n": len(x)}


def equal_bins(values: np.ndarray, count: int) -> np.ndarray:
    """Bin (n,) int of each value, from 0, in order: about equally many in each, equal values in the same one."""
    share = (rankdata(values) - 0.5) / len(values)  # of the values that are smaller, half of the equal ones included
    return np.unique((share * count).astype(int), return_inverse=True)[1]


def sheet(width: float, height: float, rows: int = 1, columns: int = 1, **options):
    """A figure and its axes, plainly drawn. (Not pyplot: needs no display and no backend.)"""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, **options)
    for one in np.ravel(axes):
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """As a PNG that survives a projector."""
    figure.savefig(path, dpi=DPI)


def mean_by(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error (k,) of the values at each of the wanted keys; NaN where there are too few."""
    parts = [values[keys == key] for key in wanted]
    error = [part.std(ddof=1) / len(part) ** 0.5 if len(part) > 1 else np.nan for part in parts]
    return np.array([part.mean() if len(part) else np.nan for part in parts]), np.array(error)


# ---- of spans -------------------------------------------------------------------------------------------------


def fig_1a_position(spans: dict[str, np.ndarray], path: Path, least: int = 8) -> dict:
    """Fig. 1(a): mean continuation success and mean local distance of the prefixes of each length; Spearman's rho.

    Lengths with fewer than `least` prefixes are left out.
    """
    ends, counts = np.unique(spans["end"], return_counts=True)
    ends = ends[counts >= least]
    figure, (left, right) = sheet(10, 3.8, 1, 2)
    twin = left.twinx()
    twin.spines["top"].set_visible(False)
    means = {}
    for axes, name, colour, label in ((left, "success", "#009E73", SUCCESS), (twin, "distance", "#7B3294", DISTANCE)):
        means[name], error = mean_by(spans["end"], spans[name], ends)
        axes.plot(ends, means[name], "o-", color=colour, ms=4, lw=2)
        axes.fill_between(ends, means[name] - error, means[name] + error, color=colour, alpha=0.2, lw=0)
        axes.set_ylabel(label, color=colour)
        axes.tick_params(axis="y", labelcolor=colour)
    left.set_ylim(0, 1)
    found = correlation(means["success"], means["distance"])
    rho = "none" if found["spearman"] is None else f"{found['spearman']:.2f}"
    left.set(xlabel="prefix, tokens", title=f"Fig. 1(a): all rollouts, Spearman {rho}")
    apart = {}
    for side, colour, name in ((1, RIGHT, "right"), (0, WRONG, "wrong")):
        kept = spans["right"] == side
        for column, style in (("success", "o-"), ("distance", "s--")):
            mean, _ = mean_by(spans["end"][kept], spans[column][kept], ends)
            right.plot(ends, mean, style, color=colour, ms=4, label=f"{column} of {name} rollouts")
            apart[f"{column}_{name}"] = [None if np.isnan(each) else float(each) for each in mean]
    right.set(xlabel="prefix, tokens", ylim=(0, 1), title="the same, right and wrong rollouts apart")
    right.legend(fontsize=8, frameon=False, loc="best")
    save(figure, path)
    return {**found, "ends": ends.tolist(), **{name: mean.tolist() for name, mean in means.items()}, **apart}


def changes(spans: dict[str, np.ndarray], least: float) -> tuple[np.ndarray, np.ndarray]:
    """Changes of success and distance from a rollout's prefix to its next, where success changes by `least` or more."""
    same = np.diff(spans["rollout"]) == 0
    success, distance = (np.diff(spans[name])[same] for name in ("success", "distance"))
    kept = np.abs(success) >= least - 1e-9
    return success[kept], distance[kept]


def fig_1b_changes(spans: dict[str, np.ndarray], path: Path, least: float = 1 / 16) -> dict:
    """Fig. 1(b): stride-wise changes of success and distance, events with |change| >= 1/16; rho, p-value, count.

    1/16 is one continuation of the paper's 16, the smallest change that they can show; the difference of two such
    shares has a standard deviation of up to 0.18. So `at_least_quarter` has the same of changes of 1/4 and more.
    """
    success, distance = changes(spans, least)
    found = correlation(success, distance)
    figure, axes = sheet(5.4, 4.2)
    jitter = np.random.default_rng(0).uniform(-least / 3, least / 3, len(success))  # equal changes hide each other
    axes.scatter(success + jitter, distance, s=14, color=np.where(success < 0, WRONG, RIGHT), alpha=0.45, lw=0)
    if len(success) >= 12:
        bins = equal_bins(success, 6)
        means = [(success[bins == bin].mean(), distance[bins == bin].mean()) for bin in np.unique(bins)]
        axes.plot(*zip(*means, strict=True), "-o", color=INK, lw=2, ms=6, label="mean of a sixth of the events")
        axes.legend(fontsize=8, frameon=False)
    axes.axhline(0, color=FAINT, lw=0.8, zorder=0)
    axes.axvline(0, color=FAINT, lw=0.8, zorder=0)
    told = "no correlation to tell" if found["spearman"] is None else f"Spearman {found['spearman']:.2f}"
    axes.set(xlabel=f"change of {SUCCESS}", ylabel=f"change of {DISTANCE}")
    axes.set_title(f"Fig. 1(b): {found['n']} local changes, {told}")
    save(figure, path)
    return {**found, "least": least, "at_least_quarter": correlation(*changes(spans, 0.25))}


def fig_3_separation(spans: dict[str, np.ndarray], path: Path, bins: int = 8) -> dict:
    """Fig. 3: within each distance bin, the AUC of continuation success for spans of right against wrong rollouts.

    Also the two densities of success in each bin, one level for each share of 16; counts, mean distance and mean
    position (`end`), as late spans are far and decided; and, for both kinds of rollouts apart, how success goes with
    distance. The bins hold about equally many spans.
    """
    which = equal_bins(spans["distance"], bins)
    rows, levels = [], np.arange(18) / 16 - 1 / 32
    for bin in range(which.max() + 1):
        right, wrong = (spans["success"][(which == bin) & (spans["right"] == side)] for side in (1, 0))
        shares = [np.histogram(part, levels)[0] / max(1, len(part)) for part in (right, wrong)]
        rows.append((auc(right, wrong), len(right), len(wrong), *(share.tolist() for share in shares)))
    names = "auc right wrong density_right density_wrong".split()
    found = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    for name in ("distance", "end"):
        found[name] = [float(spans[name][which == bin].mean()) for bin in range(len(rows))]
    found |= within(spans)
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.7, 1])
    dots, line = upper.subplots(1, 2)
    low = lower.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    jitter = np.random.default_rng(0).uniform(-0.02, 0.02, len(which))
    for side, colour, name in ((0, WRONG, "wrong"), (1, RIGHT, "right")):
        kept = spans["right"] == side
        dots.scatter(spans["distance"][kept], (spans["success"] + jitter)[kept], s=7, lw=0, alpha=0.35, color=colour)
        dots.scatter([], [], color=colour, label=f"span of a {name} rollout ({kept.sum():,})")
    dots.legend(fontsize=8, frameon=True, framealpha=0.9, edgecolor="none", loc="center right")
    dots.set(xlabel=DISTANCE, ylabel=SUCCESS, title="Fig. 3: every span")
    known = [(bin + 1, value) for bin, value in enumerate(found["auc"]) if value is not None]
    line.plot(*zip(*known, strict=True) if known else ([], []), "o-", color=INK, lw=2)
    line.axhline(0.5, color=FAINT, lw=1, ls=":")
    line.set(xlabel="distance bin, near to far, about equally many spans each", ylim=(0.4, 1.02), ylabel="AUC")
    line.set_title(f"AUC of {SUCCESS}: right against wrong rollouts")
    for bin, axes in enumerate(low):
        for share, colour in ((rows[bin][3], RIGHT), (rows[bin][4], WRONG)):
            axes.stairs(share, levels, fill=True, color=colour, alpha=0.45)
        axes.set_title(f"bin {bin + 1}\n{rows[bin][1]} right, {rows[bin][2]} wrong", fontsize=8)
        axes.set_xlabel("success", fontsize=8)
    low[0].set_ylabel("share of spans")
    for axes in (dots, line, *low):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
    return found


def within(spans: dict[str, np.ndarray]) -> dict[str, dict]:
    """Success against distance, among the spans of right rollouts and among those of wrong ones."""
    sides = {"within_right": spans["right"] == 1, "within_wrong": spans["right"] == 0}
    return {name: correlation(spans["distance"][kept], spans["success"][kept]) for name, kept in sides.items()}


def fig_9_depth(spans: dict[str, np.ndarray], path: Path, bins: int = 4) -> dict:
    """Fig. 9: success against distance within position bins, so that depth alone cannot make the relation.

    Of each of (about) `bins` position bins: rho of the two, of all spans and of right and wrong rollouts' apart, and
    mean success by quarter of distance; the AUC by which distance tells wrong rollouts from right ones is added.
    """
    which = equal_bins(spans["end"], bins)
    figure, (left, right) = sheet(9.6, 3.8, 1, 2)
    shades, found = [HEAT(0.4 + 0.6 * bin / max(1, which.max())) for bin in np.unique(which)], []
    for bin in np.unique(which):
        part = {name: values[which == bin] for name, values in spans.items()}
        quarter = equal_bins(part["distance"], 4)
        means = [float(part["success"][quarter == each].mean()) for each in np.unique(quarter)]
        tells = auc(part["distance"][part["right"] == 0], part["distance"][part["right"] == 1])
        first, last = int(part["end"].min()), int(part["end"].max())
        found.append({"from": first, "to": last, "means": means, "auc_distance": tells})
        found[-1] |= correlation(part["distance"], part["success"]) | within(part)
        left.plot(range(1, len(means) + 1), means, "o-", color=shades[bin], lw=2, label=f"tokens {first}-{last}")
    names = [f"{each['from']}-{each['to']}" for each in found]
    right.bar(names, [each["spearman"] or 0 for each in found], color=shades, width=0.6, label="all")
    for side, colour, offset in (("right", RIGHT, -0.15), ("wrong", WRONG, 0.15)):
        rhos = [each[f"within_{side}"]["spearman"] for each in found]
        places = [(place + offset, rho) for place, rho in enumerate(rhos) if rho is not None]
        right.scatter(*zip(*places, strict=True) if places else ([], []), color=colour, s=42, label=f"{side} rollouts")
    right.legend(fontsize=8, frameon=False)
    right.axhline(0, color=FAINT, lw=0.8)
    left.set(xlabel="quarter of distance, near to far", ylabel=f"mean {SUCCESS}", ylim=(0, 1), xticks=range(1, 5))
    left.set_title("Fig. 9: at equal depth")
    left.legend(title="prefix ends at", fontsize=8, title_fontsize=8, frameon=False)
    right.set(xlabel="prefix ends at token", ylabel="Spearman", title=f"distance and {SUCCESS}, by depth")
    save(figure, path)
    return {"bins": found}


# ---- of groups ------------------------------------------------------------------------------------------------


def fig_10_accuracies(accuracies: np.ndarray, path: Path) -> dict:
    """Fig. 10: how many groups have each accuracy (n,); those at 0 and at 1 are not retained."""
    values, counts = np.unique(np.round(accuracies, 6), return_counts=True)
    mixed = (values > 0) & (values < 1)
    figure, axes = sheet(5.4, 3.4)
    width = 0.8 * (np.diff(values).min() if len(values) > 1 else 0.1)
    for kept, colour, name in ((mixed, RIGHT, "mixed: kept"), (~mixed, FAINT, "all wrong, or all right")):
        bars = axes.bar(values[kept], counts[kept], width, color=colour, label=f"{name} ({counts[kept].sum()})")
        axes.bar_label(bars, fontsize=8)
    axes.set(xlabel="share of right rollouts in a group", ylabel="groups", title="Fig. 10: group accuracies")
    axes.margins(y=0.25)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper center")
    save(figure, path)
    share = float(counts[mixed].sum() / counts.sum())
    return {"mixed": share, "accuracies": values.tolist(), "groups": counts.tolist()}


def fig_11_matrices(pairs: dict[str, tuple[np.ndarray, list[int], int | None]], path: Path) -> dict:
    """Fig. 11: span-span distances of a right rollout to a wrong one, and to another right one.

    Of each pair the matrix (K, L), the last tokens (L,) of its columns' spans, and the column in which the first error
    shows up, if there is one. Means of all distances, and of the columns' minima, are the numbers.
    """
    highest = max(matrix.max() for matrix, _, _ in pairs.values())
    figure, axes = sheet(4.8 * len(pairs) + 0.6, 4.4, 1, len(pairs), squeeze=False)
    for one, (name, (matrix, ends, error)) in zip(axes[0], pairs.items(), strict=True):
        image = one.imshow(matrix, cmap=HEAT, vmin=0, vmax=highest, origin="lower", aspect="auto")
        step = max(1, len(ends) // 5)
        one.set_xticks(range(0, len(ends), step), ends[::step])
        one.set(title=f"... {name}", xlabel="its span, by last token", yticks=[])
        one.spines[:].set_visible(False)
        if error is not None:
            one.axvline(error - 0.5, color=INK, ls="--", lw=1.5)
            box = dict(fc="white", ec="none", alpha=0.85, pad=2)
            one.text(error - 0.3, len(matrix) - 0.75, "first error", fontsize=9, color=INK, va="top", bbox=box)
    axes[0, 0].set_ylabel("span of a right rollout, early to late")
    figure.colorbar(image, ax=axes[0].tolist(), label="span-span distance / mean norm", shrink=0.9)
    figure.suptitle("Fig. 11: the spans of a right rollout against those of ...")
    save(figure, path)
    parts = {name: matrix for name, (matrix, _, _) in pairs.items()}
    return {
        name: {"mean": float(each.mean()), "mean_minimum": float(each.min(0).mean())} for name, each in parts.items()
    }


# ---- against the truth ----------------------------------------------------------------------------------------


def credit_placement(results: dict[str, dict], path: Path) -> None:
    """Ours: each method's (or setting's) AUC against the true first error, and how far off its peak lies."""
    figure, (left, right) = sheet(10, 1.2 + 0.34 * len(results), 1, 2, sharey=True)
    names = list(results)
    for height, name in enumerate(names):
        place = results[name]
        left.plot([place["auc_step"], place["auc"]], [height, height], color="#DDDDDD", lw=3, zorder=1)
        left.scatter(place["auc"], height, color=RIGHT, s=42, zorder=2, label="from the first error on" * (height == 0))
        left.scatter(
            place["auc_step"], height, color=WRONG, marker="D", s=30, zorder=2, label="wrong step alone" * (height == 0)
        )
        if place["peak"]:
            low, middle, high = place["peak"]["quartiles"]
            right.plot([low, high], [height, height], color=RIGHT, lw=4, alpha=0.35, solid_capstyle="round")
            right.scatter(middle, height, color=RIGHT, s=42, zorder=2)
        else:
            right.text(0, height, "  no peak: one weight everywhere", color=FAINT, va="center", fontsize=8)
    position = results[names[0]]["auc_position"]
    left.axvline(position, color=INK, ls="--", lw=1, label=f"position alone, {position:.2f}")
    left.axvline(0.5, color=FAINT, ls=":", lw=1)
    left.set(yticks=range(len(names)), yticklabels=names, xlabel="AUC of the token weights", xlim=(-0.02, 1.02))
    left.invert_yaxis()
    left.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, columnspacing=1)
    right.axvline(0, color=INK, ls="--", lw=1)
    right.set(xlabel="tokens from first error to peak: median, middle half")
    save(figure, path)


def pooling_smear(curves: dict[str, list[float | None]], window: int, path: Path) -> dict:
    """Ours, of App. H.1: mean weight by token offset from the wrong step's last token, by pooling; where half is risen.

    A curve (2 r + 1,) has offsets -r to r. Its base is its largest value where no span reaches the wrong step's end, w
    tokens ahead and more, its top its largest in the w tokens after it; None where a curve lacks these.
    """
    figure, axes = sheet(6.4, 3.8)
    found = {}
    for (name, curve), colour in zip(curves.items(), (WRONG, RIGHT), strict=True):
        reach, values = len(curve) // 2, np.array(curve, dtype=float)
        offsets, known = np.arange(-reach, reach + 1), ~np.isnan(values)
        before, after = known & (offsets <= -window), known & (offsets > 0) & (offsets <= window)
        found[name] = {"half_risen": None, "offsets": offsets.tolist(), "weights": curve}
        if before.any() and after.any():
            base, top = values[before].max(), values[after].max()
            risen = known & (offsets > -window) & (values >= (base + top) / 2)
            found[name] |= {"base": float(base), "top": float(top), "half_risen": int(offsets[risen].min())}
        axes.plot(offsets, values, "o-", color=colour, ms=4, lw=2, label=f"{name} pooling")
    axes.axvline(0, color=INK, ls="--", lw=1)
    axes.axvspan(1 - window, 0, color=FAINT, alpha=0.15, lw=0, label="w - 1 tokens ahead")
    axes.set(xlabel="tokens from the last one of the first wrong step", ylabel="mean weight", ylim=(0, None))
    axes.legend(fontsize=9, frameon=False, loc="upper left")
    save(figure, path)
    return found


def wrap(tokens: list[str], weights: list[float], wide: int = 78) -> list[list[tuple[str, float]]]:
    """Tokens as lines of (text, weight), of at most `wide` characters unless one token has more."""
    lines = [[]]
    for token, weight in zip(tokens, weights, strict=True):
        text = token.replace("\n", "\u21b5")
        if sum(len(each) for each, _ in lines[-1]) + len(text) > wide:
            lines.append([])
        lines[-1].append((text, weight))
        if "\n" in token:
            lines.append([])
    return [line for line in lines if line]


def shaded_rollout(
    lines: list[list[tuple[str, float]]], error: tuple[int, int] | None, notes: dict[int, str], title: str, path: Path
) -> None:
    """Ours: a wrong rollout, each token shaded by its weight; `lines` of (text, weight).

    `error` says which tokens are the true first wrong step, from and to, counted over all lines; `notes` stand at the
    right of their lines, `title` above all. The method knew neither the wrong step nor that there are steps. Of a long
    rollout, 24 lines around the largest weight.
    """
    cell, height = 0.14, 0.37  # inches of a character and of a line
    heaviest = max(range(len(lines)), key=lambda row: max(weight for _, weight in lines[row]))
    skipped = max(0, min(heaviest - 12, len(lines) - 24))
    place, lines = sum(map(len, lines[:skipped])), lines[skipped:][:24]
    widest = max(sum(len(text) for text, _ in line) for line in lines)
    across = max(widest + 2 + 0.72 * max(map(len, notes.values()), default=0), 50.0)
    top, heavy = 2.6 if title else 1.6, max(weight for line in lines for _, weight in line)
    figure = Figure(figsize=(cell * (across + 2), height * (len(lines) + top + 2.2)))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-1, across + 1), ylim=(len(lines) + 2.2, -top))
    axes.axis("off")
    axes.text(0, 0.9 - top, "A wrong answer, shaded by SHEAR's weights", fontsize=15, weight="bold", color=INK)
    axes.text(0, 1.75 - top, title, fontsize=11.5, family="monospace", color="#555555", parse_math=False)
    letter = dict(family="monospace", va="center", fontsize=cell * 72 / 0.602, parse_math=False)
    for row, line in enumerate(lines):
        column, marked = 0, []
        for text, weight in line:
            axes.add_patch(Rectangle((column, row), len(text), 0.9, fc=HEAT(weight / heavy), ec="white", lw=0.6))
            ink = FAINT if text == "\u21b5" and weight < 0.4 * heavy else "white" if weight > 0.68 * heavy else INK
            axes.text(column, row + 0.45, text, color=ink, **letter)
            column += len(text)
            if error and error[0] <= place < error[1]:
                marked += [column - len(text), column]
            place += 1
        if marked:
            axes.add_patch(
                Rectangle((marked[0], row), marked[-1] - marked[0], 0.9, fill=False, ec=INK, lw=2.6, zorder=3)
            )
        weight = "bold" if marked else "normal"
        axes.text(
            widest + 1.5, row + 0.45, notes.get(skipped + row, ""), fontsize=11.5, va="center", color=INK, weight=weight
        )
    scale = axes.inset_axes((0, len(lines) + 0.75, 24, 0.4), transform=axes.transData)
    figure.colorbar(ScalarMappable(Normalize(0, heavy), HEAT), cax=scale, orientation="horizontal").outline.set_lw(0)
    scale.tick_params(labelsize=9, length=2)
    axes.text(25, len(lines) + 0.95, "weight: the factor on a token's advantage", fontsize=10, va="center", color=INK)
    save(figure, path)
