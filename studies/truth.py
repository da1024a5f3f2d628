"""Credit against the true first error, where a task knows it: which method, which setting, how early, how late.

    against_truth(args, task, batches, own, out, left_out) -> numbers, and three pictures in `out`

Of the wrong rollouts of mixed groups that have tokens before their first error: `measures.localisation`, which is how
well weights tell the tokens from the first error on from those before it, and how far off the largest weight lies, for
every credit method that gives weights and for SHEAR with one option changed at a time. "From the error on" is
the end of a rollout, so within one rollout any weight that grows with position is perfect: read the pooled AUC, beside
that of position alone.

And how far ahead of the error the weights rise: a span that ends beyond it starts up to w - 1 tokens before it, and
gives these its distance (App. H.1 of arXiv 2604.23318), whole by max pooling, in part by mean pooling. Only at the
wrong step's last token is every kind of error behind us, so tokens are counted from there; rollouts count that have a
window of tokens before the step.

Left out: `arca`, whose weights need a trained adapter, which no saved model has any more (`lora.save` merges it).
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from credit.ablations import CHOICES
from credit.measures import around, effective_weights, localisation, peak
from credit.methods import METHODS, USES_PRM, Batch, credit, true_errors
from grpo import cat_padded
from studies import figures
from tasks.problems import Task


def weights_of(method: str, batch: Batch, args: argparse.Namespace, **changed) -> Tensor:
    """What a method multiplies each token's advantage by, (G, T), with the flags' options but for those `changed`."""
    torch.manual_seed(args.seed)
    plain = dict(negative_scale=1.0, rescale="none")  # controls, which are of no method
    args = argparse.Namespace(**{**vars(args), **plain, **changed})
    return effective_weights(credit(method, batch, args), batch.advantages, batch.rollouts.mask)


def errors_in(batch: Batch, task: Task) -> Tensor:
    """`credit.true_errors`, (G, 2); -1 everywhere where the task does not know."""
    known = task.first_error or (lambda problem, text: None)
    return true_errors(batch, known, batch.source.problems)


def against_truth(
    args: argparse.Namespace, task: Task, batches: list[Batch], own: list[Tensor], out: Path, left_out: list[str]
) -> dict:
    """Every method and setting against the true first errors, and how far ahead weights rise.

    `own` are SHEAR's weights (G, T) of each batch, with the flags' options. What cannot be told goes to `left_out`.
    """
    places = torch.cat([errors_in(batch, task) for batch in batches])  # (B, 2)
    places = torch.where(places[:, :1] > 0, places, -1)
    ends = torch.where(places[:, 0] >= args.window, places[:, 1] - 1, -1)  # (B,)
    mask = cat_padded([batch.rollouts.mask for batch in batches])  # (B, T)
    judged = batches[0].source.prm is not None
    methods = {name: (name, {}) for name in METHODS if name != "arca" and (judged or name not in USES_PRM)}
    left_out.append("arca against the truth: its weights need an adapter that was trained, and is no longer there")
    if not judged:
        left_out.append(f"{', '.join(sorted(USES_PRM))} against the truth: they need --prm")
    settings = {name: ("shear", changed) for name, changed in changes_of(args).items()}
    found, curves = {"methods": {}, "settings": {}}, {}
    for part, calls in (("methods", methods), ("settings", settings)):
        for name, (method, changed) in tqdm(calls.items(), part, leave=False, disable=None):
            known = method == "shear" and not changed
            weights = own if known else [weights_of(method, batch, args, **changed) for batch in batches]
            weights = cat_padded(weights)  # (B, T)
            place = localisation(weights, mask, places)
            if place is None:
                left_out.append("credit against the truth: no rollout has tokens before and after its first error")
                return {}
            found[part][name] = place | {"peak": peak(weights, mask, places)}
            if method == "shear" and set(changed) <= {"pool"}:
                curves[changed.get("pool", args.pool)] = around(weights, mask, ends, 2 * args.window)
        figures.credit_placement(found[part], out / f"truth_{part}.png")
    smear = figures.pooling_smear(dict(sorted(curves.items())), args.window, out / "pooling.png")
    return {**found, "pooling": smear}


def changes_of(args: argparse.Namespace) -> dict[str, dict]:
    """SHEAR as the flags have it, and with one option changed at a time."""
    half, double = max(1, args.window // 2), 2 * args.window
    changed = [dict(window=half, stride=min(args.stride, half)), dict(window=double)]
    changed += [dict(stride=stride) for stride in (max(1, args.stride // 2), min(2 * args.stride, args.window))]
    changed += [dict(eps=args.eps / 5), dict(eps=args.eps * 5)]
    for name in ("pool", "reading", "distance"):
        changed += [{name: value} for value in CHOICES[name]]
    others = [each for each in changed if any(getattr(args, name) != value for name, value in each.items())]
    return {"as given": {}} | {spelled(each): each for each in others}


def spelled(options: dict) -> str:
    """Options as text."""
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in options.items()
    )
