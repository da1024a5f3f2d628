"""Credit against the truth: how well its weights find the first error, for `lab.studies.diagnose`.

How well do weights tell a wrong rollout's tokens from its first error on from those before it, and
how far off does the largest weight lie (`where.localisation`, `peak`)? For every credit method,
and for SHEAR with one setting changed at a time. Intervals are 90% jackknife intervals over 20 sets
of groups.

Left out: methods whose weights need a trained adapter, which no saved model has (`lora.save_merged`
merges it).
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from scipy import stats
from torch import Tensor
from tqdm import tqdm

from credit.batch import Batch, Context, effective_weights
from credit.rules import assign_credit
from credit.settings import Credit, Shear
from grpo import cat_padded
from lab.studies.needs import WITH_ADAPTER, WITH_MODEL
from lab.studies.where import around, localisation, peak, shares_by_part, wrong_steps

FOLDS = 20  # sets of groups that the jackknife leaves out in turn; no group is split


def weights_of(batch: Batch, context: Context, method: str) -> Tensor:
    """What a method multiplies each token's advantage by, (G, T)."""
    torch.manual_seed(context.seed)
    credited = assign_credit(batch, context, Credit(method))  # (G, T)
    return effective_weights(credited, batch.advantages, batch.mask)


def against_truth(methods: Iterable[str], context: Context, batches: list[Batch]) -> dict:
    """Score credit methods, and SHEAR with changed settings, against the true first errors.

    The result has "methods" and "settings", each name -> the result of `measure_place`. Surprisal,
    -log pi, is added to the settings. What cannot be measured is printed, with the reason.
    """
    shear = context.shear
    errors = [wrong_steps(batch, context) for batch in batches]
    wrong_step = torch.cat(errors)  # (B, 3)
    wrong_step = torch.where(wrong_step[:, :1] > 0, wrong_step, -1)  # a first token has none before
    mask = cat_padded([batch.rollouts.mask for batch in batches])  # (B, T)
    if localisation(mask.float(), mask, wrong_step) is None:
        print("left out: the truth: no rollout has tokens before and after its first error")
        return {}
    group = torch.cat([torch.full_like(rows[:, 0], n) for n, rows in enumerate(errors)])  # (B,)
    place_of = partial(
        measure_place, mask=mask, wrong_step=wrong_step, group=group, reach=2 * shear.window
    )
    measured = []
    for name in methods:
        lacks_model = name in WITH_MODEL and "prm" not in context.kept
        if lacks_model or name in WITH_ADAPTER:
            print(f"left out: {name} against the truth: the run lacks what it needs")
        else:
            measured.append(("methods", name, name, shear))
    for name, changed in changes_of(shear).items():
        measured.append(("settings", name, "shear", changed))
    results: dict[str, dict] = {"methods": {}, "settings": {}}
    for section, name, method, changed in tqdm(measured, "credit", leave=False, disable=None):
        changed_context = replace(context, shear=changed)
        of_batches = [weights_of(batch, changed_context, method) for batch in batches]
        results[section][name] = place_of(cat_padded(of_batches))
    surprisal = [-batch.log_probs for batch in batches]
    results["settings"]["surprisal"] = place_of(cat_padded(surprisal))
    return results


def measure_place(
    weights: Tensor, mask: Tensor, wrong_step: Tensor, group: Tensor, reach: int
) -> dict:
    """Measure where weights (B, T) lie around the first errors of rollouts.

    `wrong_step` (B, 3) is that of `localisation`; `group` (B,) is the number of each rollout's
    group; "around" has the mean weights up to `reach` tokens from the error. The halves of the 90%
    jackknife intervals are added.
    """
    place: dict = dict(localisation(weights, mask, wrong_step) or {})
    place["peak"] = peak(weights, mask, wrong_step)
    place["around"] = around(weights, mask, wrong_step[:, 0], reach)
    place["shares"] = shares_by_part(weights, mask, wrong_step)
    fold = group % FOLDS
    without = []  # each fold
    for left_out in fold.unique():
        kept = fold != left_out  # (B,)
        without.append(localisation(weights[kept], mask[kept], wrong_step[kept]) or {})
    aucs = pd.DataFrame(without, dtype=float)
    for name in aucs.filter(like="auc"):
        place[f"{name}_half"] = jackknife_half(aucs[name])
    return place


def jackknife_half(without: pd.Series) -> float:
    """Half the width of the 90% interval by the jackknife.

    `without` are estimates that leave out one of n parts each. They differ n - 1 times less than
    estimates from one part each would.
    """
    return (len(without) - 1) * half_width(without)


def half_width(values: pd.Series, level: float = 0.9) -> float:
    """Half the width of a mean's interval by Student's t; NaN for one value, or with a NaN."""
    quantile = stats.t.ppf((1 + level) / 2, len(values) - 1)
    return float(quantile * values.sem(skipna=False))


def changes_of(shear: Shear) -> dict[str, Shear]:
    """SHEAR's settings with one change at a time, by its name."""
    changes: list[dict[str, Any]] = [{"eps": shear.eps / 5}, {"eps": shear.eps * 5}]
    for thirds in (2, 4, 8):
        window = max(1, shear.window * thirds // 3)
        changes.append({"window": window, "stride": min(shear.stride, window)})
    settings = {}
    for change in changes:
        other = replace(shear, **change)
        if other != shear:
            name = ", ".join(f"{setting} {value:g}" for setting, value in change.items())
            settings[name] = other
    return settings
