"""Where credit went: how strong, how concentrated and how well placed it is, for any method.

    step_metrics           a step's rewards, lengths and credit, as metrics.jsonl has them
    sample_rows            a group's responses, tokens and weights, as samples.jsonl has them
    credit_vs_first_error  what an evaluation reports of credit, where a task knows first errors
    concentration          mean weight, effective share of tokens, Gini, share of the top tenth
    localisation           how well weights separate tokens before the first error from later ones
    weight_by_side         mean weights before the first error and from it on: cheap, for every step
    shares_by_part         the shares of the weight before, on and after the first wrong step
    peak, around           how far from it the largest weight lies; mean weights around a place
    group_moments          mean and standard deviation over a group's tokens, for credit methods

Concentration is measured within each rollout, so it does not show that one rollout gets more than
another; the mean and standard deviation of the weights do. These numbers describe credit, and do
not say which is better: uniform credit (GRPO) has an effective share of 1, a Gini of 0, about a
tenth of the mass on the top tenth, and an AUC of one half.
"""

import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from credit.batch import Batch, effective_weights
from credit.tokens import tokens_of
from grpo import Rollouts
from tasks.errors import printable
from tasks.problems import Task


def positions(mask: Tensor) -> Tensor:
    """(B, T) int64, the index of each token in its row."""
    return torch.arange(mask.shape[1], device=mask.device).expand_as(mask)


