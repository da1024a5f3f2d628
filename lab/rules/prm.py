"""Credit by the scores of a process reward model (`lab/tools/reward_model.py`)."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from credit.batch import Batch, Context
from credit.rules import rule
from lab.rules.oar import needs_box
from lab.tools import reward_model
from lab.tools.moments import group_moments
from lab.tools.teacher import load_for

if TYPE_CHECKING:
    from harness.run import Loaded

LINES = "embedded", "words"  # tasks in which each line is a step; elsewhere a paragraph is


def load(run: "Loaded", folder: Path, *, model: str = "", **options: object) -> None:
    """Load the reward model of a folder or hub id, or teach the embedded task's own one.

    Raises BadInput for programs, where there is no model, or where it cannot score steps.
    """
    needs_box(run, folder)
    run.context.kept["prm"] = load_for(run, folder, model)


def step_scores(batch: Batch, context: Context) -> list[tuple[Tensor, Tensor]]:
    """For each rollout, P(good) of its steps (K,), and the step (T_i,) of each of its tokens."""
    questions = [batch.problem_of(row)["problem"] for row in range(len(batch.rewards))]
    return reward_model.score_steps(
        context.kept["prm"],
        questions,
        batch.rollouts,
        context.tokenizer,
        "\n" if context.task.name in LINES else "\n\n",
        context.micro_tokens,
    )


@rule("prm", "the score of the token's step by a process reward model", prepare=load)
def prm(batch: Batch, context: Context, *, model: str = "") -> Tensor:
    """A_t = A omega_t, omega_t = p_k for A > 0 and 1 - p_k for A < 0, p_k the score of t's step.

    "PRM-based advantage reshaping", SHEAR's baseline with backward-filled scores: p_k is read at
    the step's end. Inferred: the formula, of which the paper says no more; p_k for both signs would
    punish the good steps of wrong rollouts most.
    """
    omega = batch.mask.float()  # (B, T)
    for row, (good, step) in enumerate(step_scores(batch, context)):
        scores = good[step]  # (T_i,)
        omega[row, : len(step)] = scores if batch.advantages[row] > 0 else 1 - scores
    return batch.A * omega


@rule("pure", "a soft minimum of the steps' scores", weighs=False, prepare=load)
def pure(
    batch: Batch,
    context: Context,
    *,
    model: str = "",
    temperature: float = 0.1,
    outcome: float = 1.0,
) -> Tensor:
    """A_t = (G_t - baseline) / std, in place of A: the min-form of PURE (arXiv 2504.15275).

    The source is Cheng et al. 2025. r_k = 2 p_k - 1 per step, and r*_k = r_k exp(-r_k /
    temperature) / sum_j exp(-r_j / temperature). The sum of r*_k lies between the smallest r_k and
    their mean, and tends to the former as the temperature falls. G_t is the sum of r*_k over the
    step of token t and all later ones, plus `outcome` times the verdict. The baseline is the mean
    of G over the tokens of the group's other rollouts, rollout by rollout.

    Deviates: their code divides the baseline by the padded width; ours by true lengths. Theirs then
    whitens over the batch, which takes its mean off again; ours drops this recentring and divides
    by the group's standard deviation, so that credit depends neither on padding nor on the number
    of ranks. That standard deviation counts as at least 0.1; otherwise groups of equal verdicts
    would make large advantages of small differences between scores.
    """
    mask = batch.mask
    returns = torch.zeros_like(batch.log_probs)  # (B, T)
    for row, (good, step) in enumerate(step_scores(batch, context)):
        rewards = 2 * good - 1  # r, (K,)
        shares = rewards * (-rewards / temperature).softmax(0)  # r*, (K,)
        returns[row, : len(step)] = shares.flip(0).cumsum(0).flip(0)[step]
    returns = torch.where(mask, returns + outcome * batch.correct[:, None], 0.0)
    graded = mask.any(1).view(-1, batch.group_size)  # (groups, G), those with a verdict
    means = (returns.sum(1) / mask.sum(1).clamp_min(1)).view(graded.shape)
    others = graded.sum(1, keepdim=True) - 1  # (groups, 1), leave one out
    baseline = (means.sum(1, keepdim=True) - means) / others.clamp_min(1)  # (groups, G)
    compared = (others > 0).repeat_interleave(batch.group_size, 0)  # (B, 1), one alone has none
    centred = torch.where(compared, returns - baseline.view(-1, 1), 0.0)  # (B, T)
    return centred / group_moments(centred, mask, batch.group_size)[1].clamp_min(0.1)
