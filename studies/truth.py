"""Credit against the true first error, where a task knows it: which method, which setting, how early, how late.

    against_truth(args, task, batches, out, left_out)    -> numbers; truth_methods, truth_settings and pooling.png
    shade(args, task, tokenizer, batches, out, left_out) -> a wrong rollout and its weights; rollout.png

`against_truth` takes the wrong rollouts of mixed groups that have tokens before their first error. It measures how well
weights tell the tokens from the first error on from those before it, and how far off the largest weight lies
(`measures.localisation`, `peak`), for every credit method that gives weights and for SHEAR with one option changed at a
time. "From the error on" is the end of a rollout, so within one rollout any weight that grows with position is perfect:
read the pooled AUC, beside that of position alone.

It also measures how far ahead of the error the weights rise. A span that ends beyond the error starts up to w - 1
tokens before it and gives these tokens its distance (App. H.1 of arXiv 2604.23318), whole by max pooling, in part by
mean pooling. Every kind of error is over at the wrong step's last token, so offsets are counted from there. Rollouts
with fewer than a window of tokens before the step do not count.

Left out: `arca`, whose weights need a trained adapter, which no saved model has any more (`lora.save` merges it).
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor
from tqdm import tqdm

from credit.ablations import CHOICES
from credit.measures import around, effective_weights, localisation, peak
from credit.methods import METHODS, USES_PRM, Batch, credit, true_errors
from grpo import cat_padded
from studies import figures
from studies.figures import FAINT, HEAT, INK, RIGHT, WRONG
from tasks import toy
from tasks.problems import Task


def weights_of(method: str, batch: Batch, args: argparse.Namespace, **changed) -> Tensor:
    """What a method multiplies each token's advantage by, (G, T), with the flags' options but for those `changed`."""
    torch.manual_seed(args.seed)
    uncontrolled = {"negative_scale": 1.0, "rescale": "none"}  # controls, which belong to no method
    args = argparse.Namespace(**(vars(args) | uncontrolled | changed))
    return effective_weights(credit(method, batch, args), batch.advantages, batch.rollouts.mask)


def errors_in(batch: Batch, task: Task) -> Tensor:
    """`credit.true_errors`, (G, 2); -1 everywhere where the task does not know."""
    first_error = task.first_error or (lambda problem, text: None)
    return true_errors(batch, first_error, batch.source.problems)


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
    absent = {"arca"}
    left_out.append("arca against the truth: its weights need an adapter that was trained, and is no longer there")
    if batches[0].source.prm is None:
        absent |= USES_PRM
        left_out.append(f"{', '.join(sorted(USES_PRM))} against the truth: they need --prm")
    if localisation(mask.float(), mask, errors) is None:
        left_out.append("credit against the truth: no rollout has tokens before and after its first error")
        return {}
    runs = [("methods", name, name, {}) for name in METHODS if name not in absent]
    runs += [("settings", name, "shear", changed) for name, changed in changes_of(args).items()]
    results, curves = {"methods": {}, "settings": {}}, {}
    for part, name, method, changed in tqdm(runs, "methods and settings", leave=False, disable=None):
        weights = cat_padded([weights_of(method, batch, args, **changed) for batch in batches])  # (B, T)
        results[part][name] = localisation(weights, mask, errors) | {"peak": peak(weights, mask, errors)}
        if part == "settings" and set(changed) <= {"pool"}:
            curves[changed.get("pool", args.pool)] = around(weights, mask, last_wrong, 2 * args.window)
    for part, numbers in results.items():
        credit_placement(numbers, out / f"truth_{part}.png")
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
    for name in ("pool", "reading", "distance"):
        changes += [{name: choice} for choice in CHOICES[name]]
    settings = {"as given": {}}
    for changed in changes:
        if vars(args) | changed != vars(args):
            settings[spelled(changed)] = changed
    return settings


def spelled(options: dict) -> str:
    """Options as text."""
    shown = {name: f"{value:g}" if isinstance(value, float) else value for name, value in options.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def credit_placement(results: dict[str, dict], path: Path) -> None:
    """Each method's (or setting's) AUC against the true first error, and how far off its peak lies."""
    figure, (left, right) = figures.sheet(10, 1.2 + 0.34 * len(results), 1, 2, sharey=True)
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
    left.invert_yaxis()
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, columnspacing=1)
    right.axvline(0, color=INK, ls="--", lw=1)
    right.set(xlabel="tokens from first error to peak: median, middle half")
    figures.save(figure, path)


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
    axes.set(xlabel="tokens from the last one of the first wrong step", ylabel="mean weight", ylim=(0, None))
    axes.legend(fontsize=9, loc="upper left")
    figures.save(figure, path)
    return result


# ---- one wrong rollout ----------------------------------------------------------------------------------------


def shade(
    args: argparse.Namespace, task: Task, tokenizer, batches: list[Batch], out: Path, left_out: list[str]
) -> dict[str, dict]:
    """rollout.png, of the wrong rollout whose weights rise most at its true first error, and its numbers.

    Errors about the middle come first; among these, slips of arithmetic, as they need no explanation.
    """
    chosen, clearest = None, ()
    for group, batch in enumerate(batches):
        weights = weights_of("shear", batch, args)  # (G, T)
        for row in (batch.rewards == 0).nonzero().flatten().tolist():
            error = task.first_error(batch.source.problems[0], batch.rollouts.texts[row])
            if not error:  # a right response that was cut off
                continue
            own = weights[row][batch.rollouts.mask[row]]  # (T_i,)
            clarity = (False, -1.0)
            if 0.3 <= error.token / len(own) <= 0.6:
                rise = own[error.token :].mean() - own[: error.token].mean()
                clarity = (error.kind == "arith", rise.item())
            if clarity > clearest:
                chosen, clearest = (group, row, error, own.tolist()), clarity
    if not chosen:
        left_out.append("rollout.png: no wrong rollout has a first error")
        return {}
    group, row, error, weights = chosen
    rollouts, problem = batches[group].rollouts, batches[group].source.problems[0]["problem"]
    tokens = [tokenizer.decode([id]) for id in rollouts.ids[row][rollouts.mask[row]].tolist()]
    title = "problem, mod 10:  " + problem.strip().replace(";", "  ")
    shaded_rollout(tokens, weights, error, title, out / "rollout.png")
    numbers = {"group": group, "row": row, "text": rollouts.texts[row], "first_error": [error.token, error.end]}
    return {"rollout": numbers | {"weights": weights}}


def shaded_rollout(tokens: list[str], weights: list[float], error: toy.FirstError, title: str, path: Path) -> None:
    """A wrong rollout, each token shaded by its weight, a line of the response a line, with `title` above.

    The method knew neither the wrong step, which is framed, nor that there are steps.
    """
    cell, height = 0.14, 0.37  # inches of a character and of a line
    line_ends = [place + 1 for place, token in enumerate(tokens[:-1]) if token == "\n"]
    lines = list(itertools.pairwise([0, *line_ends, len(tokens)]))  # (first token, token after the last)
    notes = []
    for start, end in lines:
        notes.append(f"mean {sum(weights[start:end]) / (end - start):.2f}")
        if start <= error.token < end:
            fault = toy.correction("".join(tokens[start:end])) if error.kind == "arith" else error.kind
            notes[-1] += f"   true first error: {fault}"
    heaviest = max(weights) or 1.0  # all are 0 where right and wrong rollouts are the same
    widest = max(len("".join(tokens[start:end])) for start, end in lines)
    across = max(widest + 2 + 0.72 * max(map(len, notes)), 50.0)  # in characters
    above, below = 2.6, len(lines) + 2.2  # in lines
    figure = Figure(figsize=(cell * (across + 2), height * (above + below)))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-1, across + 1), ylim=(below, -above))
    axes.axis("off")
    axes.text(0, 0.9 - above, "A wrong answer, shaded by SHEAR's weights", fontsize=15, weight="bold", color=INK)
    axes.text(0, 1.75 - above, title, fontsize=11.5, family="monospace", color="#555555", parse_math=False)
    letter = dict(family="monospace", va="center", fontsize=cell * 72 / 0.602, parse_math=False)
    for row, (start, end) in enumerate(lines):
        column, framed = 0, []
        for place in range(start, end):
            token, share = tokens[place], weights[place] / heaviest
            ink = "white" if share > 0.68 else FAINT if token == "\n" and share < 0.4 else INK
            axes.add_patch(Rectangle((column, row), len(token), 0.9, fc=HEAT(share), ec="white", lw=0.6))
            axes.text(column, row + 0.45, token.replace("\n", "\u21b5"), color=ink, **letter)
            if error.token <= place < error.end:
                framed += [column, column + len(token)]
            column += len(token)
        if framed:
            width = framed[-1] - framed[0]
            axes.add_patch(Rectangle((framed[0], row), width, 0.9, fill=False, ec=INK, lw=2.6, zorder=3))
        boldness = "bold" if framed else "normal"
        axes.text(widest + 1.5, row + 0.45, notes[row], fontsize=11.5, va="center", color=INK, weight=boldness)
    scale = axes.inset_axes((0, len(lines) + 0.75, 24, 0.4), transform=axes.transData)
    colours = ScalarMappable(Normalize(0, heaviest), HEAT)
    figure.colorbar(colours, cax=scale, orientation="horizontal").outline.set_lw(0)
    scale.tick_params(labelsize=9, length=2)
    axes.text(25, len(lines) + 0.95, "weight: the factor on a token's advantage", fontsize=10, va="center", color=INK)
    figures.save(figure, path)