def group_moments(values: Tensor, mask: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """The mean and standard deviation of values over all tokens of each rollout's group.

    Values and mask are (B, T), the results (B, 1) float32.
    """
    # float64: the mean of equal values is then, in float32, that value. Otherwise `standardise`
    # would blow up the rounding error.
    group_tokens = group_size * values.shape[1]  # G T
    values = values.double().reshape(-1, group_tokens)  # (groups, G T)
    mask = mask.reshape(-1, group_tokens)  # (groups, G T)
    count = mask.sum(1, keepdim=True).clamp_min(1)  # (groups, 1)
    mean = torch.where(mask, values, 0.0).sum(1, keepdim=True) / count
    std = (torch.where(mask, values - mean, 0.0).square().sum(1, keepdim=True) / count).sqrt()
    mean = mean.float().repeat_interleave(group_size, 0)  # (B, 1)
    std = std.float().repeat_interleave(group_size, 0)  # (B, 1)
    return mean, std


def standardise(values: Tensor, mask: Tensor, group_size: int) -> Tensor:
    """Values (B, T) minus the mean over their group's tokens, divided by the standard deviation."""
    mean, std = group_moments(values, mask, group_size)
    return (values - mean) / std.clamp_min(1e-8)


def concentration(token_advantages: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, float]:
    """How strong and how concentrated token advantages (B, T) are, given rollout advantages A (B,).

    `weight_mean` and `weight_std` are over the tokens whose A is not 0, as is `sign_changes`, the
    share of tokens whose advantage has the opposite sign of A.

    The others are means over the rollouts with credit. With the absolute token advantages
    v_1 <= ... <= v_T of a rollout they are:

        ess        (sum v)^2 / (T sum v^2), in (0, 1]; also called effective-token ratio
                   (arXiv 2601.07408, 2606.00257)
        gini       2 sum(t v_t) / (T sum v) - (T + 1) / T, the Gini coefficient; 0 for uniform
        top_tenth  the share of the sum that lies on the ceil(T / 10) largest

    The papers name the measures without formulas; these are the usual ones.
    """
    counts = mask & (advantages != 0)[:, None]  # (B, T)
    weights = effective_weights(token_advantages, advantages, mask)[counts]  # (n,)
    # In ascending order; what is outside of the mask is 0 and comes first, at ranks below 1.
    v = torch.where(mask, token_advantages, 0.0).abs().double().sort(1).values  # (B, T)
    length = mask.sum(1).double()  # (B,)
    rank = positions(mask) + 1 + (length - mask.shape[1])[:, None]  # (B, T), 1 to `length`
    top = rank > (length - (length + 9) // 10)[:, None]  # (B, T), the ceil(length / 10) largest
    total = v.sum(1)  # (B,)
    shares = {  # (B,) each
        "ess": total**2 / (length * v.square().sum(1)),
        "gini": 2 * (rank * v).sum(1) / (length * total) - (length + 1) / length,
        "top_tenth": (v * top).sum(1) / total,
    }
    means = {name: share[total > 0].mean().item() for name, share in shares.items()}
    if len(weights) < 2:  # where at most one token has an advantage: mean 1, deviation 0
        weights = torch.ones(2)
    return means | {
        "weight_mean": weights.mean().item(),
        "weight_std": weights.std().item(),
        "sign_changes": (weights < 0).float().mean().item(),
    }


def localisation(
    weights: Tensor, mask: Tensor, wrong_step: Tensor
) -> dict[str, float | None] | None:
    """How well token weights (B, T) separate tokens before the true first error from later ones.

    wrong_step (B, 3) int64 is where the first wrong step starts and ends, and its first wrong
    token; -1 for rollouts that do not count (right ones, and those of groups that are not mixed).
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
    rollouts = (before.any(1) & from_step.any(1)).sum().item()
    if not rollouts:
        return None
    return {
        "auc": _auc(weights, from_step, before),
        "auc_token": _auc(weights, counts & (position >= wrong), counts & (position < wrong)),
        "auc_position": _auc(position, from_step, before),
        "auc_matched": auc_matched(weights, from_step, before),
        "auc_step": _auc(weights, on_step, before | after),
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


def _auc(values: Tensor, high: Tensor, low: Tensor) -> float | None:
    """`auc` of the values at the tokens `high` against those at `low`; all are (B, T)."""
    values = values.double()  # scipy would count pairs in float32, too few digits
    return auc(values[high].cpu().numpy(), values[low].cpu().numpy())


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


def auc(high: np.ndarray, low: np.ndarray) -> float | None:
    """The chance that one of `high` exceeds one of `low`, ties counting half.

    Returns None if a side is empty.
    """
    from scipy.stats import mannwhitneyu  # imported late: slow

    if not len(high) or not len(low):
        return None
    pairs = mannwhitneyu(high, low).statistic  # pairs in which `high` is larger, ties as halves
    return float(pairs / (len(high) * len(low)))


# ---- of a step -----------------------------------------------------------------------------------


def step_metrics(batch: Batch, task: Task, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """A step's metrics of rollouts and credit, by their names in metrics.jsonl.

    Those of `weight_by_side` are among them where the task knows first errors.
    """
    mask = batch.mask
    rewards = batch.rewards.cpu().numpy()  # (B,)
    groups = rewards.reshape(-1, batch.group_size)  # (groups, G)
    equal = (batch.advantages.view(-1, batch.group_size) == 0).all(1)  # (groups,)
    by_side = {}
    if task.first_error:
        by_side = weight_by_side(batch.weights, mask, batch.true_errors(task, tokenizer)[:, 0])
    metrics = {
        "reward": float(np.nanmean(rewards)),
        "solved": float((np.nan_to_num(groups).max(1) > 0.5).mean()),
        "equal_groups": equal.float().mean().item(),
        "infra_errors": int(np.isnan(rewards).sum()),  # without a verdict; they left their groups
        "length": mask.sum(1).float().mean().item(),
        "truncated": batch.rollouts.truncated.float().mean().item(),
        "entropy": batch.entropies[mask].mean().item(),
    }
    spread = concentration(batch.token_advantages, batch.advantages, mask)
    return reason_shares(batch.reasons) | metrics | spread | by_side | batch.metrics


def reason_shares(reasons: list[str]) -> dict[str, float]:
    """The shares of responses that are cut off, and of those that hold no answer."""
    return {name: reasons.count(name) / len(reasons) for name in ("truncated", "no_answer")}


def sample_rows(
    step: int,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    batch: Batch,
    weights: dict[str, Tensor],
    group: int | None = None,
) -> list[dict]:
    """The rows of one group for samples.jsonl, one per rollout; `step` counts from 0.

    `weights` has method -> weights (B, T). `group` is a group's number; None: the first with right
    and wrong rollouts, otherwise 0.
    """
    if group is None:
        group = batch.first_mixed or 0
    first = group * batch.group_size
    problem = batch.problems[group]
    rows = []
    for row in range(first, first + batch.group_size):
        mask = batch.mask[row]  # (T,)
        sample = {
            "step": step + 1,
            "problem": problem["problem"],
            task.reference: problem[task.reference],
            "response": batch.rollouts.texts[row],
            "score": batch.rewards[row].item(),
            "reason": batch.reasons[row],
            "first_error": batch.true_error(row, task, tokenizer),
            "advantage": batch.advantages[row].item(),
            "tokens": tokens_of(tokenizer, batch.rollouts, row),
            "weights": {},
        }
        for name, of_method in weights.items():
            of_row = of_method[row][mask].double()
            sample["weights"][name] = of_row.round(decimals=4).tolist()
        rows.append(sample)
    return rows


def worked_example(
    tokenizer: PreTrainedTokenizerBase, rollouts: Rollouts, weights: Tensor, first_error: Tensor
) -> list[str]:
    """Lines to print: each line of one wrong rollout, with its mean weight.

    It is the first rollout whose error is not its first token; [] if there is none. `weights` are
    (B, T), `first_error` (B,).
    """
    rows = (first_error > 0).nonzero().flatten().tolist()
    if not rows:
        return []
    row = rows[0]
    tokens = pd.Series(tokens_of(tokenizer, rollouts, row))
    # each token's line: how many tokens before it end one
    line_of = tokens.str.contains("\n").cumsum().shift(fill_value=0)
    lines = []
    for _, line in tokens.groupby(line_of):
        mark = "  <- first error" if int(first_error[row]) in line.index else ""
        weight = weights[row, line.index.tolist()].mean().item()
        lines.append(f"  {weight:.2f}  {printable(''.join(line).strip())}{mark}")
    return lines


def credit_vs_first_error(
    tokenizer: PreTrainedTokenizerBase, task: Task, batch: Batch, method: str
) -> dict:
    """Compare the method's credit with the true first errors of wrong rollouts in mixed groups.

    Returns the numbers ("localisation"), lines to print ("example"), and for the page the rows of
    the first group ("samples"), whose problem is the same before and after training.
    """
    wrong_step = batch.true_errors(task, tokenizer)  # (B, 3)
    return {
        "localisation": localisation(batch.weights, batch.mask, wrong_step) or {},
        "example": worked_example(tokenizer, batch.rollouts, batch.weights, wrong_step[:, 0]),
        "samples": sample_rows(-1, tokenizer, task, batch, {method: batch.weights}, group=0),
    }
