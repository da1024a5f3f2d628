"""Controls: what an honest comparison of credit rules needs beside them."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from base.errors import BadInput
from credit.batch import Batch, Context, effective_weights
from credit.measures import positions
from credit.rules import find, rule, shear, weigh
from grpo import to_padded
from lab.tools.moments import group_moments
from shear import mean_norm

if TYPE_CHECKING:
    from harness.run import Loaded


def needs_first_errors(run: "Loaded", folder: Path, **options: object) -> None:
    """Raise BadInput if the run's task does not know first errors."""
    if not run.context.task.first_error:
        raise BadInput(
            f"--method {run.config.method}: needs the true first error, which --task "
            f"{run.config.task} does not know; choose another method"
        )


@rule("oracle", "control: credit only for the true first wrong step", prepare=needs_first_errors)
def oracle(batch: Batch, context: Context, *, mass: int = 0) -> Tensor:
    """A_t = A in right rollouts; in wrong ones only on the true first wrong step, 0 elsewhere.

    A wrong rollout whose first wrong step is not known keeps A. This is the credit of a perfect
    locator of errors. With `mass` 1 the n tokens of the step have A T / n, so that the rollout's
    sum stays A T: EGCA (arXiv 2603.16158), whose locator is a language model that compares a
    program's trace with a solution's. Deviates: its A is r - mean r.
    """
    position = positions(batch.mask)  # (B, T)
    places = batch.true_errors(context.task, context.tokenizer)
    start, end = places.split(1, dim=1)  # (B, 1) each
    kept = (((position >= start) & (position < end)) | (start < 0)) & batch.mask  # (B, T)
    gain = batch.lengths / kept.sum(1, keepdim=True).clamp_min(1)  # (B, 1)
    return batch.A * kept * gain**mass


@rule("own-side", "control: distance to the closest span of the same side", needs_states=True)
def own_side(batch: Batch, context: Context) -> Tensor:
    """A_t = A omega_t as in `shear`, but from the closest span of the same outcome: a control.

    The control is ours. The closest span is one of another rollout. If SHEAR's weights measure more
    than novelty, these should locate errors less well. nbar and eps are those of the whole group;
    omega is 1 in a rollout that is the only one of its side. HarA (arXiv 2610.04344), of which only
    the abstract is public, also compares rollouts of the same outcome, by the distance to their
    barycentre.
    """
    omega = batch.mask.float()  # (B, T)
    for group, states, mask, correct in batch.groups():
        if not batch.advantages[group].any():  # no opposing side: A is 0
            continue
        nbar = mean_norm(states)
        hidden = to_padded(states, mask)  # (G, T, d)
        eps = context.shear.eps_over(nbar) * nbar
        raw = replace(context, shear=replace(context.shear, eps=eps, eps_unit="raw"))
        for row in range(len(mask)):
            same = mask & (correct == correct[row])[:, None]  # (G, T)
            alone = torch.arange(len(mask), device=mask.device) == row  # (G,)
            weighed = weigh(raw, hidden[same], same, alone)
            if weighed.closest:
                omega[group][row] = weighed.omega[row] * weighed.nbar / nbar
    return batch.A * omega


@rule("position", "control: later tokens get more")
def position_credit(batch: Batch, context: Context) -> Tensor:
    """A_t = A t / T: later tokens get more, whatever they say."""
    return batch.A * batch.mask.cumsum(1) / batch.lengths.clamp_min(1)


@rule("random", "control: weights drawn at random, equal within a window")
def random_credit(batch: Batch, context: Context) -> Tensor:
    """A_t = A u, u uniform in [0, 2] and the same for `--window` tokens in a row."""
    omega = batch.mask.float()  # (B, T)
    for row, length in enumerate(batch.mask.sum(1).tolist()):
        draws = 2 * torch.rand(-(-length // context.shear.window))
        omega[row, :length] = draws.repeat_interleave(context.shear.window)[:length].to(omega)
    return batch.A * omega


@rule("shuffle", "control: SHEAR's weights in random places", needs_states=True)
def shuffle(batch: Batch, context: Context) -> Tensor:
    """A_t = A omega_p(t), omega as in `shear`, p a random permutation of the rollout's tokens.

    A control with the values of SHEAR's weights, but not their places.
    """
    token_advantages = shear(batch, context)
    for row, length in enumerate(batch.mask.sum(1).tolist()):
        token_advantages[row, :length] = token_advantages[row, torch.randperm(length)]
    return token_advantages


def prepare_scaled(
    run: "Loaded", folder: Path, *, of: str = "grpo", mean1: bool = False, **options: object
) -> None:
    """Prepare the other rule with its default options; raises BadInput where it cannot be scaled.

    With `mean1` it must have weights.
    """
    inner = find(of)
    if mean1 and not inner.weighs:
        raise BadInput(f"--method scaled: {of} has no weights; choose another rule")
    if inner.prepare:
        inner.prepare(run, folder)


# The facts hold for any rule that is scaled, as the signs of some differ from A's.
@rule(
    "scaled",
    "control: another rule, scaled (negative, mean1)",
    needs_states=True,
    weighs=False,
    prepare=prepare_scaled,
)
def scaled(
    batch: Batch, context: Context, *, of: str = "grpo", negative: float = 1.0, mean1: bool = False
) -> Tensor:
    """The credit of the rule `of`, times `negative` in wrong rollouts: a control.

    Rules differ in how much they punish. With `mean1` it is then divided by the mean weight of its
    group, so that rules differ in direction and not in the size of the step; a group without any
    weight stays as it is.
    """
    scale = torch.where(batch.correct[:, None], 1.0, negative)  # (B, 1)
    credit = scale * torch.where(batch.mask, find(of).credit(batch, context), 0.0)  # (B, T)
    if mean1:
        counts = batch.mask & (batch.A != 0)  # (B, T)
        weights = effective_weights(credit, batch.advantages, batch.mask)  # (B, T)
        mean, _ = group_moments(weights, counts, batch.group_size)  # (B, 1)
        credit = torch.where(mean > 0, credit / mean, credit)
    return credit
