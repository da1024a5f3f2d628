"""Where credit went, around the true first error: what `lab.studies.diagnose` measures.

    wrong_steps            the first wrong steps of a batch, with their first wrong tokens
    localisation           how well weights separate tokens before the first error from later ones
    shares_by_part         the shares of the weight before, on and after the first wrong step
    peak, around           how far from it the largest weight lies; mean weights around a place

`wrong_step` (B, 3) int64 is where the first wrong step starts and ends, and its first wrong token;
-1 for rollouts that do not count (right ones, and those of groups that are not mixed).
"""

import math
import re
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from credit.batch import Batch, Context
from credit.measures import auc, positions
from credit.tokens import tokens_of
from tasks.toy import DIGIT_VALUES, SHORT_LINE, SYMBOL, apply, definitions_of


def wrong_steps(batch: Batch, context: Context) -> Tensor:
    """Each wrong rollout's first wrong step, (B, 3) int64, as above.

    Outside the embedded task a step's first token counts as its first wrong one.
    """
    places = batch.true_errors(context.task, context.tokenizer)  # (B, 2)
    wrong = places[:, 0].clone()  # (B,)
    if context.task.name == "embedded":
        for row in (wrong >= 0).nonzero().flatten().tolist():
            tokens = tokens_of(context.tokenizer, batch.rollouts, row)
            start, end = places[row].tolist()
            wrong[row] = first_wrong_token(batch.problem_of(row), tokens, start, end)
    return torch.cat([places, wrong[:, None]], 1)


def first_wrong_token(problem: dict, tokens: Sequence[str], start: int, end: int) -> int:
    """The first token of an embedded response's wrong step that differs from the right step's."""
    symbols = SYMBOL.findall("".join(tokens))
    done = re.findall(r"^([a-z])=.*?(\d)$", "".join(symbols[:start]), re.M)
    values = DIGIT_VALUES | {label: int(result) for label, result in done}
    step = symbols[start:end]
    right = SYMBOL.findall(right_step("".join(step), problem, values))
    shared = 0
    while shared < min(len(step), len(right)) and step[shared] == right[shared]:
        shared += 1
    return start + shared


def right_step(step: str, problem: dict, values: dict[str, int]) -> str:
    """What a step should have been, given its label and form; "" if nothing of it fits."""
    definitions = definitions_of(problem["problem"])
    label = step[:1]
    if step.startswith(r"\boxed{"):
        return rf"\boxed{{{values.get(list(definitions)[-1], '')}}}"
    if label in values or label not in definitions:
        return ""
    left, op, right = definitions[label]
    if left not in values or right not in values:
        return ""
    result = apply(op, values[left], values[right])
    if SHORT_LINE.fullmatch(step):
        return f"{label}={result}\n"
    return f"{label}={left}{op}{right}={values[left]}{op}{values[right]}={result}\n"


def localisation(
    weights: Tensor, mask: Tensor, wrong_step: Tensor
) -> dict[str, float | None] | None:
    """How well token weights (B, T) separate tokens before the true first error from later ones.

    An AUC of 0.5 is chance, 1 a perfect order:

        auc              tokens from the wrong step on against tokens before it
        auc_token        tokens from the first wrong token on against tokens before it
        auc_position     what a token's position alone achieves: read `auc` beside it
        auc_matched      as `auc`, but only pairs of tokens at the same position
        auc_step         the tokens of the wrong step against all others, before and after
        auc_step_before  those against the tokens before the step, at the same position
        auc_step_after   those against the tokens after the step, at the same position
        rollouts         the number of rollouts that have tokens before the step and from it on

    Tokens of all rollouts are compared. Position gets one half where only pairs at the same
    position count, so no weight gains there by growing with position. An AUC is None where there
    is no pair. The means of `weight_by_side` are added. Returns None where no rollout has tokens
    on both sides.
    """
    position = positions(mask)
    start, end, wrong = wrong_step.split(1, dim=1)  # (B, 1) each
    counts = mask & (start >= 0)  # (B, T)
    before = counts & (position < start)  # (B, T)
    on_step = counts & (position >= start) & (position < end)  # (B, T)
    after = counts & (position >= end)  # (B, T)
    from_step = on_step | after  # (B, T)
    from_wrong = counts & (position >= wrong)  # (B, T)
    rollouts = (before.any(1) & from_step.any(1)).sum().item()
    if not rollouts:
        return None
    return {
        "auc": auc_of(weights[from_step], weights[before]),
        "auc_token": auc_of(weights[from_wrong], weights[counts & ~from_wrong]),
        "auc_position": auc_of(position[from_step], position[before]),
        "auc_matched": auc_matched(weights, from_step, before),
        "auc_step": auc_of(weights[on_step], weights[before | after]),
        "auc_step_before": auc_matched(weights, on_step, before),
        "auc_step_after": auc_matched(weights, on_step, after),
        **weight_by_side(weights, mask, wrong_step[:, 0]),
        "rollouts": rollouts,
    }


