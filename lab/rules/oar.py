"""Credit by the sensitivity of the final answer to a token."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from base.errors import BadInput
from credit.batch import Batch, Context
from credit.rules import rule
from grpo import Rollouts
from lab.tools import salience

if TYPE_CHECKING:
    from harness.run import Loaded


def needs_box(run: "Loaded", folder: Path, **options: object) -> None:
    """Raise BadInput where responses are programs, which put no answer in a box."""
    if run.context.task.reference != "answer":
        raise BadInput(
            f"--method {run.config.method}: needs an answer in a box, and programs have "
            "none; choose another method"
        )


@rule("oar-g", "the answer's sensitivity to a token, by gradients", prepare=needs_box)
def oar_g(
    batch: Batch,
    context: Context,
    *,
    quantile: float = 0.25,
    beta: float = 1.0,
    probe: Literal["kl", "logp"] = "kl",
    noise: float = 0.001,
) -> Tensor:
    """A_t = A omega_t, omega_t by the answer's sensitivity to token t: OAR-G (arXiv 2601.07408).

    The sensitivity is gradient times input. The defaults of quantile, beta and noise are those of
    the authors' page and code; the paper's own (ACL 2026) are not known. As in the code, J is the
    KL of the answer's mean logits (with the probe "kl"), and the gradient is multiplied by the
    embedding, which the page does not do. Inferred: the answer is the one that was given, read
    where it was sampled. With either probe, importance depends in part on the noise, which is drawn
    anew in each step.
    """
    importance_of = partial(salience.importance_by_gradient, probe=probe, noise=noise)
    return by_importance(importance_of, batch, context, quantile, beta)


@rule("oar-p", "the answer's sensitivity to a token, by masking", prepare=needs_box)
def oar_p(
    batch: Batch,
    context: Context,
    *,
    quantile: float = 0.25,
    beta: float = 1.0,
    probe: Literal["kl", "logp"] = "kl",
) -> Tensor:
    """A_t = A omega_t as in `oar_g`, the sensitivity measured by hiding one token after the other.

    It takes one forward pass per token before the answer. Deviates: with the probe "logp" a token
    whose absence makes the answer likelier has importance 0; in their code, less than 0.
    """
    importance_of = partial(salience.importance_by_masking, probe=probe)
    return by_importance(importance_of, batch, context, quantile, beta)


def by_importance(
    importance_of: Callable[[Rollouts, Context, salience.Answers], Tensor],
    batch: Batch,
    context: Context,
    quantile: float,
    beta: float,
) -> Tensor:
    """The A_t of `oar_g`, given the function that measures importance (B, T).

    Only rollouts whose A is not 0 are probed.
    """
    answers = salience.answer_places(context.tokenizer, batch.rollouts)
    probed = {row: answers[row] for row in answers if batch.advantages[row] != 0}
    importance = importance_of(batch.rollouts, context, probed)
    return batch.A * salience.outcome_weights(importance, probed, batch.mask, quantile, beta)
