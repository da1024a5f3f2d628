"""Credit against the true first error, where a task knows it: which method, which setting, how early, how late.

    against_truth(args, task, batches, out, left_out) -> numbers; truth_methods, truth_settings and pooling.png

`against_truth` takes the wrong rollouts of mixed groups that have tokens before their first error. It measures how well
weights tell the tokens from the first error on from those before it, and how far off the largest weight lies
(`measures.localisation`, `peak`), for every credit method that gives weights and for SHEAR with one option changed at a
time. "From the error on" is the end of a rollout, so within one rollout any weight that grows with position is perfect:
read the pooled AUC, beside that of position alone.

It also measures how far ahead of the error the weights rise. A span that ends beyond the error starts up to w - 1
tokens before it and gives these tokens its distance (App. H.1 of arXiv 2604.23318), whole by max pooling, in part by
mean pooling. Every kind of error is over at the wrong step's last token, so offsets are counted from there. Rollouts
with fewer than a window of tokens before the step do not count.

Left out: `arca`, whose weights need a trained adapter, which no saved model has (`lora.save_merged` merges it).
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from credit.batch import Batch
from credit.measures import around, effective_weights, localisation, peak
from credit.methods import assign_credit, true_errors
from credit.table import METHODS, NEEDS, needing, options_of
from grpo import cat_padded
from studies import figures
from studies.figures import FAINT, INK, RIGHT, WRONG
from tasks.problems import Task


def weights_of(method: str, batch: Batch, args: argparse.Namespace, **changed) -> Tensor:
    """What a method multiplies each token's advantage by, (G, T), with the flags' options but for those `changed`."""
    torch.manual_seed(args.seed)
    uncontrolled = {"negative_scale": 1.0, "rescale": "none"}  # controls, which belong to no method
    options = [] if method != args.method else args.method_option
    args = argparse.Namespace(**(vars(args) | uncontrolled | {"method_option": options} | changed))
    return effective_weights(assign_credit(method, batch, args), batch.advantages, batch.rollouts.mask)


def errors_in(batch: Batch, task: Task) -> Tensor:
    """`credit.true_errors`, (G, 2); -1 everywhere where the task does not know."""
    first_error = task.first_error or (lambda problem, text: None)
    return true_errors(batch, first_error)


# ---- methods and settings -------------------------------------------------------------------------------------


def against_truth(
    args: argparse.Namespace, task: Task, batches: list[Batch], out: Path, left_out: list[str]
) -> dict[str, dict]:
    """Every method and setting against the true first errors, and how far ahead weights rise.

    What cannot be measured goes to `left_out`, with the reason.
    """
    errors = torch.cat([errors_in(batch, task) for batch in batches])  # (B, 2)
    errors = torch.where(errors[:, :1] > 0, errors, -1)
    last_wrong = torch.where(errors[:, 0] >= args.window, errors[:, 1] - 1, -1)  # (B,)
    mask = cat_padded([batch.rollouts.mask for batch in batches])  # (B, T)
    absent = needing("adapter")
    left_out.append(
        f"{', '.join(absent)} against the truth: weights need an adapter, which no saved model has any more"
    )
    if batches[0].source.prm is None:
        absent |= needing("prm")
        left_out.append(f"{', '.join(sorted(needing('prm')))} against the truth: they need --prm")
    for word, known in (("lines", task.lines), ("rephrase", task.rephrase)):
        if known is None:
            absent |= needing(word)
            left_out.append(f"{', '.join(needing(word))} against the truth: the task does not know {NEEDS[word]}")
    if localisation(mask.float(), mask, errors) is None:
        left_out.append("credit against the truth: no rollout has tokens before and after its first error")
        return {}
    runs = [("methods", name, name, {}) for name in METHODS if name not in absent]
    runs += [("settings", name, "shear", changed) for name, changed in changes_of(args).items()]
    results, curves = {"methods": {}, "settings": {}}, {}
    for part, name, method, changed in tqdm(runs, "methods and settings", leave=False, disable=None):
        weights = cat_padded([weights_of(method, batch, args, **changed) for batch in batches])  # (B, T)
        results[part][name] = localisation(weights, mask, errors) | {"peak": peak(weights, mask, errors)}
        if part == "settings" and (name == "as given" or name.startswith("pool ")):
            pool = options_of("shear", changed.get("method_option", args.method_option))["pool"]
            curves[pool] = around(weights, mask, last_wrong, 2 * args.window)
    credit_placement(results["methods"], "method", out / "truth_methods.png")
    credit_placement(results["settings"], "SHEAR, one option changed", out / "truth_settings.png")
    curves = dict(sorted(curves.items()))
    return results | {"pooling": pooling_smear(curves, args.window, out / "pooling.png")}


def changes_of(args: argparse.Namespace) -> dict[str, dict]:
    """SHEAR as the flags have it, and with one option changed at a time."""
    half = max(1, args.window // 2)
    changes = [
        {"window": half, "stride": min(args.stride, half)},
        {"window": 2 * args.window},
        {"stride": max(1, args.stride // 2)},
        {"stride": min(2 * args.stride, args.window)},
        {"eps": args.eps / 5},
        {"eps": args.eps * 5},
    ]
    settings = {"as given": {}}
    for changed in changes:
        if vars(args) | changed != vars(args):
            settings[options_as_text(changed)] = changed
    options = options_of("shear", args.method_option)
    for name in ("pool", "reading", "distance"):
        for choice in METHODS["shear"].options[name].choices:
            if choice != options[name]:
                settings[f"{name} {choice}"] = {"method_option": [*args.method_option, f"{name}={choice}"]}
    return settings


def options_as_text(options: dict) -> str:
    """Options as text."""
    shown = {name: f"{value:g}" if isinstance(value, float) else value for name, value in options.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def credit_placement(results: dict[str, dict], ylabel: str, path: Path) -> None:
    """Each method's (or setting's) AUC against the true first error, and how far off its peak lies."""
    figure, (left, right) = figures.sheet(10, 1.6 + 0.34 * len(results), 1, 2, sharey=True)
    heights = range(len(results))
    from_error = [place["auc"] for place in results.values()]
    step_alone = [place["auc_step"] for place in results.values()]
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
    figure.legend(loc="outside lower left", ncols=3)
    right.axvline(0, color=INK, ls="--", lw=1)
    right.set(xlabel="from first error to peak, tokens (median, middle half)")
    right.set_title("How far off does the largest weight lie?")
    figures.save_png(figure, path)


def pooling_smear(curves: dict[str, list[float | None]], window: int, path: Path) -> dict:
    """Mean weight by token offset from the wrong step's last token, by pooling; where half is risen.

    A curve (2 r + 1,) has offsets -r to r. Its base is its largest value where no span reaches the wrong step's end, w
    tokens ahead and more, its top its largest in the w tokens after it; None where a curve lacks these.
    """
    figure, axes = figures.sheet(6.4, 3.8)
    result = {}
    for pooling, curve in curves.items():
        reach = len(curve) // 2
        offsets = np.arange(-reach, reach + 1)
        values = np.array(curve, dtype=float)  # None becomes NaN
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
    figures.save_png(figure, path)
    return result