def weight_by_side(weights: Tensor, mask: Tensor, first_error: Tensor) -> dict[str, float]:
    """The mean weight before the true first error and from it on; NaN where there are no tokens.

    Weights are (B, T). first_error (B,) is -1 for rollouts that do not count.
    """
    counts = mask & (first_error >= 0)[:, None]  # (B, T)
    after = positions(mask) >= first_error[:, None]  # (B, T)
    return {
        "weight_before": weights[counts & ~after].mean().item(),
        "weight_after": weights[counts & after].mean().item(),
    }


def shares_by_part(weights: Tensor, mask: Tensor, wrong_step: Tensor) -> list[float]:
    """The shares of the weight before the first wrong step, on it and after it.

    All rollouts that count are pooled. Arguments are those of `localisation`.
    """
    position = positions(mask)
    start, end, _ = wrong_step.split(1, dim=1)  # (B, 1) each
    counted = weights.double() * (mask & (start >= 0))  # (B, T)
    parts = (position < start, (position >= start) & (position < end), position >= end)
    return [(counted[part].sum() / counted.sum()).item() for part in parts]


def peak(weights: Tensor, mask: Tensor, wrong_step: Tensor) -> dict | None:
    """Quartiles of the distance in tokens from the first error's start to the largest weight.

    The distance is negative where the largest weight (the first, if several are equal) lies before
    the error. A rollout whose weights are all equal has no peak; returns None where none has one.
    Arguments are those of `localisation`.
    """
    offsets = []
    for row in (wrong_step[:, 0] >= 0).nonzero().flatten().tolist():
        of_tokens = weights[row][mask[row]]  # (T,)
        if of_tokens.max() - of_tokens.min() > 1e-6:
            offsets.append((of_tokens.argmax() - wrong_step[row, 0]).item())
    if not offsets:
        return None
    return {
        "quartiles": np.quantile(offsets, [0.25, 0.5, 0.75]).tolist(),
        "rollouts": len(offsets),
    }


def around(weights: Tensor, mask: Tensor, place: Tensor, reach: int) -> list[float | None]:
    """The mean weight at each offset, from -reach to reach, from a place in each rollout.

    weights and mask are (B, T); place is (B,), below 0 for rollouts that do not count. An offset at
    which no rollout has a token gets None.
    """
    offsets = positions(mask) - place[:, None]  # (B, T)
    counts = mask & (place >= 0)[:, None]  # (B, T)
    means = [
        weights[counts & (offsets == offset)].mean().item() for offset in range(-reach, reach + 1)
    ]
    return [None if math.isnan(mean) else mean for mean in means]


def auc_matched(values: Tensor, high: Tensor, low: Tensor) -> float | None:
    """`auc` over the pairs of a token of `high` and one of `low` at the same position.

    Values and the boolean `high` and `low`, which have no token in common, are (B, T). Returns None
    if there is no such pair.
    """
    compared = high | low  # (B, T), n tokens
    tokens = pd.DataFrame(
        {
            "place": positions(values)[compared].cpu().numpy(),
            "high": high[compared].cpu().numpy(),
            "value": values[compared].double().cpu().numpy(),
        }
    )
    # A token's rank at its position counts the tokens there that it exceeds or equals.
    tokens["rank"] = tokens.groupby("place")["value"].rank()  # ties share their mean rank
    at_position = tokens.groupby("place")["high"]
    highs = at_position.sum()  # (positions,)
    lows = at_position.count() - highs  # (positions,)
    ranks = tokens[tokens["high"]].groupby("place")["rank"].sum()  # (positions with a high,)
    won = ranks.sum() - (highs * (highs + 1) / 2).sum()  # without pairs of two highs
    pairs = (highs * lows).sum()
    return float(won / pairs) if pairs else None


def auc_of(high: Tensor, low: Tensor) -> float | None:
    """`credit.measures.auc`; None where a side is empty."""
    return auc(high, low) if len(high) and len(low) else None
