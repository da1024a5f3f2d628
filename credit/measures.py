"""What a step and an evaluation report of their rollouts and of credit, for any method.

    step_metrics           a step's rewards, lengths and credit, as metrics.jsonl has them
    sample_rows            a group's responses, tokens, weights and closest spans, as samples.jsonl
                           has them
    closest_by_rollout     the spans of a group's rollouts, each with the closest opposing one
    credit_vs_first_error  what an evaluation reports of credit, where a task knows first errors

These numbers describe credit, and do not say which is better: uniform credit (GRPO) has an
effective share of 1 and an AUC of one half.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from base.config import Shear
from base.errors import printable
from credit.batch import Batch, Context, tokens_of
from grpo import Rollouts
from shear import Weighed, span_bounds

# Reasons of reward 0 other than "wrong": cut off, without an answer, graders or programs out of
# time, crashed, and answers that cannot be read.
ZERO_REASONS = "truncated", "no_answer", "timeout", "crashed", "parse_error"


def step_metrics(batch: Batch) -> dict[str, float]:
    """A step's metrics of rollouts and credit, by their names in metrics.jsonl."""
    mask = batch.mask
    rewards = batch.rewards.cpu().numpy()  # (B,)
    groups = rewards.reshape(-1, batch.group_size)  # (groups, G)
    equal = (batch.advantages.view(-1, batch.group_size) == 0).all(1)  # (groups,)
    metrics = {
        "reward": float(np.nanmean(rewards)),
        "solved": float((np.nan_to_num(groups).max(1) > 0.5).mean()),
        "equal_groups": equal.float().mean().item(),
        "infra_errors": int(np.isnan(rewards).sum()),  # without a verdict; they left their groups
        "length": mask.sum(1).float().mean().item(),
        "truncated": batch.rollouts.truncated.float().mean().item(),
        "entropy": batch.entropies[mask].mean().item(),
    }
    return reason_shares(batch.reasons) | metrics | credit_spread(batch) | batch.metrics


def credit_spread(batch: Batch) -> dict[str, float]:
    """How strong a batch's credit is, and how far it is spread.

    `weight_mean` and `weight_std` are over the tokens whose A is not 0; where there is at most one,
    they are 1 and 0. `ess` is the mean over the rollouts with credit of (sum v)^2 / (T sum v^2), in
    (0, 1], for the T absolute token advantages v of a rollout; also called effective-token ratio
    (arXiv 2601.07408, 2606.00257, without a formula). As it is measured within each rollout, it
    does not show that one rollout gets more than another; `weight_std` does.
    """
    weights = batch.weights[batch.mask & (batch.A != 0)]  # (n,)
    if len(weights) < 2:
        weights = torch.ones(2)
    v = torch.where(batch.mask, batch.token_advantages, 0.0).abs().double()  # (B, T)
    total = v.sum(1)  # (B,)
    ess = total**2 / (batch.lengths[:, 0] * v.square().sum(1))  # (B,)
    return {
        "ess": ess[total > 0].mean().item(),
        "weight_mean": weights.mean().item(),
        "weight_std": weights.std().item(),
    }


def reason_shares(reasons: list[str]) -> dict[str, float]:
    """The share of responses that got reward 0 for each of ZERO_REASONS."""
    return {name: reasons.count(name) / len(reasons) for name in ZERO_REASONS}


# ---- rows of samples.jsonl -----------------------------------------------------------------------


def sample_rows(
    context: Context, batch: Batch, weights: dict[str, Tensor], group: int
) -> list[dict]:
    """The rows of one group for samples.jsonl, one per rollout; `group` is the group's number.

    `weights` has method -> weights (B, T). "spans" are there where the rule compared spans and the
    group is mixed.
    """
    first = group * batch.group_size
    of_group = slice(first, first + batch.group_size)
    problem = batch.problems[group]
    rows = []
    for row in range(of_group.start, of_group.stop):
        mask = batch.mask[row]  # (T,)
        sample = {
            "problem": problem["problem"],
            context.task.reference: problem[context.task.reference],
            "response": batch.rollouts.texts[row],
            "score": batch.rewards[row].item(),
            "reason": batch.reasons[row],
            "first_error": batch.true_error(row, context.task, context.tokenizer),
            "advantage": batch.advantages[row].item(),
            "tokens": tokens_of(context.tokenizer, batch.rollouts, row),
            "weights": {},
        }
        for name, of_method in weights.items():
            of_row = of_method[row][mask].double()
            sample["weights"][name] = of_row.round(decimals=4).tolist()
        rows.append(sample)
    # a rule may call SHEAR once for each group, or several times
    if len(batch.weighed) == len(batch.problems) and batch.weighed[group].closest:
        found = closest_by_rollout(
            batch.weighed[group], batch.mask[of_group], batch.correct[of_group], context.shear
        )
        for sample, spans in zip(rows, found, strict=True):
            sample["spans"] = [span._replace(distance=round(span.distance, 4)) for span in spans]
    return rows


class ClosestSpan(NamedTuple):
    """A span of a rollout, and the opposing span closest to it.

    Starts and ends are tokens; an end is the token after the last.
    """

    start: int
    end: int
    distance: float  # in units of nbar, as in the weights
    rollout: int  # of the group, the one that the opposing span belongs to
    other_start: int
    other_end: int


def closest_by_rollout(
    weighed: Weighed, mask: Tensor, correct: Tensor, settings: Shear
) -> list[list[ClosestSpan]]:
    """For each rollout of a group with both sides, its spans with the closest to each.

    mask is (G, T), correct (G,).
    """
    closest = weighed.closest
    assert closest  # of a group with both sides
    # (rollout, start, end) of each side's spans, in the order of `shear.spans_of`
    right: list[tuple[int, int, int]] = []
    wrong: list[tuple[int, int, int]] = []
    for row, length in enumerate(mask.sum(1).tolist()):
        own = right if correct[row] else wrong
        for start, end in span_bounds(length, settings.window, settings.stride):
            own.append((row, start, end))
    found: list[list[ClosestSpan]] = [[] for _ in mask]
    for own, opposing, of_own, own_to in (
        (right, wrong, closest.of_right, closest.right_to),
        (wrong, right, closest.of_wrong, closest.wrong_to),
    ):
        distances = (of_own / weighed.nbar).tolist()
        indices = own_to.tolist()
        for number, (row, start, end) in enumerate(own):
            other = opposing[indices[number]]
            found[row].append(ClosestSpan(start, end, distances[number], *other))
    return found


# ---- against the true first error ---------------------------------------------------------------


def credit_vs_first_error(context: Context, batch: Batch, method: str) -> dict:
    """Compare the method's credit with the true first errors of wrong rollouts in mixed groups.

    A right answer may hold wrong steps that cancel. Its tokens are not compared, but it is on the
    right side of its group, and wrong rollouts that share its steps get smaller weights for it.
    Returns the numbers ("localisation"), lines to print ("example"), and for the page the rows of
    the first group ("samples"), whose problem is the same before and after training.
    """
    tokenizer = context.tokenizer
    first_error = batch.true_errors(context.task, tokenizer)[:, 0]  # (B,)
    return {
        "localisation": first_error_auc(batch.weights, batch.mask, first_error),
        "example": worked_example(tokenizer, batch.rollouts, batch.weights, first_error),
        "samples": sample_rows(context, batch, {method: batch.weights}, group=0),
    }


def first_error_auc(weights: Tensor, mask: Tensor, first_error: Tensor) -> dict[str, float]:
    """How often a token from the first error on outweighs an earlier one: `auc`, of weights (B, T).

    `auc_position` is what a token's position alone achieves: read `auc` beside it. `weight_before`
    and `weight_after` are the mean weights of both kinds. first_error (B,) int64 is a token's
    index, -1 for rollouts that do not count. Tokens of all other rollouts are compared, also with
    those of another; {} where one side has none.
    """
    position = positions(mask)  # (B, T)
    counts = mask & (first_error >= 0)[:, None]  # (B, T)
    after = counts & (position >= first_error[:, None])  # (B, T)
    before = counts & ~after  # (B, T)
    if not before.any() or not after.any():
        return {}
    return {
        "auc": auc(weights[after], weights[before]),
        "auc_position": auc(position[after], position[before]),
        "weight_before": weights[before].mean().item(),
        "weight_after": weights[after].mean().item(),
    }


def positions(mask: Tensor) -> Tensor:
    """(B, T) int64, the index of each token in its row."""
    return torch.arange(mask.shape[1], device=mask.device).expand_as(mask)


def auc(high: Tensor, low: Tensor) -> float:
    """The chance that a value of `high` (n,) exceeds one of `low` (m,), ties counting half."""
    values = torch.cat([high, low]).double()  # (n + m,)
    _, place, count = values.unique(return_inverse=True, return_counts=True)
    rank = count.cumsum(0) - (count - 1) / 2  # of each value, from 1; ties share their mean rank
    ranks = rank[place[: len(high)]].double().sum().item()
    pairs = ranks - len(high) * (len(high) + 1) / 2  # won, without those of two of `high`
    return pairs / (len(high) * len(low))


def auc_matched(values: Tensor, high: Tensor, low: Tensor) -> float | None:
    """`auc` over the pairs of a token of `high` and one of `low` at the same position.

    No weight gains here by growing with position. Values and the boolean `high` and `low`, which
    have no token in common, are (B, T). Returns None if there is no such pair.
    """
    won = pairs = 0.0
    for column, ups, downs in zip(values.T, high.T, low.T, strict=True):  # (B,) each
        count = int(ups.sum()) * int(downs.sum())
        if count:
            won += count * auc(column[ups], column[downs])
            pairs += count
    return won / pairs if pairs else None


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
    tokens = tokens_of(tokenizer, rollouts, row)
    lines = []
    start = 0
    for end, token in enumerate(tokens, 1):
        if "\n" in token or end == len(tokens):
            line = printable("".join(tokens[start:end]).strip())
            mark = "  <- first error" if start <= first_error[row] < end else ""
            lines.append(f"  {weights[row, start:end].mean().item():.2f}  {line}{mark}")
            start = end
    return lines
